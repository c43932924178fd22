"""Virtual time: a queue of events. It must not know what they do.

Events at the same time run in the order in which they were planned, so a run is a function of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Agenda:
    """The queue and the clock. Times are seconds since the start of the run and never decrease."""

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Plan ``action``; a time in the past means now."""
        self._number = number = self._number + 1
        now = self.now
        heappush(self._heap, (time_s if time_s > now else now, number, action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + delay_s, action, *arguments)

    def run(self, max_events: int | None = None) -> int:
        """Run events until there are none, or ``max_events`` have run. Returns how many ran."""
        heap, pop, count = self._heap, heappop, 0
        while heap and count != max_events:
            self.now, _, action, arguments = pop(heap)
            action(*arguments)
            count += 1
        return count
