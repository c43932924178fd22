"""Approximate KV of one prompt: blended from chunks, or computed by a variant of the model.

It is attached to the prompt's sequence whenever that is admitted, on the engine's thread, with the number of leading
tokens whose KV stays exact: what follows them is neither shared nor stored. How chunks are found is in
``blend_chunks``, how a variant's KV is found and read in ``variant_kv``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows

from mooncake.engine.sequence import Sequence
from prefill_node.blend_chunks import BlendChunks, Chunk
from prefill_node.deadline import Deadline
from prefill_node.leases import Leases
from prefill_node.resources import NodeResources
from prefill_node.streamer import StreamedPrompt
from prefill_node.variant_kv import VariantPrefix


class BlendedPrompt:
    """The chunks of one prompt, and their blocks, retained between ``admitted`` and ``release``."""

    def __init__(self, node: NodeResources, blend_chunks: BlendChunks, chunks: Rows[Chunk]) -> None:
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
