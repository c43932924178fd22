"""The end of an SSD's log: records get places there, and are written in runs that become durable one after the other.

Two runs are on their way at once, and are counted in their order, for a start-up finds nothing behind what is torn. It
must not know where room for a record comes from, which blocks are worth saving, nor who waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kvstore.ssd_index import SsdIndex
from kvstore.ssd_log import Place, SsdLog
from kvstore.ssd_record import MAX_DROPS, BlockHeader, Drop, block_size, header_size, pack_block, pack_drops

log = logging.getLogger(__name__)

RUNS_ON_WAY = 2  # while one is made durable the next is being written
BACK_OFF_S = 5.0  # without writes, after the disk refused one

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class PendingBlock:
    """A block that waits to be saved. ``data`` stays as it is until ``done`` is. Dropped meanwhile: unwanted. Once its
    record has a place, ``undo`` takes it back."""

    header: BlockHeader
    data: memoryview
    done: asyncio.Future[bool]
    is_unwanted: bool = False
    undo: tuple[Drop, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """A record with its place. ``undo`` takes it back, if it is a block's."""

    place: Place
    header: bytes
    data: memoryview | None = None
    undo: tuple[Drop, ...] = ()


class SsdAppender:
    """Belongs to one event loop; what it writes it writes in threads. Whatever raises OSError leaves the log's open
    segment of no use: see ``failed``."""

    def __init__(
        self, files: SsdLog, index: SsdIndex, first_sequence: int, answer: Callable[[PendingBlock, bool], object]
    ) -> None:
        """``answer`` is told of each block whether it has been saved."""
        self._files = files
        self._index = index
        self._answer = answer
        self._sequence = first_sequence
        self._durable = first_sequence - 1
        self._runs: deque[asyncio.Task[None]] = deque()  # on their way to the disk, in the order of the log
        self._run_bytes: Counter[str] = Counter()  # of blocks in them, by tenant
        self._refusals = 0  # in a row, of the disk: told when they begin and when they end
        self._writers = ThreadPoolExecutor(RUNS_ON_WAY, thread_name_prefix="ssd-write")

    @property
    def bytes_on_way(self) -> Counter[str]:
        """Of blocks that the index does not count yet, by tenant. A copy."""
        return self._run_bytes.copy()

    @property
    def last_run(self) -> asyncio.Task[None] | None:
        """When it ends well, all before it have. None when nothing is on its way."""
        return self._runs[-1] if self._runs else None

    # Places

    def place_pending(self, pending: PendingBlock) -> Write:
        write = self.place_block(pending.header, pending.data)
        pending.undo = write.undo
        if pending.is_unwanted:
            self._index.keep_drops(pending.undo)
        return write

    def place_block(self, header: BlockHeader, data: memoryview) -> Write:
        place = self._place(header_size(header), block_size(header))
        packed = pack_block(header, place.segment, place.sequence, self._durable)
        return Write(place, packed, data, (Drop(header.key, place.segment, place.sequence),))

    def _place_drops(self, drops: Sequence[Drop]) -> Write:
        sample = pack_drops(drops, 0, 0, 0)
        place = self._place(len(sample), len(sample))
        return Write(place, pack_drops(drops, place.segment, place.sequence, self._durable))

    def _place(self, header_bytes: int, size: int) -> Place:
        segment, offset = self._index.take(size)
        self._sequence += 1
        return Place(segment, offset, header_bytes, size, self._sequence - 1)

    # Runs

    async def start(
        self, writes: Sequence[Write], blocks: Sequence[PendingBlock] = (), drops: Sequence[Drop] = ()
    ) -> None:
        """Start to write records of one segment: ``blocks``, one a record, or ``drops``. Raises what went wrong with an
        earlier run."""
        if len(self._runs) == RUNS_ON_WAY:
            await self._runs.popleft()
        self._run_bytes += _bytes_by_tenant(blocks)
        self._runs.append(asyncio.create_task(self._run(writes, blocks, drops, self.last_run), name="ssd-run"))

    async def write_drops(self, ensure_room: Callable[[int], Awaitable[None]], but_of: int | None = None) -> None:
        """Start to write the drops so far, but those of one segment."""
        while drops := self._index.take_drops(MAX_DROPS, but_of):
            try:
                await ensure_room(len(pack_drops(drops, 0, 0, 0)))
                await self.start([self._place_drops(drops)], drops=drops)
            except BaseException:  # also an earlier run's: this one has not begun then, and keeps nothing
                self._index.keep_drops(drops)
                raise

    async def settle(self) -> None:
        """Return once all that was started is durable. Raises what went wrong with it."""
        while self._runs:
            await self._runs.popleft()

    async def join(self) -> None:
        """Return once nothing is on its way any more, however it went."""
        await asyncio.gather(*self._runs, return_exceptions=True)
        self._runs.clear()

    def cancel(self) -> None:
        for run in self._runs:
            run.cancel()

    def failed(self, error: Exception) -> None:
        """The disk would not take something. What the open segment holds beyond its safe part is never looked at
        again."""
        self._index.counters["ssd_write_errors"] += 1
        self._index.close_open()
        if not isinstance(error, OSError):
            log.error("saving blocks to the SSD failed", exc_info=error)
            return
        if not self._refusals:
            log.warning("the SSD refuses writes (%s); trying again every %.0f s", error, BACK_OFF_S)
        self._refusals += 1

    async def in_writer(self, do: Callable[[T], None], what: T) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writers, do, what)

    def shut(self) -> None:
        """Return once no thread writes any more."""
        self._writers.shutdown()

    async def _run(
        self,
        writes: Sequence[Write],
        blocks: Sequence[PendingBlock],
        drops: Sequence[Drop],
        before: asyncio.Task[None] | None,
    ) -> None:
        """Write records, and once they and all before them are durable, say that they are there: a restart finds
        nothing behind what is torn. Raises OSError."""
        try:
            await self.in_writer(self._write_and_sync, writes)
            if before is not None:
                await asyncio.shield(before)
        except BaseException:  # and yet what was to be written may be there: a restart is not to find it
            self._index.keep_drops([*drops, *(drop for write in writes for drop in write.undo)])
            for pending in blocks:
                self._answer(pending, False)
            raise
        finally:
            self._run_bytes -= _bytes_by_tenant(blocks)
        if self._refusals:
            log.warning("the SSD takes writes again, after refusing %d times", self._refusals)
            self._refusals = 0
        self._durable = writes[-1].place.sequence
        self._index.dropped(drops, writes[-1].place.segment)
        for pending, write in zip(blocks, writes if blocks else (), strict=True):
            self._index.counters["ssd_writes"] += 1
            self._index.counters["ssd_write_bytes"] += pending.header.length
            if not pending.is_unwanted:
                self._index.insert(pending.header, write.place, time.monotonic())
            self._answer(pending, not pending.is_unwanted)

    def _write_and_sync(self, writes: Sequence[Write]) -> None:
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
        self._files.write(first.segment, first.offset, parts)


def _bytes_by_tenant(blocks: Iterable[PendingBlock]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for pending in blocks:
        sizes[pending.header.tenant] += block_size(pending.header)
    return sizes
