"""A disk that hangs, or is very slow, costs hits on the SSD and nothing else: what memory has goes on as before."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.checksum import range_checksums
from kvstore.eviction import make_policy
from kvstore.index.types import BlockName
from kvstore.segment import Segment
from kvstore.ssd.index import SsdIndex
from kvstore.ssd.io import PlainIO, VerifiedRead
from kvstore.ssd.log import SsdLog
from kvstore.ssd.stall import LOOKS, Stall
from kvstore.ssd.tier import SsdTier
from kvstore.store import Sealed, Store
from kvstore.transfer.owner.server import SegmentServer
from kvstore.writing import Sealing, Wanted
from mooncake.events import EventLog
from mooncake.types import BlockKey

BLOCK = 64 << 10
SLOTS = 64
PATIENCE_S = 120.0  # longer than any of these tests may take


class SwitchedDisk(PlainIO):
    """Hangs while it is off."""

    def __init__(self) -> None:
        self.writes, self.reads = threading.Event(), threading.Event()
        self.writes.set()
        self.reads.set()

    def write_and_sync(self, fd: int, offset: int, parts: Sequence[memoryview]) -> None:
        assert self.writes.wait(PATIENCE_S)
        super().write_and_sync(fd, offset, parts)

    def read(self, jobs: Sequence[VerifiedRead]) -> list[bool | OSError]:
        assert self.reads.wait(PATIENCE_S)
        return super().read(jobs)


def key(number: int) -> BlockKey:
    return BlockKey(f"block {number}".encode())


@asynccontextmanager
async def store_on(disk: SwitchedDisk, path: Path) -> AsyncIterator[tuple[Store, Segment, SsdTier]]:
    segment = Segment.create("store", BLOCK, SLOTS)
    index = SsdIndex(64 << 20, 2 << 20, make_policy("lru", 1000))
    ssd = SsdTier(SsdLog(path, 2 << 20, io=disk), index, 1, group_bytes=SLOTS * BLOCK // 16, stall_s=0.5)
    store = Store(segment, SegmentServer(segment, "store"), EventLog(1), 10.0, 10.0, ssd=ssd)
    try:
        yield store, segment, ssd
        store.check()
    finally:
        disk.writes.set()
        disk.reads.set()
        await store.close()
        segment.close()


async def put(to: Store, segment: Segment, number: int, durable: bool = False) -> Sealed:
    """Waits for room longer than a test may take, as long as the store has it wait."""
    [offer] = await to.reserve(Wanted([BlockName(key(number))], "me", BLOCK, 1), wait_s=PATIENCE_S)
    assert offer.grant is not None
    segment.block(offer.grant.slot)[:] = bytes([number % 256]) * BLOCK
    [sealed] = await to.seal([Sealing(offer.grant, range_checksums(bytes([number % 256]) * BLOCK, 1))], durable)
    return sealed


def read(store: Store, segment: Segment, slot: int) -> int:
    return segment.block(slot)[0]


@pytest.mark.parametrize("is_read", [False, True])
async def test_puts_go_on_over_a_disk_that_hangs_and_what_waits_for_it_is_saved_when_it_is_well(
    is_read: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A block that is read is copied at once, and its slot held until then."""
    caplog.set_level(logging.WARNING, "kvstore.ssd")
    disk = SwitchedDisk()
    async with asyncio.timeout(60), store_on(disk, tmp_path) as (store, segment, ssd):
        disk.writes.clear()
        for number in range(4 * SLOTS):
            assert (await put(store, segment, number)).is_sealed
            if is_read:
                store.release([(await store.acquire([key(number)])).lease_id])
        assert store.counters["ssd_in_trouble"] == 1 and store.counters["ssd_stalls"] == 1
        assert len(ssd.index) == 0, "nothing has been saved"
        assert (await put(store, segment, 1000, durable=True)) == Sealed(True, is_durable=False), "and is not to wait"
        lease = await store.acquire([key(4 * SLOTS - 1)])
        assert read(store, segment, lease.blocks[0].slot) == (4 * SLOTS - 1) % 256
        store.release([lease.lease_id])

        disk.writes.set()
        while store.counters["ssd_in_trouble"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert len(ssd.index) > 0
        assert (await put(store, segment, 1001, durable=True)).is_durable
        assert [record.message.partition(":")[0] for record in caplog.records] == [
            "the SSD stands still",
            "the SSD has caught up",
        ]


async def test_gets_of_what_memory_has_do_not_wait_for_reads_that_hang(tmp_path: Path) -> None:
    disk = SwitchedDisk()
    async with asyncio.timeout(60), store_on(disk, tmp_path) as (store, segment, ssd):
        for number in range(2 * SLOTS):
            await put(store, segment, number)
        here = store._index.exists([key(number) for number in range(2 * SLOTS)])
        cold, warm = here.index(False), 2 * SLOTS - 1
        all_cold = [key(number) for number, is_here in enumerate(here) if not is_here]
        assert key(cold) in ssd
        disk.reads.clear()
        both = await store.acquire([*all_cold, key(warm)], scattered=True)
        assert [block.key for block in both.blocks] == [key(warm)]
        still_here = store._index.exists([key(number) for number in range(2 * SLOTS)])
        assert sum(here) - sum(still_here) <= 1, "the first that hangs is the only one to take another's place"
        lease = await store.acquire([key(warm), key(cold)])  # a run of which memory has the beginning
        assert [block.key for block in lease.blocks] == [key(warm)]
        assert ssd.load_s(1) >= 0.5, "nobody counts on it meanwhile"
        assert store.counters["ssd_in_trouble"] == 1
        store.release([lease.lease_id, both.lease_id])

        disk.reads.set()
        while not ssd.is_readable:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        again = await store.acquire([key(cold)])
        assert read(store, segment, again.blocks[0].slot) == cold
        store.release([again.lease_id])


def test_a_disk_that_moves_a_little_has_not_caught_up() -> None:
    stall = Stall()
    for _ in range(LOOKS - 1):
        stall.look(True)
    assert not stall.holds and not stall.lasts
    stall.look(True)
    assert stall.holds and stall.lasts and stall.share == 1
    stall.moved()
    stall.look(True)
    assert not stall.holds and stall.lasts
    stall.look(False)
    assert not stall.lasts and stall.share == 0
