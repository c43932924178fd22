"""What the pool has of a prompt, in our layout or in another deployment's, and how that is read.

It must not know the request, nor what becomes of the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvstore.client import StoreClient
from mooncake.engine.host import EngineHost
from mooncake.page_groups import page_key
from mooncake.types import BlockKey
from prefill_node.foreign import ForeignLease, ForeignPrefix
from prefill_node.leases import CONTROL_TIMEOUT_S, Leases
from prefill_node.loader import BlockToLoad, LeasedPrefix, PrefixLoad


class StoredPrefix:
    """``keys`` are those of the prompt's full blocks."""

    def __init__(
        self,
        host: EngineHost,
        store: StoreClient,
        leases: Leases,
        keys: list[BlockKey],
        open_foreign: Callable[[], ForeignPrefix] | None,
    ) -> None:
        """``open_foreign``: the prompt in the others' layout, where there is one."""
        self._host = host
        self._store = store
        self._leases = leases
        self._keys = keys
        self._open_foreign = open_foreign
        self._foreign: ForeignPrefix | None = None

    @property
    def is_ours(self) -> bool:
        """Whether what was counted is in our layout."""
        return self._foreign is None

    async def count(self, num_usable: int) -> int:
        """Leading blocks, of so many, to be read from there: in our layout, or in the others' when those are more.
        Raises what ``StoreClient.exists`` does."""
        own = await self._count_own(self._keys[:num_usable])
        if self._open_foreign is None or own == num_usable:
            return own
        foreign = self._open_foreign()
        converted = min(num_usable, await foreign.count(CONTROL_TIMEOUT_S))
        if converted > own:
            self._foreign = foreign
        return max(own, converted)

    async def _count_own(self, keys: list[BlockKey]) -> int:
        """Those that a prompt can go on behind."""
        groups, block_tokens = self._host.plan.groups, self._host.plan.layout.block_tokens
        pages = [page_key(key, group) for group in range(groups.num_groups) for key in keys]
        there = await self._store.exists(pages, timeout_s=CONTROL_TIMEOUT_S)
        stored = next((i for i in range(len(keys)) if not there[i]), len(keys))
        return groups.border(stored, lambda g, i: there[g * len(keys) + i], block_tokens)

    def load(self, name: str, blocks: list[BlockToLoad], deadline: float) -> PrefixLoad:
        """To be given to a loader. ``deadline`` (monotonic, s) is the request's; a lease may end before."""
        store, foreign, leases = self._store, self._foreign, self._leases
        deadline = min(deadline, time.monotonic() + self._host.config.store.lease_s)
        prefix = max(block.index for block in blocks if block.group == 0) + 1
        keys = self._keys[:prefix] + [block.key for block in blocks if block.group]

        def lease() -> LeasedPrefix | ForeignLease:
            return leases.take(store, keys) if foreign is None else leases.take_foreign(store, foreign, len(keys))

        plan = self._host.plan
        return PrefixLoad(name, blocks, lease, partial(leases.end, store), plan.layout, deadline, groups=plan.groups)
