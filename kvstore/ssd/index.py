"""Where each block's record is in the SSD's log, which block is evicted when it is full, and which segment to empty
next.

    append ──▶ live ──evicted, dropped, stored again──▶ dead ──its segment has no live record──▶ room

Live bytes stay below a share of the room, so that the emptiest segment always has enough dead bytes to make copying the
rest out worthwhile. Pure: no clock, no files, no threads; what must be written (drops) is returned as values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from kvstore.eviction import Block, EvictionPolicy
from kvstore.ssd.log import Place, Scan
from kvstore.ssd.record import PAGE, BlockHeader, Drop, padded
from mooncake.types import BlockKey

MAX_LIVE_SHARE = 0.85  # of all segments: with more, compaction copies too much for what it frees
MIN_SEGMENTS = 4
SEGMENT_BYTES = 64 << 20
RECORDS_A_SEGMENT = 4  # at least this many of the largest records: the unused end is then small


def segment_size(capacity_bytes: int, largest_block: int, most: int = SEGMENT_BYTES) -> int:
    """Segment size in bytes of a tier for blocks of up to ``largest_block`` bytes."""
    return padded(max(min(most, capacity_bytes // 8), RECORDS_A_SEGMENT * (largest_block + PAGE)))


@dataclass(frozen=True, slots=True)
class SsdBlock:
    """A block that can be read from the SSD."""

    header: BlockHeader
    place: Place


@dataclass(slots=True)
class _Segment:
    used: int = 0  # bytes from its start
    live: int = 0
    keys: set[BlockKey] = field(default_factory=set)  # live blocks
    drops: set[Drop] = field(default_factory=set)  # drops written here


class SsdIndex:
    """One owner."""

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int,
        policy: EvictionPolicy,
        tenant_bytes: int = 0,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.segment_bytes = segment_bytes
        self.max_segments = max(MIN_SEGMENTS, capacity_bytes // segment_bytes)
        self.live_bytes = 0
        self._largest = 0  # record so far
        self._policy = policy
        self._is_built_on: Callable[[BlockKey], bool] = lambda key: False
        self._mark: Callable[[BlockKey, bool], object] = lambda key, is_here: None
        self._tenant_bytes = tenant_bytes  # limit per tenant; 0: none
        self._blocks: dict[BlockKey, SsdBlock] = {}
        self._by_tenant: dict[str, OrderedDict[BlockKey, None]] = {}  # least recently used first
        self._usage: Counter[str] = Counter()
        self._segments: dict[int, _Segment] = {}
        self._open: int | None = None
        self._next_segment = 1
        self._drops: dict[Drop, None] = {}  # to be written
        self._left: list[BlockHeader] = []

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> SsdBlock | None:
        return self._blocks.get(key)

    def blocks(self) -> Iterable[SsdBlock]:
        return self._blocks.values()

    def touch(self, keys: Iterable[BlockKey], now: float) -> None:
        """These were asked for, whichever tier they were read from."""
        for key in keys:
            if (block := self._blocks.get(key)) is not None:
                self._policy.hit(key, now)
                self._by_tenant[block.header.tenant].move_to_end(key)

    # Starting

    def lie_under(
        self, is_built_on: Callable[[BlockKey], bool], mark: Callable[[BlockKey, bool], object] | None = None
    ) -> None:
        """Under a tier of DRAM: ``is_built_on`` says whether a block there builds on a key, so that it stays; ``mark``
        is called for each block that is here, comes or goes."""
        self._is_built_on = is_built_on
        if mark is not None:
            self._mark = mark
            for key in self._blocks:
                mark(key, True)

    def recover(self, scan: Scan, now: float) -> list[int]:
        """Take over what a scan found: the last record of each block that was not dropped. Returns segments that
        hold nothing."""
        for number in scan.segments:
            self._segments[number] = _Segment(used=self.segment_bytes)
        self._next_segment = max((self._next_segment - 1, *scan.segments, *scan.aside)) + 1
        self.max_segments = max(MIN_SEGMENTS, self.max_segments - len(scan.aside))
        dropped = {drop for _, record in scan.records for drop in record.drops}
        for offset, record in scan.records:
            place = Place(record.segment, offset, record.header_bytes, record.size, record.sequence)
            if record.block is not None and _drop_of(record.block.key, place) not in dropped:
                self.insert(record.block, place, now)
            self._segments[record.segment].drops.update(d for d in record.drops if d.segment in self._segments)
        return [number for number, segment in self._segments.items() if not segment.keys and not segment.drops]

    # Writing

    def room(self) -> int:
        """Bytes left in the open segment."""
        return self.segment_bytes - self._segments[self._open].used if self._open is not None else 0

    def needs_reclaim(self) -> bool:
        """Whether a new segment would be one too many."""
        return len(self._segments) >= self.max_segments

    def new_segment(self) -> int:
        """The number of the next segment; none is open until ``opened`` says that it exists."""
        self._open = None
        self._next_segment += 1
        return self._next_segment - 1

    def opened(self, number: int) -> None:
        self._segments[number] = _Segment()
        self._open = number

    def take(self, size: int) -> tuple[int, int]:
        """(segment, offset) for a record of this size in the open segment, which has room for it."""
        assert self._open is not None and size <= self.room()
        segment = self._segments[self._open]
        offset, segment.used = segment.used, segment.used + size
        return self._open, offset

    def close_open(self) -> None:
        """Nothing more is written there (it failed)."""
        self._open = None

    def make_room(self, nbytes: int, waiting: int, now: float) -> bool:
        """Evict until a record of this size may live, beside those ``waiting`` to be written. False when everything
        else is built upon. A record does not cross segments, so each may end with unused room up to the largest
        record."""
        self._largest = max(self._largest, nbytes)
        limit = int(self.max_segments * (self.segment_bytes - self._largest) * MAX_LIVE_SHARE)
        held: list[BlockKey] = []
        while self.live_bytes + waiting + nbytes > limit:
            key = self._policy.victim(now) or self._knotted(now)
            if key is None:
                break
            assert isinstance(key, bytes)
            if self._is_built_on(BlockKey(key)):
                held.append(BlockKey(key))
                continue
            self._forget(self._blocks[BlockKey(key)])
            self.counters["ssd_evictions"] += 1
        for key in held:
            self._policy.insert(_policy_block(self._blocks[key].header), now)
        return self.live_bytes + waiting + nbytes <= limit

    def _knotted(self, now: float) -> BlockKey | None:
        """Blocks that name each other as parents would wait for each other for ever: evict one of them."""
        key = next((key for key in self._blocks if key in self._policy), None)
        if key is not None:
            self._policy.remove(key, now)
        return key

    def fit_tenant(self, tenant: str, nbytes: int, now: float) -> bool:
        """Evict this tenant's least recently used blocks until this many more bytes fit its quota."""
        if not self._tenant_bytes:
            return True
        for key in list(self._by_tenant.get(tenant, ())):
            if self._usage[tenant] + nbytes <= self._tenant_bytes:
                break
            if not self._is_built_on(key):
                self._remove(self._blocks[key], now)
                self.counters["ssd_evictions"] += 1
        return self._usage[tenant] + nbytes <= self._tenant_bytes

    def insert(self, header: BlockHeader, place: Place, now: float) -> None:
        """The record is on the disk and durable."""
        before = self._blocks.get(header.key)
        if before is not None:
            self._unlink(before)
            # Otherwise it would return once the new one's segment is gone.
            self._drops[_drop_of(header.key, before.place)] = None
        else:
            self._policy.insert(_policy_block(header), now)
            self._mark(header.key, True)
        self._link(SsdBlock(header, place))

    def moved(self, key: BlockKey, before: Place, after: Place) -> bool:
        """Compaction copied a record. False when the block has gone or changed meanwhile; the copy is then dead."""
        block = self._blocks.get(key)
        if block is None or block.place != before:
            self._drops[_drop_of(key, after)] = None
            return False
        self._unlink(block)
        self._link(replace(block, place=after))
        self._drops[_drop_of(key, before)] = None  # as long as its segment exists
        return True

    def drop(self, key: BlockKey, now: float) -> bool:
        """Forget a block: removed by a user, or found corrupt."""
        block = self._blocks.get(key)
        if block is None:
            return False
        self._remove(block, now)
        return True

    @property
    def has_drops(self) -> bool:
        return bool(self._drops)

    def is_dropping(self, keys: Collection[BlockKey]) -> bool:
        """Whether a drop of one of these blocks is still to be written."""
        return any(drop.key in keys for drop in self._drops)

    def take_drops(self, limit: int, but_of: int | None = None) -> list[Drop]:
        """Drops to be logged, except those of one segment; ``dropped`` says that they were, ``keep_drops`` that they
        could not be."""
        taken = list(islice((drop for drop in self._drops if drop.segment != but_of), limit))
        for drop in taken:
            del self._drops[drop]
        return taken

    def dropped(self, drops: Iterable[Drop], segment: int) -> None:
        self._segments[segment].drops.update(drops)

    def keep_drops(self, drops: Iterable[Drop]) -> None:
        self._drops.update({drop: None for drop in drops if drop.segment in self._segments})

    def take_left(self) -> list[BlockHeader]:
        """Blocks that the SSD has lost since the last call."""
        left, self._left = self._left, []
        return left

    # Compaction

    def emptiest(self) -> tuple[int, list[SsdBlock]] | None:
        """The segment to delete next, and the blocks to copy out of it first."""
        closed = [number for number in self._segments if number != self._open]
        if not closed:
            return None
        number = min(closed, key=lambda n: (self._segments[n].live, n))
        blocks = [self._blocks[key] for key in self._segments[number].keys]
        return number, sorted(blocks, key=lambda block: block.place.offset)

    def carry_drops(self, number: int) -> None:
        """The segment will be deleted. Drops written there that will still matter are queued again."""
        drops, self._segments[number].drops = self._segments[number].drops, set()
        self.keep_drops(drop for drop in drops if drop.segment != number)

    def give_up(self, number: int) -> None:
        """The segment has been deleted, and with it everything that had to be dropped there."""
        assert not self._segments[number].keys
        self.carry_drops(number)
        del self._segments[number]
        self._drops = {drop: None for drop in self._drops if drop.segment != number}

    @property
    def segments(self) -> Collection[int]:
        return self._segments.keys()

    def shrink(self) -> bool:
        """The disk has no room for more segments than there are. Returns whether that is new."""
        before, self.max_segments = self.max_segments, max(MIN_SEGMENTS, min(self.max_segments, len(self._segments)))
        return self.max_segments < before

    def live_of(self, number: int) -> int:
        return self._segments[number].live

    @property
    def capacity_bytes(self) -> int:
        return self.max_segments * self.segment_bytes

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent."""
        live: Counter[int] = Counter()
        for key, block in self._blocks.items():
            live[block.place.segment] += block.place.size
            assert key in self._segments[block.place.segment].keys and key in self._by_tenant[block.header.tenant]
            assert block.place.size == block.place.header_bytes + padded(block.header.length)
        assert +live == +Counter({number: segment.live for number, segment in self._segments.items()})
        assert self.live_bytes == sum(live.values())
        assert sum(len(segment.keys) for segment in self._segments.values()) == len(self._blocks)
        assert sum(self._usage.values()) == self.live_bytes and self._usage.keys() == self._by_tenant.keys()
        assert len(self._policy) == len(self._blocks)

    def _remove(self, block: SsdBlock, now: float) -> None:
        self._policy.remove(block.header.key, now)
        self._forget(block)

    def _forget(self, block: SsdBlock) -> None:
        self._unlink(block)
        del self._blocks[block.header.key]
        self._mark(block.header.key, False)
        self._drops[_drop_of(block.header.key, block.place)] = None
        self._left.append(block.header)

    def _link(self, block: SsdBlock) -> None:
        key, place, tenant = block.header.key, block.place, block.header.tenant
        self._blocks[key] = block
        segment = self._segments[place.segment]
        segment.keys.add(key)
        segment.live += place.size
        self.live_bytes += place.size
        self._usage[tenant] += place.size
        self._by_tenant.setdefault(tenant, OrderedDict())[key] = None

    def _unlink(self, block: SsdBlock) -> None:
        key, place, tenant = block.header.key, block.place, block.header.tenant
        segment = self._segments[place.segment]
        segment.keys.discard(key)
        segment.live -= place.size
        self.live_bytes -= place.size
        self._usage[tenant] -= place.size
        del self._by_tenant[tenant][key]
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant], self._usage[tenant]


def _drop_of(key: BlockKey, place: Place) -> Drop:
    return Drop(key, place.segment, place.sequence)


def _policy_block(header: BlockHeader) -> Block:
    return Block(header.key, header.parent or None, size=1)
