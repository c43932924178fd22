"""Prefixes that another deployment of the same model left in the pool in another layout: named, counted, leased.

The KV is the same but its bytes are arranged differently: split over tensor-parallel ranks or pipeline stages, in
blocks of another size, or in another type. Each rank's blocks have their own keys, which anyone who knows the layout
can compute; a plan says how our blocks are made from them. Only plans that read whole layers are accepted, because
nothing less can be verified. This module knows neither when a prefix is loaded nor how bytes travel.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import takewhile

from kvstore.client.store_client import StoreClient
from kvstore.client.types import Lease
from kvstore.layout.layout import ShardedLayout
from kvstore.layout.plan import Plan, plan
from kvstore.layout.reader import Shard
from mooncake.config import PoolLayoutSection
from mooncake.errors import ConfigError
from mooncake.hashing import Chain, kv_fingerprint
from mooncake.types import BlockKey, KVLayout, TokenIds


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """How the other deployment arranges the KV called ``content`` (see ``kv_fingerprint``), and how to convert it."""

    content: str
    plan: Plan

    @classmethod
    def configured(cls, section: PoolLayoutSection, content: str, layout: KVLayout) -> SourceLayout | None:
        """None if no other layout is configured. Raises ConfigError for one that cannot be read."""
        if not section.tensor_parallel:
            return None
        theirs = replace(
            layout,
            block_tokens=section.block_tokens or layout.block_tokens,
            dtype=section.dtype or layout.dtype,
        )
        source = ShardedLayout.of(theirs, section.tensor_parallel, section.pipeline_parallel)
        how = plan(source, ShardedLayout.of(layout), 0)
        if not all(box.has_whole_layers for box in how.boxes):
            raise ConfigError(
                f"pool_layout.block_tokens = {theirs.block_tokens} must divide block.tokens = {layout.block_tokens}: "
                "parts of a stored layer have no checksum"
            )
        return cls(content, how)

    def keys(
        self, rank: int, tokens: TokenIds, salt: str = "", adapter: str = "", adapter_start: int = 0
    ) -> list[BlockKey]:
        """The keys of one rank's blocks."""
        source = self.plan.source
        name = kv_fingerprint(self.content, source.block(rank), source.shard_name(rank))
        return Chain.of(name, salt, adapter, adapter_start).keys(tokens, source.block_tokens)


@dataclass(frozen=True, slots=True)
class ConvertedLease:
    """The right to read the source blocks of ``num_blocks`` of our blocks until ``expires_s`` (monotonic)."""

    plan: Plan
    num_blocks: int
    expires_s: float
    shards: dict[int, Shard]  # by rank, all from one store
    keys: dict[int, list[BlockKey]]
    leases: tuple[Lease, ...]

    @property
    def lease_ids(self) -> list[int]:
        return [lease_id for lease in self.leases for lease_id in lease.lease_ids]

    def key_of(self, slot: int) -> BlockKey:
        """The key of the stored block in a leased slot."""
        return next(
            self.keys[rank][shard.slots.index(slot)] for rank, shard in self.shards.items() if slot in shard.slots
        )


class ConvertedPrefix:
    """One prompt's prefix in the other layout. Used on the event loop."""

    def __init__(
        self,
        layout: SourceLayout,
        store: StoreClient,
        tokens: TokenIds,
        salt: str = "",
        adapter: str = "",
        adapter_start: int = 0,
    ) -> None:
        self._plan = layout.plan
        self._store = store
        self._keys = {rank: layout.keys(rank, tokens, salt, adapter, adapter_start) for rank in layout.plan.ranks}

    async def count(self, timeout_s: float) -> int:
        """How many of our leading blocks can be made completely. Raises what ``StoreClient.exists`` does."""
        answers = await asyncio.gather(
            *(self._store.exists(keys, timeout_s=timeout_s) for keys in self._keys.values() if keys)
        )
        run = min((sum(takewhile(bool, found)) for found in answers), default=0)
        return run * self._plan.source.block_tokens // self._plan.target.block_tokens

    async def lease(self, num_blocks: int, timeout_s: float) -> ConvertedLease:
        """Raises KVLoadFailed when something has gone since it was counted."""
        needed = num_blocks * self._plan.target.block_tokens // self._plan.source.block_tokens
        answers = await asyncio.gather(
            *(self._store.ranges.acquire_all(keys[:needed], timeout_s=timeout_s) for keys in self._keys.values()),
            return_exceptions=True,
        )
        leases = tuple(answer for answer in answers if not isinstance(answer, BaseException))
        for failure in answers:
            if isinstance(failure, BaseException):
                await self._store.ranges.release(leases)
                raise failure
        shards = {rank: _shard_of(lease) for rank, lease in zip(self._keys, leases, strict=True)}
        expires_s = min(lease.expires_s for lease in leases)
        return ConvertedLease(self._plan, num_blocks, expires_s, shards, self._keys, leases)


def _shard_of(lease: Lease) -> Shard:
    """One rank's blocks, in order."""
    return Shard(lease.segment, [block.slot for block in lease.blocks], [block.checksums for block in lease.blocks])
