"""A rate limit as a token bucket: how long to wait before sending this many bytes. Nothing here sleeps."""

from __future__ import annotations

import threading
import time

_NOTHING = 1e-6  # seconds: rounding errors must not cause a wait


class TokenBucket:
    """A token bucket: ``rate`` bytes per second, at most ``burst`` bytes saved. Pure: time is an argument, and it never
    sleeps."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self._burst = burst
        self._level = burst
        self._updated = now

    def try_take(self, amount: int, now: float) -> float:
        """Take ``amount`` bytes, or as much as can ever be saved up, and return 0; or take nothing and return the
        seconds until it may succeed, if nobody else comes first."""
        self._refill(now)
        lacking = min(amount, self._burst) - self._level
        if lacking > _NOTHING * self.rate:
            return lacking / self.rate
        self._level -= amount
        return 0.0

    def _refill(self, now: float) -> None:
        elapsed = max(0.0, now - self._updated)
        self._updated = max(self._updated, now)
        self._level = min(self._burst, self._level + elapsed * self.rate)


class Pacer:
    """One token bucket on the monotonic clock, shared by the threads of one engine."""

    def __init__(self, rate: float, burst: float) -> None:
        self._bucket = TokenBucket(rate, burst, time.monotonic())
        self._lock = threading.Lock()

    def try_take(self, amount: int) -> float:
        """See ``TokenBucket.try_take``."""
        with self._lock:
            return self._bucket.try_take(amount, time.monotonic())
