"""Leases of pool blocks for threads other than the event loop's: acquired within a timeout, released without waiting.

It knows neither prompts nor who reads the blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from kvstore.client.store_client import StoreClient
from mooncake.errors import KVLoadFailed, MooncakeError
from mooncake.types import BlockKey
from prefill_node.converted_prefix import ConvertedLease, ConvertedPrefix
from prefill_node.deadline import CONTROL_TIMEOUT_S
from prefill_node.loader import LeasedPrefix

L = TypeVar("L")
Lease = TypeVar("Lease", LeasedPrefix, ConvertedLease)


@dataclass(frozen=True, slots=True)
class Leases:
    """``loop`` is where stores are called."""

    loop: asyncio.AbstractEventLoop

    def acquire(self, store: StoreClient, keys: list[BlockKey]) -> LeasedPrefix:
        """All of these blocks. Raises KVLoadFailed, and what ``StoreRanges.acquire_all`` does."""
        return self._in_time(store, _acquire(store, keys))

    def acquire_converted(self, store: StoreClient, prefix: ConvertedPrefix, num_blocks: int) -> ConvertedLease:
        """The source blocks, in another layout, that make this many of our blocks. Raises likewise."""
        return self._in_time(store, prefix.lease(num_blocks, CONTROL_TIMEOUT_S))

    def release(self, store: StoreClient, lease: LeasedPrefix | ConvertedLease, corrupt: list[BlockKey]) -> None:
        """Callable from any thread; does not wait."""
        call = store.ranges.release([lease], corrupt_keys=corrupt, timeout_s=CONTROL_TIMEOUT_S)
        asyncio.run_coroutine_threadsafe(_quietly(call), self.loop)

    def _in_time(self, store: StoreClient, leasing: Coroutine[object, object, Lease]) -> Lease:
        timeout_s = CONTROL_TIMEOUT_S + 1  # the call's own time-out, which says more, comes before
        return lease_in_time(leasing, self.loop, timeout_s, lambda late: self.release(store, late, []))


def lease_in_time(
    leasing: Coroutine[object, object, L],
    loop: asyncio.AbstractEventLoop,
    timeout_s: float,
    release: Callable[[L], object],
) -> L:
    """Have the event loop acquire a lease while this thread waits. One that arrives after the timeout is passed to
    ``release``. Raises KVLoadFailed, and what ``leasing`` does."""
    future = asyncio.run_coroutine_threadsafe(leasing, loop)

    def release_late(done: Future[L]) -> None:
        if not done.cancelled() and done.exception() is None:
            release(done.result())

    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.add_done_callback(release_late)
        raise KVLoadFailed("no lease on the stored prefix came in time") from None


async def _acquire(store: StoreClient, keys: list[BlockKey]) -> LeasedPrefix:
    lease = await store.ranges.acquire_all(keys, timeout_s=CONTROL_TIMEOUT_S)
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
