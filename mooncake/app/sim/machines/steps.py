"""Step times of a decode machine: runs of steps with the same batch, kept while answers that began in them are running.

Within a run each step is longer than the one before by the same small time. ``steps.cpp`` finds an answer's longest
gaps; ``_tail_ms`` is the reference, used where that cannot be built.
"""

from __future__ import annotations

import functools
import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path

from mooncake.native import ROUNDING_AS_PYTHON, BuildFailed, load_module

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("steps.cpp")


class StepRuns:
    """Consecutive runs; steps are numbered from 0."""

    def __init__(self, native: bool = True) -> None:
        self._starts = array("q")  # first step of each run
        self._first_ms = array("d")  # its duration
        self._growth_ms = array("d")  # by how much each next step is longer
        self._native = _load() if native else None

    def __len__(self) -> int:
        return len(self._starts)

    def begin(self, step: int, first_ms: float, growth_ms: float) -> None:
        """Begin a run with this step; it replaces a run that began with the same step."""
        if self._starts and self._starts[-1] == step:
            self._first_ms[-1], self._growth_ms[-1] = first_ms, growth_ms
            return
        self._starts.append(step)
        self._first_ms.append(first_ms)
        self._growth_ms.append(growth_ms)

    def drop_before(self, step: int) -> None:
        """Drop runs that ended before this step."""
        keep = max(bisect_right(self._starts, step) - 1, 0)
        del self._starts[:keep], self._first_ms[:keep], self._growth_ms[:keep]

    def tail_ms(self, begin: int, end: int, lived_ms: float) -> float:
        """Mean of the longest tenth (at least one) of an answer's gaps, the steps ``begin`` to ``end``. In all they
        took ``lived_ms``: the first gap includes the wait for the hand-off and for the step before it. Whole runs are
        taken in order of length, which assumes that steps differ more between batches than within one."""
        if self._native is None:
            return self._tail_ms(begin, end, lived_ms)
        return self._native(self._starts, self._first_ms, self._growth_ms, begin, end, lived_ms)

    def _tail_ms(self, begin: int, end: int, lived_ms: float) -> float:
        wanted = -(-(end - begin) // 10)
        at, stop = bisect_right(self._starts, begin) - 1, bisect_left(self._starts, end)
        run_ends = self._starts[at + 1 : stop]
        run_ends.append(end)
        parts: list[tuple[float, float, int]] = []  # (longest, growth, steps) of the answer's part of each run
        offset = begin - self._starts[at]  # of the answer's first step in its first run
        span, first_step_ms, waits = 0.0, 0.0, True
        for first, growth, run_end in zip(self._first_ms[at:stop], self._growth_ms[at:stop], run_ends, strict=True):
            count = run_end - begin
            shortest, longest = first + growth * offset, first + growth * (offset + count - 1)
            span += count * (shortest + longest) / 2
            if waits:
                first_step_ms, waits, offset = shortest, False, 0
                count -= 1
            if count:
                parts.append((longest, growth, count))
            begin = run_end
        parts.append((first_step_ms + max(0.0, lived_ms - span), 0.0, 1))
        parts.sort(reverse=True)
        total, left = 0.0, wanted
        for longest, growth, count in parts:
            taken = min(count, left)
            total += taken * (longest - growth * (taken - 1) / 2)
            left -= taken
            if not left:
                break
        return total / wanted


@functools.cache
def _load() -> Callable[..., float] | None:
    try:
        found: Callable[..., float] = load_module("steps", SOURCE, flags=ROUNDING_AS_PYTHON).tail_ms
    except BuildFailed as error:
        log.warning("summing up steps in Python, more slowly: %s", error)
        return None
    return found
