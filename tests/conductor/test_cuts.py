"""How much of a store's run is fetched if only part of it is worth it: compared with trying every length."""

from __future__ import annotations

import numpy as np
import pytest
from placing import SHAPE, Cluster, incarnations

from conductor.placement.bookings import Booking
from conductor.placement.scheduler import Placement

LONG = 20 * 64 + 30  # tokens of a prompt of 20 full blocks


def on_a_slow_disk(mb_per_s: float = 10.0, **changes: object) -> Cluster:
    """A block of a MiB takes a ms to fetch, 64 ms to compute, and 105 ms to read from this SSD."""
    return Cluster(prefill=1, decode=1, stores=1, ssd_mb_per_s=mb_per_s, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("native", [True, False])
class TestOneStore:
    def test_what_is_in_dram_is_fetched_and_what_the_ssd_reads_slower_is_computed(self, native: bool) -> None:
        placement = on_a_slow_disk(native=native).place(LONG, runs={"s0": 20}, in_dram={"s0": 12})
        assert (placement.local_tokens, placement.fetched_tokens) == (0, 12 * 64)
        assert placement.new_tokens == LONG - 12 * 64
        assert placement.pool_tokens == 12 * 64, "and the node is told to read no more"
        assert placement.breakdown.fetch_ms == pytest.approx(12.0, rel=0.02), "nothing of it waits for the SSD"
        assert placement.breakdown.prefill_ms == pytest.approx(placement.new_tokens, rel=0.02)

    def test_a_disk_that_is_fast_enough_is_read_to_the_end(self, native: bool) -> None:
        placement = on_a_slow_disk(100.0, native=native).place(LONG, runs={"s0": 20}, in_dram={"s0": 12})
        assert (placement.fetched_tokens, placement.pool_tokens) == (20 * 64, None)
        assert placement.breakdown.fetch_ms == pytest.approx(20.0 + 8 * 10.49, rel=0.02)

    def test_a_run_that_begins_on_a_slow_disk_is_not_fetched_at_all(self, native: bool) -> None:
        placement = on_a_slow_disk(native=native).place(LONG, runs={"s0": 20}, in_dram={"s0": 0})
        assert (placement.fetched_tokens, placement.pool_tokens) == (0, 0)

    def test_what_the_node_holds_itself_is_not_fetched_for_the_sake_of_a_cut(self, native: bool) -> None:
        placement = on_a_slow_disk(native=native).place(LONG, runs={"s0": 20, "p0": 14}, in_dram={"s0": 12})
        assert (placement.local_tokens, placement.fetched_tokens, placement.pool_tokens) == (14 * 64, 0, 0)

    def test_while_nothing_is_known_the_longest_run_is_the_best(self, native: bool) -> None:
        cluster = on_a_slow_disk(native=native, measured=False)
        placement = cluster.place(LONG, runs={"s0": 20}, in_dram={"s0": 12})
        assert (placement.fetched_tokens, placement.pool_tokens) == (20 * 64, None)

    def test_a_cut_is_booked_as_what_is_fetched(self, native: bool) -> None:
        cluster = on_a_slow_disk(native=native)
        facts = cluster.facts(LONG, {"s0": 20}, {"s0": 12})
        placement = cluster.scheduler.place(facts, cluster.now)
        assert placement.fetched_tokens == 12 * 64
        booking = cluster.scheduler.book(facts, placement, cluster.now)
        assert booking.prefill_ms == pytest.approx(12.0 + LONG - 12 * 64, rel=0.02)
        cluster.scheduler.close(booking, cluster.now)
        assert cluster.fleet.open_work == {}


@pytest.mark.parametrize("native", [True, False])
def test_reads_of_one_ssd_take_turns_and_time_passes_for_them(native: bool) -> None:
    cluster = Cluster(prefill=2, decode=1, stores=1, ssd_mb_per_s=100.0, native=native)

    def ask() -> Placement:
        return cluster.place(LONG, {"s0": 20}, {"s0": 12}, excluded=incarnations("p1"))

    alone = ask()
    assert alone.ssd_tokens == 8 * 64
    facts = cluster.facts(LONG, {"s0": 20}, {"s0": 12}, excluded=incarnations("p0"))
    for _ in range(3):  # on the other node: 8 blocks each, 10.5 ms a block
        cluster.scheduler.book(facts, cluster.scheduler.place(facts, cluster.now), cluster.now)
    assert cluster.fleet.view(cluster.now).stores.ssd_ready_at_ms[0] - cluster.now * 1e3 == pytest.approx(
        3 * 83.9, rel=0.01
    )
    assert ask().breakdown.fetch_ms == pytest.approx(alone.breakdown.fetch_ms + 3 * 83.9, rel=0.01)
    cluster.now += 0.2
    assert ask().breakdown.fetch_ms == pytest.approx(alone.breakdown.fetch_ms + 3 * 83.9 - 200.0, rel=0.01)
    cluster.now += 0.2
    assert ask().breakdown.fetch_ms == pytest.approx(alone.breakdown.fetch_ms)


@pytest.mark.parametrize("native", [True, False])
def test_an_ssd_with_much_to_read_is_left_alone(native: bool) -> None:
    cluster = Cluster(prefill=1, decode=1, stores=1, ssd_mb_per_s=100.0, native=native)
    cluster.fleet.book(Booking("p0", "", 0, 0.0, 0, source_id="s0", ssd_bytes=1e9), cluster.now)
    placement = cluster.place(LONG, {"s0": 20}, {"s0": 12})
    assert (placement.fetched_tokens, placement.ssd_tokens, placement.pool_tokens) == (12 * 64, 0, 12 * 64)
    waiting = Booking("p0", "", 0, 10_000.0, 0)  # by the time that this is computed the SSD is free
    cluster.fleet.book(waiting, cluster.now)
    placement = cluster.place(LONG, {"s0": 20}, {"s0": 12})
    assert (placement.fetched_tokens, placement.ssd_tokens, placement.pool_tokens) == (20 * 64, 8 * 64, None)


def test_of_two_stores_the_one_with_less_may_serve_more() -> None:
    """The longest run is on a slow SSD; a shorter one is in memory."""
    cluster = Cluster(prefill=1, decode=1, stores=2, hosts=True, ssd_mb_per_s=10.0)
    placement = cluster.place(LONG, runs={"s0": 20, "s1": 15}, in_dram={"s0": 4})
    assert [store.node_id for store in placement.pools] == ["s1"]
    assert (placement.fetched_tokens, placement.pool_tokens) == (15 * 64, None)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("chunk_tokens", [0, 256])
def test_no_other_length_is_faster(native: bool, chunk_tokens: int) -> None:
    """Compared with every block of every store as the last one fetched; with chunks, within one step's fixed time."""
    rng = np.random.default_rng(3)
    cuts = 0
    for _ in range(60):
        cluster = Cluster(
            prefill=1,
            decode=1,
            stores=2,
            hosts=True,
            measured=False,
            native=native,
            chunk_tokens=chunk_tokens,
            ssd_mb_per_s=float(10.0 ** rng.uniform(0.3, 2.5)),
        )
        costs = cluster.fleet.costs
        step, token, pair = rng.uniform(0.0, 20.0), rng.uniform(0.1, 2.0), float(10.0 ** rng.uniform(-5, -2.5))
        for size in (1, 64, 512, 4096):
            for prefix in (0, 1024, 8192):
                steps = -(-size // chunk_tokens) if chunk_tokens else 1
                costs.observe_prefill("p0", size, prefix, PrefillMs(step, token, pair)(size, prefix, steps))
        for store in ("s0", "s1"):
            byte_ms = 10.0 ** rng.uniform(-8, -4.5)
            for size in (10**5, 10**6, 10**7):
                costs.observe_transfer("p0", store, size, 0.3 + byte_ms * size)
        runs = {name: int(rng.integers(0, 21)) for name in ("p0", "s0", "s1")}
        in_dram = {name: int(rng.integers(0, runs[name] + 1)) for name in ("s0", "s1")}
        queue_ms, promised_ms = rng.uniform(0, 200, 2)
        promised = promised_ms * cluster.ssd_mb_per_s * 1e3
        cluster.fleet.book(Booking("p0", "", 0, queue_ms, 0, source_id="s0", ssd_bytes=promised), cluster.now)
        placement = cluster.place(LONG, runs, in_dram)
        best_ms = least_ms(cluster, runs, in_dram, max(promised_ms - queue_ms, 0.0))
        slack_ms = costs.prefill("p0").step_ms if chunk_tokens else 0.0
        assert placement.is_known
        assert best_ms - 1e-6 <= predicted_ms(placement) <= best_ms + slack_ms + 1e-6
        cuts += placement.fetched_tokens > 0 and placement.pool_tokens is not None
    assert cuts > 5, "the trial has hardly met the case"


class PrefillMs:
    def __init__(self, step: float, token: float, pair: float) -> None:
        self._step, self._token, self._pair = step, token, pair

    def __call__(self, new: int, prefix: int, steps: int) -> float:
        return self._step * steps + self._token * new + self._pair * new * (prefix + new / 2)


def predicted_ms(placement: Placement) -> float:
    return placement.breakdown.fetch_ms + placement.breakdown.prefill_ms


def least_ms(cluster: Cluster, runs: dict[str, int], in_dram: dict[str, int], waiting_ms: float) -> float:
    """The minimum over every number of blocks from every store, by the formulas of the cost model. The SSD of s0 is
    busy for ``waiting_ms`` longer than the prompt waits itself."""
    costs, local, chunk = cluster.fleet.costs, runs["p0"], cluster.chunk_tokens
    prefill = costs.prefill("p0")

    def compute_ms(blocks: int) -> float:
        new = LONG - 64 * blocks
        return prefill.ms(new, 64 * blocks, -(-new // chunk) if chunk else 1)

    found = [compute_ms(local)]
    for store in ("s0", "s1"):
        transfer = costs.transfer("p0", store)
        for blocks in range(local + 1, runs[store] + 1):
            from_ssd = max(blocks - in_dram[store], 0) * SHAPE.block_bytes / cluster.ssd_mb_per_s / 1e3
            from_ssd += waiting_ms if from_ssd and store == "s0" else 0.0
            fetch_ms = transfer.ms((blocks - local) * SHAPE.block_bytes) + from_ssd
            found.append(fetch_ms + compute_ms(blocks))
    return min(found)
