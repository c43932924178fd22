"""Reservations: which slots each writer may fill, with which blocks, and until when.

A reservation ends when its block is sealed, when it is aborted, when its time is over (its slot is then quarantined
until the writer says that it stopped), or with its writer. Pure. It knows neither how room was made nor who reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvstore.eviction import EvictionPolicy
from kvstore.index.listing import Listing
from kvstore.index.slots import SlotState, SlotTable
from kvstore.index.tenants import Tenants
from kvstore.index.types import NO_NAME, BlockName, Grant, Reserved
from mooncake.types import BlockKey

_HELD = (SlotState.RESERVED, SlotState.QUARANTINED)


class Reservations:
    """All last equally long, ``timeout_s``. The block that a reserved one builds on stays as long as it is named."""

    def __init__(
        self, table: SlotTable, policy: EvictionPolicy, tenants: Tenants, listing: Listing, timeout_s: float
    ) -> None:
        self._table = table
        self._policy = policy
        self._tenants = tenants
        self._listing = listing
        self._timeout_s = timeout_s
        self._timeouts: deque[tuple[float, Grant]] = deque()  # in order of time; entries may be stale

    # Beginning

    def open(self, writer: str, length: int, ranges: int, now: float) -> Grant:
        """Give a free slot (there must be one) to a writer, for a block of ``length`` bytes in ``ranges`` ranges."""
        grant = self._table.reserve(writer, length, ranges)
        self._timeouts.append((now + self._timeout_s, grant))
        return grant

    def name(self, index: int, name: BlockName, tenant: str) -> None:
        """Say which block a reserved slot is being filled with."""
        self._table.name(index, name, tenant)
        self._listing.mark(name.key, True)
        slot = self._table.slots[index]
        self._tenants.charge(tenant, slot.length)
        if slot.parent:
            self._policy.pin(slot.parent)

    def note_number(self, grants: Iterable[Grant], number: int) -> None:
        """These were just reserved by the call with this number."""
        for grant in grants:
            self._table.slots[grant.slot].number = number

    # Ends

    def sealed(self, index: int) -> None:
        """The block is readable: from now on the policy knows that it builds on its parent."""
        slot = self._table.slots[index]
        self._listing.mark(slot.name.key, False)
        if slot.parent:
            self._policy.unpin(slot.parent)

    def abort(self, grant: Grant) -> bool:
        """The writer is done with this slot for good. False, with no effect, when it does not hold it any more."""
        slot = self._table.find(grant)
        if slot is None or slot.state not in _HELD:
            return False
        if slot.state is SlotState.RESERVED:
            self._forget(grant.slot)
        self._table.set_free(grant.slot)
        return True

    def writer_gone(self, writer: str) -> list[Grant]:
        """Free what this writer held, reserved or quarantined. Returns the grants that are over."""
        grants = self._table.held_by(writer)
        for grant in grants:
            self.abort(grant)
        return grants

    def expire(self, now: float) -> list[Reserved]:
        """Quarantine those that took too long, and return them."""
        expired: list[Reserved] = []
        while self._timeouts:
            deadline, grant = self._timeouts[0]
            reserved = self.get(grant)
            if reserved is not None and deadline > now:
                break
            self._timeouts.popleft()
            if reserved is not None:
                self._forget(grant.slot)
                self._table.quarantine(grant.slot)
                expired.append(reserved)
        return expired

    # Looking

    def get(self, grant: Grant) -> Reserved | None:
        """What is reserved under this grant, or None when it is over."""
        return self._table.reservation(grant)

    def name_of(self, grant: Grant) -> BlockName:
        """The block a slot was reserved for under this grant; an empty name when that is over."""
        slot = self._table.find(grant)
        return slot.name if slot is not None else NO_NAME

    def writer_of(self, grant: Grant) -> str:
        """Who still holds this slot, reserved or quarantined; "" when nobody does."""
        slot = self._table.find(grant)
        return slot.writer if slot is not None and slot.state in _HELD else ""

    def numbered(self, writer: str, numbers: Iterable[int]) -> list[Grant]:
        """The slots this writer still holds from its calls with these numbers."""
        wanted = set(numbers) - {0}
        held = self._table.held_by(writer) if wanted else []
        return [grant for grant in held if self._table.slots[grant.slot].number in wanted]

    def num_held(self, writer: str) -> int:
        """Number of slots that this writer still holds."""
        return self._table.num_held(writer)

    def is_reserved(self, key: BlockKey) -> bool:
        """Whether this block is being written."""
        return key in self._table.reserved

    def _forget(self, index: int) -> None:
        """The block is no longer being written; another writer may start on it."""
        slot = self._table.slots[index]
        if slot.name is NO_NAME:  # the block was never named
            return
        self._listing.mark(slot.name.key, False)
        self._table.unname(index)
        self._tenants.credit(slot.tenant, slot.length)
        if slot.parent:
            self._policy.unpin(slot.parent)
