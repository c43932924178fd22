"""Room reserved for clients that were refused and told when to come back.

A retry time alone only predicts what others will do: whoever asks first when there is room takes it, and clients that
come back as told find it gone. So a refusal is an appointment. It is set for when everyone with an earlier one will
have been admitted, at the pace of the last minute, and nobody without one enters before those whose time has come.

Clients that never return would leave room unused. So the number of clients expected is weighted by the fraction of
recent appointments that were kept, and while most are not, no room is reserved. Pure: times (s) are arguments.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable

from conductor.waits import MAX_RETRY_S

PACE_S = 60.0  # window over which admissions are counted
EARLY_S = 0.5  # a client may come this much before its time
GRACE_S = 2.0  # its room is reserved this much beyond it: it was told whole seconds, rounded up
FORGET = 0.98  # decay of an appointment's weight with each later one
KEPT_BY_MOST = 0.5
MAX_APPOINTMENTS = 4096


class Appointments:
    """A client is known by a name; asking again under a name keeps its appointment."""

    def __init__(self) -> None:
        self._due: dict[Hashable, float] = {}
        self._queue: list[tuple[float, int, Hashable]] = []  # a heap; it still contains cancelled ones
        self._number = 0
        self._let_in: deque[float] = deque()  # times of admissions in the last PACE_S
        self._first_s = float("inf")
        self._kept = self._missed = 1.0

    def __len__(self) -> int:
        return len(self._due)

    @property
    def kept_share(self) -> float:
        """Fraction of recent appointments for which the client came, whether or not there was room. Starts at one
        half."""
        return self._kept / (self._kept + self._missed)

    def make(self, name: Hashable, likely_s: float, now: float, comes_as_told: bool = False) -> float:
        """The retry time for a refused client, at most ``MAX_RETRY_S``; a longer wait gets no appointment.

        ``likely_s`` is the wait that others needed lately. A client that ``comes_as_told`` and finds no room is given
        just that: it stays ahead of those whose time is still to come. One that asks too early keeps its time, so
        asking again and again neither loses the place nor fills the book.
        """
        if not comes_as_told and (due := self._due.get(name)) is not None:
            return due - now
        told_s = likely_s if comes_as_told else max(likely_s, self._behind_all_s(now))
        if told_s > MAX_RETRY_S or len(self._due) >= MAX_APPOINTMENTS:
            self._due.pop(name, None)
            return float(MAX_RETRY_S)
        self._due[name] = now + told_s
        self._number += 1
        heapq.heappush(self._queue, (now + told_s, self._number, name))
        return told_s

    def comes(self, name: Hashable, now: float) -> bool:
        """A client asks: returns whether it has an appointment that is due."""
        self._forget_missed(now)
        due = self._due.get(name)
        if due is None or now < due - EARLY_S:
            return False
        self._count(is_kept=True)
        return True

    def let_in(self, name: Hashable, now: float) -> None:
        """A client was admitted, with or without an appointment."""
        self._due.pop(name, None)
        self._first_s = min(self._first_s, now)
        self._let_in.append(now)
        self._forget_let_in(now)

    def is_owed(self, now: float) -> bool:
        """Whether room must be reserved for someone whose time has come."""
        self._forget_missed(now)
        return bool(self._queue) and self._queue[0][0] <= now and self.kept_share > KEPT_BY_MOST

    def _behind_all_s(self, now: float) -> float:
        """Time until everyone who is expected, and one more, has been admitted. 0: nobody is expected."""
        self._forget_let_in(now)
        expected = self.kept_share * len(self._due)
        if expected < 1.0:
            return 0.0
        seconds = max(min(PACE_S, now - self._first_s), 1.0)
        return (expected + 1.0) * seconds / max(len(self._let_in), 1)

    def _forget_let_in(self, now: float) -> None:
        while self._let_in and self._let_in[0] < now - PACE_S:
            self._let_in.popleft()

    def _forget_missed(self, now: float) -> None:
        while self._queue:
            due, _, name = self._queue[0]
            is_open = self._due.get(name) == due
            if is_open and now < due + GRACE_S:
                return
            heapq.heappop(self._queue)
            if is_open:
                del self._due[name]
                self._count(is_kept=False)

    def _count(self, is_kept: bool) -> None:
        self._kept = FORGET * self._kept + is_kept
        self._missed = FORGET * self._missed + (not is_kept)
