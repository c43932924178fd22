"""Virtual time: what happens next, in order. It knows nothing of what happens.

Events of the same moment happen in the order in which they were planned, so a run is a function of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Agenda:
    """Times are seconds from the start of the run and never go back."""

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Plan ``action``; a time that has passed means now."""
        self._number = number = self._number + 1
        now = self.now
        heappush(self._heap, (time_s if time_s > now else now, number, action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + delay_s, action, *arguments)

    def run(self, max_events: int | None = None) -> int:
        """Let events happen until there is none, or ``max_events`` did. Returns how many."""
        heap, pop, count = self._heap, heappop, 0
        while heap and count != max_events:
            self.now, _, action, arguments = pop(heap)
            action(*arguments)
            count += 1
        return count
