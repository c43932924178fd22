"""What travels next, and over which path: pure decisions, told the time, without locks or threads.

A slice goes to the path predicted to finish it first. A path that would finish it later than the others could finish
everything that waits leaves it alone, so that a slow path carries less and nothing waits for it at the end (after TENT,
arXiv 2604.00368: predicted time = (bytes in flight + slice) / moving average of the rate).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.transfer.protocol import SLICE_BYTES
from kvstore.transfer.transport import Priority

T = TypeVar("T")

FAIR_SHARE = 16  # one slice in this many goes to a class that others have overtaken
OVERTAKEN_S = 0.010  # overtaken for this long, a class may claim that share
SLICE_S = 0.010  # a slice takes at most this long, since an urgent one waits for those in flight
ON_WAY_S = 0.020  # a path takes as many slices at once as it is predicted to carry in this time
EWMA_WEIGHT = 0.3  # of a new sample in the moving average
MIN_SAMPLE_BYTES = 64 << 10  # smaller slices measure the round trip, not the rate
STALL_S = 0.060  # without a byte moving, while another path to the same peer moves some
LONG_STALL_S = 0.5  # without a byte moving, while another path is idle
UNSEEN_S = 0.030  # that counts between two looks at a path, at most
MAX_PATIENCE = 64.0
CALM_S = 10.0  # without another such cut, after which patience is halved
BACKOFF_S = 0.1  # before a failed path is opened again; doubles each time,
MAX_BACKOFF_S = 5.0  # up to this


class Queue(Generic[T]):
    """Items by class, then by deadline, then in order of arrival; no class starves."""

    def __init__(self) -> None:
        self._heaps: tuple[list[tuple[float, int, float, T]], ...] = tuple([] for _ in Priority)
        self._count = itertools.count()
        self._since_fair = 0  # items taken since an overtaken class had its share
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, item: T, priority: Priority, deadline: float, now: float) -> None:
        heapq.heappush(self._heaps[priority], (deadline, next(self._count), now, item))
        self._length += 1

    def peek(self, now: float) -> T | None:
        """What ``pop`` would take."""
        heap = self._heaps[self._next(now)]
        return heap[0][3] if heap else None

    def pop(self, now: float) -> T | None:
        chosen = self._next(now)
        if not self._heaps[chosen]:
            return None
        is_overtaker = not any(self._heaps[:chosen])
        self._since_fair = self._since_fair + 1 if is_overtaker else 0
        self._length -= 1
        return heapq.heappop(self._heaps[chosen])[3]

    def discard(self, is_unwanted: Callable[[T], bool]) -> list[T]:
        """Take all of these out."""
        found: list[T] = []
        for heap in self._heaps:
            rows = [row for row in heap if is_unwanted(row[3])]
            if rows:
                found.extend(row[3] for row in rows)
                heap[:] = [row for row in heap if not is_unwanted(row[3])]
                heapq.heapify(heap)
        self._length -= len(found)
        return found

    def _next(self, now: float) -> int:
        """The class whose turn it is; any class when nothing waits."""
        waiting = [priority for priority, heap in enumerate(self._heaps) if heap]
        if len(waiting) > 1 and self._since_fair >= FAIR_SHARE - 1:
            overtaken = min(waiting[1:], key=lambda priority: self._heaps[priority][0][2])
            if now - self._heaps[overtaken][0][2] >= OVERTAKEN_S:
                return overtaken
        return waiting[0] if waiting else 0


@dataclass(slots=True)
class Pace:
    """What is known of one path's speed, in bytes and seconds."""

    rate: float = 0.0  # moving average; 0: unknown
    on_way_bytes: int = 0
    since: float = 0.0  # when the current slice began to move
    on_way: int = 0  # slices in flight

    def began(self, nbytes: int, now: float) -> None:
        if self.on_way == 0:
            self.since = now
        self.on_way += 1
        self.on_way_bytes += nbytes

    def arrived(self, nbytes: int, now: float) -> None:
        """A slice has ended. Small ones say nothing about the rate: they measure the round trip."""
        seconds = now - self.since
        if nbytes >= MIN_SAMPLE_BYTES and seconds > 0:
            sample = nbytes / seconds
            self.rate = sample if self.rate == 0 else self.rate + EWMA_WEIGHT * (sample - self.rate)
        self.gave_back(nbytes)
        self.since = now

    def gave_back(self, nbytes: int) -> None:
        self.on_way -= 1
        self.on_way_bytes -= nbytes

    def rate_at(self, now: float) -> float:
        """The moving average, or less when what is in flight is overdue."""
        if self.on_way == 0 or self.rate == 0:
            return self.rate
        elapsed = now - self.since
        return min(self.rate, self.on_way_bytes / elapsed) if elapsed > 0 else self.rate


def slice_bytes(request_bytes: int, paths: int, rate: float, largest: int) -> int:
    """How to cut a request: a slice takes at most SLICE_S at this rate, each path gets at least one, and it is a
    whole number of SLICE_BYTES, at most ``largest``. Larger slices cost less processor time, but urgent ones wait
    for those in flight."""
    fitting = min(int(rate * SLICE_S), request_bytes // paths, largest)
    return max(1, fitting // SLICE_BYTES) * SLICE_BYTES


def takes(path: Pace, others: Sequence[Pace], nbytes: int, waiting_bytes: int, window_bytes: int, now: float) -> bool:
    """Whether ``path`` should carry the next slice, of ``nbytes``, or leave it to the ``others``, all of which are
    open.

    ``waiting_bytes`` includes that slice. Of all paths the one that would finish first always takes it.
    """
    rate = path.rate_at(now)
    if path.on_way:
        if path.on_way_bytes + nbytes > window_bytes:
            return False
        enough = 1 if others else 2  # a lone path must not idle between two slices
        if path.on_way >= enough and rate and path.on_way_bytes / rate > ON_WAY_S:
            return False
    if rate == 0 or not others:
        return True
    finish_s = (path.on_way_bytes + nbytes) / rate
    known = [(other, other_rate) for other in others if (other_rate := other.rate_at(now)) > 0]
    if len(known) < len(others):  # one has never been tried, and may well be faster
        return True
    slice_s = min((other.on_way_bytes + nbytes) / other_rate for other, other_rate in known)
    all_s = (sum(other.on_way_bytes for other in others) + waiting_bytes) / sum(other_rate for _, other_rate in known)
    return finish_s <= max(slice_s, all_s)


@dataclass(slots=True)
class Watch:
    """Whether a path stalls while others move or could."""

    progress: int = -1
    moved_at: float = 0.0  # when bytes were last seen to have moved
    still_since: float = 0.0  # that, or when it last had nothing to do; later by what nobody has watched
    is_busy: bool = False
    seen_at: float = 0.0

    def saw(self, progress: int | None, is_busy: bool, now: float) -> None:
        """A look at it. Nobody looks while nothing is on its way: what it has to do now may have just begun. Nor does
        anybody while this process stands still."""
        if progress is None or progress != self.progress:
            self.progress = progress or 0
            self.moved_at = self.still_since = now
        if not (is_busy and self.is_busy):
            self.still_since = now
        self.still_since += max(0.0, min(now - self.seen_at - UNSEEN_S, now - self.still_since))
        self.is_busy, self.seen_at = is_busy, now

    def is_stalled(self, others: Sequence[Watch], patience: float, is_suspect: bool, now: float) -> bool:
        """The ``others`` are open too. A peer that stalls as a whole is not a failed path: another path must have
        moved since, or have been idle for long; less long if this one ``is_suspect``, because it has failed before
        and delivered nothing since. All times are multiplied by ``patience``."""
        if not self.stands_still(STALL_S * patience, now):
            return False
        if any(other.moved_at > self.still_since + STALL_S * patience / 2 for other in others):
            return True
        return self.stands_still((STALL_S if is_suspect else LONG_STALL_S) * patience, now) and not all(
            other.is_busy for other in others
        )

    def stands_still(self, seconds: float, now: float) -> bool:
        """Has something to do, and has moved nothing for this long."""
        return self.is_busy and now - self.still_since >= seconds


@dataclass(slots=True)
class Patience:
    """Factor on how long a path may stall. On a busy machine threads stall, not paths: each cut of a path that then
    proves sound doubles it, and time without a cut reduces it again."""

    factor: float = 1.0
    changed_at: float = 0.0

    def grow(self, now: float) -> None:
        self.factor, self.changed_at = min(MAX_PATIENCE, 2 * self.factor), now

    def at(self, now: float) -> float:
        if self.factor > 1.0 and now - self.changed_at >= CALM_S:
            self.factor, self.changed_at = self.factor / 2, now
        return self.factor


def backoff_s(failures: int) -> float:
    """How long a path rests after this many consecutive failures."""
    return float(min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(failures - 1, 16))) if failures > 1 else 0.0
