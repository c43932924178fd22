"""A weighted fair queue of requests: which one goes next. Priority bands first, then fair shares, then deadlines.

Pure. A higher band always goes before a lower one. Within a band, the tenant served least for its weight goes first;
within a tenant, the request with the earliest deadline. The batch class is the lowest band: it only gets idle capacity,
and its requests are displaced when the queue, which is bounded, is full.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Generic, TypeVar

MAX_TENANTS = 10_000  # remembered; beyond that those without queued requests are forgotten


class Band(IntEnum):
    """Lower goes first."""

    URGENT = 0
    NORMAL = 1
    BATCH = 2  # idle capacity only


BATCH_PRIORITY = 100  # of a request, from which on it is of the batch class


def band_of(priority: int) -> Band:
    """Band of the client's priority number: lower goes first, 0 is the default."""
    if priority >= BATCH_PRIORITY:
        return Band.BATCH
    return Band.URGENT if priority < 0 else Band.NORMAL


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One queued request. ``cost`` is what serving it takes, in any unit that all requests share (tokens, ms)."""

    item: T
    tenant: str
    band: Band
    cost: float
    deadline: float  # s


@dataclass(slots=True)
class _Tenant(Generic[T]):
    heap: list[tuple[float, int, Entry[T]]] = field(default_factory=list)  # by deadline


@dataclass(slots=True)
class _BandQueue(Generic[T]):
    """Tenants with queued requests. ``served`` is cost over weight; ``floor`` is that of the last tenant served. A
    tenant that returns after a pause starts at the floor, so nobody saves up credit."""

    tenants: dict[str, _Tenant[T]] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0


class FairQueue(Generic[T]):
    """One owner. ``weights``: a tenant's share relative to others; 1 when not listed."""

    def __init__(self, max_waiting: int, weights: dict[str, float] | None = None) -> None:
        self._max_waiting = max_waiting
        self._weights = weights or {}
        self._bands = {band: _BandQueue[T]() for band in Band}
        self._order = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, entry: Entry[T]) -> Entry[T] | None:
        """Returns the request there is no place for: None, ``entry`` itself, or a batch request displaced by it."""
        displaced = None
        if self._size >= self._max_waiting:
            displaced = self._displace_batch(entry.band)
            if displaced is None:
                return entry
        queue = self._bands[entry.band]
        tenant = queue.tenants.get(entry.tenant)
        if tenant is None:
            tenant = queue.tenants[entry.tenant] = _Tenant()
            if len(queue.served) > MAX_TENANTS:
                queue.served = {name: served for name, served in queue.served.items() if name in queue.tenants}
            queue.served[entry.tenant] = max(queue.served.get(entry.tenant, 0.0), queue.floor)
        heapq.heappush(tenant.heap, (entry.deadline, next(self._order), entry))
        self._size += 1
        return displaced

    def peek(self, is_idle: bool) -> Entry[T] | None:
        """The next request. The batch class only when the cluster ``is_idle``."""
        found = self._next(is_idle)
        return found[1].heap[0][2] if found else None

    def pop(self, is_idle: bool) -> Entry[T] | None:
        """Take the next request out, and charge its tenant."""
        found = self._next(is_idle)
        if found is None:
            return None
        queue, tenant, name = found
        entry = heapq.heappop(tenant.heap)[2]
        queue.floor = queue.served[name]
        queue.served[name] += entry.cost / self._weights.get(name, 1.0)
        self._leave(queue, name, tenant)
        return entry

    def remove(self, item: T) -> bool:
        """Take out a request whose client disconnected. Returns whether it was there."""
        for queue in self._bands.values():
            for name, tenant in queue.tenants.items():
                for at, (_, _, entry) in enumerate(tenant.heap):
                    if entry.item is item:
                        del tenant.heap[at]
                        heapq.heapify(tenant.heap)
                        self._leave(queue, name, tenant)
                        return True
        return False

    def _next(self, is_idle: bool) -> tuple[_BandQueue[T], _Tenant[T], str] | None:
        for band, queue in self._bands.items():
            if queue.tenants and (band is not Band.BATCH or is_idle):
                name = min(queue.tenants, key=lambda name: (queue.served[name], queue.tenants[name].heap[0][0], name))
                return queue, queue.tenants[name], name
        return None

    def _displace_batch(self, band: Band) -> Entry[T] | None:
        """Take out the batch request that would go last, to make room for a higher band."""
        queue = self._bands[Band.BATCH]
        if band is Band.BATCH or not queue.tenants:
            return None
        name = max(queue.tenants, key=lambda name: (queue.served[name], name))
        tenant = queue.tenants[name]
        last = max(tenant.heap, key=lambda entry: entry[:2])
        tenant.heap.remove(last)
        heapq.heapify(tenant.heap)
        self._leave(queue, name, tenant)
        return last[2]

    def _leave(self, queue: _BandQueue[T], name: str, tenant: _Tenant[T]) -> None:
        self._size -= 1
        if not tenant.heap:
            del queue.tenants[name]
