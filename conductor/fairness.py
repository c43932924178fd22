"""The waiting room: which waiting request goes next. Bands first, then fairness, then deadlines.

Pure. A higher band always goes before a lower one. Within a band, the tenant served least for its weight goes first;
within a tenant, the request with the earliest deadline. The batch class is the lowest band: it only uses capacity that
nobody else wants, and yields when somebody does. The room is bounded.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Generic, TypeVar

MAX_TENANTS = 10_000


class Band(IntEnum):
    """Lower goes first."""

    URGENT = 0
    NORMAL = 1
    BATCH = 2  # idle capacity only


BATCH_PRIORITY = 100


def band_of(priority: int) -> Band:
    """Band of the client's priority number: lower goes first, 0 is the default."""
    if priority >= BATCH_PRIORITY:
        return Band.BATCH
    return Band.URGENT if priority < 0 else Band.NORMAL


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """One waiting request. ``cost`` is what serving it takes, in any unit that all requests share (tokens, ms)."""

    item: T
    tenant: str
    band: Band
    cost: float
    deadline: float  # s
    since: float


@dataclass(slots=True)
class _Tenant(Generic[T]):
    heap: list[tuple[float, int, Waiting[T]]] = field(default_factory=list)  # by deadline


@dataclass(slots=True)
class _BandRoom(Generic[T]):
    """Tenants with waiting requests. ``served`` is cost over weight; ``floor`` is that of the last tenant served. A
    tenant that returns after a pause starts at the floor, so nobody saves up turns."""

    tenants: dict[str, _Tenant[T]] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0


class WaitingRoom(Generic[T]):
    """One owner. ``weights``: a tenant's share relative to others; 1 when not listed."""

    def __init__(self, max_waiting: int, weights: dict[str, float] | None = None) -> None:
        self._max_waiting = max_waiting
        self._weights = weights or {}
        self._bands = {band: _BandRoom[T]() for band in Band}
        self._order = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, waiting: Waiting[T]) -> Waiting[T] | None:
        """Returns the request there is no place for: None, ``waiting`` itself, or a batch request that gives way to
        it."""
        displaced = None
        if self._size >= self._max_waiting:
            displaced = self._give_way(waiting.band)
            if displaced is None:
                return waiting
        room = self._bands[waiting.band]
        tenant = room.tenants.get(waiting.tenant)
        if tenant is None:
            tenant = room.tenants[waiting.tenant] = _Tenant()
            if len(room.served) > MAX_TENANTS:
                room.served = {name: served for name, served in room.served.items() if name in room.tenants}
            room.served[waiting.tenant] = max(room.served.get(waiting.tenant, 0.0), room.floor)
        heapq.heappush(tenant.heap, (waiting.deadline, next(self._order), waiting))
        self._size += 1
        return displaced

    def peek(self, is_idle: bool) -> Waiting[T] | None:
        """The next request. The batch class only when the cluster ``is_idle``."""
        found = self._next(is_idle)
        return found[1].heap[0][2] if found else None

    def pop(self, is_idle: bool) -> Waiting[T] | None:
        """Take the next request out, and charge its tenant."""
        found = self._next(is_idle)
        if found is None:
            return None
        room, tenant, name = found
        waiting = heapq.heappop(tenant.heap)[2]
        room.floor = room.served[name]
        room.served[name] += waiting.cost / self._weights.get(name, 1.0)
        self._leave(room, name, tenant)
        return waiting

    def expire(self, now: float) -> list[Waiting[T]]:
        """Take out every request whose deadline has passed."""
        late: list[Waiting[T]] = []
        for room in self._bands.values():
            for name, tenant in list(room.tenants.items()):
                while tenant.heap and tenant.heap[0][0] <= now:
                    late.append(heapq.heappop(tenant.heap)[2])
                    self._leave(room, name, tenant)
        return late

    def remove(self, item: T) -> bool:
        """Take out a request whose client disconnected. Returns whether it was there."""
        for room in self._bands.values():
            for name, tenant in room.tenants.items():
                for at, (_, _, waiting) in enumerate(tenant.heap):
                    if waiting.item is item:
                        del tenant.heap[at]
                        heapq.heapify(tenant.heap)
                        self._leave(room, name, tenant)
                        return True
        return False

    def _next(self, is_idle: bool) -> tuple[_BandRoom[T], _Tenant[T], str] | None:
        for band, room in self._bands.items():
            if room.tenants and (band is not Band.BATCH or is_idle):
                name = min(room.tenants, key=lambda name: (room.served[name], room.tenants[name].heap[0][0], name))
                return room, room.tenants[name], name
        return None

    def _give_way(self, band: Band) -> Waiting[T] | None:
        """Take out the batch request that would go last, to make room for a higher band."""
        room = self._bands[Band.BATCH]
        if band is Band.BATCH or not room.tenants:
            return None
        name = max(room.tenants, key=lambda name: (room.served[name], name))
        tenant = room.tenants[name]
        last = max(tenant.heap, key=lambda entry: entry[:2])
        tenant.heap.remove(last)
        heapq.heapify(tenant.heap)
        self._leave(room, name, tenant)
        return last[2]

    def _leave(self, room: _BandRoom[T], name: str, tenant: _Tenant[T]) -> None:
        self._size -= 1
        if not tenant.heap:
            del room.tenants[name]
