"""Capacity reserved for refused clients, from the retry time they were given.

A retry time alone only predicts what others will do: whoever asks first when there is room takes it, and a client that
returns on time finds it gone. So a refusal is also a reservation. Its time is when all earlier ones will have been
admitted, at the pace of the last minute, and once a reservation is due, requests without one are not admitted.

Clients that never return would leave room unused. So the number of reservations is weighted by the fraction of recent
ones that were claimed, and while most are not, no room is held. Pure: times (s) are arguments.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable

from conductor.admission.retry_after import MAX_RETRY_S

PACE_S = 60.0  # window over which admissions are counted
EARLY_S = 0.5  # a client may return this much before its time
GRACE_S = 2.0  # its room is held this much beyond it: the retry time was rounded up to whole seconds
DECAY = 0.98  # of a reservation's weight in ``claimed_share`` with each later one
MIN_CLAIMED_SHARE = 0.5  # room is held while more than this is claimed
MAX_RESERVATIONS = 4096


class RetryReservations:
    """By client. Asking again before the time is due keeps the reservation."""

    def __init__(self) -> None:
        self._due_at: dict[Hashable, float] = {}
        self._queue: list[tuple[float, int, Hashable]] = []  # a heap by time; it still contains cancelled ones
        self._number = 0
        self._admitted_at: deque[float] = deque()  # within the last PACE_S
        self._first_s = float("inf")
        self._claimed = self._missed = 1.0

    def __len__(self) -> int:
        return len(self._due_at)

    @property
    def claimed_share(self) -> float:
        """Fraction of recent reservations whose client returned, whether or not there was room. Starts at one half."""
        return self._claimed / (self._claimed + self._missed)

    def reserve(self, client: Hashable, estimate_s: float, now: float, is_on_time: bool = False) -> float:
        """The retry time of a refused client, at most ``MAX_RETRY_S``; a longer wait gets no reservation.

        ``estimate_s`` is the wait that others needed recently. A client that ``is_on_time`` and finds no room is given
        just that: it stays ahead of reservations that are not due. One that asks too early keeps its time, so asking
        again and again neither loses its place nor adds reservations.
        """
        if not is_on_time and (due_at := self._due_at.get(client)) is not None:
            return due_at - now
        wait_s = estimate_s if is_on_time else max(estimate_s, self._behind_all_s(now))
        if wait_s > MAX_RETRY_S or len(self._due_at) >= MAX_RESERVATIONS:
            self._due_at.pop(client, None)
            return float(MAX_RETRY_S)
        self._due_at[client] = now + wait_s
        self._number += 1
        heapq.heappush(self._queue, (now + wait_s, self._number, client))
        return wait_s

    def claim(self, client: Hashable, now: float) -> bool:
        """A client asks: returns whether it has a reservation that is due."""
        self._expire(now)
        due_at = self._due_at.get(client)
        if due_at is None or now < due_at - EARLY_S:
            return False
        self._count(is_claimed=True)
        return True

    def admitted(self, client: Hashable, now: float) -> None:
        """A client was admitted, with or without a reservation."""
        self._due_at.pop(client, None)
        self._first_s = min(self._first_s, now)
        self._admitted_at.append(now)
        self._forget_admitted(now)

    def is_due(self, now: float) -> bool:
        """Whether room must be held for some client."""
        self._expire(now)
        return bool(self._queue) and self._queue[0][0] <= now and self.claimed_share > MIN_CLAIMED_SHARE

    def _behind_all_s(self, now: float) -> float:
        """Time until every client expected to return, and one more, has been admitted. 0: none is expected."""
        self._forget_admitted(now)
        expected = self.claimed_share * len(self._due_at)
        if expected < 1.0:
            return 0.0
        seconds = max(min(PACE_S, now - self._first_s), 1.0)
        return (expected + 1.0) * seconds / max(len(self._admitted_at), 1)

    def _forget_admitted(self, now: float) -> None:
        while self._admitted_at and self._admitted_at[0] < now - PACE_S:
            self._admitted_at.popleft()

    def _expire(self, now: float) -> None:
        while self._queue:
            due_at, _, client = self._queue[0]
            is_open = self._due_at.get(client) == due_at
            if is_open and now < due_at + GRACE_S:
                return
            heapq.heappop(self._queue)
            if is_open:
                del self._due_at[client]
                self._count(is_claimed=False)

    def _count(self, is_claimed: bool) -> None:
        self._claimed = DECAY * self._claimed + is_claimed
        self._missed = DECAY * self._missed + (not is_claimed)
