"""The SSD under a store's DRAM: saves blocks (``committing``), and loads them again.

All decisions and all state are on one event loop, in ``SsdIndex``; disk reads and writes run in threads. If the disk
refuses, loses or corrupts something, that is counted, the block's replica here is dropped, and the store goes on: a
failing tier costs hits, never bytes. It knows nothing of slots, leases or clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from kvstore.eviction import EvictionPolicy
from kvstore.ssd.committing import Committing
from kvstore.ssd.file_limit import check_file_limit
from kvstore.ssd.index import MIN_SEGMENTS, SEGMENT_BYTES, SsdIndex, segment_size
from kvstore.ssd.log import SsdLog
from kvstore.ssd.reads import SsdReads
from kvstore.ssd.record import BlockHeader
from kvstore.ssd.stall import LOOKS, STALL_S, Stall
from mooncake.errors import ChecksumMismatch, ConfigError, KVLoadFailed
from mooncake.types import BlockKey
from mooncake.vital import vital

log = logging.getLogger(__name__)

GROUP_BYTES = 16 << 20  # made durable together, at most
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
        self._committing = Committing(log_, index, first_sequence, group_bytes, self.load)
        self._stall_s = stall_s
        self._load_stall = Stall()
        self._reading = 0  # bytes
        self._bytes_per_s = _FIRST_READ_BYTES_PER_S
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
        return self._committing.is_writable

    @property
    def is_readable(self) -> bool:
        """Whether loading is worth trying now: reads in progress do not stand still."""
        return not self._load_stall.holds

    @property
    def is_in_trouble(self) -> bool:
        """Whether the disk refuses writes, or stands still."""
        return self._committing.is_in_trouble or not self.is_readable

    @property
    def is_direct(self) -> bool:
        return self._log.is_direct

    @property
    def room(self) -> int:
        """How many more blocks may wait to be saved."""
        return self._committing.room

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
        return self._committing.save(header, data)

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
                self._committing.lose(key)
            elif found is not None and found.header is header:  # compaction moved it while we waited
                return await self.load(key, into)
            raise KVLoadFailed(f"the SSD could not read the block: {error}") from None
        finally:
            self._reading -= size
            self._load_stall.moved()
        if not is_right:
            self.counters["checksum_mismatches"] += 1
            if self._index.get(key) is block:
                self._committing.lose(key)
            raise ChecksumMismatch("the block's bytes on the SSD differ from what was sealed")
        rate = size / max(time.monotonic() - started, 1e-6)
        self._bytes_per_s += _RATE_WEIGHT * (rate - self._bytes_per_s)
        self.counters["ssd_read_bytes"] += header.length
        return header

    def touch(self, keys: Iterable[BlockKey]) -> None:
        self._index.touch(keys, time.monotonic())

    def drop(self, keys: Iterable[BlockKey]) -> int:
        """Forget blocks; ``committed`` says when a restart will not find them either. Returns how many there were."""
        return self._committing.drop(keys)

    def is_dropping(self, keys: Collection[BlockKey]) -> bool:
        """Whether a restart now would find one of these blocks although it was dropped."""
        return self._committing.is_dropping(keys)

    async def committed(self) -> bool:
        """Return once all drops so far are durable: True; or once the disk has refused them: False. They are written
        when it takes writes again."""
        return await self._committing.committed()

    def take_left(self) -> list[BlockHeader]:
        return self._index.take_left()

    def be_patient(self) -> None:
        """From now on wait for the disk however slow it is: what is not saved is lost."""
        self._watcher.cancel()
        self._committing.be_patient()
        self._load_stall.forget()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Saves what waits, then closes the files. If the disk makes no progress for this long it hangs: its files
        stay open, because a thread may still be writing to them."""
        self.be_patient()
        is_answering = await self._committing.end(timeout_s)
        await asyncio.gather(self._watcher, return_exceptions=True)
        self._reads.close()
        if is_answering:
            await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        self._committing.shut()
        self._reads.shut()
        self._log.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._stall_s / LOOKS)
            self._committing.look()
            self._load_stall.look(self._reading > 0)
