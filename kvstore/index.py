"""Which block is in which slot of a store's DRAM, who writes it, who reads it, and what goes when there is no room.

    free ──reserve──▶ reserved ──seal──▶ sealed ──evict, remove, corrupt──▶ free
                       │     │
                       │     └──time-out──▶ quarantined ──the writer is done or gone──▶ free
                       └──abort, the writer is gone──▶ free

A sealed block that the policy gives up may have to be saved elsewhere first: it is then *leaving*, still readable, and
*clean* once it has been saved; a read rescues it. Pure: it takes the time as an argument, draws nothing, does no I/O,
and hands out what happened as values and events. It must not know about segments, sockets, disks or what checksums
mean. One owner; not thread-safe.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvstore.checksum import Checksums
from kvstore.eviction import Block, EvictionPolicy, make_policy
from mooncake.errors import OutOfBlocks, Overloaded
from mooncake.types import BlockEvent, BlockKey, Tier

MAX_LEASES = 65536
PIN_CHECK_S = 0.25
MAX_HARD_SHARE = 0.5  # of the slots: more hard pins would leave nothing to work with


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
    key: BlockKey
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
class Held:
    """A block that is held in place, because it is being saved elsewhere or is about to be read. ``let_go`` ends that.
    ``must_go`` when the policy has given it up: its slot is to be used again once it is safe."""

    must_go: bool
    grant: Grant
    name: BlockName
    tenant: str
    length: int
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Counts:
    free: int
    reserved: int
    sealed: int
    quarantined: int
    leases: int


class Listing(Protocol):
    """Where what is readable is listed for those who look without asking. Called in step with every change."""

    def show(self, slot: int, epoch: int, key: bytes, length: int, checksums: Checksums) -> None: ...

    def hide(self, slot: int) -> None:
        """From now on the slot's bytes may change."""
        ...


class _Unlisted:
    def show(self, slot: int, epoch: int, key: bytes, length: int, checksums: Checksums) -> None: ...

    def hide(self, slot: int) -> None: ...


_NO_NAME = BlockName(BlockKey(b""))


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    name: BlockName = _NO_NAME
    epoch: int = 0
    writer: str = ""
    tenant: str = ""
    length: int = 0
    ranges: int = 0
    parent: bytes = b""  # the block it builds on, if that was here first: so no two blocks can wait for each other
    position: int = 0  # blocks before it in its chain, as far as they were here
    checksums: Checksums | None = None
    leases: int = 0  # of readers, and of whoever saves it elsewhere
    is_hidden: bool = False  # sealed and removed, but still leased: goes when the last lease ends
    is_leaving: bool = False  # the policy has given it up
    is_clean: bool = False  # … and it may go at once


@dataclass(frozen=True, slots=True)
class _OpenLease:
    expires_s: float
    content: tuple[tuple[Grant, BlockKey], ...]


@dataclass(frozen=True, slots=True)
class _Pin:
    expires_s: float
    is_hard: bool


def _never(name: BlockName) -> bool:
    return False


class StoreIndex:
    """The table. ``check()`` verifies it as a whole; tests call it after every step.

    Epochs and lease ids count from ``first_id``: no two lives of a store may share them, or a late message to the first
    would be taken by the second. ``must_save`` says of a block whether it has to be saved before its slot is used
    again, ``is_elsewhere`` whether it can be read without this slot; both answer at once. ``tenant_bytes`` bounds what
    one tenant may have here (0: nothing does).
    """

    def __init__(
        self,
        num_slots: int,
        lease_s: float,
        reserve_timeout_s: float,
        first_id: int = 1,
        policy: EvictionPolicy | None = None,
        tenant_bytes: int = 0,
        must_save: Callable[[BlockName], bool] = _never,
        is_elsewhere: Callable[[BlockName], bool] = _never,
        listing: Listing | None = None,
    ) -> None:
        self._listing = listing or _Unlisted()
        self.counters: Counter[str] = Counter()
        self._lease_s = lease_s
        self._reserve_timeout_s = reserve_timeout_s
        self._policy = policy or make_policy("lru", num_slots)
        self._tenant_bytes = tenant_bytes
        self._must_save = must_save
        self._is_elsewhere = is_elsewhere
        self._slots = [_Slot() for _ in range(num_slots)]
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: slots that were touched already come first
        self._num = Counter({SlotState.FREE: num_slots})
        self._sealed: dict[BlockKey, int] = {}  # readable blocks
        self._reserved: dict[BlockKey, int] = {}  # blocks being written
        self._held_by: dict[str, set[int]] = {}  # reserved and quarantined slots of a writer
        self._timeouts: deque[tuple[float, Grant]] = deque()  # in order of time; entries may be out of date
        self._leases: dict[int, _OpenLease] = {}  # in order of expiry
        self._children: Counter[bytes] = Counter()  # readable and reserved blocks that build on a key
        self._usage: Counter[str] = Counter()  # bytes of each tenant
        self._by_tenant: dict[str, OrderedDict[BlockKey, None]] = {}  # readable blocks, least recently used first
        self._pins: dict[BlockKey, _Pin] = {}
        self._soft: OrderedDict[BlockKey, None] = OrderedDict()  # soft pins, oldest first
        self._num_hard = 0
        self._next_pin_check = 0.0
        self._leaving: list[Held] = []  # to be handed out
        self._num_saving = 0
        self._num_held = 0
        self._clean: OrderedDict[int, None] = OrderedDict()  # slots
        self._events: list[BlockEvent] = []
        self._epochs = itertools.count(first_id)
        self._lease_ids = itertools.count(first_id)

    # Writing

    def reserve(
        self, names: Sequence[BlockName], writer: str, length: int, ranges: int, now: float, tenant: str = ""
    ) -> list[Offer]:
        """A slot for each block that is neither stored nor being written, evicting what the policy gives up.

        When room runs out the leading blocks have slots. Raises OutOfBlocks when there was none for any; there may be
        some as soon as blocks of ``take_leaving`` have been saved.
        """
        self._expire(now)
        offers = [Offer() for _ in names]
        wanted: dict[BlockKey, int] = {}
        for index, name in enumerate(names):
            if (slot := self._sealed.get(name.key)) is not None:
                self._touch(slot, now)
                offers[index] = Offer(is_stored=True)
            elif name.key not in self._reserved:
                wanted.setdefault(name.key, index)
        waiting = deque(wanted.values())
        with self._pinned((names[index].parent for index in waiting), now):
            if not self._fit_tenant(tenant, length * len(waiting), now):
                while waiting and self._usage[tenant] + length * len(waiting) > self._tenant_bytes:
                    waiting.pop()
                if not waiting:
                    self.counters["refused_quota"] += 1
                    raise OutOfBlocks(f"tenant {tenant!r} has used up its {self._tenant_bytes} bytes")
            asked = len(waiting)
            while waiting and self._make_room(len(waiting), now):
                index = waiting.popleft()
                offers[index] = Offer(self._reserve(names[index], writer, length, ranges, now, tenant))
        if waiting and len(waiting) == asked:
            raise OutOfBlocks("the store is full: every block is being read or written, or others build on it")
        return offers

    def reservation(self, grant: Grant) -> Reserved | None:
        """What is reserved under this grant, or None when it is over."""
        slot = self._slots[grant.slot] if 0 <= grant.slot < len(self._slots) else None
        if slot is None or slot.state is not SlotState.RESERVED or slot.epoch != grant.epoch:
            return None
        return Reserved(grant, slot.writer, slot.length, slot.ranges)

    def seal(self, grant: Grant, checksums: Checksums, now: float) -> bool:
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
        self._by_tenant.setdefault(slot.tenant, OrderedDict())[slot.name.key] = None
        self._events.append(BlockEvent(True, slot.name.key, slot.name.parent))
        self.counters["stored"] += 1
        self._enter_policy(slot, now)
        self._listing.show(grant.slot, slot.epoch, slot.name.key, slot.length, checksums)
        if slot.parent:
            self._policy.unpin(slot.parent)  # from now on the policy knows that this block builds on it
        return True

    def name_reserved(self, grant: Grant, name: BlockName, length: int, ranges: int, tenant: str) -> bool:
        """Say at last what a slot reserved under another name, for at least so many bytes, has been filled with. False
        when the reservation is over, or the block is here or being written already; then nothing happens."""
        if self.reservation(grant) is None or name.key in self._sealed or name.key in self._reserved:
            return False
        slot = self._slots[grant.slot]
        self._forget_reserved(slot)
        slot.length, slot.ranges = length, ranges
        self._name(slot, grant.slot, name, tenant)
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
        self._expire(now)
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

    def acquire(self, keys: Sequence[BlockKey], now: float, scattered: bool = False) -> Lease:
        """Lease the longest leading run of ``keys`` that is here; with ``scattered`` all of them that are here.

        Raises Overloaded when far too many leases are open."""
        self._expire(now)
        here = self._sealed.__contains__
        run = [self._sealed[key] for key in (filter(here, keys) if scattered else itertools.takewhile(here, keys))]
        self.counters["hits"] += len(run)
        self.counters["misses"] += len(keys) - len(run)
        expires_s = now + self._lease_s
        if not run:
            return Lease(0, expires_s, ())
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} read leases are open", self._lease_s)
        for index in reversed(run):  # so that a parent counts as used after its children, and outlives them
            self._touch(index, now)
            self._hold(index)
        lease_id = next(self._lease_ids)
        content = tuple((Grant(index, self._slots[index].epoch), self._slots[index].name.key) for index in run)
        self._leases[lease_id] = _OpenLease(expires_s, content)
        return Lease(lease_id, expires_s, tuple(map(self._leased, run)))

    def touch(self, key: BlockKey, now: float) -> None:
        """A block was offered again: that is a use of it, if it is here."""
        if (index := self._sealed.get(key)) is not None:
            self._touch(index, now)

    def was_read(self, slots: Iterable[int], now: float) -> list[BlockKey]:
        """These were found in the listing and read without a lease. Returns the blocks that are in them."""
        keys: list[BlockKey] = []
        for index in slots:
            key = self._slots[index].name.key
            if self._sealed.get(key) == index:
                self._touch(index, now)
                keys.append(key)
        self.counters["hits"] += len(keys)
        return keys

    def release(self, lease_id: int) -> None:
        """End a lease. One that has expired or never was is nothing to end."""
        lease = self._leases.pop(lease_id, None)
        for grant, key in lease.content if lease else ():
            self._let_read(grant, key)

    def is_reserved(self, key: BlockKey) -> bool:
        """Whether someone is writing this block."""
        return key in self._reserved

    def reserved_name(self, grant: Grant) -> BlockName:
        """Of a slot that was reserved under this grant; an empty one when that is over."""
        slot = self._slots[grant.slot] if 0 <= grant.slot < len(self._slots) else None
        return slot.name if slot is not None and slot.epoch == grant.epoch else _NO_NAME

    def stored_keys(self) -> list[BlockKey]:
        """Readable blocks."""
        return list(self._sealed)

    def exists(self, keys: Iterable[BlockKey]) -> list[bool]:
        return [key in self._sealed for key in keys]

    # Dropping

    def remove(self, keys: Iterable[BlockKey], now: float) -> int:
        """Make blocks unreadable; a leased one keeps its slot until its leases end. Returns how many there were."""
        self._expire(now)
        found = [slot for slot in map(self._sealed.get, dict.fromkeys(keys)) if slot is not None]
        for index in found:
            self._hide(index, now)
            if self._slots[index].leases == 0:
                self._set_free(index)
        return len(found)

    def drop_corrupt(self, keys: Iterable[BlockKey], now: float) -> int:
        """Drop blocks whose bytes are wrong, leased or not: their readers check checksums. Returns how many."""
        found = [slot for slot in map(self._sealed.get, dict.fromkeys(keys)) if slot is not None]
        for index in found:
            self._hide(index, now)
            self._set_free(index)
        self.counters["checksum_mismatches"] += len(found)
        return len(found)

    # Pinning

    def pin(self, keys: Iterable[BlockKey], is_hard: bool, expires_s: float, now: float) -> int:
        """Keep blocks that are here until ``expires_s``: hard for certain, soft as long as anything else can go.

        A second pin of a block replaces the first. Returns how many are pinned. Raises OutOfBlocks when so many hard
        pins would leave too little room; nothing is pinned then.
        """
        self._expire(now)
        found = [key for key in dict.fromkeys(keys) if key in self._sealed]
        if is_hard:
            more = sum(not (key in self._pins and self._pins[key].is_hard) for key in found)
            if self._num_hard + more > len(self._slots) * MAX_HARD_SHARE:
                raise OutOfBlocks(f"hard pins may hold {MAX_HARD_SHARE:.0%} of the store's blocks")
        for key in found:
            self.unpin([key])
            self._rescue(self._sealed[key], now)
            self._pins[key] = _Pin(expires_s, is_hard)
            self._policy.pin(key)
            self._num_hard += is_hard
            if not is_hard:
                self._soft[key] = None
        return len(found)

    def unpin(self, keys: Iterable[BlockKey]) -> int:
        """Returns how many were pinned."""
        count = 0
        for key in keys:
            pin = self._pins.pop(key, None)
            if pin is not None:
                self._policy.unpin(key)
                self._num_hard -= pin.is_hard
                self._soft.pop(key, None)
                count += 1
        return count

    # Leaving: blocks that are saved elsewhere before their slots are used again

    def prepare(self, num_slots: int, now: float) -> None:
        """See to it that so many slots are free, clean or about to be, so that a later ``reserve`` need not wait."""
        while len(self._free) + len(self._clean) + self._num_saving < num_slots:
            if not self._give_up_one(now):
                return

    def take_leaving(self) -> list[Held]:
        """What has to be saved now; ``let_go`` of each, whatever comes of it."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def hold(self, key: BlockKey) -> Held | None:
        """Keep a block's bytes in place for a while. None when it is not here."""
        index = self._sealed.get(key)
        if index is None:
            return None
        self._hold(index)
        self._num_held += 1
        return self._describe(index, must_go=False)

    def let_go(self, held: Held) -> None:
        """It has been saved, or cannot be: if it had to go, its slot may be used again unless it was read meanwhile."""
        if held.must_go:
            self._num_saving -= 1
        else:
            self._num_held -= 1
        slot = self._slots[held.grant.slot]
        if held.must_go and slot.epoch == held.grant.epoch and slot.is_leaving and not slot.is_hidden:
            slot.is_clean = True
            self._clean[held.grant.slot] = None
        self._let_read(held.grant, held.name.key)

    def is_built_on(self, key: BlockKey) -> bool:
        """Whether a block here, readable or being written, comes right after ``key``."""
        return self._children[key] > 0

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

    @property
    def num_saving(self) -> int:
        """Blocks that are to go once they have been saved."""
        return self._num_saving

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def usage(self) -> dict[str, int]:
        """Bytes of each tenant, readable or being written."""
        return dict(+self._usage)

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
        present = [self._slots[index] for index in sealed | reserved]
        assert +self._children == Counter(slot.parent for slot in present if slot.parent)
        usage: Counter[str] = Counter()
        for slot in present:
            usage[slot.tenant] += slot.length
        assert +self._usage == +usage
        leases = Counter(grant for lease in self._leases.values() for grant, _ in lease.content)
        extra = 0
        for index, slot in enumerate(self._slots):
            expected = leases[Grant(index, slot.epoch)] if slot.state is SlotState.SEALED else 0
            extra += slot.leases - expected
            assert slot.leases >= expected, (index, slot.leases, expected)
            assert not slot.is_hidden or slot.leases > 0
            in_policy = slot.state is SlotState.SEALED and not slot.is_hidden and not slot.is_leaving
            assert not in_policy or slot.name.key in self._policy
            assert slot.is_clean == (index in self._clean) and (slot.is_leaving or not slot.is_clean)
        assert extra <= self._num_saving + self._num_held
        assert len(self._policy) == sum(not self._slots[index].is_leaving for index in sealed)
        assert sum(map(len, self._by_tenant.values())) == len(sealed)
        assert self._num_hard == sum(pin.is_hard for pin in self._pins.values())
        assert self._pins.keys() <= self._sealed.keys()

    # Moves

    def _reserve(self, name: BlockName, writer: str, length: int, ranges: int, now: float, tenant: str) -> Grant:
        grant = Grant(self._free.pop(), next(self._epochs))
        slot = self._slots[grant.slot]
        self._move(slot, SlotState.RESERVED)
        slot.writer, slot.epoch, slot.length, slot.ranges = writer, grant.epoch, length, ranges
        self._name(slot, grant.slot, name, tenant)
        self._held_by.setdefault(writer, set()).add(grant.slot)
        self._timeouts.append((now + self._reserve_timeout_s, grant))
        return grant

    def _name(self, slot: _Slot, index: int, name: BlockName, tenant: str) -> None:
        slot.name, slot.tenant = name, tenant
        slot.parent, slot.position = self._link(name.parent)
        self._usage[tenant] += slot.length
        if slot.parent:
            self._children[slot.parent] += 1
            self._policy.pin(slot.parent)
        self._reserved[name.key] = index

    def _make_room(self, wanted: int, now: float) -> bool:
        """See to it that a slot is free, by dropping what is clean, else what the policy gives up."""
        while not self._free:
            if (index := self._next_clean()) is not None:
                self._evict(index, now)
            elif self._num_saving >= wanted or not self._give_up_one(now):
                break
        return bool(self._free)

    def _next_clean(self) -> int | None:
        """A block that may go, and that no block which is still being saved builds on."""
        leaf = next((index for index in self._clean if not self._children[self._slots[index].name.key]), None)
        return leaf if leaf is not None or self._num_saving else next(iter(self._clean), None)

    def _give_up_one(self, now: float) -> bool:
        """Let the policy choose a block, and make it clean or have it saved. False when there is none to choose."""
        key = self._policy.victim(now)
        while key is None and self._soft:
            self.unpin([next(iter(self._soft))])
            key = self._policy.victim(now)
        if key is None and (key := self._below_others()) is not None:
            self._policy.remove(key, now)
        if key is None:
            return False
        assert isinstance(key, bytes)
        index = self._sealed[BlockKey(key)]
        slot = self._slots[index]
        slot.is_leaving = True
        if not self._must_save(slot.name):
            slot.is_clean = True
            self._clean[index] = None
            return True
        self._hold(index)
        self._num_saving += 1
        self._leaving.append(self._describe(index, must_go=True))
        return True

    def _below_others(self) -> BlockKey | None:
        """When one chain fills the store: a block that others build on, but that stays readable elsewhere."""
        for keys in self._by_tenant.values():
            for key in keys:
                slot = self._slots[self._sealed[key]]
                is_idle = slot.leases == 0 and not slot.is_leaving and key not in self._pins
                if is_idle and (self._is_elsewhere(slot.name) or self._must_save(slot.name)):
                    return key
        return None

    def _evict(self, index: int, now: float) -> None:
        self._hide(index, now)
        if self._slots[index].leases == 0:  # else someone is just saving it
            self._set_free(index)
        self.counters["evictions"] += 1

    def _fit_tenant(self, tenant: str, nbytes: int, now: float) -> bool:
        """Drop what this tenant has not used for longest until so many more bytes fit its quota."""
        if not self._tenant_bytes:
            return True
        for key in list(self._by_tenant.get(tenant, ())):
            if self._usage[tenant] + nbytes <= self._tenant_bytes:
                break
            index = self._sealed[key]
            if self._slots[index].leases == 0 and not self._children[key] and key not in self._pins:
                self._evict(index, now)
        return self._usage[tenant] + nbytes <= self._tenant_bytes

    def _forget_reserved(self, slot: _Slot) -> None:
        """The block is not being written any more; another writer may start on it."""
        del self._reserved[slot.name.key]
        self._leave(slot)
        if slot.parent:
            self._policy.unpin(slot.parent)

    def _hide(self, index: int, now: float) -> None:
        """The block is not readable here any more."""
        slot = self._slots[index]
        key = slot.name.key
        self._listing.hide(index)
        del self._sealed[key]
        self.unpin([key])
        self._policy.remove(key, now)
        self._clean.pop(index, None)
        slot.is_hidden, slot.is_clean = True, False
        del self._by_tenant[slot.tenant][key]
        if not self._by_tenant[slot.tenant]:
            del self._by_tenant[slot.tenant]
        stays = self._is_elsewhere(slot.name)
        self._events.append(BlockEvent(stays, key, slot.name.parent, Tier.SSD if stays else Tier.DRAM))
        self._leave(slot)

    def _leave(self, slot: _Slot) -> None:
        self._usage[slot.tenant] -= slot.length
        if not self._usage[slot.tenant]:
            del self._usage[slot.tenant]
        if slot.parent:
            self._children[slot.parent] -= 1
            if not self._children[slot.parent]:
                del self._children[slot.parent]

    @contextlib.contextmanager
    def _pinned(self, keys: Iterable[bytes], now: float) -> Iterator[None]:
        """A chain's own beginning is not evicted to make room for its end."""
        parents = {key for key in keys if key}
        for key in parents:
            if (index := self._sealed.get(BlockKey(key))) is not None:
                self._rescue(index, now)
            self._policy.pin(key)
        try:
            yield
        finally:
            for key in parents:
                self._policy.unpin(key)

    def _let_go(self, index: int) -> None:
        """The writer has no more to do with this slot."""
        writer = self._slots[index].writer
        self._held_by[writer].discard(index)
        if not self._held_by[writer]:
            del self._held_by[writer]

    def _set_free(self, index: int) -> None:
        slot = self._slots[index]
        self._move(slot, SlotState.FREE)
        slot.name, slot.epoch, slot.writer, slot.tenant = _NO_NAME, 0, "", ""
        slot.checksums, slot.leases, slot.is_hidden, slot.is_leaving, slot.is_clean = None, 0, False, False, False
        self._free.append(index)

    def _move(self, slot: _Slot, state: SlotState) -> None:
        assert (slot.state, state) in _MOVES, f"{slot.state} -> {state}"
        self._num[slot.state] -= 1
        self._num[state] += 1
        slot.state = state

    def _touch(self, index: int, now: float) -> None:
        slot = self._slots[index]
        if slot.is_leaving:
            self._rescue(index, now)
        else:
            self._policy.hit(slot.name.key, now)
        self._by_tenant[slot.tenant].move_to_end(slot.name.key)

    def _rescue(self, index: int, now: float) -> None:
        """A block that was about to go is wanted after all."""
        slot = self._slots[index]
        if slot.is_leaving:
            slot.is_leaving = slot.is_clean = False
            self._clean.pop(index, None)
            self._enter_policy(slot, now)

    def _enter_policy(self, slot: _Slot, now: float) -> None:
        self._policy.insert(Block(slot.name.key, slot.parent or None, slot.position), now)

    def _link(self, parent: bytes) -> tuple[bytes, int]:
        """The parent, if it is here, and the position of a block that comes after it."""
        index = self._sealed.get(BlockKey(parent), self._reserved.get(BlockKey(parent)))
        return (b"", 0) if index is None else (parent, self._slots[index].position + 1)

    def _hold(self, index: int) -> None:
        self._slots[index].leases += 1
        self._policy.pin(self._slots[index].name.key)

    def _let_read(self, grant: Grant, key: BlockKey) -> None:
        """Undo ``_hold``."""
        self._policy.unpin(key)
        slot = self._slots[grant.slot]
        if slot.epoch != grant.epoch or slot.state is not SlotState.SEALED:
            return  # dropped as corrupt meanwhile, and perhaps used again
        slot.leases -= 1
        if slot.leases == 0 and slot.is_hidden:
            self._set_free(grant.slot)

    def _describe(self, index: int, must_go: bool) -> Held:
        slot = self._slots[index]
        assert slot.checksums is not None
        return Held(must_go, Grant(index, slot.epoch), slot.name, slot.tenant, slot.length, slot.checksums)

    def _leased(self, index: int) -> LeasedBlock:
        slot = self._slots[index]
        assert slot.checksums is not None
        return LeasedBlock(slot.name.key, index, slot.length, slot.checksums)

    def _expire(self, now: float) -> None:
        """End leases and pins that ran out."""
        while self._leases:
            lease_id, lease = next(iter(self._leases.items()))
            if lease.expires_s > now:
                break
            self.counters["expired_leases"] += 1
            self.release(lease_id)
        if self._pins and now >= self._next_pin_check:
            self._next_pin_check = now + PIN_CHECK_S
            self.unpin([key for key, pin in self._pins.items() if pin.expires_s <= now])
