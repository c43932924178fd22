"""Approximate KV of one prompt: blended from chunks, or computed by a variant of the model.

It is attached to the prompt's sequence whenever that is admitted, on the engine's thread, with the number of leading
tokens whose KV stays exact: what follows them is neither shared nor stored. How chunks are found is in
``blend_chunks``, how a variant's KV is found and read in ``variant_kv``.
"""

from __future__ import annotations

import time

from kvstore.client.store_client import StoreClient
from mooncake.engine.sequence import Sequence
from mooncake.rpc import prefill_pb2 as pb
from mooncake.types import BlockKey, TokenIds
from prefill_node.blend_chunks import BlendChunks, Chunk, Compute
from prefill_node.deadline import Deadline
from prefill_node.leases import Leases
from prefill_node.resources import NodeResources
from prefill_node.streamer import StreamedPrompt
from prefill_node.variant_kv import Sender, VariantPrefix, find_variant_prefix


class ApproximateKV:
    """What one prompt reuses approximately: nothing before ``find``."""

    def __init__(self, node: NodeResources, request: pb.PrefillRequest, leases: Leases, deadline: Deadline) -> None:
        self._node = node
        self._request = request
        self._leases = leases
        self._deadline = deadline
        self._blended: BlendedPrompt | None = None
        self._variant: VariantPrompt | None = None

    async def find(
        self,
        tokens: TokenIds,
        keys: list[BlockKey],
        stored_blocks: int,
        store: StoreClient | None,
        compute: Compute,
    ) -> None:
        """Look for chunks, and for a variant's KV of the blocks that neither this node nor our own pool has.
        ``compute`` is for chunks."""
        blend_chunks, sender = self._node.blend_chunks, self._node.variant
        if blend_chunks is not None:
            chunks = await blend_chunks.prepare(self._request, tokens, store, compute)
            self._blended = BlendedPrompt(self._node, blend_chunks, chunks) if chunks else None
        if sender is not None:
            found = await self._find_variant_prefix(sender, tokens, keys, stored_blocks, store)
            self._variant = VariantPrompt(self._node, found, self._leases, self._deadline) if found else None

    def admitted(self, prompt: StreamedPrompt, sequence: Sequence) -> None:
        """On the engine's thread, whenever the prompt's sequence is admitted."""
        if self._blended is not None:
            self._blended.admitted(sequence)
        elif self._variant is not None:
            self._variant.admitted(prompt, sequence)

    def release(self) -> None:
        """On the engine's thread. Idempotent."""
        if self._blended is not None:
            self._blended.release()

    @property
    def variant_blocks(self) -> int:
        """Leading blocks of which the variant has KV, or we."""
        return self._variant.end if self._variant else 0

    @property
    def num_exact(self) -> int | None:
        """Leading tokens whose KV is exact; None: all."""
        found = self._blended or self._variant
        return found.num_exact if found is not None else None

    @property
    def blended_tokens(self) -> int:
        return self._blended.num_tokens if self._blended else 0

    @property
    def inherited_tokens(self) -> int:
        """Tokens with the variant's KV."""
        return self._variant.num_tokens if self._variant else 0

    async def _find_variant_prefix(
        self, sender: Sender, tokens: TokenIds, keys: list[BlockKey], stored_blocks: int, store: StoreClient | None
    ) -> VariantPrefix | None:
        """Prompts for which there was nothing, though it would have helped, are counted."""
        block_tokens = self._node.host.cache_size.layout.block_tokens
        usable = (len(tokens) - 1) // block_tokens
        first = max(stored_blocks, self._node.host.engine.match(keys[:usable]))
        if first >= usable:
            return None
        theirs = sender.keys(tokens[: usable * block_tokens], self._request.cache_salt)
        stores = [self._node.store_at(address) for address in sender.pools] or ([store] if store else [])
        found = await find_variant_prefix(sender, stores, theirs, first)
        if found is None:
            self._node.host.counters["prompts_not_inherited"] += 1
        return found


class BlendedPrompt:
    """The chunks of one prompt, and their blocks, retained between ``admitted`` and ``release``."""

    def __init__(self, node: NodeResources, blend_chunks: BlendChunks, chunks: list[Chunk]) -> None:
        self._pool = node.host.engine.block_pool
        self._blend_chunks = blend_chunks
        self._chunks = chunks
        self._retained: list[int] = []  # blocks, each with one reference of ours
        self.num_tokens = 0
        self.num_exact: int | None = None

    def admitted(self, sequence: Sequence) -> None:
        """Retain the chunks' blocks. Not earlier: a waiting request holds no blocks."""
        self.release()
        blend, self._retained = self._blend_chunks.acquire(self._pool, self._chunks, sequence.num_computed)
        self.num_tokens = blend.num_tokens if blend else 0
        reused = sequence.reused
        reused.blend = blend
        if blend is not None:
            reused.limit_exact(blend.first)
        self.num_exact = reused.num_exact

    def release(self) -> None:
        """Idempotent."""
        retained, self._retained = self._retained, []
        self._pool.release(retained)


class VariantPrompt:
    """A variant's KV of one prompt, loaded anew whenever the sequence is admitted."""

    def __init__(self, node: NodeResources, found: VariantPrefix, leases: Leases, deadline: Deadline) -> None:
        self._node = node
        self._found = found
        self._leases = leases
        self._deadline = deadline
        self.num_tokens = 0
        self.num_exact: int | None = None

    @property
    def end(self) -> int:
        """The variant has KV of the blocks up to here."""
        return self._found.end

    def admitted(self, prompt: StreamedPrompt, sequence: Sequence) -> None:
        reused = sequence.reused
        prompt.variant_load, reused.hidden_states = None, None
        if self.num_tokens:  # the first load failed
            self._node.host.counters["prompts_not_inherited"] += 1
        self.num_tokens = len(reused.variant_tokens)
        if reused.variant_tokens:
            deadline = min(self._deadline.at_s, time.monotonic() + self._node.host.config.store.lease_s)
            prompt.variant_load = self._found.load(sequence, self._leases, deadline)
            self.num_exact = reused.num_exact
            self._node.loader.submit(prompt.variant_load)
