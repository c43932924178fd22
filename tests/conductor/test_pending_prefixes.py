"""Pending prefixes: a prompt in prefill counts as cached on its node, and only there, until it is computed."""

import numpy as np
import pytest
from placing import Cluster, pair

from conductor.placement.bookings import Booking
from conductor.placement.pending import MARKER_TOKENS
from conductor.placement.pending_native import new_pending_prefixes
from conductor.placement.view import RequestFacts
from mooncake.types import BlockKey


def chain(name: int, blocks: int, beyond: int = -1, shared: int = 0) -> list[BlockKey]:
    """Blocks of one conversation; from ``shared`` on those of another one that begins alike."""
    return [
        BlockKey(bytes([at]) + (name if beyond < 0 or at < shared else 100 * beyond + shared).to_bytes(31, "little"))
        for at in range(blocks)
    ]


def ask(cluster: Cluster, keys: list[BlockKey]) -> RequestFacts:
    return cluster.facts()._replace(num_tokens=64 * len(keys) + 1, keys=keys)


def test_the_next_turn_queues_behind_the_last_one_instead_of_computing_it_again() -> None:
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
def test_a_pending_prefix_ends_with_its_prefill_or_its_request(ending: str) -> None:
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
def test_markers_against_comparing_every_block(native: bool) -> None:
    """Random prompts of two families come and go; a run is at most one marker distance shorter than the truth."""
    rng = np.random.default_rng(3)
    cluster = Cluster(prefill=3)
    view, pending, queued = cluster.fleet.view(cluster.now), new_pending_prefixes(64, native), []
    for _ in range(400):
        if queued and rng.random() < 0.45:
            booking, _ = queued.pop(rng.integers(len(queued)))
            pending.remove(booking)
        else:
            keys = chain(1, int(rng.integers(0, 40)), beyond=int(rng.integers(2, 5)), shared=int(rng.integers(30)))
            booking = Booking(f"p{rng.integers(3)}", "", 1, 1.0, 1)
            pending.add(booking, keys, 0)
            queued.append((booking, keys))
        asked = chain(1, 40, beyond=int(rng.integers(2, 5)), shared=int(rng.integers(30)))
        runs = np.zeros(64)
        pending.extend_runs(asked, view, runs, int(runs.max()))
        deepest = 0
        for node_id, slot in zip(("p0", "p1", "p2"), view.prefill.slots, strict=True):
            theirs = [keys for booking, keys in queued if booking.prefill_id == node_id]
            true = max((shared_blocks(keys, asked) for keys in theirs), default=0)
            assert runs[slot] <= true
            deepest = max(deepest, true)
        assert runs.max() > deepest - MARKER_TOKENS // 64
    for booking, _ in queued:
        pending.remove(booking)
    assert len(pending) == 0
    runs = np.zeros(64)
    pending.extend_runs(chain(1, 40), view, runs, 0)
    assert not runs.any()


def test_many_prompts_share_one_marker() -> None:
    cluster = Cluster(prefill=3)
    view, keys = cluster.fleet.view(cluster.now), chain(1, 40)
    for native in (True, False):
        pending, runs = new_pending_prefixes(64, native), np.zeros(64)
        bookings = [Booking(f"p{number % 2}", "", 1, 1.0, 1) for number in range(300)]
        for booking in bookings:
            pending.add(booking, keys, 0)
        pending.extend_runs(keys, view, runs, 0)
        assert list(runs[view.prefill.slots]) == [40, 40, 0]
        for booking in bookings[::2]:
            pending.remove(booking)
        runs[:] = 0
        pending.extend_runs(keys, view, runs, 0)
        assert list(runs[view.prefill.slots]) == [0, 40, 0]


def test_an_invalid_key_is_refused_and_adds_nothing() -> None:
    pending, runs = new_pending_prefixes(64), np.zeros(64)
    with pytest.raises(ValueError, match="15 bytes"):
        pending.add(Booking("p0", "", 1, 1.0, 1), [*chain(1, 17), b"short"], 0)
    assert len(pending) == 0
    cluster = Cluster(prefill=3)
    pending.add(Booking("p0", "", 1, 1.0, 1), chain(2, 5), 0)
    pending.extend_runs(chain(1, 17), cluster.fleet.view(cluster.now), runs, 0)
    assert not runs.any()


def shared_blocks(one: list[BlockKey], other: list[BlockKey]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
