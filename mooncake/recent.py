"""What is open to peers, by address: made when it is first asked for, and let go of when nobody has for a while.

A peer that starts again mostly has another address, and nobody says that the old one is of no use any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

KEEP_S = 300.0

T = TypeVar("T")


class Recent(Generic[T]):
    """One owner, one event loop. Looks for what can go whenever something new is made."""

    def __init__(
        self,
        make: Callable[[str], T],
        keep_s: float = KEEP_S,
        may_go: Callable[[T], bool] = lambda thing: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Something is kept as long as it may not go."""
        self._make = make
        self._keep_s = keep_s
        self._may_go = may_go
        self._clock = clock
        self._things: dict[str, T] = {}
        self._asked_at: dict[str, float] = {}

    def get(self, address: str) -> T:
        if address not in self._things:
            self._let_go()
            self._things[address] = self._make(address)
        self._asked_at[address] = self._clock()
        return self._things[address]

    def pop(self, address: str) -> T | None:
        self._asked_at.pop(address, None)
        return self._things.pop(address, None)

    def pop_all(self) -> list[T]:
        things = list(self._things.values())
        self._things.clear()
        self._asked_at.clear()
        return things

    def __len__(self) -> int:
        return len(self._things)

    def _let_go(self) -> None:
        unused = self._clock() - self._keep_s
        for address in [address for address, asked_at in self._asked_at.items() if asked_at < unused]:
            if self._may_go(self._things[address]):
                self.pop(address)
