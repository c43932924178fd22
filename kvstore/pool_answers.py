"""Calls for many keys, spread over stores: groups that fit a message each, and what the stores' answers add up to.

It knows keys by their numbers alone, and nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Hashable, Iterable, Sequence
from typing import TypeVar

from mooncake.errors import DeadlineExceeded, MooncakeError, RetryElsewhere, TryLater

MAX_BATCH = 2048  # blocks in one message to a store: with a thousand checksums each they fit one

OUTAGES = (RetryElsewhere, TryLater, DeadlineExceeded)  # of one store: another may well answer

T = TypeVar("T")
Place = TypeVar("Place", bound=Hashable)


def grouped(placed: Iterable[tuple[Place, int]]) -> list[tuple[Place, list[int]]]:
    """Numbers by where they are placed, no more of them together than fit a message."""
    groups: dict[Place, list[int]] = {}
    for place, number in placed:
        groups.setdefault(place, []).append(number)
    return [
        (place, numbers[at : at + MAX_BATCH])
        for place, numbers in groups.items()
        for at in range(0, len(numbers), MAX_BATCH)
    ]


def share_s(deadline: float, num_turns: int) -> float:
    """The time that the next of so many turns may take."""
    return (deadline - time.monotonic()) / num_turns


async def answers_of(calls: Sequence[Awaitable[T]]) -> list[T | BaseException]:
    """What each gave or raised. One alone needs no task of its own."""
    if len(calls) != 1:
        return await asyncio.gather(*calls, return_exceptions=True)
    try:
        return [await calls[0]]
    except MooncakeError as error:
        return [error]


class Told:
    """Whether some store has answered for each key, by number."""

    def __init__(self) -> None:
        self._answered: set[int] = set()
        self._outages: dict[int, MooncakeError] = {}

    def of(self, numbers: Sequence[int], answer: Sequence[T] | BaseException) -> Iterable[tuple[int, T]]:
        """What a store says of each; nothing when it did not answer. Raises what is no outage."""
        if isinstance(answer, OUTAGES):
            self._outages.update((number, answer) for number in numbers if number not in self._outages)
            return ()
        if isinstance(answer, BaseException):
            raise answer
        self._answered.update(numbers)
        return zip(numbers, answer, strict=True)

    def check(self) -> None:
        """Raises what kept the stores of a key from answering, if none has."""
        for number, outage in self._outages.items():
            if number not in self._answered:
                raise outage
