"""Makes room at the end of an SSD's log: creates a segment, or, when there are enough, empties one first (compaction).

The segment with the fewest live bytes goes: its live records are copied to the end of the log, then its file is
deleted. It knows neither which blocks are worth keeping, nor who saves and reads them.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Awaitable, Callable

from kvstore.ssd.append import SsdAppender
from kvstore.ssd.index import SsdBlock, SsdIndex
from kvstore.ssd.log import FULL, SsdLog
from kvstore.ssd.record import BlockHeader, padded
from mooncake.errors import KVLoadFailed
from mooncake.types import BlockKey

log = logging.getLogger(__name__)


class SsdRoom:
    """Belongs to one event loop."""

    def __init__(
        self,
        files: SsdLog,
        index: SsdIndex,
        appender: SsdAppender,
        load: Callable[[BlockKey, memoryview], Awaitable[BlockHeader]],
    ) -> None:
        """``load`` reads and verifies a block, as ``SsdTier.load`` does."""
        self._files = files
        self._index = index
        self._appender = appender
        self._load = load

    async def ensure(self, size: int) -> None:
        """Make sure that the open segment has room for a record. Raises OSError."""
        if self._index.room() >= size:
            return
        if self._index.needs_reclaim():
            await self._appender.settle()  # records in flight are not counted as live anywhere yet
            await self._reclaim()
        await self._ensure_open(size)

    async def _ensure_open(self, size: int) -> None:
        """Likewise, without emptying another segment first."""
        if self._index.room() < size:
            await self._open_segment()

    async def _open_segment(self) -> None:
        number = self._index.new_segment()
        try:
            await self._appender.in_writer(self._files.create, number)
        except OSError as error:
            if error.errno not in FULL or not await self._live_with_less():
                raise
            await self._appender.in_writer(self._files.create, number)
        self._index.opened(number)

    async def _live_with_less(self) -> bool:
        """The disk is full before the tier is: delete the segment with the fewest live bytes, and reduce the tier to
        the room there is."""
        await self._appender.settle()  # records in flight are not counted in any segment yet
        found = self._index.emptiest()
        if found is None:
            return False
        number, blocks = found
        now = time.monotonic()
        for block in blocks:
            self._index.drop(block.header.key, now)
        await self._delete(number)
        self._index.counters["ssd_full"] += 1
        if self._index.shrink():
            kept = self._index.capacity_bytes / 1e9
            log.warning("the disk is full: the SSD tier is limited to %.3g GB until the store restarts", kept)
        return True

    async def _reclaim(self) -> None:
        """Copy the live records of the emptiest segments into the open one, and delete them, until there is room for
        a segment."""
        for _ in range(len(self._index.segments)):  # more than there may be, if an earlier run was allowed more
            found = self._index.emptiest() if self._index.needs_reclaim() else None
            if found is None:
                return
            number, blocks = found
            self._index.carry_drops(number)
            await self._appender.write_drops(self._ensure_open, but_of=number)
            await self._appender.settle()
            for block in blocks:
                await self._copy(block)
            if number not in self._index.segments:
                continue  # the disk was full, and it had to be deleted uncopied
            if self._index.live_of(number):
                return  # something could not be copied; the next attempt may succeed
            await self._delete(number)
            self._index.counters["ssd_segments_compacted"] += 1

    async def _delete(self, number: int) -> None:
        """Its drops count until the file is gone: recovery would find it. Raises OSError."""
        await self._appender.in_writer(self._files.delete, number)
        self._index.give_up(number)

    async def _copy(self, block: SsdBlock) -> None:
        """Move one block to the open segment; one that cannot be read correctly is dropped instead."""
        key = block.header.key
        if self._index.get(key) is not block:
            return
        data = memoryview(mmap.mmap(-1, padded(block.header.length)))
        try:
            await self._load(key, data)
        except KVLoadFailed:
            return
        await self._ensure_open(block.place.size)
        write = self._appender.place_block(block.header, data)
        await self._appender.start([write])
        await self._appender.settle()
        self._index.moved(key, block.place, write.place)
        self._index.counters["ssd_copied_bytes"] += block.header.length
