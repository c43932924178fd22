"""Which combinations of a sweep `make test` runs."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from sweeps import cover

SIZES = {"dtype": 3, "window": 5, "lengths": 4, "head_dim": 2}
ALL = [dict(zip(SIZES, values, strict=True)) for values in product(*map(range, SIZES.values()))]


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 24)])
def test_every_value_is_run_beside_every_other(strength: int, most: int) -> None:
    chosen = [ALL[number] for number in cover(ALL, strength)]
    assert len(chosen) <= most
    for names in combinations(SIZES, strength):
        found = {tuple(each[name] for name in names) for each in chosen}
        assert found == set(product(*(range(SIZES[name]) for name in names)))


def test_what_never_occurs_is_not_asked_for() -> None:
    """Names that are given values together have them together only, and some combinations are slow anyway."""
    given = [{"tokens": n, "width": n, "bias": bias} for n in range(4) for bias in range(2) if (n, bias) != (1, 1)]
    assert cover(given) == set(range(7))
    assert len(cover(given, 1)) == 4
    assert cover([{"seed": seed} for seed in range(3)]) == {0, 1, 2}


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("third", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_others_are_slow(request: pytest.FixtureRequest, first: int, second: int, third: int) -> None:
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    quick = [item for item in items if item.function is request.function and not item.get_closest_marker("slow")]
    assert len(quick) in (1, 10), "of 18; one where it was asked for alone"
