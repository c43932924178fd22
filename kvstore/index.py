"""Which block is in which slot of a store, who writes it, who reads it, and what goes when there is no room.

    free ──reserve──▶ reserved ──seal──▶ sealed ──evict, remove, corrupt──▶ free
                       │     │
                       │     └──time-out──▶ quarantined ──the writer is done or gone──▶ free
                       └──abort, the writer is gone──▶ free

Pure: it takes the time as an argument, draws nothing, does no I/O, and hands out what happened as values and events.
It must not know about segments, sockets or checksums' meaning. One owner; not thread-safe.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.checksum import Checksums
from mooncake.errors import OutOfBlocks, Overloaded
from mooncake.types import BlockEvent, BlockKey

MAX_LEASES = 65536


class SlotState(StrEnum):
    FREE = "free"
    RESERVED = "reserved"
    SEALED = "sealed"
    QUARANTINED = "quarantined"


_MOVES = frozenset(
    {
        (SlotState.FREE, SlotState.RESERVED),
        (SlotState.RESERVED, SlotState.SEALED),
        (SlotState.RESERVED, SlotState.FREE),
        (SlotState.RESERVED, SlotState.QUARANTINED),
        (SlotState.QUARANTINED, SlotState.FREE),
        (SlotState.SEALED, SlotState.FREE),
    }
)


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block's key and that of the block before it (empty for a first block)."""

    key: BlockKey
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of one writer to one slot. The epoch is never used again, so it also names the slot's content."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Offer:
    """The answer for one block of a reservation. Without a grant it is stored, being written, or there is no room."""

    grant: Grant | None = None
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a writer promised to write."""

    grant: Grant
    writer: str
    length: int  # bytes
    ranges: int  # equal parts of it, each with a checksum


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    slot: int
    length: int
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read some slots until ``expires_s``. ``lease_id`` is 0 when there is nothing to read."""

    lease_id: int
    expires_s: float
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    free: int
    reserved: int
    sealed: int
    quarantined: int
    leases: int


_NO_NAME = BlockName(BlockKey(b""))


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    name: BlockName = _NO_NAME
    epoch: int = 0
    writer: str = ""
    length: int = 0
    ranges: int = 0
    checksums: Checksums | None = None
    leases: int = 0
    children: int = 0  # readable and reserved blocks that were built on this one while it was here
    parent: Grant | None = None  # the slot this one counts as a child in; over when that has been freed since
    last_used: int = 0
    is_hidden: bool = False  # sealed and removed, but still leased: goes when the last lease ends
    is_queued: bool = False  # has an entry in the eviction queue


@dataclass(frozen=True, slots=True)
class _OpenLease:
    expires_s: float
    content: tuple[Grant, ...]


class StoreIndex:
    """The table. ``check()`` verifies it as a whole; tests call it after every step.

    Epochs and lease ids count from ``first_id``: no two lives of a store may share them, or a late message to the first
    would be taken by the second.
    """

    def __init__(self, num_slots: int, lease_s: float, reserve_timeout_s: float, first_id: int = 1) -> None:
        self.counters: Counter[str] = Counter()
        self._lease_s = lease_s
        self._reserve_timeout_s = reserve_timeout_s
        self._slots = [_Slot() for _ in range(num_slots)]
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: slots that were touched already come first
        self._num = Counter({SlotState.FREE: num_slots})
        self._sealed: dict[BlockKey, int] = {}  # readable blocks
        self._reserved: dict[BlockKey, int] = {}  # blocks being written
        self._held_by: dict[str, set[int]] = {}  # reserved and quarantined slots of a writer
        self._timeouts: deque[tuple[float, Grant]] = deque()  # in order of time; entries may be out of date
        self._leases: dict[int, _OpenLease] = {}  # in order of expiry
        self._evictable: list[tuple[int, int]] = []  # heap of (last used, slot); entries may be out of date
        self._events: list[BlockEvent] = []
        self._epochs = itertools.count(first_id)
        self._lease_ids = itertools.count(first_id)
        self._ticks = itertools.count(1)

    # Writing

    def reserve(self, names: Sequence[BlockName], writer: str, length: int, ranges: int, now: float) -> list[Offer]:
        """A slot for each block that is neither stored nor being written, evicting what has not been used for long.

        When room runs out the leading blocks have slots. Raises OutOfBlocks when there was none for any.
        """
        self._expire_leases(now)
        offers = [Offer() for _ in names]
        wanted: dict[BlockKey, int] = {}
        for index, name in enumerate(names):
            if (slot := self._sealed.get(name.key)) is not None:
                self._touch(slot)
                offers[index] = Offer(is_stored=True)
            elif name.key not in self._reserved:
                wanted.setdefault(name.key, index)
        waiting = deque(wanted.values())
        with self._pinned(names[index].parent for index in waiting):
            while waiting and self._make_room():
                index = waiting.popleft()
                offers[index] = Offer(self._reserve(names[index], writer, length, ranges, now))
        if waiting and len(waiting) == len(wanted):
            self.counters["refused_full"] += 1
            raise OutOfBlocks("the store is full: every block is being read or written, or others build on it")
        return offers

    def reservation(self, grant: Grant) -> Reserved | None:
        """What is reserved under this grant, or None when it is over."""
        slot = self._slots[grant.slot] if 0 <= grant.slot < len(self._slots) else None
        if slot is None or slot.state is not SlotState.RESERVED or slot.epoch != grant.epoch:
            return None
        return Reserved(grant, slot.writer, slot.length, slot.ranges)

    def seal(self, grant: Grant, checksums: Checksums) -> bool:
        """Make a written block readable. False when the grant is over (timed out, aborted, or never given)."""
        reserved = self.reservation(grant)
        if reserved is None or len(checksums) != reserved.ranges:
            self.counters["refused_seals"] += 1
            return False
        slot = self._slots[grant.slot]
        self._let_go(grant.slot)
        self._move(slot, SlotState.SEALED)
        del self._reserved[slot.name.key]
        self._sealed[slot.name.key] = grant.slot
        slot.checksums = checksums
        self._events.append(BlockEvent(True, slot.name.key, slot.name.parent))
        self.counters["stored"] += 1
        self._touch(grant.slot)
        self._queue_if_evictable(grant.slot)
        return True

    def abort(self, grant: Grant) -> bool:
        """The writer is done with this slot for good. False when it holds it no more; then nothing happens."""
        slot = self._slots[grant.slot] if 0 <= grant.slot < len(self._slots) else None
        if slot is None or slot.epoch != grant.epoch:
            return False
        if slot.state is SlotState.RESERVED:
            self._forget_reserved(slot)
        elif slot.state is not SlotState.QUARANTINED:
            return False
        self._let_go(grant.slot)
        self._set_free(grant.slot)
        return True

    def sweep(self, now: float) -> list[Reserved]:
        """Quarantine reservations that took too long and end leases that ran out. Returns those reservations: their
        grants must be revoked, and ``abort`` frees the slot once its writer can no longer be writing."""
        self._expire_leases(now)
        expired: list[Reserved] = []
        while self._timeouts:
            deadline, grant = self._timeouts[0]
            reserved = self.reservation(grant)
            if reserved is not None and deadline > now:
                break
            self._timeouts.popleft()
            if reserved is not None:
                self._forget_reserved(self._slots[grant.slot])
                self._move(self._slots[grant.slot], SlotState.QUARANTINED)
                self.counters["expired_reservations"] += 1
                expired.append(reserved)
        return expired

    def writer_gone(self, writer: str) -> list[Grant]:
        """Free what this writer held, reserved or quarantined. Returns the grants that are over."""
        grants = [Grant(index, self._slots[index].epoch) for index in sorted(self._held_by.get(writer, ()))]
        for grant in grants:
            self.abort(grant)
        return grants

    # Reading

    def acquire(self, keys: Sequence[BlockKey], now: float) -> Lease:
        """Lease the longest stored leading run of ``keys``. Raises Overloaded when far too many leases are open."""
        self._expire_leases(now)
        found = list(itertools.takewhile(lambda slot: slot is not None, map(self._sealed.get, keys)))
        run = [slot for slot in found if slot is not None]
        self.counters["hits"] += len(run)
        self.counters["misses"] += len(keys) - len(run)
        expires_s = now + self._lease_s
        if not run:
            return Lease(0, expires_s, ())
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} read leases are open", self._lease_s)
        for index in reversed(run):  # so that a parent counts as used after its children, and outlives them
            self._slots[index].leases += 1
            self._touch(index)
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = _OpenLease(expires_s, tuple(Grant(i, self._slots[i].epoch) for i in run))
        return Lease(lease_id, expires_s, tuple(map(self._leased, run)))

    def release(self, lease_id: int) -> None:
        """End a lease. One that has expired or never was is nothing to end."""
        lease = self._leases.pop(lease_id, None)
        for content in lease.content if lease else ():
            slot = self._slots[content.slot]
            if slot.epoch != content.epoch or slot.state is not SlotState.SEALED:
                continue  # dropped as corrupt meanwhile, and perhaps used again
            slot.leases -= 1
            if slot.leases == 0 and slot.is_hidden:
                self._set_free(content.slot)
            else:
                self._queue_if_evictable(content.slot)

    def exists(self, keys: Iterable[BlockKey]) -> list[bool]:
        return [key in self._sealed for key in keys]

    # Dropping

    def remove(self, keys: Iterable[BlockKey], now: float) -> int:
        """Make blocks unreadable; a leased one keeps its slot until its leases end. Returns how many there were."""
        self._expire_leases(now)
        found = [slot for slot in map(self._sealed.get, dict.fromkeys(keys)) if slot is not None]
        for index in found:
            self._hide(index)
            if self._slots[index].leases == 0:
                self._set_free(index)
        return len(found)

    def drop_corrupt(self, keys: Iterable[BlockKey]) -> int:
        """Drop blocks whose bytes are wrong, leased or not: their readers check checksums. Returns how many."""
        found = [slot for slot in map(self._sealed.get, dict.fromkeys(keys)) if slot is not None]
        for index in found:
            self._hide(index)
            self._set_free(index)
        self.counters["checksum_mismatches"] += len(found)
        return len(found)

    # Accounts

    def take_events(self) -> list[BlockEvent]:
        """What became readable or unreadable since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def counts(self) -> Counts:
        num = self._num
        return Counts(
            num[SlotState.FREE],
            num[SlotState.RESERVED],
            num[SlotState.SEALED],
            num[SlotState.QUARANTINED],
            len(self._leases),
        )

    def check(self) -> None:
        """Raises AssertionError when the table contradicts itself."""
        by_state = Counter(slot.state for slot in self._slots)
        assert +by_state == +self._num, (by_state, self._num)
        assert len(self._free) == len(set(self._free)) == by_state[SlotState.FREE]
        assert all(self._slots[index].state is SlotState.FREE for index in self._free)
        sealed = {i for i, slot in enumerate(self._slots) if slot.state is SlotState.SEALED and not slot.is_hidden}
        reserved = {i for i, slot in enumerate(self._slots) if slot.state is SlotState.RESERVED}
        quarantined = {i for i, slot in enumerate(self._slots) if slot.state is SlotState.QUARANTINED}
        assert set(self._sealed.values()) == sealed and len(self._sealed) == len(sealed)
        assert set(self._reserved.values()) == reserved and len(self._reserved) == len(reserved)
        assert all(
            self._slots[index].name.key == key for key, index in (*self._sealed.items(), *self._reserved.items())
        )
        held = [index for slots in self._held_by.values() for index in slots]
        assert sorted(held) == sorted(reserved | quarantined) and all(self._held_by.values())
        links = Counter(self._slots[index].parent for index in sealed | reserved)
        leases = Counter(content for lease in self._leases.values() for content in lease.content)
        for index, slot in enumerate(self._slots):
            expected = leases[Grant(index, slot.epoch)] if slot.state is SlotState.SEALED else 0
            assert slot.leases == expected, (index, slot.leases, expected)
            assert not slot.is_hidden or slot.leases > 0
            assert slot.children == (links[Grant(index, slot.epoch)] if slot.epoch else 0), index
            assert slot.parent is None or slot.parent.epoch < slot.epoch, index  # so nothing is its own ancestor
            assert slot.is_queued or not self._is_evictable(slot), index
        assert Counter(index for _, index in self._evictable) == Counter(
            index for index, slot in enumerate(self._slots) if slot.is_queued
        )

    # Moves

    def _reserve(self, name: BlockName, writer: str, length: int, ranges: int, now: float) -> Grant:
        grant = Grant(self._free.pop(), next(self._epochs))
        slot = self._slots[grant.slot]
        self._move(slot, SlotState.RESERVED)
        slot.name, slot.writer, slot.epoch, slot.length, slot.ranges = name, writer, grant.epoch, length, ranges
        slot.parent = self._join_parent(name.parent)
        self._reserved[name.key] = grant.slot
        self._held_by.setdefault(writer, set()).add(grant.slot)
        self._timeouts.append((now + self._reserve_timeout_s, grant))
        return grant

    def _make_room(self) -> bool:
        """See to it that a slot is free, by dropping the least recently used leaf that nobody reads."""
        while not self._free and self._evictable:
            last_used, index = heapq.heappop(self._evictable)
            slot = self._slots[index]
            slot.is_queued = False
            if not self._is_evictable(slot):
                continue  # comes back when it is evictable again
            if slot.last_used != last_used:
                self._queue_if_evictable(index)
                continue
            self._hide(index)
            self._set_free(index)
            self.counters["evictions"] += 1
        return bool(self._free)

    def _forget_reserved(self, slot: _Slot) -> None:
        """The block is not being written any more; another writer may start on it."""
        del self._reserved[slot.name.key]
        self._leave_parent(slot)

    def _hide(self, index: int) -> None:
        """The block is not readable any more."""
        slot = self._slots[index]
        del self._sealed[slot.name.key]
        slot.is_hidden = True
        self._events.append(BlockEvent(False, slot.name.key, slot.name.parent))
        self._leave_parent(slot)

    def _join_parent(self, parent: bytes) -> Grant | None:
        index = self._sealed.get(BlockKey(parent), self._reserved.get(BlockKey(parent)))
        if index is None:
            return None
        self._slots[index].children += 1
        return Grant(index, self._slots[index].epoch)

    def _leave_parent(self, slot: _Slot) -> None:
        link, slot.parent = slot.parent, None
        if link is None or self._slots[link.slot].epoch != link.epoch:
            return
        self._slots[link.slot].children -= 1
        self._queue_if_evictable(link.slot)

    @contextlib.contextmanager
    def _pinned(self, keys: Iterable[bytes]) -> Iterator[None]:
        """A chain's own beginning is not evicted to make room for its end."""
        found = {slot for key in keys if (slot := self._sealed.get(BlockKey(key))) is not None}
        for index in found:
            self._slots[index].children += 1
        try:
            yield
        finally:
            for index in found:
                self._slots[index].children -= 1
                self._queue_if_evictable(index)

    def _let_go(self, index: int) -> None:
        """The writer has no more to do with this slot."""
        writer = self._slots[index].writer
        self._held_by[writer].discard(index)
        if not self._held_by[writer]:
            del self._held_by[writer]

    def _set_free(self, index: int) -> None:
        slot = self._slots[index]
        self._move(slot, SlotState.FREE)
        slot.name, slot.epoch, slot.writer = _NO_NAME, 0, ""
        slot.checksums, slot.leases, slot.children, slot.is_hidden = None, 0, 0, False
        self._free.append(index)

    def _move(self, slot: _Slot, state: SlotState) -> None:
        assert (slot.state, state) in _MOVES, f"{slot.state} -> {state}"
        self._num[slot.state] -= 1
        self._num[state] += 1
        slot.state = state

    def _touch(self, index: int) -> None:
        self._slots[index].last_used = next(self._ticks)

    def _is_evictable(self, slot: _Slot) -> bool:
        return slot.state is SlotState.SEALED and slot.leases == 0 and not slot.is_hidden and slot.children == 0

    def _queue_if_evictable(self, index: int) -> None:
        slot = self._slots[index]
        if not slot.is_queued and self._is_evictable(slot):
            slot.is_queued = True
            heapq.heappush(self._evictable, (slot.last_used, index))

    def _leased(self, index: int) -> LeasedBlock:
        slot = self._slots[index]
        assert slot.checksums is not None
        return LeasedBlock(index, slot.length, slot.checksums)

    def _expire_leases(self, now: float) -> None:
        while self._leases:
            lease_id, lease = next(iter(self._leases.items()))
            if lease.expires_s > now:
                return
            self.counters["expired_leases"] += 1
            self.release(lease_id)
