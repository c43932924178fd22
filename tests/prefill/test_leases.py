"""Leases of stored blocks, acquired by a thread that waits only for a while."""

from __future__ import annotations

import asyncio

import pytest

from mooncake.errors import KVLoadFailed
from prefill_node.leases import lease_in_time

WAIT_S = 20.0


async def test_a_lease_that_comes_too_late_ends_at_once() -> None:
    """Otherwise its blocks could not be evicted until it expires."""
    may_come = asyncio.Event()
    ended: asyncio.Queue[int] = asyncio.Queue()

    async def leasing(lease_id: int) -> int:
        await may_come.wait()
        return lease_id

    async def refused() -> int:
        await may_come.wait()
        raise KVLoadFailed("it is gone")

    loop = asyncio.get_running_loop()
    for call in (leasing(7), refused()):
        with pytest.raises(KVLoadFailed, match="came in time"):
            await asyncio.to_thread(lease_in_time, call, loop, 0.01, ended.put_nowait)
    may_come.set()
    assert await asyncio.to_thread(lease_in_time, leasing(8), loop, WAIT_S, ended.put_nowait) == 8
    assert await asyncio.wait_for(ended.get(), WAIT_S) == 7 and ended.empty()
