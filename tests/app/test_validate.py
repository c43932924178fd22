"""The simulator compared with a live pair of nodes: measurements, the simulator's description, the comparison."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conductor.placement.cost import DecodeCost, PrefillCost
from mooncake.app.bench.load.traffic import Answer
from mooncake.app.extras import MissingDependency
from mooncake.app.sim.commands.calibrate_pair import PairCosts, one_by_one, together
from mooncake.app.sim.commands.validate import (
    Compared,
    chosen_trace,
    described_cluster,
    markdown,
    parse,
    parts_ms,
    settings,
)
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.errors import ConfigError
from mooncake.trace import TraceRequest

COSTS = PairCosts(
    PrefillCost(10.0, 2.0, 0.0, True),
    DecodeCost(20.0, 2.0, 0.0, True),
    request_ms=7.0,
    handoff_ms=3.0,
    decode_tail=1.0,
    prefill_beside=1.5,
    decode_beside=2.0,
)


def answer(sent_s: float, *times_s: float) -> Answer:
    return Answer(sent_s, times_s, times_s[-1])


def test_prompts_sent_together_tell_what_each_takes_and_what_it_waits_for_beside() -> None:
    each_ms, beside_ms = one_by_one([answer(0.0, 0.31), answer(0.0, 0.11), answer(0.0, 0.21)])
    assert (each_ms, beside_ms) == (pytest.approx(100.0), pytest.approx(10.0))


def test_only_steps_of_the_whole_batch_count() -> None:
    early = answer(0.0, 0.0, 0.1, 0.2, 0.25, 0.30, 0.35, 0.4)
    late = answer(0.0, 0.15, 0.2, 0.25, 0.30, 0.35, 0.45)
    step_ms, context, tail = together([early, late], tokens=100)
    assert step_ms == pytest.approx(50.0)
    assert context == pytest.approx(100 + 4 + 100 + 2.5)
    assert tail == pytest.approx(1.0)


def simulated(*requests: TraceRequest, costs: PairCosts = COSTS) -> Simulation:
    options = parse(["--tokens-per-block", "8"])
    simulation = Simulation(
        described_cluster(settings(options), costs, 160.0), requests, Run(jitter_s=0.0, tokens_per_block=8)
    )
    simulation.run()
    return simulation


def test_one_request_takes_what_was_measured_alone() -> None:
    results = simulated(TraceRequest(0.0, 100, 11, tuple(range(13)))).results
    assert results.ttft_s[0] * 1e3 == pytest.approx(10 + 200 + 7)
    later_ms = 22.0
    assert results.mean_tbt_ms[0] == pytest.approx(later_ms + 3.0 / 10, rel=0.01), "the hand-off once, over ten gaps"


def test_a_prompt_beside_decodes_takes_longer_and_they_beside_it() -> None:
    long = TraceRequest(0.0, 8, 200, (100,))
    alone = simulated(long).results
    late = TraceRequest(1000.0, 100, 2, tuple(range(13)))
    both = simulated(long, late).results
    assert both.ttft_s[1] * 1e3 == pytest.approx(210 * 1.5 + 7, rel=0.02)
    more_ms = (both.end_s[0] - alone.end_s[0]) * 1e3
    assert more_ms == pytest.approx(315 / 2, rel=0.2), "half of the work that 315 ms hold was not done in them"


def test_a_hand_off_keeps_up_with_a_prefill_that_gets_faster() -> None:
    """A decode that runs during a long prompt ends early; layers are sent as they are computed, so none are left at the
    end."""
    short, long = TraceRequest(0.0, 8, 10, (100,)), TraceRequest(100.0, 1000, 3, tuple(range(125)))
    results = simulated(short, long).results
    assert results.end_s[0] < 1.0 < results.ttft_s[1]
    assert results.mean_tbt_ms[1] == pytest.approx(23.0 + 3.0 / 2, rel=0.05)


def test_noise_of_steps_shows_in_the_longest_tenth_alone() -> None:
    request = TraceRequest(0.0, 8, 100, (1,))
    calm, noisy = (simulated(request, costs=replace(COSTS, decode_tail=tail)) for tail in (1.0, 1.5))
    assert noisy.results.tail_tbt_ms[0] == pytest.approx(1.5 * calm.results.tail_tbt_ms[0])
    assert noisy.results.mean_tbt_ms[0] == calm.results.mean_tbt_ms[0]


def test_the_trace_has_the_rate_that_is_asked_for_and_is_the_same_for_both() -> None:
    trace = chosen_trace(parse(["--requests", "50", "--rate", "2.0"]))
    times_ms = [request.timestamp_ms for request in trace]
    assert times_ms == sorted(times_ms) and times_ms[0] == 0.0
    assert times_ms[-1] == pytest.approx(25_000)
    assert trace == chosen_trace(parse(["--requests", "50", "--rate", "2.0"]))


def test_figures_outside_their_limits_are_told() -> None:
    assert Compared("p50", 100.0, 109.0, 0.1).is_within
    assert not Compared("p50", 100.0, 111.0, 0.1).is_within
    assert Compared("p90", 100.0, 500.0).is_within, "no limit is set on it"
    assert math.isinf(Compared("nothing came", 0.0, 1.0).error)


def test_the_saved_page_is_that_of_the_saved_figures() -> None:
    folder = Path(__file__).parents[2] / "deploy" / "reproduction"
    line = json.loads((folder / "validation.json").read_text())
    rows = [Compared(row["what"], row["live"], row["simulated"], row["limit"]) for row in line["results"]]
    assert (folder / "validation.md").read_text() == markdown(line, rows)


def test_what_makes_no_sense_is_one_sentence() -> None:
    for rate in ("0", "nan", "inf", "many"):
        with pytest.raises(ConfigError, match=f"--rate must be positive, got '{rate}'"):
            parse(["--rate", rate])


def test_plots_that_cannot_be_drawn_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it was not installed
    with pytest.raises(MissingDependency, match="--out needs matplotlib"):
        parse(["--out", str(tmp_path)])


def test_a_first_token_s_time_is_waiting_for_others_and_own_work() -> None:
    """Three requests sent at 0, 1 and 10 s; their first tokens come at 2, 5 and 11 s."""
    waited_ms, own_ms = parts_ms(np.array([0.0, 1.0, 10.0]), np.array([2.0, 4.0, 1.0]))
    assert waited_ms.tolist() == [0.0, 1000.0, 0.0]
    assert own_ms.tolist() == [2000.0, 3000.0, 1000.0]
