"""Prompts waiting for a node count as blocks that it will hold, until they are computed, and only on this node."""

import numpy as np
import pytest
from placing import Cluster, pair

from conductor.bookings import Booking
from conductor.promises import MARK_TOKENS
from conductor.promises_native import new_promises
from conductor.view import RequestFacts
from mooncake.types import BlockKey


def chain(name: int, blocks: int, beyond: int = -1, shared: int = 0) -> list[BlockKey]:
    """Blocks of one conversation; from ``shared`` on those of another one that begins alike."""
    return [
        BlockKey(bytes([at]) + (name if beyond < 0 or at < shared else 100 * beyond + shared).to_bytes(31, "little"))
        for at in range(blocks)
    ]


def ask(cluster: Cluster, keys: list[BlockKey]) -> RequestFacts:
    return cluster.facts()._replace(num_tokens=64 * len(keys) + 1, keys=keys)


def test_the_next_turn_waits_behind_the_last_one_instead_of_computing_it_again() -> None:
    cluster = Cluster(stores=2, hosts=True)
    turn = ask(cluster, chain(7, 21))
    first = cluster.scheduler.place(turn, cluster.now)
    cluster.scheduler.book(turn, first, cluster.now)
    cluster.now += 1.3  # nearly done: waiting is cheap, and computing it all again is not
    second = cluster.scheduler.place(ask(cluster, chain(7, 30)), cluster.now)
    assert pair(second)[0] == pair(first)[0]
    assert second.local_tokens == 21 * 64
    assert pair(cluster.scheduler.place(ask(cluster, chain(8, 30)), cluster.now))[0] != pair(first)[0]


def test_a_long_queue_is_not_waited_for() -> None:
    cluster = Cluster(stores=2, hosts=True)
    turn = ask(cluster, chain(7, 8))
    first = cluster.scheduler.place(turn, cluster.now)
    for _ in range(6):
        cluster.scheduler.book(turn, first, cluster.now)
    assert pair(cluster.scheduler.place(ask(cluster, chain(7, 9)), cluster.now))[0] != pair(first)[0]


@pytest.mark.parametrize("ending", ["prefill_done", "close"])
def test_a_promise_ends_with_the_prefill_however_that_ended(ending: str) -> None:
    cluster = Cluster(stores=2, hosts=True)
    turn = ask(cluster, chain(7, 21))
    booking = cluster.scheduler.book(turn, cluster.scheduler.place(turn, cluster.now), cluster.now)
    for _ in range(2):
        getattr(cluster.scheduler, ending)(booking, cluster.now)
        assert cluster.scheduler.place(ask(cluster, chain(7, 30)), cluster.now).local_tokens == 0


def test_published_policies_go_by_what_caches_report() -> None:
    cluster = Cluster(stores=2, hosts=True, policy="algorithm_1")
    turn = ask(cluster, chain(7, 21))
    cluster.scheduler.book(turn, cluster.scheduler.place(turn, cluster.now), cluster.now)
    assert cluster.scheduler.place(ask(cluster, chain(7, 30)), cluster.now + 1.3).local_tokens == 0


@pytest.mark.parametrize("native", [True, False])
def test_marks_against_comparing_every_block(native: bool) -> None:
    """Random prompts of two families come and go; a count is right to the marks' distance below what is true."""
    rng = np.random.default_rng(3)
    cluster = Cluster(prefill=3)
    view, promises, waiting = cluster.fleet.view(cluster.now), new_promises(64, native), []
    for _ in range(400):
        if waiting and rng.random() < 0.45:
            booking, _ = waiting.pop(rng.integers(len(waiting)))
            promises.kept(booking)
        else:
            keys = chain(1, int(rng.integers(0, 40)), beyond=int(rng.integers(2, 5)), shared=int(rng.integers(30)))
            booking = Booking(f"p{rng.integers(3)}", "", 1, 1.0, 1)
            promises.give(booking, keys, 0)
            waiting.append((booking, keys))
        asked = chain(1, 40, beyond=int(rng.integers(2, 5)), shared=int(rng.integers(30)))
        runs = np.zeros(64)
        promises.count(asked, view, runs, int(runs.max()))
        deepest = 0
        for node_id, slot in zip(("p0", "p1", "p2"), view.prefill.slots, strict=True):
            theirs = [keys for booking, keys in waiting if booking.prefill_id == node_id]
            true = max((shared_blocks(keys, asked) for keys in theirs), default=0)
            assert runs[slot] <= true
            deepest = max(deepest, true)
        assert runs.max() > deepest - MARK_TOKENS // 64
    for booking, _ in waiting:
        promises.kept(booking)
    assert len(promises) == 0
    runs = np.zeros(64)
    promises.count(chain(1, 40), view, runs, 0)
    assert not runs.any()


def test_many_prompts_wait_with_one_mark() -> None:
    cluster = Cluster(prefill=3)
    view, keys = cluster.fleet.view(cluster.now), chain(1, 40)
    for native in (True, False):
        promises, runs = new_promises(64, native), np.zeros(64)
        bookings = [Booking(f"p{number % 2}", "", 1, 1.0, 1) for number in range(300)]
        for booking in bookings:
            promises.give(booking, keys, 0)
        promises.count(keys, view, runs, 0)
        assert list(runs[view.prefill.slots]) == [40, 40, 0]
        for booking in bookings[::2]:
            promises.kept(booking)
        runs[:] = 0
        promises.count(keys, view, runs, 0)
        assert list(runs[view.prefill.slots]) == [0, 40, 0]


def test_what_is_no_key_is_refused_and_promises_nothing() -> None:
    promises, runs = new_promises(64), np.zeros(64)
    with pytest.raises(ValueError, match="15 bytes"):
        promises.give(Booking("p0", "", 1, 1.0, 1), [*chain(1, 17), b"short"], 0)
    assert len(promises) == 0
    cluster = Cluster(prefill=3)
    promises.give(Booking("p0", "", 1, 1.0, 1), chain(2, 5), 0)
    promises.count(chain(1, 17), cluster.fleet.view(cluster.now), runs, 0)
    assert not runs.any()


def shared_blocks(one: list[BlockKey], other: list[BlockKey]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
