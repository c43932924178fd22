"""The SSD under a store's DRAM: saves blocks in groups that are made durable together, and loads them again.

All decisions and all state are on one event loop, in ``SsdIndex``; disk reads and writes run in threads. ``append``
writes records, ``room`` makes room for them. If the disk refuses, loses or corrupts something, that is counted, the
block's replica here is dropped, and the store goes on: a failing tier costs hits, never bytes. It knows nothing of
slots, leases or clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from pathlib import Path

from kvstore.eviction import EvictionPolicy
from kvstore.ssd.append import BACK_OFF_S, PendingBlock, SsdAppender
from kvstore.ssd.file_limit import check_file_limit
from kvstore.ssd.index import MIN_SEGMENTS, SEGMENT_BYTES, SsdIndex, segment_size
from kvstore.ssd.log import SsdLog
from kvstore.ssd.reads import SsdReads
from kvstore.ssd.record import MAX_HEADER_BYTES, BlockHeader, block_size, header_size
from kvstore.ssd.room import SsdRoom
from kvstore.ssd.stall import LOOKS, STALL_S, Stall
from mooncake.errors import ChecksumMismatch, ConfigError, KVLoadFailed
from mooncake.types import BlockKey
from mooncake.vital import vital

log = logging.getLogger(__name__)

GROUP_BYTES = 16 << 20  # made durable together, at most
MAX_QUEUE = 4096  # blocks waiting to be saved
CLOSE_TIMEOUT_S = 15.0  # without progress: the disk hangs
_RATE_WEIGHT = 0.2
_FIRST_READ_BYTES_PER_S = 1e9  # assumed until something has been read


class SsdTier:
    """``open`` it; then ``save``, ``load``, ``drop``; then ``close``. Belongs to one event loop."""

    def __init__(
        self,
        log_: SsdLog,
        index: SsdIndex,
        first_sequence: int,
        group_bytes: int = GROUP_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        """Blocks are written in groups of ``group_bytes``; those of up to three are held while the disk hangs. After
        ``stall_s`` without progress it stands still."""
        self.counters: Counter[str] = index.counters
        self._log = log_
        self._reads = SsdReads(log_)
        self._index = index
        self._group_bytes, self._stall_s = group_bytes, stall_s
        self._save_stall, self._load_stall = Stall(), Stall()
        self._appender = SsdAppender(log_, index, first_sequence, self._answer, self._save_stall)
        self._room = SsdRoom(log_, index, self._appender, self.load)
        self._queue: deque[PendingBlock] = deque()
        self._saving: dict[BlockKey, PendingBlock] = {}
        self._is_committing = False
        self._work = asyncio.Event()
        self._is_ending = asyncio.Event()  # a disk that refused is tried once more at once
        self._commits: list[asyncio.Future[bool]] = []  # waiting for drops to be durable
        self._off_until = 0.0
        self._reading = 0  # bytes
        self._bytes_per_s = _FIRST_READ_BYTES_PER_S
        self._task = vital(self._commit_for_ever(), "ssd-commit")
        self._watcher = vital(self._watch(), "ssd-watch")

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
        tenant_bytes: int = 0,
        group_bytes: int = GROUP_BYTES,
    ) -> SsdTier:
        """Recover what earlier runs left there. Blocks larger than ``largest_block`` (bytes) are refused. Raises
        ConfigError."""
        segment_bytes = segment_size(capacity_bytes, largest_block, segment_bytes)
        if MIN_SEGMENTS * segment_bytes > capacity_bytes:
            needed = MIN_SEGMENTS * segment_bytes / 1e9
            raise ConfigError(f"store.ssd_gb = {capacity_bytes / 1e9:g} is too little: {needed:.3f} are needed")
        index = SsdIndex(capacity_bytes, segment_bytes, policy, tenant_bytes)
        check_file_limit(capacity_bytes, index.max_segments)
        return await cls.over(SsdLog(directory, segment_bytes, direct), index, group_bytes)

    @classmethod
    async def over(cls, files: SsdLog, index: SsdIndex, group_bytes: int = GROUP_BYTES) -> SsdTier:
        """Take over what earlier runs left in these files. Raises ConfigError, after closing them."""
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
        index.counters.update(ssd_torn=scan.torn, ssd_rotten=scan.rotten, ssd_segments_aside=len(scan.aside))
        log.info("%s: %d blocks found, %d torn ones cut off", files.directory, len(index), scan.torn)
        if scan.rotten:
            log.warning("%s: %d headers are wrong; their records are lost, perhaps drops", files.directory, scan.rotten)
        if scan.aside:
            log.warning("%s: %d segments lie aside, and take room until removed", files.directory, len(scan.aside))
        return cls(files, index, scan.last_sequence + 1, group_bytes)

    @property
    def index(self) -> SsdIndex:
        return self._index

    @property
    def is_writable(self) -> bool:
        """Whether saving is worth trying now: the disk has not refused a write lately, and is not behind."""
        return not self._is_resting and not self._save_stall.lasts

    @property
    def is_readable(self) -> bool:
        """Whether loading is worth trying now: reads in progress do not stand still."""
        return not self._load_stall.holds

    @property
    def is_in_trouble(self) -> bool:
        """Whether the disk refuses writes, or stands still."""
        return self._appender.is_refused or self._save_stall.lasts or not self.is_readable

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
        """Bytes of a block; None when it is not there."""
        block = self._index.get(key)
        return block.header.length if block else None

    def headers(self) -> list[BlockHeader]:
        return [block.header for block in self._index.blocks()]

    def load_s(self, nbytes: int) -> float:
        """Predicted time to read this many bytes, behind the reads in progress."""
        return max((nbytes + self._reading) / self._bytes_per_s, self._load_stall.share * self._stall_s)

    def save(self, header: BlockHeader, data: memoryview) -> asyncio.Future[bool]:
        """Write a block, whose bytes must not change until the answer: True once it is durable, False when it could
        not be stored (full, error, quota, too many ranges for a record). Free for blocks that are there already or
        on their way."""
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
            self._saving[header.key] = pending = PendingBlock(header, data, done)
            self._queue.append(pending)
            self._work.set()
        return done

    async def load(self, key: BlockKey, into: memoryview) -> BlockHeader:
        """Read a block and verify it. ``into`` has its length, or up to the next whole page if possible.

        Raises KVLoadFailed when it is not here (any more), and ChecksumMismatch when its bytes are wrong; then, and
        after a disk error, the block is dropped.
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
                if (count := self.counters["ssd_read_errors"]).bit_count() == 1:  # seldom: a dead disk fails every read
                    log.warning("the SSD could not read a block (%d so far): %s", count, error)
                self._lose(key)
            elif found is not None and found.header is header:  # compaction moved it while we waited
                return await self.load(key, into)
            raise KVLoadFailed(f"the SSD could not read the block: {error}") from None
        finally:
            self._reading -= size
            self._load_stall.moved()
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
            if (pending := self._saving.pop(key, None)) is not None:
                pending.is_unwanted = True  # otherwise it would return once it has been written
                self._index.keep_drops(pending.undo)
            dropped += self._index.drop(key, time.monotonic())
        if self._index.has_drops:
            self._work.set()
        return dropped

    def is_dropping(self, keys: Collection[BlockKey]) -> bool:
        """Whether a restart now would find one of these blocks although it was dropped."""
        return self._index.is_dropping(keys) or self._appender.is_dropping(keys)

    async def committed(self) -> bool:
        """Return once all drops so far are durable: True; or once the disk has refused them: False. They are written
        when it takes writes again."""
        if not self._index.has_drops and not self._is_committing:
            return True
        if self._is_resting:
            return False
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._commits.append(done)
        self._work.set()
        return await done

    def take_left(self) -> list[BlockHeader]:
        return self._index.take_left()

    def be_patient(self) -> None:
        """From now on wait for the disk however slow it is: what is not saved is lost."""
        self._watcher.cancel()
        self._save_stall.forget()
        self._load_stall.forget()
        self._off_until = 0.0
        self._is_ending.set()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Saves what waits, then closes the files. If the disk makes no progress for this long it hangs: its files
        stay open, because a thread may still be writing to them."""
        self.be_patient()
        is_answering = await self._finish(timeout_s)
        self._task.cancel()
        self._appender.cancel()
        await asyncio.gather(self._task, self._watcher, return_exceptions=True)
        await self._appender.join()
        left = len(self._saving)
        for pending in self._saving.copy().values():
            self._answer(pending, False)
        self._refuse_waiting()
        self._reads.close()
        _answer_all(self._commits, False)
        if is_answering:
            await asyncio.to_thread(self._shut)
        else:
            log.error("the SSD hangs: its files stay open, and %d blocks are not saved", left)

    async def _finish(self, timeout_s: float) -> bool:
        """Whether everything waiting was saved or refused, and all drops are durable."""
        while self._saving:
            done, _ = await asyncio.wait([pending.done for pending in self._saving.values()], timeout=timeout_s)
            if not done:
                return False
        try:
            await asyncio.wait_for(self.committed(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _shut(self) -> None:
        self._appender.shut()
        self._reads.shut()
        self._log.close()

    def _lose(self, key: BlockKey) -> None:
        self._index.drop(key, time.monotonic())
        self._work.set()

    # Committing

    async def _commit_for_ever(self) -> None:
        while True:
            self._is_committing = False
            with contextlib.suppress(TimeoutError):  # remaining drops do not wait for more
                async with asyncio.timeout(BACK_OFF_S if self._index.has_drops else None):
                    await self._work.wait()
            await self._rest()
            self._work.clear()
            self._is_committing = True
            while self._queue or self._index.has_drops or self._commits:
                group = self._next_group()
                try:
                    await self._commit(group)
                    if not self._queue:
                        await self._appender.settle()
                except Exception as error:  # of the disk, or a bug, which must not stop the next group
                    await self._appender.join()
                    self._fail(group, error)
                    break

    @property
    def _is_resting(self) -> bool:
        """Whether the disk refused a write lately."""
        return time.monotonic() < self._off_until

    async def _rest(self) -> None:
        """Every try after a refusal costs the rest of a segment, so drops wait as long as blocks do."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(self._off_until - time.monotonic(), 0.0)):
                await self._is_ending.wait()

    def _next_group(self) -> list[PendingBlock]:
        group: list[PendingBlock] = []
        nbytes = 0
        while self._queue and (not group or nbytes + block_size(self._queue[0].header) <= self._group_bytes):
            pending = self._queue.popleft()
            nbytes += block_size(pending.header)
            group.append(pending)
        return group

    async def _commit(self, group: list[PendingBlock]) -> None:
        """Start writing drops, then blocks."""
        now = time.monotonic()
        kept: list[PendingBlock] = []
        waiting = self._appender.bytes_on_way
        for pending in group:
            size, tenant = block_size(pending.header), pending.header.tenant
            if pending.is_unwanted:
                self._answer(pending, False)
            elif self._index.fit_tenant(tenant, waiting[tenant] + size, now) and self._index.make_room(
                size, waiting.total(), now
            ):
                kept.append(pending)
                waiting[tenant] += size
            else:
                self.counters["ssd_refused"] += 1
                self._answer(pending, False)
        await self._tell_drops()
        async for part in self._fitting(kept):
            await self._appender.start([self._appender.place_pending(pending) for pending in part], part)

    async def _fitting(self, group: Sequence[PendingBlock]) -> AsyncIterator[list[PendingBlock]]:
        """Parts of a group that fit the open segment, opening new ones as needed."""
        left = deque(group)
        while left:
            await self._room.ensure(block_size(left[0].header))
            room, part = self._index.room(), list[PendingBlock]()
            while left and block_size(left[0].header) <= room:
                room -= block_size(left[0].header)
                part.append(left.popleft())
            yield part

    async def _tell_drops(self) -> None:
        """Start writing the drops so far. Those waiting for them are notified as soon as they are durable or
        refused, however much is still to be saved."""
        waiting, self._commits = self._commits, []
        try:
            await self._appender.write_drops(self._room.ensure)
        except BaseException:
            _answer_all(waiting, False)
            raise
        if (run := self._appender.last_run) is not None:
            run.add_done_callback(lambda run: _answer_all(waiting, not run.cancelled() and run.exception() is None))
        else:
            _answer_all(waiting, True)

    def _fail(self, group: Iterable[PendingBlock], error: Exception) -> None:
        """The disk refused it."""
        self._appender.failed(error)
        self._off_until = time.monotonic() + BACK_OFF_S
        for pending in group:
            self._answer(pending, False)
        self._refuse_waiting()
        _answer_all(self._commits, False)
        self._commits.clear()

    async def _watch(self) -> None:
        """Nothing more waits for a disk that stands still, until what waits already has been saved."""
        while True:
            await asyncio.sleep(self._stall_s / LOOKS)
            was_behind = self._save_stall.lasts
            last_run = self._appender.last_run
            self._save_stall.look(bool(self._saving) or (last_run is not None and not last_run.done()))
            self._load_stall.look(self._reading > 0)
            if self._save_stall.lasts and not was_behind:
                self.counters["ssd_stalls"] += 1
                log.warning("the SSD stands still: blocks leave memory without being saved until it has caught up")
                self._refuse_waiting()
            elif was_behind and not self._save_stall.lasts:
                log.warning("the SSD has caught up")

    def _refuse_waiting(self) -> None:
        """Their slots are held for as long as they wait."""
        for pending in self._queue:
            self._answer(pending, False)
        self._queue.clear()

    def _answer(self, pending: PendingBlock, is_saved: bool) -> None:
        if self._saving.get(pending.header.key) is pending:
            del self._saving[pending.header.key]
        if not pending.done.done():
            pending.done.set_result(is_saved)


def _answer_all(waiting: Iterable[asyncio.Future[bool]], is_durable: bool) -> None:
    for done in waiting:
        if not done.done():
            done.set_result(is_durable)
