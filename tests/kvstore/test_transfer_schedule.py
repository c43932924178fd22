"""Decisions about which slice is sent next and over which path; time is an argument."""

from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstore.transfer.scheduling.schedule import (
    CALM_S,
    FAIR_SHARE,
    LONG_STALL_S,
    MAX_PATIENCE,
    OVERTAKEN_S,
    STALL_S,
    Pace,
    Patience,
    Queue,
    Watch,
    backoff_s,
    slice_bytes,
    takes,
)
from kvstore.transfer.transport import Priority

MIB = 1 << 20


def test_urgent_goes_first_and_the_earliest_deadline_within_a_class() -> None:
    queue: Queue[str] = Queue()
    for name, priority, deadline in (
        ("copy", Priority.BACKGROUND, 1.0),
        ("late", Priority.URGENT, 9.0),
        ("soon", Priority.URGENT, 5.0),
        ("soon too", Priority.URGENT, 5.0),
        ("usual", Priority.NORMAL, 0.5),
    ):
        queue.push(name, priority, deadline, now=0.0)
    assert queue.peek(0.0) == "soon"
    assert [queue.pop(0.0) for _ in range(5)] == ["soon", "soon too", "late", "usual", "copy"]
    assert queue.pop(0.0) is None


def test_background_copies_get_their_share_under_endless_urgent_traffic() -> None:
    queue: Queue[str] = Queue()
    for _ in range(10):
        queue.push("copy", Priority.BACKGROUND, 100.0, now=0.0)
    taken: list[str | None] = []
    for step in range(20 * FAIR_SHARE):
        now = 2 * OVERTAKEN_S + step * 1e-4
        queue.push("layer", Priority.URGENT, 1.0, now)
        taken.append(queue.pop(now))
    assert taken.count("copy") == 10  # all of them, one in sixteen
    first = [index for index, name in enumerate(taken) if name == "copy"]
    assert all(later - earlier == FAIR_SHARE for earlier, later in itertools.pairwise(first))


def test_what_has_just_arrived_does_not_claim_a_share() -> None:
    queue: Queue[str] = Queue()
    for _ in range(3 * FAIR_SHARE):
        queue.push("layer", Priority.URGENT, 1.0, now=0.0)
    queue.push("copy", Priority.BACKGROUND, 1.0, now=0.0)
    assert [queue.pop(OVERTAKEN_S / 2) for _ in range(3 * FAIR_SHARE)] == ["layer"] * 3 * FAIR_SHARE


def test_slices_grow_with_the_request_and_the_speed_and_stay_urgent_on_slow_paths() -> None:
    assert slice_bytes(64 * MIB, 2, 0.0, 4 * MIB) == MIB  # nothing known yet
    assert slice_bytes(64 * MIB, 2, 50e6, 4 * MIB) == MIB
    assert slice_bytes(64 * MIB, 2, 1e9, 4 * MIB) == 4 * MIB
    assert slice_bytes(64 * MIB, 2, 1e9, MIB) == MIB
    assert slice_bytes(4 * MIB, 2, 1e9, 4 * MIB) == 2 * MIB  # one for each path
    assert slice_bytes(100, 2, 1e9, 4 * MIB) == MIB


def test_what_is_cancelled_leaves_the_queue() -> None:
    queue: Queue[int] = Queue()
    for number in range(20):
        queue.push(number, Priority(number % 3), float(number % 4), now=0.0)
    assert sorted(queue.discard(lambda number: number % 2 == 0)) == list(range(0, 20, 2))
    rest = [queue.pop(0.0) for _ in range(10)]
    assert sorted(number for number in rest if number is not None) == list(range(1, 20, 2))
    assert len(queue) == 0


def pace(rate: float, on_way: int = 0, now: float = 0.0) -> Pace:
    made = Pace(rate=rate)
    for _ in range(on_way):
        made.began(MIB, now)
    return made


def test_the_last_slice_is_left_to_the_path_that_will_finish_it_first() -> None:
    fast, slow = pace(100e6), pace(10e6)
    assert takes(fast, [slow], MIB, MIB, 4 * MIB, 0.0)
    assert not takes(slow, [fast], MIB, MIB, 4 * MIB, 0.0)
    assert not takes(slow, [pace(100e6, on_way=2)], MIB, MIB, 4 * MIB, 0.0)  # still earlier over the busy fast one
    assert takes(slow, [fast], MIB, 20 * MIB, 4 * MIB, 0.0)  # with much to do, everybody helps


def test_the_owners_credit_is_kept_and_one_slice_always_goes() -> None:
    assert takes(pace(1e9), [], 4 * MIB, 4 * MIB, MIB, 0.0)
    assert not takes(pace(1e9, on_way=1), [], MIB, MIB, MIB, 0.0)
    assert takes(pace(1e9, on_way=1), [], MIB, MIB, 2 * MIB, 0.0)


def test_a_path_that_is_overdue_counts_as_slow_before_it_says_so() -> None:
    busy = pace(1e9, on_way=1, now=0.0)
    assert busy.rate_at(0.0005) == 1e9
    assert busy.rate_at(0.1) == pytest.approx(MIB / 0.1)


@given(
    st.lists(st.tuples(st.floats(1e5, 1e10), st.integers(0, 4)), min_size=1, max_size=6),
    st.integers(1, 64),
)
def test_some_path_always_takes_the_next_slice(paths: list[tuple[float, int]], waiting: int) -> None:
    """At any speeds: otherwise slices could wait with no path to carry them. Paths with too much in flight will ask
    again later."""
    paces = [pace(rate, on_way) for rate, on_way in paths]
    best = min(paces, key=lambda each: (each.on_way_bytes + MIB) / each.rate)
    others = [each for each in paces if each is not best]
    if best.on_way == 0:
        assert takes(best, others, MIB, waiting * MIB, 4 * MIB, 0.0)
    idle = [each for each in paces if each.on_way == 0]
    if len(idle) == len(paces):
        assert any(takes(each, [x for x in paces if x is not each], MIB, waiting * MIB, 4 * MIB, 0.0) for each in idle)


def simulate(rates: list[float], cut_at: float, cut_to: float, seconds: float, shares: bool) -> float:
    """Bytes per second from 200 ms after path 0 is cut, in virtual time. Without ``shares`` every path gets the same
    number of slices, as with static striping, where a stripe waits for its slowest part."""
    paces = [Pace() for _ in rates]
    ends: list[list[float]] = [[] for _ in rates]  # of the slices on their way
    now, moved, step, turn = 0.0, 0, 0.0005, 0
    while now < cut_at + 0.2 + seconds:
        now += step
        speeds = [cut_to if index == 0 and now >= cut_at else rate for index, rate in enumerate(rates)]
        for index, lane in enumerate(ends):
            while lane and lane[0] <= now:
                lane.pop(0)
                paces[index].arrived(MIB, now)
                moved += MIB if now >= cut_at + 0.2 else 0
        for index, lane in enumerate(ends):
            others = [each for other, each in enumerate(paces) if other != index]
            while (
                takes(paces[index], others, MIB, 1000 * MIB, 4 * MIB, now)
                if shares
                else turn % len(rates) == index and len(lane) < 2
            ):
                turn += 1
                paces[index].began(MIB, now)
                lane.append(max(now, lane[-1] if lane else now) + MIB / speeds[index])
    return moved / seconds


def test_a_slow_path_costs_its_own_share_and_no_more() -> None:
    rates = [100e6] * 4
    left = 310e6
    assert simulate(rates, 0.5, 10e6, 2.0, shares=True) >= 0.9 * left
    assert simulate(rates, 0.5, 10e6, 2.0, shares=False) < 0.2 * left  # why it is worth the trouble


def test_a_path_that_stands_still_is_told_from_a_peer_that_does() -> None:
    dead, alive, now = Watch(), Watch(), 0.0
    while now < 2 * STALL_S:
        now += 0.01
        dead.saw(7, True, now)
        alive.saw(round(now * 1000), True, now)
    assert dead.is_stalled([alive], 1.0, False, now)
    assert not alive.is_stalled([dead], 1.0, False, now)

    one, other = Watch(), Watch()
    for _ in range(200):
        now += 0.01
        one.saw(1, True, now)
        other.saw(1, True, now)
    assert not one.is_stalled([other], 1.0, False, now)


def test_a_path_that_stands_still_beside_an_idle_one_gets_longer() -> None:
    dead, idle, now = Watch(), Watch(), 1.0
    dead.saw(1, True, now)
    for _ in range(int(LONG_STALL_S / 0.01) + 2):
        now += 0.01
        dead.saw(1, True, now)
        idle.saw(5, False, now)
        if now < 1.0 + LONG_STALL_S - 0.02:
            assert not dead.is_stalled([idle], 1.0, False, now)
    assert dead.is_stalled([idle], 1.0, False, now)
    assert not dead.is_stalled([idle], 2.0, False, now)
    assert dead.is_stalled([idle], 2.0, True, now)  # after what it has done before


def test_a_path_that_nobody_watched_has_not_stood_still() -> None:
    """Nobody looks while nothing is on its way: the first look may come before the first byte moves."""
    path, idle = Watch(), Watch()
    for watch in (path, idle):
        watch.saw(5, False, 1.0)
    idle.saw(6, False, 4.0)
    path.saw(5, True, 9.0)
    assert not path.is_stalled([idle], 1.0, True, 9.0)
    for look in range(1, 30):
        path.saw(5, True, 9.0 + 0.02 * look)
    assert path.is_stalled([idle], 1.0, False, 9.58)


def test_what_nobody_watched_of_a_stall_does_not_count() -> None:
    """This process stood still, and the path's own thread has not run since."""
    path, moving = Watch(), Watch()
    for now in (1.0, 1.02, 11.02):
        path.saw(5, True, now)
        moving.saw(round(now * 100), True, now)
    assert not path.is_stalled([moving], 1.0, False, 11.02)
    assert not path.stands_still(0.1, 11.02)
    path.saw(5, True, 11.06)
    assert path.is_stalled([moving], 1.0, False, 11.06)


def test_paths_that_were_cut_in_vain_make_for_patience() -> None:
    patience = Patience()
    assert patience.at(0.0) == 1.0
    for _ in range(10):
        patience.grow(1.0)
    assert patience.at(1.0) == MAX_PATIENCE
    assert [patience.at(1.0 + CALM_S * step) for step in (1, 2, 3)] == [32.0, 16.0, 8.0]


def test_a_path_that_keeps_failing_rests_longer_each_time() -> None:
    rests = [backoff_s(failures) for failures in range(1, 20)]
    assert rests[0] == 0.0
    assert rests == sorted(rests)
    assert max(rests) == 5.0


@given(st.integers(0, 1000))
def test_the_queue_loses_nothing(seed: int) -> None:
    random_ = random.Random(seed)
    queue: Queue[int] = Queue()
    inside: set[int] = set()
    for number in range(100):
        if random_.random() < 0.6:
            queue.push(number, random_.choice(list(Priority)), random_.random(), now=number * 0.001)
            inside.add(number)
        elif (item := queue.pop(number * 0.001)) is not None:
            inside.remove(item)
        assert len(queue) == len(inside)
