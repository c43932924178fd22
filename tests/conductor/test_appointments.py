"""Appointments: retry times, reserved room, and clients that do not return."""

import pytest

from conductor.appointments import GRACE_S, MAX_APPOINTMENTS, PACE_S, Appointments
from conductor.waits import MAX_RETRY_S


def reliable(pace: float = 1.0) -> tuple[Appointments, float]:
    """Appointments after a minute in which all clients came on time and ``pace`` per second were admitted; and the time
    at its end."""
    book = Appointments()
    now = 0.0
    for number in range(int(60 * pace)):
        now = number / pace
        assert book.make(number, 1.0, now) == 1.0 or number
        assert book.comes(number, now + 1.0) or number
        book.let_in(number, now)
    assert not len(book)
    return book, now


def test_while_nobody_comes_back_it_tells_what_strangers_found_and_keeps_no_room() -> None:
    book = Appointments()
    for second in range(100):
        told_s = book.make(second, 7.0, float(second))
        if second > 10:
            assert told_s == 7.0
            assert not book.is_owed(float(second))
    assert book.kept_share < 0.1
    assert len(book) <= 7 + GRACE_S + 1, "who did not come is forgotten"


def test_who_is_refused_is_told_when_all_before_him_will_be_in() -> None:
    book, now = reliable(pace=2.0)
    told = [book.make(("new", number), 1.0, now) for number in range(20)]
    assert told == sorted(told)
    assert told[-1] == pytest.approx(20 / 2.0, rel=0.25), "twenty at two a second"


def test_room_is_kept_from_when_the_time_has_come_until_it_is_taken_or_missed() -> None:
    book, now = reliable()
    book.make("late", 5.0, now)
    assert not book.is_owed(now + 4.9)
    assert book.is_owed(now + 5.1)
    assert not book.is_owed(now + 5.0 + GRACE_S), "he has not come"

    book.make("early", 5.0, now)
    assert not book.comes("early", now + 3.0)
    assert book.comes("early", now + 4.8)
    book.let_in("early", now + 4.8)
    assert not book.is_owed(now + 5.1)


def test_who_comes_as_told_and_finds_no_room_is_not_sent_to_the_end() -> None:
    book, now = reliable()
    book.make("first", 2.0, now)
    for number in range(30):
        book.make(("behind", number), 2.0, now)
    assert book.comes("first", now + 2.0)
    assert book.make("first", 1.0, now + 2.0, comes_as_told=True) == 1.0


def test_beyond_the_longest_time_that_is_told_nobody_has_an_appointment() -> None:
    book, now = reliable(pace=0.2)
    told = [book.make(number, 1.0, now) for number in range(100)]
    assert told[-1] == MAX_RETRY_S
    assert len(book) < 20


def test_the_book_is_bounded() -> None:
    book = Appointments()
    for second in range(400):  # nobody comes, so nobody is thought to be in front
        book.make(("gone", second), 1.0, float(second))
        book.is_owed(float(second))
    for number in range(MAX_APPOINTMENTS + 10):
        told = book.make(number, 30.0, 500.0)
        book.is_owed(500.0)
    assert told == MAX_RETRY_S
    assert len(book) == MAX_APPOINTMENTS


def test_clients_that_stop_coming_are_not_waited_for_much_longer() -> None:
    book, now = reliable()
    owed = 0
    for number in range(200):
        now += 1.0
        book.make(("gone", number), 3.0, now)
        owed += book.is_owed(now)
        book.let_in(("stranger", number), now)
    assert owed < 100
    assert not book.is_owed(now)


def test_what_was_let_in_is_forgotten_though_nobody_is_ever_refused() -> None:
    book = Appointments()
    for second in range(1000):
        book.let_in(second, float(second))
    assert len(book._let_in) <= PACE_S + 1


def test_who_asks_too_early_keeps_its_time_and_fills_nothing() -> None:
    book, now = reliable()
    told = book.make("eager", 10.0, now)
    for step in range(50):
        assert not book.comes("eager", now + step / 10)
        assert book.make("eager", 1.0, now + step / 10) == pytest.approx(told - step / 10)
    assert len(book._queue) == 1
    assert book.comes("eager", now + told)
