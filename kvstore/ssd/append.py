"""The end of an SSD's log: assigns places to records and writes them in runs that become durable one after another.

Two runs are in flight at once, but are counted in order, because recovery finds nothing behind a torn record. It knows
neither how room for records is made, which blocks are worth saving, nor who waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.ssd.index import SsdIndex
from kvstore.ssd.log import Place, SsdLog
from kvstore.ssd.record import MAX_DROPS, BlockHeader, Drop, block_size, header_size, pack_block, pack_drops
from kvstore.ssd.stall import Stall
from mooncake.threads import Threads
from mooncake.types import BlockKey

log = logging.getLogger(__name__)

RUNS_ON_WAY = 2  # while one is made durable the next is being written
BACK_OFF_S = 5.0  # without writes, after the disk refused one

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class PendingBlock:
    """A block waiting to be saved. ``data`` is unchanged until ``done``. If it is dropped meanwhile, it is unwanted.
    Once its record has a place, ``undo`` takes that back."""

    header: BlockHeader
    data: memoryview
    done: asyncio.Future[bool]
    is_unwanted: bool = False
    undo: tuple[Drop, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """A record with its place. ``undo`` takes back a block's."""

    place: Place
    header: bytes
    data: memoryview | None = None
    undo: tuple[Drop, ...] = ()


class SsdAppender:
    """Belongs to one event loop; writes in threads. After any OSError the log's open segment is unusable: see
    ``failed``."""

    def __init__(
        self,
        files: SsdLog,
        index: SsdIndex,
        first_sequence: int,
        answer: Callable[[PendingBlock, bool], object],
        stall: Stall,
    ) -> None:
        """``answer`` is called with each block and whether it has been saved; ``stall`` is told whenever the disk has
        done something."""
        self._files = files
        self._index = index
        self._answer = answer
        self._stall = stall
        self._sequence = first_sequence
        self._durable = first_sequence - 1
        self._runs: deque[asyncio.Task[None]] = deque()  # in flight, in the order of the log
        self._run_bytes: Counter[str] = Counter()  # by tenant: bytes of blocks in them
        self._drops_on_way: set[Drop] = set()  # taken from the index, and not yet durable
        self._refusals = 0  # consecutive ones of the disk: logged when they start and end
        self._writers = Threads(RUNS_ON_WAY, "ssd-write")

    @property
    def bytes_on_way(self) -> Counter[str]:
        """By tenant: bytes of blocks that the index does not count yet. A copy."""
        return self._run_bytes.copy()

    @property
    def last_run(self) -> asyncio.Task[None] | None:
        """Its success implies that of all before it. None when nothing is in flight."""
        return self._runs[-1] if self._runs else None

    @property
    def is_refused(self) -> bool:
        """Whether the disk refused the last write."""
        return self._refusals > 0

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
        """Start writing records of one segment: ``blocks``, one per record, or ``drops``. Raises what went wrong
        with an earlier run."""
        if len(self._runs) == RUNS_ON_WAY:
            await self._runs.popleft()
        self._run_bytes += _bytes_by_tenant(blocks)
        self._runs.append(asyncio.create_task(self._run(writes, blocks, drops, self.last_run), name="ssd-run"))

    async def write_drops(self, ensure_room: Callable[[int], Awaitable[None]], but_of: int | None = None) -> None:
        """Start writing the drops so far, except those of one segment."""
        while drops := self._index.take_drops(MAX_DROPS, but_of):
            self._drops_on_way.update(drops)
            try:
                await ensure_room(len(pack_drops(drops, 0, 0, 0)))
                await self.start([self._place_drops(drops)], drops=drops)
            except BaseException:  # even an earlier run's: then this one has not started, and keeps nothing
                self._drops_on_way.difference_update(drops)
                self._index.keep_drops(drops)
                raise

    def is_dropping(self, keys: Collection[BlockKey]) -> bool:
        """Whether a drop of one of these blocks is being written."""
        return any(drop.key in keys for drop in self._drops_on_way)

    async def settle(self) -> None:
        """Return once everything started is durable. Raises what went wrong."""
        while self._runs:
            await self._runs.popleft()

    async def join(self) -> None:
        """Return once nothing is in flight, whatever the outcome."""
        await asyncio.gather(*self._runs, return_exceptions=True)
        self._runs.clear()

    def cancel(self) -> None:
        for run in self._runs:
            run.cancel()

    def failed(self, error: Exception) -> None:
        """The disk refused something. The open segment beyond its durable part is never used again."""
        self._index.counters["ssd_write_errors"] += 1
        self._index.close_open()
        if not isinstance(error, OSError):
            log.error("saving blocks to the SSD failed", exc_info=error)
            return
        if not self._refusals:
            log.warning("the SSD refuses writes (%s); trying again every %.0f s", error, BACK_OFF_S)
        self._refusals += 1

    async def in_writer(self, do: Callable[[T], None], what: T) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._writers, do, what)
        finally:
            self._stall.moved()

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
        """Write records, and report them once they and all before them are durable: recovery finds nothing behind a
        torn record. Raises OSError."""
        try:
            await self.in_writer(self._write_and_sync, writes)
            if before is not None:
                await asyncio.shield(before)
        except BaseException:  # the record may be on the disk all the same; recovery must not find it
            self._index.keep_drops([*drops, *(drop for write in writes for drop in write.undo)])
            for pending in blocks:
                self._answer(pending, False)
            raise
        finally:
            self._drops_on_way.difference_update(drops)
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
        """In a thread: one run of records of one segment, durable on return. Raises OSError."""
        headers = memoryview(mmap.mmap(-1, sum(len(write.header) for write in writes)))  # aligned, in one piece
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
