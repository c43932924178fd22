"""Placement: what it does with caches, queues and costs, and what it refuses."""

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from placing import Cluster, incarnation, incarnations, pair

from conductor.placement.bookings import Booking
from conductor.placement.policies.milliseconds import REPLICA_COST
from conductor.placement.scheduler import Placement, PlacementScheduler
from conductor.registry import Health, NodeLoad
from mooncake.errors import NodeUnavailable, Overloaded


def test_without_matches_and_load_any_pair_is_as_good() -> None:
    placement = Cluster().place()
    assert set(pair(placement)) <= {"p0", "p1", "d0", "d1"}
    assert placement.new_tokens == 640
    assert placement.predicted_ttft_ms == pytest.approx(640, rel=0.01)
    assert placement.breakdown.queue_ms == 0.0


def test_a_cached_prefix_attracts() -> None:
    placement = Cluster().place(runs={"p1": 5})
    assert pair(placement)[0] == "p1"
    assert (placement.local_tokens, placement.fetched_tokens, placement.new_tokens) == (320, 0, 320)


def test_the_last_token_is_always_computed() -> None:
    placement = Cluster().place(runs={"p1": 10})
    assert placement.new_tokens == 1
    placement = Cluster().place(num_tokens=1, runs={})
    assert placement.new_tokens == 1


def test_the_pool_serves_every_node_so_the_queue_decides() -> None:
    cluster = Cluster()
    first = cluster.place(runs={})
    cluster.book(first)
    placement = cluster.place(runs={"s0": 8})
    assert pair(placement)[0] != pair(first)[0]
    assert placement.fetched_tokens == 512
    assert [store.node_id for store in placement.pools] == ["s0"]
    assert placement.breakdown.fetch_ms == pytest.approx(8.0, rel=0.02), "8 blocks of 1 MiB at 1 ms"


def test_a_busy_node_loses_its_cache_advantage() -> None:
    cluster = Cluster()
    chosen = []
    for _ in range(12):
        placement = cluster.place(runs={"p1": 9})
        chosen.append(placement.prefill.node_id)
        cluster.book(placement)
    assert chosen[:8] == ["p1"] * 8, "a queue of 64 ms each is less than the 576 ms that p0 would compute more"
    assert "p0" in chosen[8:]


def test_decode_stays_where_the_conversation_is() -> None:
    placement = Cluster().place(num_tokens=64, runs={"d1": 1})
    assert pair(placement)[1] == "d1"
    assert placement.breakdown.handoff_ms == 0.0


def test_decode_load_spreads() -> None:
    cluster = Cluster()
    first = cluster.place()
    cluster.book(first)
    assert pair(cluster.place())[1] != pair(first)[1]


def test_a_decode_node_without_room_is_passed_over_while_another_has_some() -> None:
    cluster = Cluster()
    full = NodeLoad(blocks_total=100, blocks_free=1, blocks_cached=0)
    cluster.fleet.registry.heartbeat("d0", incarnation("d0"), full, False, cluster.now)
    cluster.fleet.heartbeat("d0", full)
    assert pair(cluster.place())[1] == "d1"
    cluster.fleet.registry.heartbeat("d1", incarnation("d1"), full, False, cluster.now)
    cluster.fleet.heartbeat("d1", full)
    assert pair(cluster.place())[1] in {"d0", "d1"}, "nobody has room: the request waits there"


def test_one_answer_token_needs_no_decode_node() -> None:
    placement = Cluster(decode=0).place(needs_decode=False)
    assert placement.decode is None
    with pytest.raises(NodeUnavailable, match="decode"):
        Cluster(decode=0).place()
    with pytest.raises(NodeUnavailable, match="prefill"):
        Cluster(prefill=0).place()


def test_nodes_that_failed_this_request_are_excluded() -> None:
    cluster = Cluster()
    assert pair(cluster.place(excluded=incarnations("p0", "d0"))) == ("p1", "d1")
    with pytest.raises(NodeUnavailable):
        cluster.place(excluded=incarnations("d0", "d1"))


def test_a_deadline_that_cannot_be_met_is_refused_early() -> None:
    with pytest.raises(Overloaded) as refused:
        Cluster().place(budget_ms=100.0)
    assert refused.value.retry_after_s == pytest.approx(0.54, abs=0.05)
    assert Cluster(measured=False).place(budget_ms=100.0), "an unknown prediction refuses nobody"


def test_without_measurements_load_decides() -> None:
    cluster = Cluster(measured=False, prefill=3, decode=3)
    pairs = []
    for _ in range(3):
        placement = cluster.place(runs={"p0": 5})
        assert not placement.is_known
        assert placement.predicted_ttft_ms == 0.0
        pairs.append(pair(placement))
        cluster.book(placement)
    assert sorted(pairs) == [("p0", "d0"), ("p1", "d1"), ("p2", "d2")]


def test_a_shared_first_block_does_not_herd() -> None:
    cluster = Cluster(prefill=5, decode=5)
    chosen: Counter[str] = Counter()
    for _ in range(50):
        placement = cluster.place(num_tokens=2000, runs={"p3": 1})
        chosen[placement.prefill.node_id] += 1
        cluster.book(placement, 2000)
    assert max(chosen.values()) <= 13, chosen
    assert min(chosen.values()) >= 8, chosen


def test_closing_all_bookings_leaves_no_outstanding_work() -> None:
    cluster = Cluster()
    bookings = [cluster.book(cluster.place()) for _ in range(7)]
    assert cluster.fleet.open_work
    for booking in bookings:
        cluster.fleet.prefill_done(booking, cluster.now)
        cluster.fleet.close(booking, cluster.now)
        cluster.fleet.close(booking, cluster.now)  # twice is once
    assert cluster.fleet.open_work == {}
    assert cluster.fleet.view(cluster.now).prefill.queued_ms.tolist() == [0.0, 0.0]


def test_unbooked_load_shows_in_heartbeats() -> None:
    cluster = Cluster()
    cluster.book(cluster.place(excluded=incarnations("p1")))
    load = NodeLoad(waiting=2, waiting_tokens=1640)
    cluster.fleet.registry.heartbeat("p0", incarnation("p0"), load, False, cluster.now)
    cluster.fleet.heartbeat("p0", load)
    queue = cluster.fleet.view(cluster.now).prefill.queued_ms
    assert queue[0] == pytest.approx(1640, rel=0.02), "640 tokens are ours, 1,000 are unbooked"
    assert queue[1] == 0.0


def test_time_passing_shortens_the_queue() -> None:
    cluster = Cluster(prefill=1)
    cluster.book(cluster.place())
    cluster.now += 0.4
    assert cluster.place().breakdown.queue_ms == pytest.approx(240, rel=0.05)
    cluster.now += 10.0
    assert cluster.place().breakdown.queue_ms == pytest.approx(0.0, abs=1e-6), "it may be late, but not negative"


def total(copied: dict[str, int], placement: Placement) -> float:
    """Of an answer of 10 tokens, the rent of copied blocks included; the store that all share is s1."""
    parts, rent = placement.breakdown, REPLICA_COST * 64 * copied[placement.prefill.node_id]
    return placement.predicted_ttft_ms + rent + parts.handoff_ms + 10.0 * parts.step_ms


def test_pruning_finds_the_same_pair_as_trying_all() -> None:
    rng = np.random.default_rng(7)
    for _ in range(50):
        cluster = Cluster(prefill=6, decode=5, stores=2)
        for name in [f"p{i}" for i in range(6)]:
            cluster.fleet.book(Booking(name, f"d{rng.integers(5)}", 10, float(rng.integers(500)), 640), cluster.now)
        runs = {
            f"{kind}{i}": int(rng.integers(1, 10))
            for kind, count in (("p", 6), ("d", 5), ("s", 2))
            for i in range(count)
            if rng.random() < 0.5
        }
        best = cluster.place(runs=runs)
        everybody = {*(f"p{i}" for i in range(6)), *(f"d{i}" for i in range(5))}

        longest = max((run for name, run in runs.items() if name[0] in "ps"), default=0)
        copied = {f"p{i}": longest - max(runs.get(f"p{i}", 0), runs.get("s1", 0)) for i in range(6)}
        totals = [
            total(copied, cluster.place(runs=runs, excluded=incarnations(*(everybody - {f"p{p}", f"d{d}"}))))
            for p in range(6)
            for d in range(5)
        ]
        assert total(copied, best) == pytest.approx(min(totals), rel=1e-3)


def random_cluster(rng: np.random.Generator) -> Cluster:
    """Nodes of different speeds, links, queues and room."""
    cluster = Cluster(prefill=6, decode=5, stores=6, hosts=bool(rng.integers(2)), measured=bool(rng.integers(5)))
    costs, registry = cluster.fleet.costs, cluster.fleet.registry
    for i in range(5):
        for size in (10, 100, 1000):
            if rng.random() < 0.7:
                costs.observe_prefill(f"p{i}", size, 0, float(size * rng.uniform(0.2, 3.0)))
            costs.observe_transfer(f"p{i}", f"d{rng.integers(5)}", size << 20, float(size * rng.uniform(0.1, 20.0)))
            costs.observe_transfer(f"p{i}", f"s{rng.integers(6)}", size << 20, float(size * rng.uniform(0.1, 50.0)))
        load = NodeLoad(blocks_total=100, blocks_free=int(rng.integers(100)))
        registry.heartbeat(f"d{i}", incarnation(f"d{i}"), load, False, cluster.now)
        cluster.fleet.heartbeat(f"d{i}", load)
        booking = Booking(
            f"p{i}", f"d{rng.integers(5)}", 10, float(rng.integers(500)), 640, 3, f"s{i}", 1e6, rng.uniform(0, 1e9)
        )
        cluster.fleet.book(booking, cluster.now - rng.random(), session=f"session {i}")
    return cluster


def test_the_search_in_cpp_equals_its_python_reference() -> None:
    rng, compared = np.random.default_rng(11), 0
    for _ in range(60):
        cluster = random_cluster(rng)
        for _ in range(5):
            runs = {name: int(rng.integers(1, 20)) for name in NAMES if rng.random() < 0.4}
            asked = {
                "num_tokens": int(rng.integers(1, 1400)),
                "runs": runs,
                "in_dram": {name: int(rng.integers(run + 1)) for name, run in runs.items() if rng.random() < 0.5},
                "needs_decode": bool(rng.integers(4)),
                "session": f"session {rng.integers(5)}" if rng.integers(2) else "",
                "excluded": incarnations("p1", "d1") if rng.integers(2) else frozenset(),
            }
            facts = cluster.facts(**asked)
            placements = []
            for native in (True, False):
                scheduler = PlacementScheduler(cluster.fleet, cluster.scheduler.shape, native=native)
                placements.append(scheduler.place(facts, cluster.now))
                cluster.fleet.index.sweep()
            compiled, defined = placements
            assert compiled.breakdown == pytest.approx(defined.breakdown)
            assert compiled._replace(breakdown=defined.breakdown) == defined
            compared += 1
    assert compared == 300


def test_an_updated_view_equals_a_rebuilt_one() -> None:
    rng, compared = np.random.default_rng(5), 0
    for _ in range(8):
        cluster = random_cluster(rng)
        fleet, bookings = cluster.fleet, []
        for step in range(60):
            cluster.now += 0.02
            name = f"{'pd'[rng.integers(2)]}{rng.integers(5)}"
            match rng.integers(5):
                case 0:
                    bookings.append(
                        Booking(f"p{rng.integers(6)}", f"d{rng.integers(5)}", 10, 40.0, 64, int(rng.integers(4)))
                    )
                    fleet.book(bookings[-1], cluster.now)
                case 1 if bookings:
                    booking = bookings[rng.integers(len(bookings))]
                    (fleet.prefill_done if rng.integers(2) else fleet.close)(booking, cluster.now)
                case 2:
                    fleet.costs.observe_decode(f"d{rng.integers(5)}", 4, 400, float(rng.uniform(5, 50)))
                case 3:
                    peer = f"{'ds'[rng.integers(2)]}{rng.integers(5)}"
                    fleet.costs.observe_transfer(f"p{rng.integers(5)}", peer, 1 << 20, float(rng.uniform(1, 50)))
                case _:  # often what it said before
                    load = NodeLoad(
                        int(rng.integers(2)), 0, 64 * int(rng.integers(2)), 0, 100, 50 * int(rng.integers(2))
                    )
                    fleet.registry.heartbeat(name, incarnation(name), load, False, cluster.now)
                    fleet.heartbeat(name, load)
            if step % 5 == 0:
                for _ in range(12):  # few changed costs are looked at each time
                    cluster.now += 0.02
                    kept = fleet.view(cluster.now)
                fleet.registry.set_health("p0", Health.HEALTHY, "")
                built = fleet.view(cluster.now)
                assert built is not kept
                for side in ("prefill", "decode", "stores"):
                    for part in fields(getattr(built, side)):
                        a, b = getattr(getattr(kept, side), part.name), getattr(getattr(built, side), part.name)
                        if isinstance(a, np.ndarray) and part.name != "slots":
                            np.testing.assert_allclose(a, b, err_msg=f"{side}.{part.name}")
                            compared += 1
                for links in ("fetch_link", "send_link"):  # which numbers they have is nobody's business
                    costs = [view.links[getattr(view, links)] for view in (kept, built)]
                    np.testing.assert_allclose(*costs, err_msg=links)
                np.testing.assert_allclose(kept.least_send, built.least_send)
    assert compared > 500


NAMES = [f"{kind}{i}" for kind, count in (("p", 6), ("d", 5), ("s", 6)) for i in range(count)]
