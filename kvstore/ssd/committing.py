"""What an SSD tier has still to write: blocks that wait to be saved and drops, written in groups that become durable
together, and told to those who wait for them.

``append`` writes records, ``room`` makes room for them. A disk that refuses a write gets none for a while; one that
stands still gets no more to wait for. It knows nothing of reads, nor which blocks are worth saving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence

from kvstore.ssd.append import BACK_OFF_S, PendingBlock, SsdAppender
from kvstore.ssd.index import SsdIndex
from kvstore.ssd.log import SsdLog
from kvstore.ssd.record import MAX_HEADER_BYTES, BlockHeader, block_size, header_size
from kvstore.ssd.room import SsdRoom
from kvstore.ssd.stall import Stall
from mooncake.types import BlockKey
from mooncake.vital import vital

log = logging.getLogger(__name__)

MAX_QUEUE = 4096  # blocks waiting to be saved


class Committing:
    """``save`` and ``drop``; ``look`` at regular intervals; then ``end`` and ``shut``. Belongs to one event loop."""

    def __init__(
        self,
        files: SsdLog,
        index: SsdIndex,
        first_sequence: int,
        group_bytes: int,
        load: Callable[[BlockKey, memoryview], Awaitable[BlockHeader]],
    ) -> None:
        """``load`` reads and verifies a block, as ``SsdTier.load`` does."""
        self._index = index
        self._group_bytes = group_bytes
        self._stall = Stall()
        self._appender = SsdAppender(files, index, first_sequence, self._answer, self._stall)
        self._room = SsdRoom(files, index, self._appender, load)
        self._queue: deque[PendingBlock] = deque()
        self._saving: dict[BlockKey, PendingBlock] = {}
        self._is_committing = False
        self._work = asyncio.Event()
        self._is_ending = asyncio.Event()  # a disk that refused is tried once more at once
        self._commits: list[asyncio.Future[bool]] = []  # waiting for drops to be durable
        self._off_until = 0.0
        self._task = vital(self._commit_for_ever(), "ssd-commit")

    @property
    def is_writable(self) -> bool:
        """As ``SsdTier.is_writable``."""
        return not self._is_resting and not self._stall.lasts

    @property
    def is_in_trouble(self) -> bool:
        """As ``SsdTier.is_in_trouble``, but of writes alone."""
        return self._appender.is_refused or self._stall.lasts

    @property
    def room(self) -> int:
        """As ``SsdTier.room``."""
        return MAX_QUEUE - len(self._saving)

    def save(self, header: BlockHeader, data: memoryview) -> asyncio.Future[bool]:
        """As ``SsdTier.save``."""
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
            self._index.counters["ssd_refused"] += 1
            done.set_result(False)
        else:
            self._saving[header.key] = pending = PendingBlock(header, data, done)
            self._queue.append(pending)
            self._work.set()
        return done

    def drop(self, keys: Iterable[BlockKey]) -> int:
        """As ``SsdTier.drop``."""
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
        """As ``SsdTier.is_dropping``."""
        return self._index.is_dropping(keys) or self._appender.is_dropping(keys)

    async def committed(self) -> bool:
        """As ``SsdTier.committed``."""
        if not self._index.has_drops and not self._is_committing:
            return True
        if self._is_resting:
            return False
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._commits.append(done)
        self._work.set()
        return await done

    def lose(self, key: BlockKey) -> None:
        """The disk has lost it."""
        self._index.drop(key, time.monotonic())
        self._work.set()

    def look(self) -> None:
        """Nothing more waits for a disk that stands still, until what waits already has been saved."""
        was_behind = self._stall.lasts
        last_run = self._appender.last_run
        self._stall.look(bool(self._saving) or (last_run is not None and not last_run.done()))
        if self._stall.lasts and not was_behind:
            self._index.counters["ssd_stalls"] += 1
            log.warning("the SSD stands still: blocks leave memory without being saved until it has caught up")
            self._refuse_waiting()
        elif was_behind and not self._stall.lasts:
            log.warning("the SSD has caught up")

    def be_patient(self) -> None:
        """As ``SsdTier.be_patient``."""
        self._stall.forget()
        self._off_until = 0.0
        self._is_ending.set()

    async def end(self, timeout_s: float) -> bool:
        """Save what waits; False if the disk makes no progress for this long. What is not saved by then is refused."""
        is_answering = await self._finish(timeout_s)
        self._task.cancel()
        self._appender.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._appender.join()
        if not is_answering:
            log.error("the SSD hangs: its files stay open, and %d blocks are not saved", len(self._saving))
        for pending in self._saving.copy().values():
            self._answer(pending, False)
        self._refuse_waiting()
        _answer_all(self._commits, False)
        return is_answering

    def shut(self) -> None:
        """Return once no thread writes any more."""
        self._appender.shut()

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
                self._index.counters["ssd_refused"] += 1
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
