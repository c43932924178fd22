"""Reuse of KV that another variant of the model, the *sender*, left in the pool (DroidSpeak): found, and loaded.

The blocks have the sender's names, which anyone who knows its KV fingerprint can compute. The hidden states that go
into the receiver's own layers are read first, into side buffers: those layers are computed from them while the other
layers' KV is still being read.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch

from kvstore.client.store_client import StoreClient
from mooncake.engine.hidden_states import HiddenStates
from mooncake.engine.hosting.host import EngineHost
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad
from mooncake.errors import MooncakeError
from mooncake.hashing import chain_seed, extend_chain, kv_fingerprint
from mooncake.model.pages import TORCH_DTYPES
from mooncake.types import BlockKey, KVLayout, TokenIds
from prefill_node.leases import Leases
from prefill_node.loader import PrefixLoad

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0  # how long a prompt waits to learn what the pool has


@dataclass(frozen=True, slots=True)
class Sender:
    """The variant whose KV is read, the layout of its blocks, and which layers are recomputed."""

    fingerprint: str
    layout: KVLayout
    own_layers: range
    inputs_first: bool
    hidden_size: int
    pools: tuple[str, ...]  # gRPC addresses of its stores; (): those of the request

    @classmethod
    def configured(cls, host: EngineHost) -> Sender | None:
        """None if no variant is configured. Raises ConfigError."""
        profile = host.variant
        if profile is None:
            return None
        layout = host.layout_with(profile.sender_keeps)
        fingerprint = kv_fingerprint(profile.sender, layout)
        pools = host.config.prefill.variant_pools
        return cls(fingerprint, layout, profile.layers, profile.inputs_first, host.hidden_size, pools)

    def keys(self, tokens: TokenIds, salt: str) -> list[BlockKey]:
        return extend_chain(chain_seed(self.fingerprint, salt), tokens, self.layout.block_tokens)

    @property
    def input_layers(self) -> range:
        """The layers of a block that hold the inputs of our first layer; none if those are the embeddings."""
        first = self.own_layers[0]
        return self.layout.input_layers(first) if first else range(0)

    @property
    def order(self) -> list[int]:
        """The layers of a block in the order they are read."""
        as_it_is = [layer for layer in self.layout.kv_layers if layer not in self.own_layers]
        return [*self.input_layers, *as_it_is] if self.inputs_first else [*as_it_is, *self.input_layers]


@dataclass(frozen=True, slots=True)
class VariantPrefix:
    """What the pool has of one prompt: the sender's blocks up to ``end``, in this store."""

    sender: Sender
    store: StoreClient
    keys: list[BlockKey]
    end: int

    def load(self, sequence: Sequence, leases: Leases, deadline: float) -> PrefixLoad:
        """A load of what the just admitted sequence reuses; tells the sequence where its hidden states will be, and
        from which token on its KV is not exact. On the engine's thread."""
        reused, layout = sequence.reused, self.sender.layout
        start = reused.variant_tokens.start
        first, end = (token // layout.block_tokens for token in (start, reused.variant_tokens.stop))
        keys, store = self.keys[first:end], self.store
        hidden = HiddenBuffer(self.sender, end - first)
        reused.hidden_states = hidden.states(start)
        reused.limit_exact(start)
        blocks = [BlockToLoad(i, sequence.blocks.block_table[first + i], key) for i, key in enumerate(keys)]
        return PrefixLoad(
            sequence.request_id,
            blocks,
            lambda: leases.acquire(store, keys),
            partial(leases.release, store),
            layout,
            deadline,
            self.sender.order,
            hidden.by_layer,
        )


async def find_variant_prefix(
    sender: Sender, stores: list[StoreClient], keys: list[BlockKey], first: int
) -> VariantPrefix | None:
    """The longest run of the prompt's blocks from ``first`` on in any one store; None: there is none."""
    runs = await asyncio.gather(*(_run_length(store, keys[first:]) for store in stores))
    longest = max(runs, default=0)
    if not longest:
        return None
    return VariantPrefix(sender, stores[runs.index(longest)], keys, first + longest)


async def _run_length(store: StoreClient, keys: list[BlockKey]) -> int:
    if not keys:
        return 0
    try:
        there = await store.exists(keys, timeout_s=ASK_TIMEOUT_S)
    except MooncakeError as error:
        log.info("a pool does not answer for a variant's KV: %s", error.message)
        return 0
    return sum(takewhile(bool, there))


class HiddenBuffer:
    """Memory beside the cache for the inputs of our first own layer, for ``num_blocks`` blocks."""

    def __init__(self, sender: Sender, num_blocks: int) -> None:
        layout, layers = sender.layout, sender.input_layers
        self._memory: npt.NDArray[np.uint8] = np.empty((num_blocks, len(layers), layout.layer_bytes), np.uint8)
        self.by_layer = {layer: self._memory[:, place] for place, layer in enumerate(layers)}
        self._sender = sender

    def states(self, first: int) -> HiddenStates | None:
        """The inputs of a sequence's tokens from ``first`` on; valid once they have been read."""
        if not self.by_layer:
            return None
        layout, hidden_size = self._sender.layout, self._sender.hidden_size
        rows = torch.from_numpy(self._memory).flatten(1).view(TORCH_DTYPES[layout.dtype])
        shape, strides = (len(rows), layout.block_tokens, hidden_size), (rows.stride(0), hidden_size, 1)
        return HiddenStates(first, rows.as_strided(shape, strides))
