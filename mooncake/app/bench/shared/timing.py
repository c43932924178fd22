"""Timing: several ways in turns, and one call again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    reps: int,
    *,
    pause_s: float = 0.0,
    warm_up: bool = True,
    tell: Callable[[int], None] = lambda reps: None,
) -> dict[str, tuple[float, ...]]:
    """Seconds of each way per repetition, measured alternately after a warm-up, with ``pause_s`` before each. ``tell``
    hears how many repetitions are done."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for rep in range(0 if warm_up else 1, reps + 1):
        for name, work in ways.items():
            time.sleep(pause_s)
            began_s = time.perf_counter()
            work()
            if rep:
                times[name].append(time.perf_counter() - began_s)
        tell(rep)
    return {name: tuple(taken) for name, taken in times.items()}


def repeated(call: Callable[[int], None], seconds: float) -> tuple[list[float], float]:
    """Call it with 0, 1, … for ``seconds``, at least once. Returns the seconds of each call, and of all together."""
    taken: list[float] = []
    started_s = time.perf_counter()
    while not taken or time.perf_counter() < started_s + seconds:
        began_s = time.perf_counter()
        call(len(taken))
        taken.append(time.perf_counter() - began_s)
    return taken, time.perf_counter() - started_s


def median_us(taken: list[float]) -> float:
    return sorted(taken)[len(taken) // 2] * 1e6


def milliseconds(taken: tuple[float, ...] | list[float]) -> tuple[float, ...]:
    return tuple(1e3 * s for s in taken)
