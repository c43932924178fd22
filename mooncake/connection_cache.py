"""A cache of connections by peer address: created on first use, dropped when unused for a while.

A restarted peer usually has another address, and nothing announces that the old one is obsolete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

KEEP_S = 300.0

T = TypeVar("T")


class ConnectionCache(Generic[T]):
    """One owner, one event loop. Unused entries are dropped whenever a new one is created."""

    def __init__(
        self,
        make: Callable[[str], T],
        keep_s: float = KEEP_S,
        may_go: Callable[[T], bool] = lambda connection: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``make`` creates the entry of an address; entries unused for ``keep_s`` are dropped if ``may_go``."""
        self._make = make
        self._keep_s = keep_s
        self._may_go = may_go
        self._clock = clock
        self._connections: dict[str, T] = {}
        self._asked_at: dict[str, float] = {}

    def get(self, address: str) -> T:
        if address not in self._connections:
            self._drop_unused()
            self._connections[address] = self._make(address)
        self._asked_at[address] = self._clock()
        return self._connections[address]

    def pop(self, address: str) -> T | None:
        self._asked_at.pop(address, None)
        return self._connections.pop(address, None)

    def pop_all(self) -> list[T]:
        connections = list(self._connections.values())
        self._connections.clear()
        self._asked_at.clear()
        return connections

    def __len__(self) -> int:
        return len(self._connections)

    def _drop_unused(self) -> None:
        unused = self._clock() - self._keep_s
        for address in [address for address, asked_at in self._asked_at.items() if asked_at < unused]:
            if self._may_go(self._connections[address]):
                self.pop(address)
