"""Retry reservations: retry times, room held for clients that return, and clients that do not."""

import pytest

from conductor.admission.retry_after import MAX_RETRY_S
from conductor.admission.retry_reservations import GRACE_S, MAX_RESERVATIONS, PACE_S, RetryReservations


def reliable(pace: float = 1.0) -> tuple[RetryReservations, float]:
    """Reservations after a minute in which all clients returned on time and ``pace`` per second were admitted; and the
    time at its end."""
    reservations = RetryReservations()
    now = 0.0
    for number in range(int(60 * pace)):
        now = number / pace
        assert reservations.reserve(number, 1.0, now) == 1.0 or number
        assert reservations.claim(number, now + 1.0) or number
        reservations.admitted(number, now)
    assert not len(reservations)
    return reservations, now


def test_while_no_client_returns_the_estimate_is_given_and_no_room_is_held() -> None:
    reservations = RetryReservations()
    for second in range(100):
        told_s = reservations.reserve(second, 7.0, float(second))
        if second > 10:
            assert told_s == 7.0
            assert not reservations.is_due(float(second))
    assert reservations.claimed_share < 0.1
    assert len(reservations) <= 7 + GRACE_S + 1, "who did not come is forgotten"


def test_a_retry_time_is_behind_all_earlier_reservations() -> None:
    reservations, now = reliable(pace=2.0)
    told = [reservations.reserve(("new", number), 1.0, now) for number in range(20)]
    assert told == sorted(told)
    assert told[-1] == pytest.approx(20 / 2.0, rel=0.25), "twenty at two a second"


def test_room_is_held_from_the_due_time_until_it_is_claimed_or_missed() -> None:
    reservations, now = reliable()
    reservations.reserve("late", 5.0, now)
    assert not reservations.is_due(now + 4.9)
    assert reservations.is_due(now + 5.1)
    assert not reservations.is_due(now + 5.0 + GRACE_S), "it was missed"

    reservations.reserve("early", 5.0, now)
    assert not reservations.claim("early", now + 3.0)
    assert reservations.claim("early", now + 4.8)
    reservations.admitted("early", now + 4.8)
    assert not reservations.is_due(now + 5.1)


def test_a_client_that_returns_on_time_and_finds_no_room_keeps_its_place() -> None:
    reservations, now = reliable()
    reservations.reserve("first", 2.0, now)
    for number in range(30):
        reservations.reserve(("behind", number), 2.0, now)
    assert reservations.claim("first", now + 2.0)
    assert reservations.reserve("first", 1.0, now + 2.0, is_on_time=True) == 1.0


def test_beyond_the_longest_retry_time_nothing_is_reserved() -> None:
    reservations, now = reliable(pace=0.2)
    told = [reservations.reserve(number, 1.0, now) for number in range(100)]
    assert told[-1] == MAX_RETRY_S
    assert len(reservations) < 20


def test_the_number_of_reservations_is_bounded() -> None:
    reservations = RetryReservations()
    for second in range(400):  # nobody comes, so nobody is thought to be in front
        reservations.reserve(("gone", second), 1.0, float(second))
        reservations.is_due(float(second))
    for number in range(MAX_RESERVATIONS + 10):
        told = reservations.reserve(number, 30.0, 500.0)
        reservations.is_due(500.0)
    assert told == MAX_RETRY_S
    assert len(reservations) == MAX_RESERVATIONS


def test_when_clients_stop_returning_room_is_soon_no_longer_held() -> None:
    reservations, now = reliable()
    due = 0
    for number in range(200):
        now += 1.0
        reservations.reserve(("gone", number), 3.0, now)
        due += reservations.is_due(now)
        reservations.admitted(("stranger", number), now)
    assert due < 100
    assert not reservations.is_due(now)


def test_old_admissions_are_forgotten_even_if_nothing_is_refused() -> None:
    reservations = RetryReservations()
    for second in range(1000):
        reservations.admitted(second, float(second))
    assert len(reservations._admitted_at) <= PACE_S + 1


def test_asking_too_early_keeps_the_time_and_adds_no_reservation() -> None:
    reservations, now = reliable()
    told = reservations.reserve("eager", 10.0, now)
    for step in range(50):
        assert not reservations.claim("eager", now + step / 10)
        assert reservations.reserve("eager", 1.0, now + step / 10) == pytest.approx(told - step / 10)
    assert len(reservations._queue) == 1
    assert reservations.claim("eager", now + told)
