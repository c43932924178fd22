"""Summarised decoding compared with the real batching code, step by step: the same tokens at the same times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.app.sim.cluster import Machines, Model, StepCurve
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.machines.coupled import CoupledMachine
from mooncake.app.sim.machines.decode import DecodeMachine
from mooncake.app.sim.requests import SimRequest

CURVE = StepCurve(decode_step_ms=20.0, decode_sequence_ms=1.5, decode_context_ms=1e-4)
MODEL = Model(num_layers=4, token_bytes=1024, block_tokens=512)
GROUP = Machines(role="decode", count=1, curve="it", kv_tokens=1 << 22)

Arrival = tuple[float, int, int]  # seconds, prompt, answer
End = tuple[float, float]  # seconds, tail


def summed_up(arrivals: list[Arrival]) -> dict[int, End]:
    agenda, ends = Agenda(), {}

    def ended(request: SimRequest, tail_ms: float) -> None:
        ends[request.index] = (agenda.now, tail_ms)

    machine = DecodeMachine(GROUP, CURVE, MODEL, agenda, ended)
    _join_all(agenda, arrivals, machine.join)
    assert not machine.running and not machine.waiting and machine.reserved_tokens == 0 and machine.context == 0
    assert machine.tokens == sum(output - 1 for _, _, output in arrivals)
    return ends


def step_by_step(arrivals: list[Arrival]) -> dict[int, End]:
    agenda, ends = Agenda(), {}

    def ended(request: SimRequest, tail_ms: float) -> None:
        ends[request.index] = (agenda.now, tail_ms)

    machine = CoupledMachine(GROUP, CURVE, MODEL, agenda, lambda *_: None, ended)
    _join_all(agenda, arrivals, machine.receive)
    machine.pool.check()
    assert machine.pool.num_in_use == 0
    return ends


def _join_all(agenda: Agenda, arrivals: list[Arrival], join: object) -> None:
    assert callable(join)
    for index, (at_s, prompt, output) in enumerate(arrivals):
        request = SimRequest(index, prompt, output, [])
        request.first_token_s = at_s
        agenda.at(at_s, join, request)
    agenda.run()


def test_one_sequence_alone_takes_the_curve() -> None:
    [(end_s, tail_ms)] = summed_up([(0.0, 1000, 11)]).values()
    gaps = [20.0 + 1.5 + 1e-4 * (1001 + step) for step in range(10)]
    assert end_s == pytest.approx(sum(gaps) / 1e3)
    assert tail_ms == pytest.approx(max(gaps))


arrival = st.tuples(st.floats(0.0, 6.0), st.integers(1, 20_000), st.integers(2, 300))


@given(st.lists(arrival, min_size=1, max_size=25))
@settings(max_examples=60)
def test_sequences_end_at_the_same_time_as_in_the_shipped_engine(arrivals: list[Arrival]) -> None:
    ours, theirs = summed_up(arrivals), step_by_step(arrivals)
    assert ours.keys() == theirs.keys() == set(range(len(arrivals)))
    for index in ours:
        assert ours[index][0] == pytest.approx(theirs[index][0], rel=1e-6)
        # within a run of steps the longest tenth is taken from its end, between runs in order of their longest step
        assert ours[index][1] == pytest.approx(theirs[index][1], rel=0.01)


def test_the_same_on_a_busy_machine_for_minutes() -> None:
    rng = np.random.default_rng(7)
    times = rng.exponential(1.0, 300).cumsum()
    arrivals = [(float(at), int(rng.integers(100, 30_000)), int(rng.integers(2, 600))) for at in times]
    ours, theirs = summed_up(arrivals), step_by_step(arrivals)
    for index in ours:
        assert ours[index][0] == pytest.approx(theirs[index][0], rel=1e-6)
        assert ours[index][1] == pytest.approx(theirs[index][1], rel=0.01)


def test_who_waits_on_a_full_machine_does_not_undo_its_slowing_down() -> None:
    agenda, ends = Agenda(), dict[int, float]()
    full = Machines(role="decode", count=1, curve="it", max_sequences=1)
    curve, model = StepCurve(decode_step_ms=100.0), Model(num_layers=1, token_bytes=1)
    machine = DecodeMachine(full, curve, model, agenda, lambda request, _: ends.setdefault(request.index, agenda.now))

    def join(index: int) -> None:
        request = SimRequest(index, 10, 101, [])
        request.first_token_s = agenda.now
        machine.join(request)

    agenda.at(0.0, join, 0)
    agenda.at(1.05, machine.disturb, 10.0)
    agenda.at(1.07, join, 1)  # in the same step: there is no room for it
    agenda.run()
    assert ends[0] == pytest.approx(11 * 0.1 + 89 * 1.0)
