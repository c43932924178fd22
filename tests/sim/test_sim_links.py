"""Bytes between simulated hosts: who shares what, and how long it takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.app.sim.events import Agenda
from mooncake.app.sim.links import Flow, Network


class Wire:
    """Hosts with 100 bytes a second each way, and when each flow has arrived."""

    def __init__(self, *hosts: str, speed: float = 100.0) -> None:
        self.agenda = Agenda()
        self.network = Network(self.agenda)
        self.arrived: dict[str, float] = {}
        for host in hosts:
            self.network.join(host, speed)

    def send(self, name: str, source: str, target: str, num_bytes: float, limit: float = float("inf")) -> Flow:
        def done(flow: Flow) -> None:
            self.arrived[name] = self.agenda.now

        return self.network.send(source, target, num_bytes, done, limit)


def test_two_flows_share_the_way_out_and_the_second_speeds_up_when_the_first_is_over() -> None:
    wire = Wire("a", "b", "c")
    wire.send("short", "a", "b", 100.0)
    wire.send("long", "a", "c", 200.0)
    wire.agenda.run()
    assert wire.arrived == {"short": pytest.approx(2.0), "long": pytest.approx(3.0)}


def test_a_flow_with_a_limit_leaves_the_rest_to_the_others() -> None:
    wire = Wire("a", "b", "c")
    wire.send("slow", "a", "b", 100.0, limit=20.0)
    wire.send("fast", "a", "c", 160.0)
    wire.agenda.run()
    assert wire.arrived == {"slow": pytest.approx(5.0), "fast": pytest.approx(2.0)}


def test_shares_are_max_min_fair_over_two_bottlenecks() -> None:
    """a sends to b and c; d sends to c. Two flows share c's ingress and a's egress: all get a half."""
    wire = Wire("a", "b", "c", "d")
    wire.network.join("fat", 1000.0)
    first = wire.send("ab", "a", "b", 1e6)
    second = wire.send("ac", "a", "c", 1e6)
    third = wire.send("dc", "d", "c", 1e6)
    fourth = wire.send("fc", "fat", "c", 1e6)
    assert [flow.rate for flow in (second, third, fourth)] == [pytest.approx(100 / 3)] * 3
    assert first.rate == pytest.approx(100 - 100 / 3)


def test_a_sender_that_changes_its_pace_takes_its_flow_along_and_others_have_the_rest() -> None:
    wire = Wire("a", "b", "c")
    slow = wire.send("slow", "a", "b", 100.0, limit=20.0)
    wire.send("fast", "a", "c", 300.0)
    wire.agenda.at(1.0, wire.network.finish_within, slow, 2.0)  # 80 bytes in two seconds
    wire.agenda.run()
    assert wire.arrived == {"slow": pytest.approx(3.0), "fast": pytest.approx(4.0)}


def test_what_is_cancelled_never_arrives_and_gives_its_share_back() -> None:
    wire = Wire("a", "b", "c")
    gone = wire.send("gone", "a", "b", 1000.0)
    wire.send("stays", "a", "c", 100.0)
    wire.network.cancel(gone)
    wire.agenda.run()
    assert wire.arrived == {"stays": pytest.approx(1.0)}
    assert wire.network.num_open == 0


flows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(1.0, 1e4), st.floats(1.0, 300.0), st.floats(0.0, 20.0)),
    min_size=1,
    max_size=12,
)
paces = st.lists(st.tuples(st.integers(0, 11), st.floats(0.1, 50.0), st.floats(0.0, 40.0)), max_size=4)


@given(flows, paces)
@settings(max_examples=150)
def test_no_port_carries_more_than_it_can_and_nobody_could_have_more(
    asked: list[tuple[int, int, float, float, float]], changes: list[tuple[int, float, float]]
) -> None:
    """Max-min fair: every flow is at its limit, or uses a full port in which no flow has more."""
    wire = Wire("0", "1", "2", "3")
    alive: list[Flow] = []

    def start(number: int, source: int, target: int, size: float, limit: float) -> None:
        alive.append(wire.send(str(number), str(source), str(target), size, limit))
        check()

    def check() -> None:
        now = [flow for flow in alive if flow in flow.source.flows]
        for port in {port for flow in now for port in (flow.source, flow.target)}:
            used = sum(flow.rate for flow in now if port in (flow.source, flow.target))
            assert used <= port.capacity * (1 + 1e-6)
        for flow in now:
            assert flow.rate > 0
            if flow.rate >= flow.limit * (1 - 1e-6):
                continue
            ends = [
                [other.rate for other in now if port in (other.source, other.target)]
                for port in (flow.source, flow.target)
            ]
            assert any(sum(rates) >= 100 * (1 - 1e-6) and flow.rate >= max(rates) * (1 - 1e-6) for rates in ends)

    def change(number: int, left_s: float) -> None:
        if number < len(alive) and alive[number] in alive[number].source.flows:
            wire.network.finish_within(alive[number], left_s)
            check()

    for number, left_s, at_s in changes:
        wire.agenda.at(at_s, change, number, left_s)
    for number, (source, target, size, limit, at_s) in enumerate(asked):
        wire.agenda.at(at_s, start, number, source, target, size, limit)
    wire.agenda.run()
    assert len(wire.arrived) == len(asked)
    assert wire.network.bytes_moved == pytest.approx(sum(flow.num_bytes for flow in alive), rel=1e-6)
