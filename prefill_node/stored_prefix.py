"""What the pool has of a prompt, in our layout or in another deployment's, and how to read it.

It knows neither the request nor what happens to the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import takewhile

from kvstore.client.store_client import StoreClient
from mooncake.engine.hosting.host import EngineHost
from mooncake.engine.step_plan import BlockToLoad
from mooncake.page_groups import page_key
from mooncake.types import BlockKey
from prefill_node.converted_prefix import ConvertedLease, ConvertedPrefix
from prefill_node.deadline import CONTROL_TIMEOUT_S
from prefill_node.leases import Leases
from prefill_node.loader import LeasedPrefix, PrefixLoad


class StoredPrefix:
    """``keys`` are those of the prompt's full blocks."""

    def __init__(
        self,
        host: EngineHost,
        store: StoreClient,
        leases: Leases,
        keys: list[BlockKey],
        open_converted: Callable[[], ConvertedPrefix] | None,
    ) -> None:
        """``open_converted`` returns the prompt's prefix in another layout, if one is configured."""
        self._host = host
        self._store = store
        self._leases = leases
        self._keys = keys
        self._open_converted = open_converted
        self._converted: ConvertedPrefix | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the counted blocks are in our layout."""
        return self._converted is None

    async def count(self, num_usable: int) -> int:
        """How many leading blocks, of ``num_usable``, can be read: in our layout, or in the other one if that has
        more. Raises what ``StoreClient.exists`` does."""
        own = await self._count_own(self._keys[:num_usable])
        if self._open_converted is None or own == num_usable:
            return own
        converted = self._open_converted()
        num_converted = min(num_usable, await converted.count(CONTROL_TIMEOUT_S))
        if num_converted > own:
            self._converted = converted
        return max(own, num_converted)

    async def _count_own(self, keys: list[BlockKey]) -> int:
        """Blocks after which a prompt can continue."""
        groups, block_tokens = self._host.cache_size.groups, self._host.cache_size.layout.block_tokens
        pages = [page_key(key, group) for group in range(groups.num_groups) for key in keys]
        there = await self._store.exists(pages, timeout_s=CONTROL_TIMEOUT_S)
        stored = sum(takewhile(bool, there[: len(keys)]))
        return groups.border(stored, lambda g, i: there[g * len(keys) + i], block_tokens)

    def load(self, name: str, blocks: list[BlockToLoad], deadline: float) -> PrefixLoad:
        """A load for the loader. ``deadline`` (monotonic, s) is the request's; a lease may end earlier."""
        store, converted, leases = self._store, self._converted, self._leases
        deadline = min(deadline, time.monotonic() + self._host.config.store.lease_s)
        prefix = max(block.index for block in blocks if block.group == 0) + 1
        keys = self._keys[:prefix] + [block.key for block in blocks if block.group]

        def lease() -> LeasedPrefix | ConvertedLease:
            if converted is not None:
                return leases.acquire_converted(store, converted, len(keys))
            return leases.acquire(store, keys)

        size = self._host.cache_size
        return PrefixLoad(
            name, blocks, lease, partial(leases.release, store), size.layout, deadline, groups=size.groups
        )
