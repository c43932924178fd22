"""Demand for one role, measured from the work that arrives: the load that requests meet, in nodes.

Pure. Rates are averaged over requests instead of over time, so that a pause between two bursts changes nothing.
``rate_s`` and ``smoothing_s`` are time constants: of a rate, and of its mean.
"""

from __future__ import annotations

import math


class Average:
    """An exponential mean that starts as a plain one, so that an empty start is soon forgotten."""

    def __init__(self, smoothing_s: float) -> None:
        self._smoothing_s = smoothing_s
        self._age_s = 0.0
        self.value = 0.0

    def add(self, value: float, elapsed_s: float) -> float:
        self._age_s += elapsed_s
        if elapsed_s > 0.0:
            weight = max(1.0 - math.exp(-elapsed_s / self._smoothing_s), elapsed_s / self._age_s)
            self.value += weight * (value - self.value)
        return self.value


class Demand:
    """The load that requests meet, in nodes, from work reported as it arrives."""

    def __init__(self, rate_s: float, smoothing_s: float) -> None:
        self._arrived_ms = 0.0
        self._rate = Average(rate_s)
        self._level = Average(smoothing_s)

    @property
    def level(self) -> float:
        return self._level.value

    def add(self, node_ms: float) -> None:
        self._arrived_ms += node_ms

    def tick(self, elapsed_s: float, requests_s: float) -> None:
        """Close an interval that was ``requests_s`` long in time as requests see it."""
        rate = self._rate.add(self._arrived_ms / 1e3 / elapsed_s, elapsed_s)
        self._arrived_ms = 0.0
        self._level.add(rate, requests_s)


class RequestClock:
    """Time as requests see it: a second with fewer requests than the mean is shorter in proportion."""

    def __init__(self, rate_s: float, smoothing_s: float) -> None:
        self._count = 0
        self._rate = Average(rate_s)
        self._mean_rate = Average(smoothing_s)

    def arrived(self) -> None:
        self._count += 1

    def tick(self, elapsed_s: float) -> float:
        rate = self._rate.add(self._count / elapsed_s, elapsed_s)
        self._count = 0
        if not rate:
            return 0.0
        requests_s = elapsed_s * rate / max(self._mean_rate.value, rate)
        self._mean_rate.add(rate, requests_s)
        return requests_s
