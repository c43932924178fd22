"""Hand-offs that wait for room in the engine: by priority, then first come, first served.

It does not know what a hand-off is: it reserves blocks for sequences.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from itertools import count

from mooncake.engine.contract import Reservation
from mooncake.engine.loop import EngineThread
from mooncake.engine.sequence import Sequence
from mooncake.errors import OutOfBlocks

RETRY_S = 0.02  # between checks for room while running sequences free theirs


class ReservationQueue:
    """Without the order, short prompts would overtake a long one for ever."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._arrivals = count()
        self._waiting: list[tuple[int, int]] = []  # priority, arrival

    def __len__(self) -> int:
        return len(self._waiting)

    async def reserve(self, sequence: Sequence, deadline: float, check_open: Callable[[], None]) -> Reservation:
        """Reserve blocks when there is room and nobody is ahead. ``check_open`` raises once it is not wanted any more.

        Raises OutOfBlocks at the ``deadline`` (of the event loop's clock), and what ``Engine.reserve`` does.
        """
        place = (sequence.priority, next(self._arrivals))
        refusal = OutOfBlocks("others wait for room before it")
        try:
            while True:
                if not self._waiting or place <= self._waiting[0]:
                    try:
                        return await asyncio.wrap_future(self._thread.call(lambda engine: engine.reserve(sequence)))
                    except OutOfBlocks as error:
                        refusal = error
                if place not in self._waiting:
                    insort(self._waiting, place)
                if asyncio.get_running_loop().time() + RETRY_S > deadline:
                    raise refusal
                await asyncio.sleep(RETRY_S)
                check_open()
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
