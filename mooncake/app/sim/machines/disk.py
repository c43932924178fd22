"""A host's SSD in virtual time. The real index decides which blocks are kept, where in the log, and what is copied out
of a full segment; here the bytes take time.

Reads queue behind reads and writes behind writes, each at its own rate, as the real tier predicts reads. The content
survives the host's processes. It must not know what is in memory, or who reads.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.eviction import make_policy
from kvstore.index.types import Held
from kvstore.ssd.index import MIN_SEGMENTS, SsdIndex, segment_size
from kvstore.ssd.log import Place
from kvstore.ssd.record import MAX_DROPS, BlockHeader, block_size, header_size
from kvstore.tiers.decisions import REFUSED_PAUSE_S
from mooncake.app.sim.cluster import Model, Ssd
from mooncake.app.sim.events import Agenda
from mooncake.errors import ConfigError
from mooncake.types import BlockKey


class Disk:
    """One SSD with a log of blocks. Raises ConfigError when it is too small for blocks of this size."""

    is_writable = True

    def __init__(self, ssd: Ssd, model: Model, agenda: Agenda) -> None:
        block_bytes, capacity = model.block_tokens * model.token_bytes, ssd.tokens * model.token_bytes
        segment_bytes = segment_size(capacity, block_bytes)
        if MIN_SEGMENTS * segment_bytes > capacity:
            least = -(-MIN_SEGMENTS * segment_bytes // model.token_bytes)
            raise ConfigError(f"an SSD of {ssd.tokens:,} tokens is too small for its log: {least:,} are needed")
        self.index = SsdIndex(capacity, segment_bytes, make_policy(ssd.eviction, max(1, capacity // block_bytes)))
        self.bytes_read = 0
        self.bytes_written = 0  # including copies within the log
        self._agenda = agenda
        self._read_bytes_per_s, self._write_bytes_per_s = ssd.read_gb_per_s * 1e9, ssd.write_gb_per_s * 1e9
        self._reads_end = self._writes_end = 0.0
        self._waiting_bytes = 0  # of blocks being written
        self._saving: dict[BlockKey, float] = {}  # when each of them will be written
        self._sequence = 0
        self._life = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.index

    def length(self, key: BlockKey) -> int | None:
        block = self.index.get(key)
        return block.header.length if block else None

    def load_s(self, nbytes: int) -> float:
        """Seconds until ``nbytes`` more would be read, after the reads already queued."""
        return max(self._reads_end - self._agenda.now, 0.0) + nbytes / self._read_bytes_per_s

    def read(self, nbytes: int) -> float:
        """Queue a read of ``nbytes``. Returns when it will end."""
        self._reads_end = self._agenda.now + self.load_s(nbytes)
        self.bytes_read += nbytes
        return self._reads_end

    def save(self, held: Held, on_end: Callable[[Held], None]) -> None:
        """Write a block; ``on_end`` is called at the end, successful or not."""
        key, now = held.name.key, self._agenda.now
        if key in self.index or key in self._saving:
            self._agenda.at(self._saving.get(key, now), on_end, held)
            return
        header = BlockHeader(key, held.name.parent, held.tenant, held.length, held.checksums)
        size = block_size(header)
        if not self.index.make_room(size, self._waiting_bytes, now):
            self._agenda.at(now + REFUSED_PAUSE_S, on_end, held)
            return
        self._waiting_bytes += size
        self._saving[key] = self._write(size)
        self._agenda.at(self._saving[key], self._saved, header, size, self._life)
        self._agenda.at(self._saving[key], on_end, held)

    def lose_power(self) -> None:
        """The host dies: blocks not yet written are lost."""
        self._life += 1
        self._saving.clear()
        self._waiting_bytes = 0
        self._reads_end = self._writes_end = self._agenda.now

    def _saved(self, header: BlockHeader, size: int, life: int) -> None:
        if life != self._life:
            return
        self._waiting_bytes -= size
        del self._saving[header.key]
        index = self.index
        if index.room() < size and index.needs_reclaim():
            self._reclaim()
        index.insert(header, self._place(header, size), self._agenda.now)
        while index.has_drops:  # records of a few bytes in the log, needed for a restart
            index.take_drops(MAX_DROPS)

    def _reclaim(self) -> None:
        """As the real tier does: empty the segments with the least content until there is room for a new one."""
        index = self.index
        for _ in range(index.max_segments):
            found = index.emptiest() if index.needs_reclaim() else None
            if found is None:
                return
            number, blocks = found
            for block in blocks:
                self.read(block.place.size)
                self._write(block.place.size)
                index.moved(block.header.key, block.place, self._place(block.header, block.place.size))
            index.give_up(number)

    def _place(self, header: BlockHeader, size: int) -> Place:
        index = self.index
        if index.room() < size:
            index.opened(index.new_segment())
        segment, offset = index.take(size)
        self._sequence += 1
        return Place(segment, offset, header_size(header), size, self._sequence)

    def _write(self, size: int) -> float:
        self._writes_end = max(self._writes_end, self._agenda.now) + size / self._write_bytes_per_s
        self.bytes_written += size
        return self._writes_end
