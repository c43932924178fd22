"""The SSD under a store's DRAM: saves blocks in groups that are made durable together, and loads them again.

All decisions and all state live on one event loop, in ``SsdIndex``; reads and writes of the disk run in threads. What
the disk refuses, loses or returns wrong is counted, the block's replica here is dropped, and the store goes on: a tier
that fails costs hits, never bytes. It must not know about slots, leases or clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import mmap
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvstore.eviction import EvictionPolicy
from kvstore.ssd_index import MIN_SEGMENTS, SEGMENT_BYTES, SsdBlock, SsdIndex, segment_size
from kvstore.ssd_log import Place, SsdLog
from kvstore.ssd_reads import SsdReads
from kvstore.ssd_record import (
    MAX_DROPS,
    MAX_HEADER_BYTES,
    BlockHeader,
    Drop,
    block_size,
    header_size,
    pack_block,
    pack_drops,
    padded,
)
from mooncake.errors import ChecksumMismatch, ConfigError, KVLoadFailed
from mooncake.types import BlockKey

log = logging.getLogger(__name__)

GROUP_BYTES = 16 << 20  # made durable together
RUNS_ON_WAY = 2  # while one is made durable the next is being written
MAX_QUEUE = 4096  # blocks waiting to be saved
CLOSE_TIMEOUT_S = 15.0  # without anything being saved: the disk hangs
BACK_OFF_S = 5.0  # without writes, after the disk refused one
_FULL = (errno.ENOSPC, errno.EDQUOT)
_RATE_WEIGHT = 0.2
_FIRST_READ_BYTES_PER_S = 1e9  # believed until something was read

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Saving:
    """A block that waits to be saved. ``data`` stays as it is until ``done`` is. Dropped meanwhile: unwanted. Once its
    record has a place, ``undo`` takes it back."""

    header: BlockHeader
    data: memoryview
    done: asyncio.Future[bool]
    is_unwanted: bool = False
    undo: tuple[Drop, ...] = ()


@dataclass(frozen=True, slots=True)
class _Write:
    """A record with its place. ``undo`` takes it back, if it is a block's."""

    place: Place
    header: bytes
    data: memoryview | None = None
    undo: tuple[Drop, ...] = ()


class SsdTier:
    """``open`` it; then ``save``, ``load``, ``drop``; then ``close``. Belongs to one event loop."""

    def __init__(self, log_: SsdLog, index: SsdIndex, first_sequence: int) -> None:
        self.counters: Counter[str] = index.counters
        self._log = log_
        self._reads = SsdReads(log_)
        self._index = index
        self._sequence = first_sequence
        self._durable = first_sequence - 1
        self._queue: deque[_Saving] = deque()
        self._saving: dict[BlockKey, _Saving] = {}
        self._runs: deque[asyncio.Task[None]] = deque()  # on their way to the disk, in the order of the log
        self._run_bytes: Counter[str] = Counter()  # of blocks in them, by tenant
        self._is_committing = False
        self._work = asyncio.Event()
        self._commits: list[asyncio.Future[None]] = []  # who waits for drops to be safe
        self._off_until = 0.0
        self._refusals = 0  # in a row, of the disk: told when they begin and when they end
        self._reading = 0  # bytes
        self._bytes_per_s = _FIRST_READ_BYTES_PER_S
        self._writers = ThreadPoolExecutor(RUNS_ON_WAY, thread_name_prefix="ssd-write")
        self._task = asyncio.create_task(self._commit_for_ever(), name="ssd-commit")

    @classmethod
    async def open(
        cls,
        directory: Path,
        capacity_bytes: int,
        policy: EvictionPolicy,
        largest_block: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        direct: bool = True,
        is_built_on: Callable[[BlockKey], bool] = lambda key: False,
        tenant_bytes: int = 0,
    ) -> SsdTier:
        """Find what earlier lives left there. Larger blocks than ``largest_block`` (bytes) are refused. Raises
        ConfigError."""
        segment_bytes = segment_size(capacity_bytes, largest_block, segment_bytes)
        if MIN_SEGMENTS * segment_bytes > capacity_bytes:
            needed = MIN_SEGMENTS * segment_bytes / 1e9
            raise ConfigError(f"store.ssd_gb = {capacity_bytes / 1e9:g} is too little: {needed:.3f} are needed")
        index = SsdIndex(capacity_bytes, segment_bytes, policy, is_built_on, tenant_bytes)
        return await cls.over(SsdLog(directory, segment_bytes, direct), index)

    @classmethod
    async def over(cls, files: SsdLog, index: SsdIndex) -> SsdTier:
        """Take over what earlier lives left in these files. Raises ConfigError; they are closed then."""
        try:
            scan = await asyncio.to_thread(files.scan)
            for number in index.recover(scan, time.monotonic()):
                await asyncio.to_thread(files.delete, number)
                index.give_up(number)
        except BaseException as error:
            files.close()
            if isinstance(error, OSError):
                raise ConfigError(f"store.ssd_path {files.directory}: {error}") from None
            raise
        index.counters.update(ssd_torn=scan.torn, ssd_segments_aside=len(scan.aside))
        log.info("%s: %d blocks found, %d torn ones cut off", files.directory, len(index), scan.torn)
        if scan.aside:
            log.warning("%s: %d segments lie aside, and take room until removed", files.directory, len(scan.aside))
        return cls(files, index, scan.last_sequence + 1)

    @property
    def index(self) -> SsdIndex:
        return self._index

    @property
    def is_writable(self) -> bool:
        """Whether saving is worth trying now."""
        return time.monotonic() >= self._off_until

    @property
    def is_direct(self) -> bool:
        return self._log.is_direct

    @property
    def room(self) -> int:
        """How many more blocks may wait to be saved."""
        return MAX_QUEUE - len(self._saving)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._index

    def get(self, key: BlockKey) -> BlockHeader | None:
        block = self._index.get(key)
        return block.header if block else None

    def length(self, key: BlockKey) -> int | None:
        """Bytes of a block, None when it is not there."""
        block = self._index.get(key)
        return block.header.length if block else None

    def headers(self) -> list[BlockHeader]:
        return [block.header for block in self._index.blocks()]

    def load_s(self, nbytes: int) -> float:
        """What reading so many bytes is going to take, with what is being read already."""
        return (nbytes + self._reading) / self._bytes_per_s

    def save(self, header: BlockHeader, data: memoryview) -> asyncio.Future[bool]:
        """Write a block, whose bytes must stay as they are until the answer: True once it is durable, False when it
        could not be kept (full, error, quota, too many ranges for a record). Saving what is there already or on its way
        costs nothing."""
        waiting = self._saving.get(header.key)
        if waiting is not None:
            return waiting.done
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if header.key in self._index:
            done.set_result(True)
        elif (
            not self.is_writable
            or self.room <= 0
            or block_size(header) > self._index.segment_bytes // 2
            or header_size(header) > MAX_HEADER_BYTES
        ):
            self.counters["ssd_refused"] += 1
            done.set_result(False)
        else:
            self._saving[header.key] = saving = _Saving(header, data, done)
            self._queue.append(saving)
            self._work.set()
        return done

    async def load(self, key: BlockKey, into: memoryview) -> BlockHeader:
        """Read a block and verify it. ``into`` has its length, or up to the next whole page if it can.

        Raises KVLoadFailed when it is not here (any more), and ChecksumMismatch when its bytes are wrong; the block is
        dropped then, as after an error of the disk.
        """
        block = self._index.get(key)
        if block is None:
            raise KVLoadFailed("the block has left the SSD")
        header, size, started = block.header, block.place.size, time.monotonic()
        self._reading += size
        try:
            is_right = await self._reads.read(block, into)
        except (OSError, KeyError) as error:
            found = self._index.get(key)
            if found is block:
                self.counters["ssd_read_errors"] += 1
                log.warning("the SSD could not read a block: %s", error)
                self._lose(key)
            elif found is not None and found.header is header:  # compaction moved it while we waited
                return await self.load(key, into)
            raise KVLoadFailed(f"the SSD could not read the block: {error}") from None
        finally:
            self._reading -= size
        if not is_right:
            self.counters["checksum_mismatches"] += 1
            if self._index.get(key) is block:
                self._lose(key)
            raise ChecksumMismatch("the block's bytes on the SSD differ from what was sealed")
        rate = size / max(time.monotonic() - started, 1e-6)
        self._bytes_per_s += _RATE_WEIGHT * (rate - self._bytes_per_s)
        self.counters["ssd_read_bytes"] += header.length
        return header

    def touch(self, keys: Iterable[BlockKey]) -> None:
        self._index.touch(keys, time.monotonic())

    def drop(self, keys: Iterable[BlockKey]) -> int:
        """Forget blocks; ``committed`` says when a restart will not find them either. Returns how many there were."""
        dropped = 0
        for key in keys:
            if (saving := self._saving.pop(key, None)) is not None:
                saving.is_unwanted = True  # or it would come back when it has been written
                self._index.keep_drops(saving.undo)
            dropped += self._index.drop(key, time.monotonic())
        if self._index.has_drops:
            self._work.set()
        return dropped

    async def committed(self) -> None:
        """Return once all drops so far are durable, or the disk would not take them."""
        if self._index.has_drops or self._is_committing:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._commits.append(done)
            self._work.set()
            await done

    def take_left(self) -> list[BlockHeader]:
        return self._index.take_left()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Saves what waits, then lets go of the files. A disk that takes nothing for so long hangs: its files stay
        open, for a thread may still be writing there."""
        is_answering = await self._finish(timeout_s)
        tasks = [self._task, *self._runs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        left = len(self._saving)
        for saving in [*self._saving.values(), *self._queue]:
            self._answer(saving, False)
        self._queue.clear()
        if is_answering:
            await asyncio.to_thread(self._shut)
        else:
            log.error("the SSD hangs: its files stay open, and %d blocks are not saved", left)

    async def _finish(self, timeout_s: float) -> bool:
        """Whether all that waits was saved or refused, and all drops are durable."""
        while self._saving:
            done, _ = await asyncio.wait([saving.done for saving in self._saving.values()], timeout=timeout_s)
            if not done:
                return False
        try:
            await asyncio.wait_for(self.committed(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _shut(self) -> None:
        self._writers.shutdown()
        self._reads.shut()
        self._log.close()

    def _lose(self, key: BlockKey) -> None:
        self._index.drop(key, time.monotonic())
        self._work.set()

    # Committing

    async def _commit_for_ever(self) -> None:
        while True:
            self._is_committing = False
            with contextlib.suppress(TimeoutError):  # drops that are left over do not wait for more
                async with asyncio.timeout(BACK_OFF_S if self._index.has_drops else None):
                    await self._work.wait()
            self._work.clear()
            self._is_committing = True
            while self._queue or self._index.has_drops or self._commits:
                group = self._next_group()
                try:
                    await self._commit(group)
                    if not self._queue:
                        await self._settle()
                except Exception as error:  # of the disk, or a bug, which must not stop the next group
                    await asyncio.gather(*self._runs, return_exceptions=True)
                    self._runs.clear()
                    self._fail(group, error)
                    break

    def _next_group(self) -> list[_Saving]:
        group: list[_Saving] = []
        nbytes = 0
        while self._queue and (not group or nbytes + block_size(self._queue[0].header) <= GROUP_BYTES):
            saving = self._queue.popleft()
            nbytes += block_size(saving.header)
            group.append(saving)
        return group

    async def _commit(self, group: list[_Saving]) -> None:
        """Start to write drops, then blocks."""
        now = time.monotonic()
        kept: list[_Saving] = []
        waiting = self._run_bytes.copy()
        for saving in group:
            size, tenant = block_size(saving.header), saving.header.tenant
            if saving.is_unwanted:
                self._answer(saving, False)
            elif self._index.fit_tenant(tenant, waiting[tenant] + size, now) and self._index.make_room(
                size, waiting.total(), now
            ):
                kept.append(saving)
                waiting[tenant] += size
            else:
                self.counters["ssd_refused"] += 1
                self._answer(saving, False)
        await self._tell_drops()
        async for part in self._fitting(kept):
            await self._start_run(part, [self._place_saving(saving) for saving in part])

    async def _start_run(
        self, savings: Sequence[_Saving], writes: Sequence[_Write], drops: Sequence[Drop] = ()
    ) -> None:
        """Raises what went wrong with an earlier one."""
        if len(self._runs) == RUNS_ON_WAY:
            await self._runs.popleft()
        self._run_bytes += _bytes_by_tenant(savings)
        before = self._runs[-1] if self._runs else None
        self._runs.append(asyncio.create_task(self._run(savings, writes, drops, before), name="ssd-run"))

    async def _run(
        self,
        savings: Sequence[_Saving],
        writes: Sequence[_Write],
        drops: Sequence[Drop],
        before: asyncio.Task[None] | None,
    ) -> None:
        """Write records, and once they and all before them are durable, say that they are there: a restart finds
        nothing behind what is torn. Raises OSError."""
        try:
            await self._in_writer(self._write_and_sync, writes)
            if before is not None:
                await asyncio.shield(before)
        except BaseException:  # and yet what was to be written may be there: a restart is not to find it
            self._index.keep_drops([*drops, *(drop for write in writes for drop in write.undo)])
            for saving in savings:
                self._answer(saving, False)
            raise
        finally:
            self._run_bytes -= _bytes_by_tenant(savings)
        if self._refusals:
            log.warning("the SSD takes writes again, after refusing %d times", self._refusals)
            self._refusals = 0
        self._durable = writes[-1].place.sequence
        self._index.dropped(drops, writes[-1].place.segment)
        for saving, write in zip(savings, writes if savings else (), strict=True):
            self.counters["ssd_writes"] += 1
            self.counters["ssd_write_bytes"] += saving.header.length
            if not saving.is_unwanted:
                self._index.insert(saving.header, write.place, time.monotonic())
            self._answer(saving, not saving.is_unwanted)

    async def _settle(self) -> None:
        """Return once all that was started is durable. Raises what went wrong with it."""
        while self._runs:
            await self._runs.popleft()

    async def _fitting(self, group: Sequence[_Saving]) -> AsyncIterator[list[_Saving]]:
        """Parts of a group that fit the open segment, opening new ones as needed."""
        left = deque(group)
        while left:
            await self._ensure_room(block_size(left[0].header))
            room, part = self._index.room(), list[_Saving]()
            while left and block_size(left[0].header) <= room:
                room -= block_size(left[0].header)
                part.append(left.popleft())
            yield part

    async def _tell_drops(self) -> None:
        """Start to write the drops so far. Who waits for them hears of it as soon as they are durable, however much is
        still to be saved, or when the disk would not take them."""
        waiting, self._commits = self._commits, []
        try:
            await self._write_drops(self._ensure_room)
        finally:
            if self._runs:
                self._runs[-1].add_done_callback(lambda _: _answer_all(waiting))
            else:
                _answer_all(waiting)

    async def _write_drops(self, ensure_room: Callable[[int], Awaitable[None]], but_of: int | None = None) -> None:
        while drops := self._index.take_drops(MAX_DROPS, but_of):
            try:
                await ensure_room(len(pack_drops(drops, 0, 0, 0)))
                await self._start_run((), [self._place_drops(drops)], drops)
            except BaseException:  # also an earlier run's: this one has not begun then, and keeps nothing
                self._index.keep_drops(drops)
                raise

    async def _ensure_room(self, size: int) -> None:
        """See to it that the open segment has room for a record. Raises OSError."""
        if self._index.room() >= size:
            return
        if self._index.needs_reclaim():
            await self._settle()  # what is on its way counts as live nowhere yet
            await self._reclaim()
        await self._ensure_open(size)

    async def _ensure_open(self, size: int) -> None:
        """As above, without making room for another segment first."""
        if self._index.room() < size:
            await self._open_segment()

    async def _open_segment(self) -> None:
        number = self._index.new_segment()
        try:
            await self._in_writer(self._log.create, number)
        except OSError as error:
            if error.errno not in _FULL or not await self._live_with_less():
                raise
            await self._in_writer(self._log.create, number)
        self._index.opened(number)

    async def _live_with_less(self) -> bool:
        """The disk is full before the tier is: give up the segment that holds least, and keep to what room there is."""
        await self._settle()  # what is on its way is in no segment's books yet
        found = self._index.emptiest()
        if found is None:
            return False
        number, blocks = found
        now = time.monotonic()
        for block in blocks:
            self._index.drop(block.header.key, now)
        await self._delete(number)
        self.counters["ssd_full"] += 1
        if self._index.shrink():
            kept = self._index.capacity_bytes / 1e9
            log.warning("the disk is full: the SSD tier keeps to %.3g GB until the store is started anew", kept)
        return True

    async def _reclaim(self) -> None:
        """Empty segments with the fewest live bytes into the open one, and delete them, until there is room for one."""
        for _ in range(self._index.max_segments):
            found = self._index.emptiest() if self._index.needs_reclaim() else None
            if found is None:
                return
            number, blocks = found
            self._index.carry_drops(number)
            await self._write_drops(self._ensure_open, but_of=number)
            await self._settle()
            for block in blocks:
                await self._copy(block)
            if number not in self._index.segments:
                continue  # the disk was full, and it had to go as it was
            if self._index.live_of(number):
                return  # something could not be copied; the next one may do better
            await self._delete(number)
            self.counters["ssd_segments_compacted"] += 1

    async def _delete(self, number: int) -> None:
        """Its drops count until the file is gone: whoever starts anew would find it. Raises OSError."""
        await self._in_writer(self._log.delete, number)
        self._index.give_up(number)

    async def _copy(self, block: SsdBlock) -> None:
        """Move one block to the open segment; one that cannot be read rightly is dropped instead."""
        key = block.header.key
        if self._index.get(key) is not block:
            return
        data = memoryview(mmap.mmap(-1, padded(block.header.length)))
        try:
            await self.load(key, data)
        except KVLoadFailed:
            return
        await self._ensure_open(block.place.size)
        write = self._place_block(block.header, data)
        await self._start_run((), [write])
        await self._settle()
        self._index.moved(key, block.place, write.place)
        self.counters["ssd_copied_bytes"] += block.header.length

    def _place_saving(self, saving: _Saving) -> _Write:
        write = self._place_block(saving.header, saving.data)
        saving.undo = write.undo
        if saving.is_unwanted:
            self._index.keep_drops(saving.undo)
        return write

    def _place_block(self, header: BlockHeader, data: memoryview) -> _Write:
        place = self._place(header_size(header), block_size(header))
        packed = pack_block(header, place.segment, place.sequence, self._durable)
        return _Write(place, packed, data, (Drop(header.key, place.segment, place.sequence),))

    def _place_drops(self, drops: Sequence[Drop]) -> _Write:
        sample = pack_drops(drops, 0, 0, 0)
        place = self._place(len(sample), len(sample))
        return _Write(place, pack_drops(drops, place.segment, place.sequence, self._durable))

    def _place(self, header_bytes: int, size: int) -> Place:
        segment, offset = self._index.take(size)
        self._sequence += 1
        return Place(segment, offset, header_bytes, size, self._sequence - 1)

    def _write_and_sync(self, writes: Sequence[_Write]) -> None:
        """In a thread: one run of records of one segment, durable when this returns. Raises OSError."""
        headers = memoryview(mmap.mmap(-1, sum(len(write.header) for write in writes)))  # aligned, all at once
        parts: list[memoryview] = []
        at = 0
        for write in writes:
            headers[at : at + len(write.header)] = write.header
            parts.append(headers[at : at + len(write.header)])
            at += len(write.header)
            if write.data is not None:
                parts.append(write.data)
        first = writes[0].place
        self._log.write(first.segment, first.offset, parts)

    async def _in_writer(self, do: Callable[[T], None], what: T) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writers, do, what)

    def _fail(self, group: Iterable[_Saving], error: Exception) -> None:
        """The disk would not take it. What the open segment holds beyond its safe part is never looked at again."""
        self.counters["ssd_write_errors"] += 1
        self._index.close_open()
        self._off_until = time.monotonic() + BACK_OFF_S
        if isinstance(error, OSError):
            if not self._refusals:
                log.warning("the SSD refuses writes (%s); trying again every %.0f s", error, BACK_OFF_S)
            self._refusals += 1
        else:
            log.error("saving blocks to the SSD failed", exc_info=error)
        for saving in [*group, *self._queue]:
            self._answer(saving, False)
        self._queue.clear()
        _answer_all(self._commits)
        self._commits.clear()

    def _answer(self, saving: _Saving, is_saved: bool) -> None:
        if self._saving.get(saving.header.key) is saving:
            del self._saving[saving.header.key]
        if not saving.done.done():
            saving.done.set_result(is_saved)


def _bytes_by_tenant(savings: Iterable[_Saving]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for saving in savings:
        sizes[saving.header.tenant] += block_size(saving.header)
    return sizes


def _answer_all(waiting: Iterable[asyncio.Future[None]]) -> None:
    for done in waiting:
        if not done.done():
            done.set_result(None)
