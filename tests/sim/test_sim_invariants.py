"""Invariants in virtual time, over random traces, policies, admissions, faults: nothing lost, run twice or leaked."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.admission.rules import ADMISSIONS
from conductor.placement.policies import POLICIES
from mooncake.app.sim.cluster import Cluster, Ssd, load_preset
from mooncake.app.sim.output.summary import summarize, to_json
from mooncake.app.sim.requests import Fate
from mooncake.app.sim.simulation import Fault, Run, Simulation
from mooncake.app.traces.shapes import generate
from mooncake.trace import TraceRequest

MACHINES = ("prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1")


def small_cluster(
    policy: str = "milliseconds", admission: str = "none", store_blocks: int = 300, ssd_tokens: int = 0
) -> Cluster:
    cluster = load_preset("paper-16").with_counts(prefill=3, decode=2)
    ssd = Ssd(tokens=ssd_tokens) if ssd_tokens and store_blocks else None
    cluster = cluster.with_machines("prefill", store_tokens=store_blocks * 512, ssd=ssd)
    return cluster.with_conductor(policy=policy, admission=admission, max_tokens=2000)


def small_trace(seed: int, requests: int = 80) -> list[TraceRequest]:
    """At the published rate a third of the machines has to work hard."""
    return generate("conversation", requests, seed)


def play(cluster: Cluster, seed: int, faults: list[Fault], requests: int = 80) -> Simulation:
    simulation = Simulation(cluster, small_trace(seed, requests), Run(seed=seed), faults)
    simulation.run()
    return simulation


def check_invariants(simulation: Simulation) -> None:
    results = simulation.results
    assert not (results.fate == Fate.OPEN).any(), "a request was lost"
    assert simulation.conductor.fleet.open_work == {}, "something is still booked"
    assert simulation.network.num_open == 0, "a hand-off or a fetch is still open"
    for machine in simulation.machines.prefill.values():
        assert machine.running is None and not machine.queue
        machine.cache.check()
        assert machine.cache.num_in_use == 0, "somebody still holds blocks"
    for decoder in simulation.machines.decode.values():
        assert not decoder.running and not decoder.waiting
        assert decoder.reserved_tokens == 0 and decoder.context == 0
    if simulation.conductor.admission is not None:
        assert len(simulation.conductor.admission.inflight) == 0
    rejected = results.fate == Fate.REJECTED
    assert not results.prefill_ms[rejected].any(), "a rejected request cost prefill"
    assert np.isnan(results.ttft_s[rejected]).all()
    done = results.fate == Fate.DONE
    assert (results.ttft_s[done] > 0).all() and (results.end_s[done] >= results.arrival_s[done]).all()
    with_gaps = done & (results.output_tokens > 1)
    assert (results.tail_tbt_ms[with_gaps] >= results.mean_tbt_ms[with_gaps] * (1 - 1e-6)).all()
    assert (results.cached_tokens < results.input_tokens).all()
    assert (results.fetched_tokens <= results.cached_tokens).all()
    assert (results.ssd_tokens <= results.cached_tokens).all()


faults = st.lists(
    st.builds(
        Fault,
        at_s=st.floats(0.0, 40.0),
        machine=st.sampled_from(MACHINES),
        down_s=st.floats(0.5, 30.0),
        slowdown=st.sampled_from([0.0, 0.0, 5.0]),
    ),
    max_size=6,
)


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(sorted(POLICIES)),
    admission=st.sampled_from(sorted(ADMISSIONS)),
    struck=faults,
    store_blocks=st.sampled_from([0, 20, 300, 3000]),
    ssd_tokens=st.sampled_from([0, 10_000, 2_000_000]),
)
@settings(max_examples=8)
def test_every_request_ends_once_and_nothing_leaks_whatever_dies(
    seed: int, policy: str, admission: str, struck: list[Fault], store_blocks: int, ssd_tokens: int
) -> None:
    check_invariants(play(small_cluster(policy, admission, store_blocks, ssd_tokens), seed, struck))


@pytest.mark.slow
@given(
    seed=st.integers(0, 1_000_000),
    policy=st.sampled_from(sorted(POLICIES)),
    admission=st.sampled_from(sorted(ADMISSIONS)),
    struck=faults,
    store_blocks=st.sampled_from([0, 20, 300, 3000]),
    ssd_tokens=st.sampled_from([0, 10_000, 2_000_000]),
)
@settings(max_examples=100)
def test_the_same_over_many_more_seeds(
    seed: int, policy: str, admission: str, struck: list[Fault], store_blocks: int, ssd_tokens: int
) -> None:
    check_invariants(play(small_cluster(policy, admission, store_blocks, ssd_tokens), seed, struck, 200))


def test_a_request_goes_on_elsewhere_when_its_decode_machine_dies() -> None:
    simulation = play(small_cluster(), 3, [Fault(20.0, "decode-0", 1000.0)])
    results = simulation.results
    again = results.attempts > 1
    assert again.any(), "nobody was on the machine that died: choose another moment"
    assert (results.fate == Fate.DONE).all()
    assert simulation.machines.decode["decode-1"].tokens > 0


def one_of_each(**of_all: float) -> Cluster:
    return load_preset("paper-16").with_counts(prefill=1, decode=2).with_machines(**of_all)


def test_an_answer_that_goes_on_elsewhere_has_as_many_tokens_as_one_that_does_not() -> None:
    request = TraceRequest(0, 1024, 100, (1, 2))
    simulation = Simulation(one_of_each(), [request], Run(jitter_s=0.0), [Fault(1.5, "decode-0", 1000.0)])
    prompts: list[int] = []
    simulation.agenda.at(1.6, lambda: prompts.extend(request.num_tokens for request in simulation._open))
    results = simulation.run()
    assert (results.fate.item(0), results.attempts.item(0)) == (Fate.DONE, 2)
    told = prompts[0] - 1024
    assert told > 1, "it died before it had decoded anything: choose another moment"
    assert told + 1 + simulation.machines.decode["decode-1"].tokens == 100, "of which prefill gave one, each time"


def test_requests_wait_for_the_only_machine_of_a_role_as_live_ones_do() -> None:
    cluster = load_preset("paper-16").with_counts(prefill=1, decode=1)
    trace = [TraceRequest(0, 1024, 100, (1, 2)), TraceRequest(2000, 1024, 100, (1, 3))]
    for down_s, fates in ((5.0, [Fate.DONE, Fate.DONE]), (60.0, [Fate.FAILED, Fate.FAILED])):
        simulation = Simulation(cluster, trace, Run(jitter_s=0.0), [Fault(1.5, "decode-0", down_s)])
        assert simulation.run().fate.tolist() == fates
        check_invariants(simulation)


def test_a_slow_machine_stays_slow_beside_a_busy_one() -> None:
    trace = [TraceRequest(0, 51_200, 500, tuple(range(100)))]
    slow = [Fault(12.0, "decode-0", 1000.0, slowdown=5.0), Fault(12.0, "decode-1", 1000.0, slowdown=5.0)]
    alone, beside = (
        Simulation(one_of_each(beside=share), trace, Run(jitter_s=0.0), slow).run().mean_tbt_ms.item(0)
        for share in (1.0, 1.1)
    )
    assert beside == pytest.approx(alone, rel=0.02)


def flash_crowd(requests: int = 1500) -> list[TraceRequest]:
    """Prompts of 40 shared blocks, a hundred a second, and a few of the trace, before and long after."""
    prefix = tuple(range(10**6, 10**6 + 40))
    crowd = [TraceRequest(5000 + at * 10, 40 * 512 + 100, 20, (*prefix, 10**7 + at)) for at in range(requests)]
    first = TraceRequest(0, 40 * 512 + 100, 20, (*prefix, 10**7 - 1))
    later = [TraceRequest(60_000 + at * 5000, 1024, 20, (at * 2, at * 2 + 1)) for at in range(60)]
    return [first, *crowd, *later]


CROWDED = load_preset("paper-16").with_conductor(policy="longest_prefix", replicates=True)  # which does not spread work


@pytest.mark.slow
@pytest.mark.parametrize("ssd", [None, Ssd(tokens=2_000_000)])
def test_a_hot_prefix_is_replicated_and_later_dropped_where_it_was_not_before(ssd: Ssd | None) -> None:
    trace = flash_crowd()
    simulation = Simulation(CROWDED.with_machines("prefill", ssd=ssd), trace, Run(jitter_s=0.0))
    hot = simulation.block_keys(trace[0])
    held: list[int] = []

    def look() -> None:
        held.append(sum(machine.cache.match(hot) == len(hot) for machine in simulation.machines.prefill.values()))

    for at_s in (4.0, 25.0, 320.0):
        simulation.agenda.at(at_s, look)
    simulation.run()
    check_invariants(simulation)
    before, during, after = held
    assert before == after == 1 and during > 2
    assert simulation.replicas.made == during - 1
    assert simulation.replicas.dropped == during - 1


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["prefill-0", "prefill-1", "prefill-2", "prefill-3"])
def test_copies_from_and_to_a_machine_that_dies_are_forgotten(dies: str) -> None:
    """Slow links, so that copies are surely on their way then."""
    slow = CROWDED.with_machines(nic_gb_per_s=2.0)
    simulation = Simulation(slow, flash_crowd(400), Run(jitter_s=0.0), [Fault(6.5, dies, 20.0), Fault(40.0, dies, 5.0)])
    on_their_way: list[int] = []
    simulation.agenda.at(6.4, lambda: on_their_way.append(len(simulation.replicas._moving)))
    simulation.run()
    check_invariants(simulation)
    assert on_their_way[0] > 0
    assert not simulation.replicas._moving


def test_a_machine_that_comes_back_gets_work_again() -> None:
    simulation = play(small_cluster(), 3, [Fault(5.0, "prefill-0", 5.0)], 300)
    check_invariants(simulation)
    assert len(simulation.machines.prefill["prefill-0"].cache.pool._by_key) > 0


def test_a_prefix_that_is_fetched_is_computed_when_its_source_dies() -> None:
    """Slow links, so that the fetch is surely on its way when the machine dies."""
    cluster = small_cluster("algorithm_1").with_machines(nic_gb_per_s=0.05)
    for at_s in (8.0, 12.0, 16.0, 20.0):
        check_invariants(play(cluster, 4, [Fault(at_s, "prefill-0", 10.0), Fault(at_s + 1, "prefill-1", 10.0)]))


@pytest.mark.slow
def test_what_is_read_from_an_ssd_is_computed_when_its_host_dies() -> None:
    ssd = Ssd(tokens=10_000_000, read_gb_per_s=3.5, write_gb_per_s=50.0)
    cluster = small_cluster().with_machines("prefill", store_tokens=150 * 512, ssd=ssd)
    simulation = Simulation(cluster, small_trace(5, 300), Run(seed=5))
    reading_s = []

    def look() -> None:
        if any(request.loading is not None for request in simulation._open):
            reading_s.append(simulation.agenda.now)

    for tick in range(2000):
        simulation.agenda.at(tick / 10, look)
    simulation.run()
    assert len(reading_s) > 2, "nothing was being read"
    for at_s in reading_s[:: len(reading_s) // 3]:
        struck = [Fault(at_s, name, 10.0) for name in ("prefill-0", "prefill-1", "prefill-2")]
        check_invariants(play(cluster, 5, struck, 300))


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    cluster = small_cluster("random", "lookahead")

    def line(seed: int) -> bytes:
        simulation = Simulation(cluster, small_trace(1), Run(seed=seed))
        simulation.run()
        return msgspec.json.encode(to_json(summarize(simulation, "trace"), cluster, simulation.options))

    assert line(5) == line(5)
    assert line(5) != line(6)


def test_coupled_machines_keep_the_invariants_too() -> None:
    cluster = load_preset("vllm-chunked-16").with_counts(coupled=3)
    simulation = Simulation(cluster, small_trace(2), Run(seed=2))
    results = simulation.run()
    assert (results.fate == Fate.DONE).all()
    assert simulation.conductor.fleet.open_work == {}
    for machine in simulation.machines.coupled.values():
        machine.pool.check()
        assert machine.pool.num_in_use == 0
    assert sum(machine.tokens for machine in simulation.machines.coupled.values()) == results.output_tokens.sum()


def test_machines_that_change_roles_lose_nothing_and_keep_their_hosts_memory() -> None:
    """Prompts only, then answers only: prefill machines are wanted first and decode machines later."""
    prompts = [TraceRequest(at * 100.0, 6000, 2, tuple(range(at * 12, at * 12 + 12))) for at in range(1200)]
    start_ms, first_id = prompts[-1].timestamp_ms, 1200 * 12
    answers = [TraceRequest(start_ms + at * 100.0, 100, 900, (first_id + at,)) for at in range(2400)]
    cluster = load_preset("paper-16").with_counts(prefill=4, decode=4).with_conductor(balances_roles=True)
    simulation = Simulation(cluster, [*prompts, *answers], Run(seed=1, jitter_s=0.0))
    simulation.run()
    check_invariants(simulation)
    assert (simulation.results.fate == Fate.DONE).all()
    assert simulation.conductor.balancer is not None and simulation.conductor.balancer.switches >= 1
    assert any(machine.cache.pool.num_cached for machine in simulation.machines.prefill.values())
