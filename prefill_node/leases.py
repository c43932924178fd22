"""Leases of pool blocks for threads other than the event loop's: acquired within a timeout, released without waiting.

It knows neither prompts nor who reads the blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from kvstore.client.store_client import StoreClient
from mooncake.errors import MooncakeError
from mooncake.types import BlockKey
from prefill_node.converted_prefix import ConvertedLease, ConvertedPrefix
from prefill_node.deadline import CONTROL_TIMEOUT_S
from prefill_node.loader import LeasedPrefix, lease_in_time

Lease = TypeVar("Lease", LeasedPrefix, ConvertedLease)


@dataclass(frozen=True, slots=True)
class Leases:
    """``loop`` is where stores are called."""

    loop: asyncio.AbstractEventLoop

    def acquire(self, store: StoreClient, keys: list[BlockKey]) -> LeasedPrefix:
        """All of these blocks. Raises KVLoadFailed, and what ``StoreClient.acquire`` does."""
        return self._in_time(store, _acquire(store, keys))

    def acquire_converted(self, store: StoreClient, prefix: ConvertedPrefix, num_blocks: int) -> ConvertedLease:
        """The source blocks, in another layout, that make this many of our blocks."""
        return self._in_time(store, prefix.lease(num_blocks, CONTROL_TIMEOUT_S))

    def release(self, store: StoreClient, lease: LeasedPrefix | ConvertedLease, corrupt: list[BlockKey]) -> None:
        """Callable from any thread; does not wait."""
        call = store.release_ids(lease.lease_ids, corrupt_keys=corrupt, timeout_s=CONTROL_TIMEOUT_S)
        asyncio.run_coroutine_threadsafe(_quietly(call), self.loop)

    def _in_time(self, store: StoreClient, leasing: Coroutine[object, object, Lease]) -> Lease:
        return lease_in_time(leasing, self.loop, CONTROL_TIMEOUT_S + 1, lambda late: self.release(store, late, []))


async def _acquire(store: StoreClient, keys: list[BlockKey]) -> LeasedPrefix:
    lease = await store.acquire_all(keys, timeout_s=CONTROL_TIMEOUT_S)
    return LeasedPrefix(
        lease.segment,
        lease.lease_ids,
        lease.expires_s,
        [block.slot for block in lease.blocks],
        [block.checksums for block in lease.blocks],
    )


async def _quietly(call: Awaitable[object]) -> None:
    with contextlib.suppress(MooncakeError):
        await call
