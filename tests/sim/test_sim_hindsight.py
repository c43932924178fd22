"""Refusals judged in hindsight: an oracle's replay, and when the request would have been admitted."""

import numpy as np
import pytest

from mooncake.app.reproduction.hindsight import (
    RetryProbe,
    estimated_with_hindsight,
    false_rejections,
    keep_placements,
    retry_time_errors,
)
from mooncake.app.sim.cluster import Cluster, load_preset
from mooncake.app.sim.requests import Fate
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.traces.shapes import generate
from mooncake.trace import TraceRequest

LATER = TraceRequest(90_000.0, 600, 2, (10**6,))


def cluster(ttft_s: float = 5.0) -> Cluster:
    """One machine per role; a prompt of 8,000 tokens takes about a second."""
    found = load_preset("paper-16").with_counts(prefill=1, decode=1).with_slo(ttft_s=ttft_s)
    return found.with_conductor(admission="early")


def prompts(count: int, every_ms: float) -> list[TraceRequest]:
    """None shares anything with another."""
    return [TraceRequest(at * every_ms, 8000, 20, tuple(range(16 * at, 16 * at + 16))) for at in range(count)]


def judged(trace: list[TraceRequest], refuses: int | None = None) -> Simulation:
    """A run that has ended. ``refuses``: one more is turned away, for no reason."""
    simulation = Simulation(cluster(), trace, Run(jitter_s=0.0))
    keep_placements(simulation)
    if refuses is not None:
        simulation.conductor.turned_away.add(refuses)
    simulation.run()
    return simulation


def test_who_would_have_met_the_limits_and_hurt_nobody_was_refused_wrongly() -> None:
    simulation = judged(prompts(12, every_ms=3000.0), refuses=5)
    assert (simulation.results.fate == Fate.REJECTED).sum() == 1
    assert false_rejections(simulation, 4, seed=1).tolist() == [True]


def test_who_would_have_come_too_late_or_made_others_late_was_refused_rightly() -> None:
    simulation = judged(prompts(24, every_ms=250.0))
    assert (simulation.results.fate == Fate.REJECTED).sum() >= 8
    assert false_rejections(simulation, 4, seed=1).tolist() == [False] * 4


def test_the_probe_knows_when_the_door_opens_and_passes_through_it_itself_never() -> None:
    simulation = Simulation(cluster(), [*prompts(12, every_ms=50.0), LATER], Run(jitter_s=0.0))
    probe = RetryProbe(simulation)
    keep_placements(simulation)
    results = simulation.run()
    refused = set(np.flatnonzero(results.fate == Fate.REJECTED).tolist())
    assert refused and set(probe.waits_s) == refused, "the queue ends long before the last request comes"
    for at, wait_s in probe.waits_s.items():
        assert 0.0 < wait_s <= 12.0
        assert np.isnan(results.ttft_s[at])
    assert len(probe.errors()) == len(refused)
    assert len(probe.errors_with_hindsight()) == len(refused)


@pytest.mark.slow
def test_a_run_that_is_looked_at_is_the_run_that_would_have_been() -> None:
    """Look-ahead samples answer lengths, and samples again those that answers have exceeded."""
    full = load_preset("paper-16").with_counts(prefill=4, decode=1).with_slo(tbt_ms=60.0)
    full = full.with_conductor(admission="lookahead", max_tokens=2000)
    trace = generate("conversation", 600, 1)

    def ends(probed: bool) -> list[float]:
        simulation = Simulation(full, trace, Run(speed=2.0))
        if probed:
            RetryProbe(simulation)
        results = simulation.run()
        assert 50 < (results.fate == Fate.REJECTED).sum() < 550
        return [float(end_s) for end_s in results.end_s]

    assert ends(probed=True) == ends(probed=False)


def test_with_hindsight_is_told_what_is_right_for_most_that_are_alike() -> None:
    rng = np.random.default_rng(3)
    features, is_slow = rng.random((90, 2)), np.arange(90) < 60
    features[:30] += 5.0  # slow ones behind a long queue
    true_s = np.where(is_slow, np.where(features[:, 0] > 2.0, 30.0, 8.0), 1.0)
    true_s[::30] = 60.0  # one of each kind is as no other
    told_s = estimated_with_hindsight(features, is_slow, true_s)
    right = np.abs(told_s / true_s - 1.0) <= 0.25
    assert right.sum() == 87 and not right[::30].any()


def test_clients_that_come_back_when_told_are_let_in_then() -> None:
    trace = [*prompts(200, every_ms=500.0), TraceRequest(200_000.0, 600, 2, (10**6,))]
    simulation = Simulation(cluster(), trace, Run(jitter_s=0.0, returns=2))
    results = simulation.run()
    assert len(results.retry_times) > 100, "half of them found no room at once"
    assert (results.fate == Fate.DONE).mean() > 0.7
    assert np.median(retry_time_errors(results)) <= 0.25
    strangers = Simulation(cluster(), trace, Run(jitter_s=0.0)).run()
    assert (strangers.fate == Fate.REJECTED).sum() > 50
    assert not strangers.retry_times


def test_who_gives_up_waited_as_long_as_can_be_told() -> None:
    simulation = Simulation(cluster(), [*prompts(60, every_ms=50.0), LATER], Run(jitter_s=0.0, returns=1))
    results = simulation.run()
    lost = [retry_time for retry_time in results.retry_times if results.fate[retry_time.request] == Fate.REJECTED]
    assert lost
    errors = dict(
        zip((retry_time.request for retry_time in results.retry_times), retry_time_errors(results), strict=True)
    )
    assert all(errors[retry_time.request] == abs(retry_time.wait_s / 60 - 1) for retry_time in lost)
