"""The SSD tier: durable blocks are recovered, torn or corrupt ones are not, and the size limit is kept."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import mmap
import os
import platform
import shutil
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from waiting import until

from kvstore.checksum import range_checksums
from kvstore.eviction import make_policy
from kvstore.ssd.index import SsdIndex
from kvstore.ssd.io import NativeIO, PlainIO, SsdIO, VerifiedRead
from kvstore.ssd.log import BlockRead, SsdLog
from kvstore.ssd.record import (
    MAX_HEADER_BYTES,
    PAGE,
    BlockHeader,
    Drop,
    NotARecord,
    block_size,
    pack_block,
    pack_drops,
    parse,
)
from kvstore.ssd.tier import GROUP_BYTES, SsdTier
from mooncake.errors import ChecksumMismatch, ConfigError, KVLoadFailed
from mooncake.types import BlockKey

SIZE = 64 << 10
MIB = 1 << 20


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def data(number: int, size: int = SIZE) -> memoryview:
    return memoryview(np.random.default_rng(number).bytes(size))


def header(number: int, size: int = SIZE, ranges: int = 4, parent: bytes = b"", tenant: str = "") -> BlockHeader:
    return BlockHeader(key(number), parent, tenant, size, range_checksums(data(number, size), ranges))


@asynccontextmanager
async def tier(
    path: Path, capacity: int = 64 * MIB, segment_bytes: int = 8 * MIB, **options: int
) -> AsyncIterator[SsdTier]:
    opened = await SsdTier.open(path, capacity, make_policy("lru", 1024), SIZE, segment_bytes=segment_bytes, **options)
    try:
        yield opened
        opened.index.check()
    finally:
        await opened.close()


async def save(to: SsdTier, *numbers: int, size: int = SIZE) -> list[bool]:
    return list(await asyncio.gather(*(to.save(header(n, size), data(n, size)) for n in numbers)))


async def found(where: SsdTier, number: int, size: int = SIZE) -> bool:
    """Whether the block is there; if it is, its bytes are right."""
    if key(number) not in where:
        return False
    into = bytearray(size)
    assert (await where.load(key(number), memoryview(into))).length == size
    assert into == data(number, size)
    return True


KEY_AT = pack_block(header(1), 1, 1, 1).index(key(1))  # in a block's header

headers = st.builds(
    lambda key, parent, tenant, ranges, part: BlockHeader(
        BlockKey(key), parent, tenant, ranges * part, np.arange(ranges, dtype=np.uint64)
    ),
    st.binary(min_size=1, max_size=256),
    st.binary(max_size=256),
    st.text(max_size=16),
    st.integers(1, 2000),
    st.integers(1, 1 << 20),
)


@given(headers, st.integers(0, 1 << 63), st.integers(0, 1 << 63), st.integers(0, 1 << 63))
def test_a_header_says_what_was_put_into_it(block: BlockHeader, segment: int, sequence: int, durable: int) -> None:
    packed = pack_block(block, segment, sequence, durable)
    assert len(packed) % PAGE == 0
    record = parse(packed + bytes(PAGE), segment)
    assert record.block is not None
    assert (record.sequence, record.durable, record.size) == (sequence, durable, block_size(block))
    assert (record.block.key, record.block.parent, record.block.tenant) == (block.key, block.parent, block.tenant)
    assert record.block.length == block.length and np.array_equal(record.block.checksums, block.checksums)
    with pytest.raises(NotARecord):
        parse(packed, segment ^ 1)  # it lies in another segment than it was written for


@given(headers, st.integers(0, 8 * PAGE))
def test_a_header_with_any_bit_flipped_is_no_record(block: BlockHeader, place: int) -> None:
    packed = bytearray(pack_block(block, 1, 2, 3))
    packed[place % len(packed)] ^= 1 << (place % 8)
    with pytest.raises(NotARecord):
        parse(bytes(packed), 1)


@given(
    st.lists(
        st.builds(Drop, st.binary(min_size=1, max_size=256).map(BlockKey), *[st.integers(0, 1 << 62)] * 2), max_size=200
    )
)
def test_drops_arrive(drops: list[Drop]) -> None:
    assert parse(pack_drops(drops, 1, 2, 3), 1).drops == tuple(drops)


async def test_what_was_saved_is_loaded_and_survives_a_restart(tmp_path: Path) -> None:
    sizes = {1: SIZE, 2: SIZE + 4, 3: 4, 4: 3 * MIB}
    async with tier(tmp_path) as first:
        for number, size in sizes.items():
            assert await save(first, number, size=size) == [True]
            assert await found(first, number, size)
        assert await save(first, 1) == [True]  # once more costs nothing
        assert first.counters["ssd_writes"] == 4
    async with tier(tmp_path) as second:
        assert len(second.index) == 4
        for number, size in sizes.items():
            assert await found(second, number, size)
        assert not await found(second, 9)
        with pytest.raises(KVLoadFailed):
            await second.load(key(9), memoryview(bytearray(SIZE)))
        assert await save(second, 5) == [True]
    async with tier(tmp_path) as third:
        assert len(third.index) == 5 and await found(third, 5)


async def test_what_was_dropped_stays_away(tmp_path: Path) -> None:
    async with tier(tmp_path) as first:
        await save(first, *range(8))
        assert first.drop([key(1), key(2), key(99)]) == 2
        await first.committed()
        await save(first, 2)  # and this one is back
    async with tier(tmp_path) as second:
        assert [await found(second, n) for n in range(8)] == [n != 1 for n in range(8)]


async def test_a_block_of_too_many_ranges_is_refused_and_costs_no_other(tmp_path: Path) -> None:
    most = (MAX_HEADER_BYTES - KEY_AT - 32) // 8
    async with tier(tmp_path) as opened:
        ranges = {1: most, 2: most + 1, 3: 4, 4: 2 * most, 5: 1}
        blocks = {number: header(number, 128 * count, count) for number, count in ranges.items()}
        answers = await asyncio.gather(*(opened.save(block, data(n, block.length)) for n, block in blocks.items()))
        assert answers == [True, False, True, False, True]
        assert opened.is_writable and opened.counters["ssd_write_errors"] == 0
        assert await found(opened, 1, 128 * most) and await found(opened, 5, 128)


async def test_a_file_that_is_not_of_the_log_is_left_alone(tmp_path: Path) -> None:
    async with tier(tmp_path) as opened:
        assert await save(opened, 0) == [True]
    shutil.copy(only_segment(tmp_path), copy := tmp_path / "copy of the first.kvlog")
    async with tier(tmp_path) as again:
        assert await found(again, 0) and len(again.index) == 1
    assert copy.exists()


async def test_a_directory_serves_one_store(tmp_path: Path) -> None:
    async with tier(tmp_path):
        with pytest.raises(ConfigError, match="in use"):
            SsdLog(tmp_path, MIB)
    with pytest.raises(ConfigError):
        SsdLog(tmp_path / "lock" / "deeper", MIB)


def size_of(path: Path) -> int:
    return sum(segment.stat().st_size for segment in path.glob("*.kvlog"))


def only_segment(path: Path) -> Path:
    [segment] = path.glob("*.kvlog")
    return segment


async def test_a_flipped_bit_costs_the_block_and_nothing_else(tmp_path: Path) -> None:
    async with tier(tmp_path) as opened:
        await save(opened, 0, 1, 2)
        block = opened.index.get(key(1))
        assert block is not None
        with only_segment(tmp_path).open("r+b") as file:
            os.pwrite(file.fileno(), b"\xff\x00\xff", block.place.offset + block.place.header_bytes + 777)
            os.fsync(file.fileno())
        with pytest.raises(ChecksumMismatch):
            await opened.load(key(1), memoryview(bytearray(SIZE)))
        assert [await found(opened, n) for n in range(3)] == [True, False, True]
        assert opened.counters["checksum_mismatches"] == 1
        assert [gone.key for gone in opened.take_left()] == [key(1)]
        assert await save(opened, 1) == [True] and await found(opened, 1)
    async with tier(tmp_path) as again:
        assert [await found(again, n) for n in range(3)] == [True, True, True]


@pytest.mark.parametrize("cut", ["header", "middle", "garbage"])
async def test_a_torn_tail_is_cut_off_for_good(tmp_path: Path, cut: str) -> None:
    async with tier(tmp_path) as opened:
        for number in range(4):
            await save(opened, number)
        places = [opened.index.get(key(n)).place for n in range(4)]  # type: ignore[union-attr]
    with only_segment(tmp_path).open("r+b") as file:
        last = places[3]
        start = (
            last.offset + {"header": 100, "middle": last.header_bytes + SIZE // 2, "garbage": last.header_bytes}[cut]
        )
        os.pwrite(file.fileno(), b"torn" * 64 if cut == "garbage" else bytes(SIZE // 2), start)
    for life in range(3):  # also after later lives have made their own records durable
        async with tier(tmp_path) as again:
            assert [await found(again, n) for n in range(4)] == [True, True, True, False]
            assert again.counters["ssd_torn"] == (1 if life == 0 and cut != "header" else 0)
            assert await save(again, 10 + life) == [True]


async def test_a_flipped_bit_in_a_header_costs_its_block_and_brings_none_back_that_was_dropped(tmp_path: Path) -> None:
    async with tier(tmp_path) as opened:
        for number in range(4):
            assert await save(opened, number) == [True]
        assert opened.drop([key(0)]) == 1
        await opened.committed()
        block = opened.index.get(key(1))
        assert block is not None
    with only_segment(tmp_path).open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff", block.place.offset + 40)
    for life in range(3):
        async with tier(tmp_path) as again:
            assert [await found(again, n) for n in range(4)] == [False, False, True, True]
            assert again.counters["ssd_rotten"] == 1 and again.counters["ssd_torn"] == 0
            assert await save(again, 10 + life) == [True]


async def test_what_lies_behind_a_torn_header_does_not_count_in_any_later_life(tmp_path: Path) -> None:
    """Two runs are in flight at once: the second may have reached the disk without the first."""
    async with tier(tmp_path) as opened:
        for number in range(4):
            assert await save(opened, number) == [True]
        places = [opened.index.get(key(n)).place for n in range(4)]  # type: ignore[union-attr]
    with only_segment(tmp_path).open("r+b") as file:  # nothing says yet that records 2 and 3 are durable
        os.pwrite(file.fileno(), pack_block(header(3), 1, places[3].sequence, places[1].sequence), places[3].offset)
        os.pwrite(file.fileno(), bytes(PAGE - 8), places[2].offset + 8)
    for life in range(3):
        async with tier(tmp_path) as again:
            assert [await found(again, n) for n in range(4)] == [True, True, False, False]
            assert again.counters["ssd_torn"] == (life == 0) and again.counters["ssd_rotten"] == 0
            assert await save(again, 10 + life) == [True]


class BadSpot(SsdLog):
    """Cannot read one page."""

    bad = (0, 0)

    def read(self, segment: int, offset: int, into: memoryview) -> None:
        if segment == self.bad[0] and offset <= self.bad[1] < offset + into.nbytes:
            raise OSError(errno.EIO, "Input/output error")
        super().read(segment, offset, into)


@pytest.mark.parametrize("bad_number", [0, 3, 15])  # a segment's first record; its fourth; what may be torn
async def test_a_segment_that_cannot_be_read_is_left_aside_for_good_and_costs_no_other(
    tmp_path: Path, bad_number: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with tier(tmp_path, 8 * MIB, MIB) as opened:
        assert await save(opened, *range(15)) == [True] * 15  # one segment
        assert await save(opened, 15) == [True]
        places = [block.place for block in map(opened.index.get, map(key, range(16))) if block is not None]
    place = places[bad_number]
    path = tmp_path / f"{place.segment:016x}.kvlog"
    before, lost = path.read_bytes(), {n for n in range(16) if places[n].segment == place.segment}
    for life in range(3):
        files = BadSpot(tmp_path, MIB)
        if life == 0:
            files.bad = (place.segment, place.offset + (place.header_bytes if bad_number == 15 else 0))
        index = SsdIndex(8 * MIB, MIB, make_policy("lru", 1024))
        opened = await SsdTier.over(files, index)
        assert {n for n in range(16) if key(n) in opened} == set(range(16)) - lost
        assert opened.counters["ssd_segments_aside"] == 1 and opened.counters["ssd_torn"] == 0
        assert index.capacity_bytes == 7 * MIB
        assert await save(opened, 20 + life) == [True]
        await opened.close()
        assert path.with_suffix(".unread").read_bytes() == before and not path.exists()
    assert str(path) in caplog.text
    async with tier(tmp_path, 8 * MIB, MIB) as opened:
        assert [await found(opened, n) for n in (20, 21, 22)] == [True] * 3


async def test_a_segment_that_is_cut_short_is_an_error_that_is_counted(tmp_path: Path) -> None:
    async with tier(tmp_path) as opened:
        await save(opened, 0, 1)
        os.truncate(only_segment(tmp_path), PAGE)
        with pytest.raises(KVLoadFailed, match="could not read"):
            await opened.load(key(0), memoryview(bytearray(SIZE)))
        assert opened.counters["ssd_read_errors"] == 1
        assert key(0) not in opened


async def test_the_room_is_never_exceeded_and_the_oldest_leave(tmp_path: Path) -> None:
    capacity, written = 8 * MIB, 0
    rng = np.random.default_rng(0)
    async with tier(tmp_path, capacity) as opened:
        for step in range(60):
            numbers = [step * 8 + i for i in range(8)]
            assert await save(opened, *numbers) == [True] * 8
            written += 8 * SIZE
            opened.touch([key(0), key(1)])  # these two are read all the time
            if step % 4 == 0:
                opened.drop([key(int(rng.integers(2, step * 8 + 8)))])
            assert size_of(tmp_path) <= capacity + opened.index.segment_bytes
            opened.index.check()
        assert opened.counters["ssd_segments_compacted"] > 5 and opened.counters["ssd_evictions"] > 100
        assert await found(opened, 0) and await found(opened, 1) and not await found(opened, 2)
        here = [n for n in range(480) if await found(opened, n)]
        assert {472 + i for i in range(8)} <= set(here)
        assert opened.counters["ssd_copied_bytes"] < written
        await opened.committed()
    async with tier(tmp_path, capacity) as again:
        assert [n for n in range(480) if await found(again, n)] == here


class SmallDisk(SsdLog):
    """Has room for so many segments, whatever was promised."""

    room = 0

    def create(self, segment: int) -> None:
        if len(self._files) >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().create(segment)


async def test_a_tier_that_is_given_less_room_than_before_gives_back_the_rest(tmp_path: Path) -> None:
    async with tier(tmp_path, 32 * MIB, MIB) as before:
        for first in range(0, 400, 20):
            assert all(await save(before, *range(first, first + 20)))
    async with tier(tmp_path, 8 * MIB, MIB) as after:
        assert size_of(tmp_path) > 16 * MIB
        assert await save(after, 400) == [True]
        assert size_of(tmp_path) <= 8 * MIB
        kept = [number for number in range(401) if key(number) in after]
        assert kept[-1] == 400 and len(kept) > 60
        assert all([await found(after, number) for number in kept])


@pytest.mark.parametrize("room", [0, 1, 2, 6])
async def test_a_disk_that_is_smaller_than_promised_is_used_as_far_as_it_goes(
    tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk, index = SmallDisk(tmp_path, MIB), SsdIndex(64 * MIB, MIB, make_policy("lru", 1024))
    disk.room = room
    opened = SsdTier(disk, index, first_sequence=1)
    try:
        for step in range(20):
            kept = await save(opened, *range(step * 8, step * 8 + 8))
            assert kept == [room > 0] * 8
            index.check()
        if not room:
            assert not opened.is_writable and opened.counters["ssd_refused"] == 19 * 8
        else:
            here = [number for number in range(160) if await found(opened, number)]
            assert {152 + i for i in range(8)} <= set(here) and len(here) * SIZE > (room - 1) * MIB // 2
            assert opened.counters["ssd_full"] and opened.counters["ssd_write_errors"] == 0
        assert len(caplog.records) == 1  # once, however long it lasts
    finally:
        await opened.close()


class MoodyDisk(PlainIO):
    """Delays the writes of some blocks; those of others fail once, before or after everything is written."""

    def __init__(self) -> None:
        self.waits: dict[BlockKey, threading.Event] = {}
        self.fails: set[BlockKey] = set()
        self.fails_late: set[BlockKey] = set()
        self.failures = 0
        self.begun: set[BlockKey] = set()  # of those that wait

    def write_and_sync(self, fd: int, offset: int, parts: Sequence[memoryview]) -> None:
        written = {bytes(part[KEY_AT : KEY_AT + 32]) for part in parts}
        for waiting in [key for key in self.waits if key in written]:
            self.begun.add(waiting)
            assert self.waits[waiting].wait(20)
        early, late = self.fails & written, self.fails_late & written
        if not early:
            super().write_and_sync(fd, offset, parts)
        if not early and not late:
            return
        self.fails -= early
        self.fails_late -= late
        self.failures += 1
        raise OSError(errno.EIO, "Input/output error")


def moody_tier(path: Path, disk: MoodyDisk, capacity: int = 64 * MIB, segment_bytes: int = MIB) -> SsdTier:
    files = SsdLog(path, segment_bytes, io=disk)
    return SsdTier(files, SsdIndex(capacity, segment_bytes, make_policy("lru", 1024)), first_sequence=1)


async def test_what_was_dropped_stays_away_though_the_disk_fails_at_the_time(tmp_path: Path) -> None:
    """The drop's record waits for two runs of blocks in flight, and the second of them fails."""
    disk, size = MoodyDisk(), GROUP_BYTES // 2 + PAGE  # so that each goes by itself
    disk.waits = {key(n): threading.Event() for n in (1, 2)}
    disk.fails = {key(2)}
    opened = moody_tier(tmp_path, disk, 8 * GROUP_BYTES, 2 * GROUP_BYTES)
    assert await save(opened, 9) == [True]
    saves = asyncio.create_task(save(opened, 1, 2, 3, 4, size=size))
    await until(lambda: len(disk.begun) == 2)
    assert opened.drop([key(9)]) == 1
    disk.waits[key(1)].set()
    await until(lambda: not opened.index.has_drops)  # they are on their way
    disk.waits[key(2)].set()
    assert await saves == [True, False, False, False]
    await opened.committed()
    await opened.close()
    async with tier(tmp_path, 8 * GROUP_BYTES, 2 * GROUP_BYTES) as again:
        assert await found(again, 1, size) and not await found(again, 9)


@pytest.mark.slow  # as long as writes are left out after one that failed
async def test_a_drop_that_the_disk_refused_is_written_when_it_is_well_again_though_nothing_else_is(
    tmp_path: Path,
) -> None:
    disk = MoodyDisk()
    disk.fails_late = {key(1)}
    opened = moody_tier(tmp_path / "ssd", disk)
    assert await save(opened, 0) == [True]
    assert await save(opened, 1) == [False]
    assert opened.index.has_drops
    await until(lambda: not opened.index.has_drops)
    await opened.committed()
    shutil.copytree(tmp_path / "ssd", tmp_path / "after a crash")
    await opened.close()
    async with tier(tmp_path / "after a crash", segment_bytes=MIB) as again:
        assert await found(again, 0) and not await found(again, 1)


async def test_what_could_not_be_made_durable_and_was_then_dropped_stays_away(tmp_path: Path) -> None:
    """Its bytes may well be on the disk."""
    disk = MoodyDisk()
    disk.fails_late = {key(1)}
    opened = moody_tier(tmp_path, disk)
    assert await save(opened, 0) == [True]
    assert await save(opened, 1) == [False]
    assert opened.drop([key(1)]) == 0  # as the store's users would: it has it in memory
    await opened.committed()
    await opened.close()
    async with tier(tmp_path, segment_bytes=MIB) as again:
        assert await found(again, 0) and not await found(again, 1)


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_a_block_that_could_not_be_copied_is_where_it_was_until_it_is_dropped(
    tmp_path: Path, is_dropped: bool
) -> None:
    disk, capacity = MoodyDisk(), 8 * MIB
    opened = moody_tier(tmp_path, disk, capacity)
    assert await save(opened, 0, 1) == [True] * 2
    disk.fails_late = {key(1)}  # when the other has been copied
    for step in range(1, 60):
        opened.touch([key(0), key(1)])  # so that they do not leave before their segment is needed
        if not all(await save(opened, *range(step * 8, step * 8 + 8))):
            break
    assert disk.failures == 1 and step > 8
    opened.index.check()
    assert not is_dropped or opened.drop([key(1)]) == 1
    await opened.committed()
    here = [n for n in range(480) if await found(opened, n)]
    assert 0 in here and (1 in here) is not is_dropped
    await opened.close()
    async with tier(tmp_path, capacity) as again:
        assert [n for n in range(480) if await found(again, n)] == here


class LateReader(SsdLog):
    """Delays the first read of a certain block before it opens the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MIB)
        self.wanted = range_checksums(data(0), 4)
        self.is_asleep, self.is_woken = threading.Event(), threading.Event()

    def read_blocks(self, reads: Sequence[BlockRead]) -> list[bool | OSError | KeyError]:
        if not self.is_asleep.is_set() and any(np.array_equal(read.checksums, self.wanted) for read in reads):
            self.is_asleep.set()
            assert self.is_woken.wait(20)
        return super().read_blocks(reads)


async def test_a_block_that_is_moved_while_somebody_is_about_to_read_it_is_read_where_it_is_then(
    tmp_path: Path,
) -> None:
    files = LateReader(tmp_path)
    opened = SsdTier(files, SsdIndex(8 * MIB, MIB, make_policy("lru", 1024)), first_sequence=1)
    try:
        assert await save(opened, 0) == [True]
        block = opened.index.get(key(0))
        assert block is not None
        reading = asyncio.create_task(found(opened, 0))
        await until(files.is_asleep.is_set)
        for step in itertools.count(1):
            opened.touch([key(0)])  # so that it is copied out of its segment, not evicted
            assert all(await save(opened, *range(step * 8, step * 8 + 8)))
            if block.place.segment not in opened.index.segments:
                break
        files.is_woken.set()
        assert await reading and opened.counters["ssd_read_errors"] == 0
    finally:
        await opened.close()


class Graveyard(SsdLog):
    """Keeps the files that a kill would leave each time a segment was deleted. Deleting those in ``fails`` fails at
    first."""

    def __init__(self, path: Path, places: Path, io: SsdIO | None = None) -> None:
        super().__init__(path, MIB, io=io)
        self._path_of_all, self._places = path, places
        self.fails: set[int] = set()
        self.copies: list[Path] = []

    def delete(self, segment: int) -> None:
        if segment in self.fails:
            self.fails.discard(segment)
            raise OSError(errno.EIO, "Input/output error")
        super().delete(segment)
        self.copies.append(self._places / str(len(self.copies)))
        shutil.copytree(self._path_of_all, self.copies[-1])


async def test_what_was_dropped_stays_away_though_the_segment_that_says_so_goes_first(tmp_path: Path) -> None:
    files = Graveyard(tmp_path / "ssd", tmp_path)
    opened = SsdTier(files, SsdIndex(8 * MIB, MIB, make_policy("lru", 1024)), first_sequence=1)
    rng, gone = np.random.default_rng(0), list[tuple[int, int]]()  # with how many segments were deleted before
    for step in range(40):
        numbers = range(step * 8, step * 8 + 8)
        assert await save(opened, *numbers) == [True] * 8
        kept = [n for n in range(0, step * 8 + 8, 3) if key(n) in opened]
        opened.touch(key(n) for n in kept)  # these stay long, and their segments with them
        opened.drop([key(number := int(rng.choice(kept)))])
        await opened.committed()
        gone.append((number, len(files.copies)))
    await opened.close()
    assert len(files.copies) > 10
    for at, copy in enumerate(files.copies):
        async with tier(copy, 8 * MIB) as again:
            assert not [number for number, deleted in gone if deleted <= at and key(number) in again]


async def test_what_is_dropped_from_a_segment_that_cannot_be_deleted_stays_away(tmp_path: Path) -> None:
    disk = MoodyDisk()
    files = Graveyard(tmp_path / "ssd", tmp_path, disk)
    opened = SsdTier(files, SsdIndex(8 * MIB, MIB, make_policy("lru", 1024)), first_sequence=1)
    assert await save(opened, 0, 1, 2) == [True] * 3
    disk.waits, files.fails = {key(0): threading.Event()}, {1}  # when it is copied out of the first segment

    async def save_on() -> None:
        for step in range(1, 60):
            opened.touch([key(n) for n in range(3)])
            if not all(await save(opened, *range(step * 8, step * 8 + 8))):
                return

    saving = asyncio.create_task(save_on())
    await until(lambda: key(0) in disk.begun)
    assert opened.drop([key(1)]) == 1
    disk.waits[key(0)].set()
    await saving
    await opened.committed()
    assert not files.fails and key(1) not in opened
    opened.index.check()
    here = [n for n in range(480) if await found(opened, n)]
    await opened.close()
    async with tier(tmp_path / "ssd", 8 * MIB) as again:
        assert [n for n in range(480) if await found(again, n)] == here


def test_a_segment_that_could_not_be_deleted_can_be_when_the_disk_is_well_again(tmp_path: Path) -> None:
    files = SsdLog(tmp_path, MIB)
    files.create(1)
    path = only_segment(tmp_path).rename(tmp_path / "moved").rename  # something else is in its place
    (tmp_path / f"{1:016x}.kvlog").mkdir()
    with pytest.raises(OSError):
        files.delete(1)
    page = memoryview(bytearray(PAGE))
    files.read(1, 0, page)
    (tmp_path / f"{1:016x}.kvlog").rmdir()
    path(tmp_path / f"{1:016x}.kvlog")
    files.delete(1)
    assert not list(tmp_path.glob("*.kvlog"))
    files.close()


async def test_who_waits_for_drops_does_not_wait_for_all_that_is_being_saved(tmp_path: Path) -> None:
    disk, directory, size, most = MoodyDisk(), tmp_path / "ssd", MIB, 800
    pages = memoryview(mmap.mmap(-1, size))
    sums = range_checksums(pages, 1)
    opened = moody_tier(directory, disk, 256 * MIB, 8 * MIB)
    assert await save(opened, 0) == [True]
    disk.waits = {key(1): threading.Event()}
    numbers, is_enough = itertools.count(1), False

    async def save_on() -> None:
        while not is_enough and (number := next(numbers)) < most:
            assert await opened.save(BlockHeader(key(number), b"", "", size, sums), pages)

    savers = [asyncio.create_task(save_on()) for _ in range(3 * GROUP_BYTES // size)]
    await until(lambda: key(1) in disk.begun)
    opened.drop([key(0), key(1)])  # one that is there, and one that is about to be
    waiting = asyncio.create_task(opened.committed())
    disk.waits[key(1)].set()
    await waiting
    assert next(numbers) < most
    shutil.copytree(directory, tmp_path / "after a crash")
    is_enough = True
    failures = [answer for answer in await asyncio.gather(*savers, return_exceptions=True) if answer is not None]
    assert len(failures) == 1, "that of the block that was dropped"
    opened.index.check()
    await opened.close()
    async with tier(tmp_path / "after a crash", 256 * MIB) as again:
        assert key(0) not in again and key(1) not in again and len(again.index) > 0


async def test_parents_outlive_their_children(tmp_path: Path) -> None:
    async with tier(tmp_path, 8 * MIB) as opened:
        for number in range(200):
            parent = key(number - 1) if number % 20 else b""
            await opened.save(header(number, parent=parent), data(number))
        for number in range(200):
            if number % 20 and key(number) in opened:
                assert key(number - 1) in opened
        assert len(opened.index) < 120


async def test_a_tenant_has_its_quota_and_no_more(tmp_path: Path) -> None:
    async with tier(tmp_path, tenant_bytes=5 * (SIZE + PAGE)) as opened:
        for number in range(8):
            assert await opened.save(header(number, tenant="greedy"), data(number))
            assert await opened.save(header(100 + number, tenant=f"modest {number}"), data(100 + number))
        assert [await found(opened, n) for n in range(8)] == [False] * 3 + [True] * 5
        assert all([await found(opened, 100 + n) for n in range(8)])


async def test_a_tenant_has_no_more_than_its_quota_though_it_saves_all_at_once(tmp_path: Path) -> None:
    async with tier(tmp_path, tenant_bytes=5 * (SIZE + PAGE)) as opened:
        assert await opened.save(header(100, tenant="greedy"), data(100))
        saves = [opened.save(header(n, tenant="greedy" if n % 2 else "other"), data(n)) for n in range(16)]
        kept = await asyncio.gather(*saves)
        assert sum(kept[1::2]) == sum(kept[::2]) == 5 and kept == [key(n) in opened for n in range(16)]


async def test_of_tenants_whose_blocks_have_gone_nothing_is_kept(tmp_path: Path) -> None:
    """Their names are callers' own, as many as they like."""
    async with tier(tmp_path, 8 * MIB) as opened:
        for number in range(200):
            await opened.save(header(number, tenant=f"tenant {number}"), data(number))
        opened.index.check()
        assert len(opened.index) < 120


async def test_without_o_direct_the_page_cache_serves(tmp_path: Path) -> None:
    async with tier(tmp_path, direct=False) as opened:
        assert not opened.is_direct
        assert await save(opened, 0, 1) == [True, True]
        assert await found(opened, 0)
    async with tier(tmp_path) as again:  # the files are the same
        assert await found(again, 0) and await found(again, 1)


FALLOCATE, PWRITEV2, FLOCK = 285, 328, 73  # system calls of x86-64
filters_calls = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")


def run_where(call: int, fails_with: int, work: Callable[[], object]) -> None:
    """Do this in a thread where a system call fails, as on another file system, or on a full disk."""
    load, jump_if_equal, give, allow, error = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    rows = [(load, 0, 0, 0), (jump_if_equal, 0, 1, call), (give, 0, 0, error | fails_with), (give, 0, 0, allow)]

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
        program = ctypes.create_string_buffer(struct.pack("H6xQ", len(rows), ctypes.addressof(code)))
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        if libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) != 0:  # PR_SET_SECCOMP
            pytest.skip(f"no filters of system calls here: {os.strerror(ctypes.get_errno())}")
        work()

    with ThreadPoolExecutor(1) as alone:
        alone.submit(run).result()


@filters_calls
def test_a_file_system_that_cannot_reserve_room_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    async def use() -> None:
        opened = await SsdTier.open(tmp_path, 64 * MIB, make_policy("lru", 1024), SIZE, segment_bytes=MIB)
        assert await save(opened, *range(40)) == [True] * 40  # several segments
        assert all([await found(opened, number) for number in range(40)])
        await opened.close()
        assert opened.counters["ssd_write_errors"] == 0
        files = SsdLog(tmp_path, 1 << 50)
        with pytest.raises(OSError, match="No space left"):
            files.create(99)
        files.close()

    run_where(FALLOCATE, errno.EOPNOTSUPP, lambda: asyncio.run(use()))


def is_direct(path: Path) -> bool:
    files = SsdLog(path, MIB)
    files.close()
    return files.is_direct


@filters_calls
def test_a_full_disk_is_not_taken_for_one_that_refuses_o_direct(tmp_path: Path) -> None:
    if not is_direct(tmp_path):
        pytest.skip("this file system refuses O_DIRECT")
    for number, expected in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EINVAL, False)):
        answers: list[bool] = []
        run_where(PWRITEV2, number, lambda answers=answers: answers.append(is_direct(tmp_path)))  # type: ignore[misc]
        assert answers == [expected], os.strerror(number)


@filters_calls
def test_a_file_system_without_locks_is_not_taken_for_one_in_use(tmp_path: Path) -> None:
    def open_it() -> None:
        with pytest.raises(ConfigError, match="cannot be locked: No locks available"):
            SsdLog(tmp_path, MIB)

    run_where(FLOCK, errno.ENOLCK, open_it)


async def test_many_savers_and_readers_share_groups(tmp_path: Path) -> None:
    async with tier(tmp_path, 256 * MIB) as opened:
        assert all(await save(opened, *range(300)))
        assert all(await asyncio.gather(*(found(opened, n) for n in range(300))))
        opened.drop([key(n) for n in range(0, 300, 2)])
    async with tier(tmp_path, 256 * MIB) as again:
        assert [await found(again, n) for n in range(300)] == [n % 2 == 1 for n in range(300)]


@pytest.mark.parametrize("make", [PlainIO, NativeIO])
def test_pages_are_moved_and_verified_alike_natively_and_in_python(tmp_path: Path, make: Callable[[], SsdIO]) -> None:
    io, size = make(), 3 * MIB + PAGE
    pages = memoryview(mmap.mmap(-1, 2 * size))
    pages[:] = np.random.default_rng(4).bytes(2 * size)
    blocks = [pages[:size], pages[size:]]
    sums = [range_checksums(block[: size - 1000], 8) for block in blocks]
    fd = os.open(tmp_path / "pages", os.O_CREAT | os.O_RDWR, 0o600)
    io.write_and_sync(fd, PAGE, [blocks[0], pages[:PAGE], blocks[1]])  # a gap of a page between the two
    assert os.pread(fd, 2 * size + 2 * PAGE, 0) == bytes(PAGE) + bytes(blocks[0]) + bytes(pages[:PAGE]) + bytes(
        blocks[1]
    )

    into = [memoryview(mmap.mmap(-1, size)) for _ in range(4)]
    second = PAGE + size + PAGE
    jobs = [
        VerifiedRead(fd, PAGE, into[0], size - 1000, sums[0]),
        VerifiedRead(fd, second, into[1], size - 1000, sums[1]),
        VerifiedRead(fd, second, into[2], size - 1000, sums[0]),  # other bytes than were sealed
        VerifiedRead(fd, second + PAGE, into[3], size - 1000, sums[1]),  # beyond the end
    ]
    right, also_right, wrong, failed = io.read(jobs)
    short = VerifiedRead(fd, PAGE, into[0], 800, range_checksums(pages[:800], 8))
    assert io.read([short]) == [True]
    assert (right, also_right, wrong) == (True, True, False) and isinstance(failed, OSError)
    assert into[:2] == blocks
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        io.write_and_sync(fd, 0, [blocks[0]])
