"""A disk that takes no more writes, like a file system that has become read-only, or that gives none back."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from descriptors import no_more_threads

from kvstore.checksum import range_checksums
from kvstore.eviction import make_policy
from kvstore.index.types import BlockName
from kvstore.segment import Segment
from kvstore.ssd.index import SsdIndex
from kvstore.ssd.io import PlainIO, VerifiedRead
from kvstore.ssd.log import SsdLog
from kvstore.ssd.tier import SsdTier
from kvstore.store import Store
from kvstore.transfer.owner.server import SegmentServer
from kvstore.writing import Sealing, Wanted
from mooncake.errors import NodeUnavailable
from mooncake.events import EventLog
from mooncake.types import BlockKey

BLOCK = 64 << 10
MIB = 1 << 20


class FailingDisk(PlainIO):
    def __init__(self) -> None:
        self.writes_fail = self.reads_fail = False
        self.refusals = 0
        self.is_writing, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()

    def write_and_sync(self, fd: int, offset: int, parts: Sequence[memoryview]) -> None:
        self.is_writing.set()
        self.may_write.wait(10)
        if self.writes_fail:
            self.refusals += 1
            raise OSError(errno.EROFS, "Read-only file system")
        super().write_and_sync(fd, offset, parts)

    def read(self, jobs: Sequence[VerifiedRead]) -> list[bool | OSError]:
        if self.reads_fail:
            return [OSError(errno.EIO, "Input/output error") for _ in jobs]
        return super().read(jobs)


def key(number: int) -> BlockKey:
    return BlockKey(f"block {number}".encode())


@asynccontextmanager
async def store_on(disk: FailingDisk, path: Path) -> AsyncIterator[tuple[Store, Segment]]:
    segment = Segment.create("store", BLOCK, 64)
    index = SsdIndex(64 * MIB, 2 * MIB, make_policy("lru", 1000))
    ssd = await SsdTier.over(SsdLog(path, 2 * MIB, io=disk), index)
    store = Store(segment, SegmentServer(segment, "store"), EventLog(1), 10.0, 10.0, ssd=ssd)
    try:
        yield store, segment
        store.check()
    finally:
        await store.close()
        segment.close()


async def put(to: Store, segment: Segment, number: int) -> bool:
    """Whether it is durable."""
    [offer] = await to.reserve(Wanted([BlockName(key(number))], "me", BLOCK, 1))
    assert offer.grant is not None
    data = bytes([number]) * BLOCK
    segment.block(offer.grant.slot)[:] = data
    [sealed] = await to.seal([Sealing(offer.grant, range_checksums(data, 1))], True)
    return sealed.is_durable


async def test_who_removes_a_block_is_told_when_a_restart_would_find_it(tmp_path: Path) -> None:
    disk = FailingDisk()
    async with store_on(disk, tmp_path) as (store, segment):
        for number in range(4):
            assert await put(store, segment, number)
        disk.writes_fail = True
        for _ in range(2):  # asking again makes it no better
            with pytest.raises(NodeUnavailable, match="after a restart"):
                await store.remove([key(0), key(1)])
        assert store.exists([key(n) for n in range(4)]) == [False, False, True, True]
        assert await store.remove([key(9)]) == 0, "what was never there does not come back"
    async with store_on(FailingDisk(), tmp_path) as (store, segment):
        assert all(store.exists([key(n) for n in range(4)])), "the process ended before the disk took the removal"
        disk.writes_fail = False
        assert await store.remove([key(0), key(1)]) == 2
    async with store_on(disk, tmp_path) as (store, segment):
        assert store.exists([key(n) for n in range(4)]) == [False, False, True, True]


async def test_who_removes_a_block_again_while_the_disk_writes_the_removal_waits_for_it_too(tmp_path: Path) -> None:
    """As one does whose first call took too long."""
    disk = FailingDisk()
    async with store_on(disk, tmp_path) as (store, segment):
        assert await put(store, segment, 0)
        disk.is_writing.clear()
        disk.may_write.clear()
        disk.writes_fail = True
        removals = [asyncio.create_task(store.remove([key(0)]))]
        await asyncio.to_thread(disk.is_writing.wait, 10)
        removals.append(asyncio.create_task(store.remove([key(0)])))
        await asyncio.sleep(0.05)
        assert not removals[1].done()
        disk.may_write.set()
        refused = await asyncio.gather(*removals, return_exceptions=True)
        assert [type(error) for error in refused] == [NodeUnavailable] * 2


async def test_a_removal_that_was_refused_is_written_at_the_stop_if_the_disk_is_well_by_then(tmp_path: Path) -> None:
    disk = FailingDisk()
    async with store_on(disk, tmp_path) as (store, segment):
        assert await put(store, segment, 0)
        disk.writes_fail = True
        with pytest.raises(NodeUnavailable):
            await store.remove([key(0)])
        disk.writes_fail = False
    async with store_on(disk, tmp_path) as (store, segment):
        assert store.exists([key(0)]) == [False]


async def test_a_disk_that_refuses_is_left_alone_whatever_is_removed_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try gives up the rest of a segment."""
    caplog.set_level(logging.WARNING, "kvstore.ssd")
    disk = FailingDisk()
    async with store_on(disk, tmp_path) as (store, segment):
        for number in range(20):
            assert await put(store, segment, number)
        disk.writes_fail = True
        for number in range(20):
            with pytest.raises(NodeUnavailable):
                await store.remove([key(number)])
        assert disk.refusals == 1
        assert len(caplog.records) == 1


async def test_a_disk_that_reads_nothing_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FailingDisk()
    async with store_on(disk, tmp_path) as (store, segment):
        for number in range(100):
            assert await put(store, segment, number)
    async with store_on(disk, tmp_path) as (store, segment):
        caplog.set_level(logging.WARNING, "kvstore.ssd")
        disk.reads_fail = True
        for number in range(100):
            store.release([(await store.acquire([key(number)])).lease_id])
        assert store.counters["ssd_read_errors"] == 100
        assert len(caplog.records) == 7  # the 1st, 2nd, 4th, … 64th


async def test_blocks_are_read_where_no_thread_can_be_started(tmp_path: Path) -> None:
    async with store_on(FailingDisk(), tmp_path) as (store, segment):
        for number in range(6):
            assert await put(store, segment, number)
        ssd, into = store.ssd, [memoryview(bytearray(BLOCK)) for _ in range(6)]
        assert ssd is not None
        with no_more_threads():
            async with asyncio.timeout(10):
                await asyncio.gather(*(ssd.load(key(number), into[number]) for number in range(6)))
        assert [set(block) for block in into] == [{number} for number in range(6)]
