"""Read leases: which slots each reader keeps in place, and until when.

A lease ends when it is released or when its time is over. Pure. It knows neither readers nor how they chose the blocks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.index.room import Room
from kvstore.index.slots import SlotTable
from kvstore.index.types import Grant, Lease
from mooncake.errors import Overloaded
from mooncake.types import BlockKey

MAX_LEASES = 65536


@dataclass(frozen=True, slots=True)
class _OpenLease:
    expires_s: float
    content: tuple[tuple[Grant, BlockKey], ...]


class Leases:
    """All last equally long, ``lease_s``. Ids count from ``first_id``."""

    def __init__(self, table: SlotTable, room: Room, lease_s: float, first_id: int) -> None:
        self._table = table
        self._room = room
        self._lease_s = lease_s
        self._open: dict[int, _OpenLease] = {}  # in order of expiry
        self._ids = itertools.count(first_id)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, run: Sequence[int], now: float) -> Lease:
        """Lease these sealed slots, which counts as a use of their blocks. Raises Overloaded when far too many leases
        are open."""
        expires_s = now + self._lease_s
        if not run:
            return Lease(0, expires_s, ())
        if len(self._open) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} read leases are open", self._lease_s)
        for index in reversed(run):  # so that a parent counts as used after its children, and outlives them
            self._room.touch(index, now)
            self._room.lease(index)
        lease_id = next(self._ids)
        blocks = tuple(map(self._table.leased, run))
        content = tuple((self._table.grant_of(block.slot), block.key) for block in blocks)
        self._open[lease_id] = _OpenLease(expires_s, content)
        return Lease(lease_id, expires_s, blocks)

    def release(self, lease_id: int) -> None:
        """End a lease. No effect if it has expired or never existed."""
        lease = self._open.pop(lease_id, None)
        for grant, key in lease.content if lease else ():
            self._room.end_lease(grant, key)

    def expire(self, now: float) -> int:
        """End those whose time is over. Returns how many."""
        num_expired = 0
        while self._open:
            lease_id, lease = next(iter(self._open.items()))
            if lease.expires_s > now:
                break
            self.release(lease_id)
            num_expired += 1
        return num_expired

    @property
    def by_slot(self) -> Counter[Grant]:
        """How many open leases each slot has."""
        return Counter(grant for lease in self._open.values() for grant, _ in lease.content)
