"""Places that are kept for clients who were refused and told when to come back.

A retry time alone is a forecast of what strangers will do: whoever asks when there is room takes it, and those who come
back as they were told find it gone. So a refusal is an appointment. It is made for when all who have one before will
have been let in, at the pace of the last minute, and nobody without one goes in before those whose time has come.

Clients who never come back would leave room empty. So what waits counts by the share of appointments that were kept
lately, and while most are not, no place is kept for anybody. Pure: times (s) are given.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable

from conductor.waits import MAX_RETRY_S

PACE_S = 60.0  # in which requests are counted that were let in
EARLY_S = 0.5  # that a client may come before its time
GRACE_S = 2.0  # that its place is kept beyond it: it was told whole seconds, rounded up
FORGET = 0.98  # how much less an appointment counts with each one after it
KEPT_BY_MOST = 0.5
MAX_APPOINTMENTS = 4096


class Appointments:
    """Who has one is known by a name; who asks for the same has the same."""

    def __init__(self) -> None:
        self._due: dict[Hashable, float] = {}
        self._queue: list[tuple[float, int, Hashable]] = []  # a heap; in it are also those that are over
        self._number = 0
        self._let_in: deque[float] = deque()  # in the last PACE_S
        self._first_s = float("inf")
        self._kept = self._missed = 1.0

    def __len__(self) -> int:
        return len(self._due)

    @property
    def kept_share(self) -> float:
        """Of appointments, lately: that the client came, whether or not there was room. A half at first."""
        return self._kept / (self._kept + self._missed)

    def make(self, name: Hashable, likely_s: float, now: float, comes_as_told: bool = False) -> float:
        """What to tell who is refused, at most ``MAX_RETRY_S``; beyond it, there is no appointment.

        ``likely_s`` is the wait by what strangers found lately. It is all that is said to who ``comes_as_told`` and
        finds no room: it stays in front of those who have their time still to come. Who asks too early keeps its time:
        asking again and again neither loses a place nor fills the book.
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
        """Somebody asks: whether it has an appointment, and for now."""
        self._forget_missed(now)
        due = self._due.get(name)
        if due is None or now < due - EARLY_S:
            return False
        self._count(is_kept=True)
        return True

    def let_in(self, name: Hashable, now: float) -> None:
        """Whoever it is."""
        self._due.pop(name, None)
        self._first_s = min(self._first_s, now)
        self._let_in.append(now)
        self._forget_let_in(now)

    def is_owed(self, now: float) -> bool:
        """Whether room is to be kept for somebody whose time has come."""
        self._forget_missed(now)
        return bool(self._queue) and self._queue[0][0] <= now and self.kept_share > KEPT_BY_MOST

    def _behind_all_s(self, now: float) -> float:
        """Until all have been let in who will come, and one more. 0: nobody is expected."""
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
