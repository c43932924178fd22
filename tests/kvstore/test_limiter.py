"""The token bucket, told what time it is."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstore.transfer.scheduling.limiter import TokenBucket


def test_what_is_saved_up_goes_at_once_and_the_rest_waits() -> None:
    bucket = TokenBucket(rate=100.0, burst=50.0, now=0.0)
    assert bucket.try_take(50, 0.0) == 0.0
    assert bucket.try_take(20, 0.0) == pytest.approx(0.2)
    assert bucket.try_take(20, 0.1) == pytest.approx(0.1)  # nothing was taken
    assert bucket.try_take(20, 0.2) == 0.0
    assert bucket.try_take(10, 5.0) == 0.0


def test_more_than_can_be_saved_up_is_paid_afterwards() -> None:
    bucket = TokenBucket(rate=100.0, burst=50.0, now=0.0)
    assert bucket.try_take(150, 0.0) == 0.0
    assert bucket.try_take(50, 0.0) == pytest.approx(1.5)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 3)), max_size=50))
def test_the_rate_is_never_exceeded(takes: list[tuple[int, float]]) -> None:
    """A caller that waits as told has moved, at any time, at most the burst, rate times time, and one amount larger
    than the burst that is still being paid for."""
    bucket, now, moved = TokenBucket(rate=200.0, burst=100.0, now=0.0), 0.0, 0
    for amount, pause in takes:
        now += pause
        while wait_s := bucket.try_take(amount, now):
            now += wait_s
        moved += amount
        assert moved <= 100.0 + 200.0 * now + max(0, amount - 100) + 0.01
