"""The token bucket, told what time it is."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstore.transfer.limiter import TokenBucket


def test_what_is_saved_up_goes_at_once_and_the_rest_waits() -> None:
    bucket = TokenBucket(rate=100.0, burst=50.0, now=0.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(100, 0.0) == pytest.approx(1.0)
    assert bucket.take(100, 0.0) == pytest.approx(2.0)  # behind the one before
    assert bucket.take(10, 5.0) == 0.0


def test_what_is_given_back_can_be_taken_again() -> None:
    bucket = TokenBucket(rate=100.0, burst=50.0, now=0.0)
    bucket.take(150, 0.0)
    bucket.give_back(100)
    assert bucket.take(100, 0.0) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 3)), max_size=50))
def test_the_rate_is_never_exceeded(takes: list[tuple[int, float]]) -> None:
    """Whoever waits as told has, at any moment, moved at most the burst and the rate's share of the time."""
    bucket, now, moved = TokenBucket(rate=200.0, burst=100.0, now=0.0), 0.0, 0
    for amount, pause in takes:
        now += pause
        now += bucket.take(amount, now)
        moved += amount
        assert moved <= 100.0 + 200.0 * now + 1e-6
