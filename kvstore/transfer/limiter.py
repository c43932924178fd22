"""A rate limit as a token bucket: how long to wait before sending so many bytes. Nothing here sleeps."""

from __future__ import annotations

import threading
import time


class TokenBucket:
    """``rate`` bytes a second, with at most ``burst`` bytes saved up. Debt is allowed: whoever takes more than there
    is waits until it is paid, and those who come later wait behind. Pure: it is told the time and never sleeps."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self._burst = burst
        self._level = burst
        self._updated = now

    def take(self, amount: int, now: float) -> float:
        """Take ``amount`` bytes; the seconds to wait before sending them."""
        self._refill(now)
        self._level -= amount
        return max(0.0, -self._level / self.rate)

    def give_back(self, amount: int) -> None:
        """What was taken will not be sent after all."""
        self._level = min(self._burst, self._level + amount)

    def _refill(self, now: float) -> None:
        elapsed = max(0.0, now - self._updated)
        self._updated = max(self._updated, now)
        self._level = min(self._burst, self._level + elapsed * self.rate)


class Pacer:
    """One token bucket on the monotonic clock, shared by the threads of one engine."""

    def __init__(self, rate: float, burst: float) -> None:
        self._bucket = TokenBucket(rate, burst, time.monotonic())
        self._lock = threading.Lock()

    def take(self, amount: int) -> float:
        with self._lock:
            return self._bucket.take(amount, time.monotonic())

    def give_back(self, amount: int) -> None:
        with self._lock:
            self._bucket.give_back(amount)
