"""Retry times of refused requests, from the room that others found recently."""

from conductor.admission.retry_after import MAX_RETRY_S, WINDOW_S, RetryAfterEstimator

LIMIT_MS = 1000.0
FULL, FREE = LIMIT_MS + 500.0, 0.0


def seen(
    *spans: tuple[float, float], repeats: int = 1, every_s: float = 0.1, decode_load: float = 0.5
) -> RetryAfterEstimator:
    """Requests observed queues: each span is (ms of queue, seconds for which it lasted)."""
    estimator, now = RetryAfterEstimator(), 50.0
    for wait_ms, lasts_s in spans * repeats:
        for _ in range(round(lasts_s / every_s)):
            estimator.observe(wait_ms, decode_load, now)
            now += every_s
    return estimator


def test_nothing_is_estimated_before_anything_is_known() -> None:
    assert seen((FULL, 0.1)).estimate_s(LIMIT_MS) == 0
    assert seen((FREE, 30.0)).estimate_s(LIMIT_MS) == 0


def test_the_estimate_is_the_usual_wait() -> None:
    """There is room for two seconds in every ten: a refused request waits up to eight."""
    estimator = seen((FULL, 8.0), (FREE, 2.0), repeats=12)
    assert 4 <= estimator.estimate_s(LIMIT_MS) <= 8
    assert seen((FULL, 0.8), (FREE, 2.2), repeats=30).estimate_s(LIMIT_MS) == 1


def test_a_shorter_prompt_waits_less() -> None:
    """Half of the time the queue is too long for both; short prompts find room within 1 s, long ones within 20 s."""
    estimator = seen((FULL, 0.5), (LIMIT_MS, 0.5), (FULL, 0.5), (LIMIT_MS, 18.5), (FREE, 2.0), (FULL, 0.5), repeats=6)
    assert estimator.estimate_s(LIMIT_MS) == 1
    assert estimator.estimate_s(LIMIT_MS / 2) >= 8


def test_room_to_decode_is_needed_as_well() -> None:
    estimator = seen((FREE, 40.0), decode_load=1.5)
    assert estimator.estimate_s(LIMIT_MS) >= 30, "there was none in all that time"


def test_an_ongoing_wait_is_expected_to_last_as_long_again() -> None:
    assert 9 <= seen((FREE, 5.0), (FULL, 10.0)).estimate_s(LIMIT_MS) <= 10
    assert seen((FULL, 1000.0)).estimate_s(LIMIT_MS) == MAX_RETRY_S


def test_old_samples_are_forgotten_even_without_requests() -> None:
    estimator = seen((FULL, 30.0), (FREE, 5.0))
    estimator.observe(FULL, 0.5, now=85.0 + WINDOW_S + 10.0)
    assert estimator.estimate_s(LIMIT_MS) == 0
    estimator.observe(FULL, 0.5, now=85.0 + WINDOW_S + 40.0)
    assert 28 <= estimator.estimate_s(LIMIT_MS) <= 30, "what was found last holds until the next one asks"
