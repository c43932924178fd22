"""Tests of many combinations of parameters: a few of them show what all would.

Of a test that is marked ``sweep``, `make test` runs a cover: combinations that have every value of every parameter
beside every value of every other one (``sweep(1)``: every value at least once; ``sweep(3)``: every three). The others
are marked slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Combination = Mapping[str, int]  # each parameter, and a number for its value


def mark_what_is_beyond_the_cover(items: Sequence[pytest.Item]) -> None:
    sweeps: defaultdict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            sweeps[item.parent, item.originalname].append(item)
    for tests in sweeps.values():
        marker = tests[0].get_closest_marker("sweep")
        assert marker is not None
        if not hasattr(tests[0], "callspec"):
            continue  # one test, without parameters
        values = [{name: id(value) for name, value in test.callspec.params.items()} for test in tests]
        covered = cover(values, *marker.args)
        for number, test in enumerate(tests):
            if number not in covered:
                test.add_marker(pytest.mark.slow)


def rounds(count: int, quick: int) -> list[Any]:
    """Numbers of random runs that differ in nothing else; all but the first ``quick`` are slow."""
    return [*range(quick), *(pytest.param(number, marks=pytest.mark.slow) for number in range(quick, count))]


def cover(given: Sequence[Combination], strength: int = 2) -> set[int]:
    """Numbers of combinations in which all sets of ``strength`` values occur that occur together in any.

    Chosen greedily: always the one that has most that is new, of those the first one whose values were chosen least.
    """
    sets = [[frozenset(each) for each in combinations(values.items(), min(strength, len(values)))] for values in given]
    missing, left = {each for some in sets for each in some}, set(range(len(sets)))
    chosen: set[int] = set()
    times: Counter[tuple[str, int]] = Counter()
    while missing:
        best = max(
            left,
            key=lambda n: (
                sum(each in missing for each in sets[n]),
                -sum(times[value] for value in given[n].items()),
                -n,
            ),
        )
        chosen.add(best)
        left.remove(best)
        missing.difference_update(sets[best])
        times.update(given[best].items())
    return chosen
