"""The accounts of a store's DRAM: who may write which slot, what is readable, who reads it until when, and what is
evicted.

A slot's life is in ``slots``, writers in ``reservations``, readers in ``leases``, eviction in ``room``; the calls here
keep them in step. Pure: it takes the time as an argument, uses no randomness, does no I/O, and returns what happened as
values and events. It knows no segments, sockets or disks, nor what checksums mean. One owner; not thread-safe.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.checksum import Checksums
from kvstore.eviction import EvictionPolicy, make_policy
from kvstore.index.leases import Leases
from kvstore.index.listing import Listing, Unlisted
from kvstore.index.pins import Pins
from kvstore.index.reservations import Reservations
from kvstore.index.room import Room
from kvstore.index.slots import SlotState, SlotTable
from kvstore.index.tenants import Tenants
from kvstore.index.types import NO_NAME, BlockName, Counts, Grant, Held, Lease, Offer, Reserved
from mooncake.errors import OutOfBlocks
from mooncake.types import BlockEvent, BlockKey, Tier


def _never(name: BlockName) -> bool:
    return False


class StoreIndex:
    """The table. ``check()`` verifies it as a whole; tests call it after every step.

    Epochs and lease ids count from ``first_id``: no two incarnations of a store may share them, or the second would
    accept a late message to the first. ``must_save`` says whether a block has to be saved before its slot is reused,
    ``is_elsewhere`` whether it can be read without this slot, ``can_wait`` whether saving takes a moment only; they
    return immediately. ``tenant_bytes`` limits what one tenant may store here (0: no limit).
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
        can_wait: Callable[[], bool] = lambda: True,
    ) -> None:
        if policy is None:  # an empty policy is falsy
            policy = make_policy("lru", num_slots)
        self.counters: Counter[str] = Counter()
        self._policy = policy
        self._is_elsewhere = is_elsewhere
        self._can_wait = can_wait
        self._listing = listing or Unlisted()
        self._table = SlotTable(num_slots, first_id)
        self._tenants = Tenants(tenant_bytes)
        self._pins = Pins(policy, num_slots)
        self._room = Room(self._table, policy, self._pins, self._tenants, must_save, is_elsewhere)
        self._leases = Leases(self._table, self._room, lease_s, first_id)
        self.reservations = Reservations(self._table, policy, self._tenants, self._listing, reserve_timeout_s)
        self._events: list[BlockEvent] = []

    # Writing

    def reserve(
        self, names: Sequence[BlockName], writer: str, length: int, ranges: int, now: float, tenant: str = ""
    ) -> list[Offer]:
        """A slot for each block that is neither stored nor being written, evicting what the policy chooses.

        When room runs out the leading blocks have slots. Raises OutOfBlocks when there was none for any; there may be
        some as soon as the blocks of ``take_leaving`` have been saved.
        """
        self._expire(now)
        offers = [Offer() for _ in names]
        wanted: dict[BlockKey, int] = {}
        for index, name in enumerate(names):
            if (slot := self._table.sealed.get(name.key)) is not None:
                self._room.touch(slot, now)
                offers[index] = Offer(is_stored=True)
            elif name.key not in self._table.reserved:
                wanted.setdefault(name.key, index)
        waiting = deque(wanted.values())
        with self._pinned((names[index].parent for index in waiting), now):
            if not self._fit_tenant(tenant, length * len(waiting), now):
                while waiting and not self._tenants.fits(tenant, length * len(waiting)):
                    waiting.pop()
                if not waiting:
                    self.counters["refused_quota"] += 1
                    raise OutOfBlocks(f"tenant {tenant!r} has used up its {self._tenants.tenant_bytes} bytes")
            asked = len(waiting)
            while waiting and self._make_room(len(waiting), now):
                index = waiting.popleft()
                offers[index] = Offer(grant := self.reservations.open(writer, length, ranges, now))
                self.reservations.name(grant.slot, names[index], tenant)
        if waiting and len(waiting) == asked:
            raise OutOfBlocks("the store is full: every block is being read or written, or others build on it")
        return offers

    def reserve_ahead(
        self, count: int, writer: str, length: int, now: float, ranges: int = 1, behind: Iterable[bytes] = ()
    ) -> list[Grant]:
        """Slots for blocks not named yet, for ``adopt``: at most ``count``, and only as many as fit without evicting
        the blocks they come ``behind``."""
        self._expire(now)
        grants: list[Grant] = []
        with self._pinned(behind, now):
            while len(grants) < count and self._make_room(count - len(grants), now):
                grants.append(self.reservations.open(writer, length, ranges, now))
        return grants

    def seal(self, grant: Grant, checksums: Checksums, now: float) -> bool:
        """Make a written block readable. False when the grant is over (timed out, aborted, or never given)."""
        reserved = self.reservations.get(grant)
        if reserved is None or len(checksums) != reserved.ranges:
            self.counters["refused_seals"] += 1
            return False
        slot = self._table.slots[grant.slot]
        self._make_readable(grant.slot, checksums, now)
        self._listing.show(grant.slot, slot.epoch, slot.name.key, slot.length, checksums)
        self.reservations.sealed(grant.slot)
        return True

    def adopt(
        self,
        grant: Grant,
        name: BlockName,
        length: int,
        checksums: Checksums,
        now: float,
        tenant: str = "",
        is_listed: bool = False,
    ) -> bool:
        """Name the block that a slot of ``reserve_ahead`` has been filled with, which makes it readable;
        ``is_listed``: the board shows it already. False, with no effect, when the reservation is over, or the block
        is stored or being written."""
        slot, table = self._table.find(grant), self._table
        is_open = slot is not None and slot.state is SlotState.RESERVED and slot.name is NO_NAME
        if slot is None or not is_open or name.key in table.sealed or name.key in table.reserved:
            return False
        slot.length, slot.ranges = length, len(checksums)
        table.name(grant.slot, name, tenant)
        self._tenants.charge(tenant, length)
        self._make_readable(grant.slot, checksums, now)
        if not is_listed:
            self._listing.show(grant.slot, grant.epoch, name.key, length, checksums)
        return True

    def sweep(self, now: float) -> list[Reserved]:
        """Quarantine reservations that took too long and end expired leases. Returns those reservations: their
        grants must be revoked, and ``abort`` frees the slot once its writer can no longer be writing."""
        self._expire(now)
        expired = self.reservations.expire(now)
        self.counters["expired_reservations"] += len(expired)
        return expired

    # Reading

    def acquire(self, keys: Sequence[BlockKey], now: float, scattered: bool = False) -> Lease:
        """Lease the longest leading run of ``keys`` that is here; with ``scattered`` all of them that are here.

        Raises Overloaded when far too many leases are open.
        """
        self._expire(now)
        sealed = self._table.sealed
        here = sealed.__contains__
        run = [sealed[key] for key in (filter(here, keys) if scattered else itertools.takewhile(here, keys))]
        self.counters["hits"] += len(run)
        self.counters["misses"] += len(keys) - len(run)
        return self._leases.open(run, now)

    def touch(self, key: BlockKey, now: float) -> None:
        """A block was offered again: that counts as a use of it, if it is here."""
        if (index := self._table.sealed.get(key)) is not None:
            self._room.touch(index, now)

    def was_read(self, slots: Iterable[int], now: float) -> list[BlockKey]:
        """These were found in the listing and read without a lease. Returns the blocks in them."""
        keys: list[BlockKey] = []
        for index in slots:
            key = self._table.slots[index].name.key
            if self._table.sealed.get(key) == index:
                self._room.touch(index, now)
                keys.append(key)
        self.counters["hits"] += len(keys)
        return keys

    def release(self, lease_id: int) -> None:
        """End a lease. No effect if it has expired or never existed."""
        self._leases.release(lease_id)

    # Dropping

    def remove(self, keys: Iterable[BlockKey], now: float) -> int:
        """Make blocks unreadable; a leased one keeps its slot until its leases end. Returns how many there were."""
        self._expire(now)
        found = [slot for slot in map(self._table.sealed.get, dict.fromkeys(keys)) if slot is not None]
        for index in found:
            self._hide(index, now)
            if self._table.slots[index].leases == 0:
                self._table.set_free(index)
        return len(found)

    def give_up(self, keys: Sequence[BlockKey], now: float) -> int:
        """Make a chain unreadable from its last block backwards, up to one that something builds on, or that is
        leased or pinned. Missing blocks are skipped. Returns how many went."""
        self._expire(now)
        count = 0
        for key in reversed(keys):
            index = self._table.sealed.get(key)
            if index is None:
                continue
            if self._table.is_built_on(key) or self._table.slots[index].leases or key in self._pins:
                break
            self._hide(index, now)
            self._table.set_free(index)
            count += 1
        return count

    def drop_corrupt(self, keys: Iterable[BlockKey], now: float) -> int:
        """Drop corrupt blocks, leased or not: their readers verify checksums. Returns how many."""
        found = [slot for slot in map(self._table.sealed.get, dict.fromkeys(keys)) if slot is not None]
        for index in found:
            self._hide(index, now)
            self._table.set_free(index)
        self.counters["checksum_mismatches"] += len(found)
        return len(found)

    # Pinning

    def pin(self, keys: Iterable[BlockKey], is_hard: bool, expires_s: float, now: float) -> int:
        """Keep blocks that are here until ``expires_s``: hard pins without exception, soft ones as long as anything
        else can be evicted.

        A second pin of a block replaces the first. Returns how many are pinned. Raises OutOfBlocks when so many hard
        pins would leave too little room; nothing is pinned then.
        """
        self._expire(now)
        found = [key for key in dict.fromkeys(keys) if key in self._table.sealed]
        if is_hard:
            self._pins.check_share(found)
        for key in found:
            self._room.rescue(self._table.sealed[key], now)
            self._pins.pin(key, is_hard, expires_s)
        return len(found)

    def unpin(self, keys: Iterable[BlockKey]) -> int:
        """Returns how many were pinned."""
        return self._pins.unpin(keys)

    # Leaving: blocks that are saved elsewhere before their slots are reused

    def prepare(self, num_slots: int, now: float) -> None:
        """Make this many slots free, clean or about to be, so that a later ``reserve`` need not wait."""
        self._room.prepare(num_slots, now)

    def take_leaving(self) -> list[Held]:
        """What has to be saved now; call ``let_go`` for each, whether or not it was saved."""
        return self._room.take_leaving()

    def hold(self, key: BlockKey) -> Held | None:
        """Keep a block's bytes in place for a while. None when it is not here."""
        index = self._table.sealed.get(key)
        return None if index is None else self._room.hold(index)

    def keep(self, key: BlockKey, now: float) -> Held | None:
        """``hold`` for somebody who is about to read the block: it does not leave meanwhile, even if it was to."""
        if (index := self._table.sealed.get(key)) is not None:
            self._room.rescue(index, now)
        return self.hold(key)

    def let_go(self, held: Held) -> None:
        """It was saved, or could not be: if it had to leave, its slot may be reused unless it has been read
        meanwhile."""
        self._room.let_go(held)

    # Looking

    def exists(self, keys: Iterable[BlockKey]) -> list[bool]:
        return [key in self._table.sealed for key in keys]

    def stored_keys(self) -> list[BlockKey]:
        """Readable blocks."""
        return list(self._table.sealed)

    def is_built_on(self, key: BlockKey) -> bool:
        """Whether a block here, readable or being written, directly follows ``key``."""
        return self._table.is_built_on(key)

    # Accounts

    def take_events(self) -> list[BlockEvent]:
        """What became readable or unreadable since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def counts(self) -> Counts:
        free, reserved, sealed, quarantined = map(self._table.num, SlotState)
        return Counts(free, reserved, sealed, quarantined, len(self._leases))

    @property
    def num_saving(self) -> int:
        """Number of blocks that will leave once they have been saved."""
        return self._room.num_saving

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def usage(self) -> dict[str, int]:
        """Bytes of each tenant, readable or being written."""
        return self._tenants.usage

    def check(self) -> None:
        """Raises AssertionError when the table is inconsistent."""
        table = self._table
        table.check()
        readable = [table.slots[index] for index in table.sealed.values()]
        self._tenants.check([*readable, *(table.slots[index] for index in table.reserved.values())], readable)
        self._pins.check(table.sealed)
        self._room.check(self._leases.by_slot)

    # State changes

    def _make_readable(self, index: int, checksums: Checksums, now: float) -> None:
        self._table.seal(index, checksums)
        slot = self._table.slots[index]
        self._tenants.add(slot.tenant, slot.name.key)
        self._events.append(BlockEvent(True, slot.name.key, slot.name.parent))
        self.counters["stored"] += 1
        self._room.enter(index, now)

    def _make_room(self, wanted: int, now: float) -> bool:
        """Free a slot, by dropping a clean block, or else what the policy chooses."""
        while not self._table.free:
            if (index := self._room.next_clean()) is not None:
                self._evict(index, now)
            elif (self._room.num_saving >= wanted and self._can_wait()) or not self._room.give_up_one(now):
                break
        return bool(self._table.free)

    def _fit_tenant(self, tenant: str, nbytes: int, now: float) -> bool:
        """Drop this tenant's least recently used blocks until this many more bytes fit its quota."""
        if self._tenants.fits(tenant, nbytes):
            return True
        for key in self._tenants.blocks_of(tenant):
            index = self._table.sealed[key]
            is_idle = self._table.slots[index].leases == 0 and key not in self._pins
            if is_idle and not self._table.is_built_on(key):
                self._evict(index, now)
                if self._tenants.fits(tenant, nbytes):
                    return True
        return False

    def _evict(self, index: int, now: float) -> None:
        self._hide(index, now)
        if self._table.slots[index].leases == 0:  # otherwise it is just being saved
            self._table.set_free(index)
        self.counters["evictions"] += 1

    def _hide(self, index: int, now: float) -> None:
        """The block is no longer readable here."""
        slot = self._table.slots[index]
        key = slot.name.key
        self._listing.hide(index)
        self._pins.unpin([key])
        self._room.forget(index, now)
        self._table.hide(index)
        self._tenants.remove(slot.tenant, key)
        self._tenants.credit(slot.tenant, slot.length)
        stays = self._is_elsewhere(slot.name)
        self._events.append(BlockEvent(stays, key, slot.name.parent, Tier.SSD if stays else Tier.DRAM))

    @contextlib.contextmanager
    def _pinned(self, keys: Iterable[bytes], now: float) -> Iterator[None]:
        """A chain's own beginning must not be evicted to make room for its end."""
        parents = {key for key in keys if key}
        for key in parents:
            if (index := self._table.sealed.get(BlockKey(key))) is not None:
                self._room.rescue(index, now)
            self._policy.pin(key)
        self._room.kept |= parents
        try:
            yield
        finally:
            self._room.kept -= parents
            for key in parents:
                self._policy.unpin(key)

    def _expire(self, now: float) -> None:
        """End expired leases and pins."""
        if num_expired := self._leases.expire(now):
            self.counters["expired_leases"] += num_expired
        self._pins.expire(now)
