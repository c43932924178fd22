"""Calls for many keys, spread over stores: groups that fit into one message each, and combining the stores' answers.

It knows keys only by their index, and nothing of the calls' meaning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Hashable, Iterable, Sequence
from typing import TypeVar

from kvstore.client.types import MAX_BATCH
from mooncake.errors import DeadlineExceeded, MooncakeError, RetryElsewhere, TryLater

OUTAGES = (RetryElsewhere, TryLater, DeadlineExceeded)  # of one store: another may well answer

T = TypeVar("T")
Place = TypeVar("Place", bound=Hashable)


def grouped(placed: Iterable[tuple[Place, int]]) -> list[tuple[Place, list[int]]]:
    """Indices by where they are placed, in groups that fit into one message."""
    groups: dict[Place, list[int]] = {}
    for place, number in placed:
        groups.setdefault(place, []).append(number)
    return [
        (place, numbers[at : at + MAX_BATCH])
        for place, numbers in groups.items()
        for at in range(0, len(numbers), MAX_BATCH)
    ]


def share_s(deadline: float, num_turns: int) -> float:
    """The time that the next of this many turns may take."""
    return (deadline - time.monotonic()) / num_turns


async def answers_of(calls: Sequence[Awaitable[T]]) -> list[T | BaseException]:
    """Each call's result or exception. A single call needs no task of its own."""
    if len(calls) != 1:
        return await asyncio.gather(*calls, return_exceptions=True)
    try:
        return [await calls[0]]
    except MooncakeError as error:
        return [error]


class Answered:
    """Whether some store has answered for each key, by index."""

    def __init__(self) -> None:
        self._answered: set[int] = set()
        self._outages: dict[int, MooncakeError] = {}

    def of(self, numbers: Sequence[int], answer: Sequence[T] | BaseException) -> Iterable[tuple[int, T]]:
        """Record a store's answer for these keys, or its outage. Raises any other error."""
        if isinstance(answer, OUTAGES):
            self._outages.update((number, answer) for number in numbers if number not in self._outages)
            return ()
        if isinstance(answer, BaseException):
            raise answer
        self._answered.update(numbers)
        return zip(numbers, answer, strict=True)

    def check(self) -> None:
        """Raises the outage of a key that no store has answered for."""
        for number, outage in self._outages.items():
            if number not in self._answered:
                raise outage


def true_anywhere(
    groups: Sequence[tuple[Place, list[int]]], answers: Sequence[Sequence[bool] | BaseException], count: int
) -> list[bool]:
    """For each of ``count`` keys whether a store has answered True. Raises like ``Answered``."""
    found, answered = [False] * count, Answered()
    for (_, mine), answer in zip(groups, answers, strict=True):
        for index, is_true in answered.of(mine, answer):
            found[index] = found[index] or is_true
    answered.check()
    return found
