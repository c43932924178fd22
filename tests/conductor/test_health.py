"""Sick nodes: found by what they do, taken out step by step, and taken back when they are well."""

import math

import numpy as np
import pytest

from conductor.control.health import TRANSITIONS, HealthTracker
from conductor.registry import Health
from mooncake.config import HealthSection

USUAL_MS = 20.0


class Nodes:
    """Decode nodes that report ten steps a second and are probed once a second."""

    def __init__(self, usual_ms: float = USUAL_MS, count: int = 6) -> None:
        self.usual_ms = usual_ms
        self.tracker = HealthTracker(HealthSection())
        self.now = 0.0
        self.rng = np.random.default_rng(3)
        self.slower = dict.fromkeys([f"d{i}" for i in range(count)], 1.0)
        self.silent: set[str] = set()
        self.history: list[tuple[float, str, Health]] = []
        for name in self.slower:
            self.tracker.join(name, "decode", 0.0)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for name, slower in self.slower.items():
                isolated = self.tracker.state(name) is Health.ISOLATED
                if name not in self.silent and not isolated:
                    for _ in range(10):
                        took_ms = self.usual_ms * slower * self.rng.lognormal(0.0, 0.1)
                        self.tracker.measured(name, took_ms, self.usual_ms)
                self.tracker.probed(name, name not in self.silent and slower < 2.0)
            for change in self.tracker.tick(self.now, idle=list(self.slower)):
                self.history.append((self.now, change.node_id, change.to))

    def states(self, name: str) -> list[Health]:
        return [to for _, node_id, to in self.history if node_id == name]


def test_an_hour_of_noise_isolates_nobody() -> None:
    nodes = Nodes()
    nodes.run(3600)
    assert nodes.history == []


def test_a_slow_node_is_drained_within_half_a_minute_and_returns_when_it_is_healthy() -> None:
    nodes = Nodes()
    nodes.run(60)
    nodes.slower["d2"] = 5.0
    nodes.run(30)
    assert nodes.states("d2") == [Health.SUSPECTED, Health.DRAINING, Health.ISOLATED]
    assert {name for _, name, _ in nodes.history} == {"d2"}
    nodes.run(120)
    assert nodes.tracker.state("d2") is Health.ISOLATED, "it is still slow"
    nodes.slower["d2"] = 1.0
    nodes.run(90)
    assert nodes.states("d2")[3:] == [Health.PROBATION, Health.HEALTHY]


def test_a_millisecond_more_is_what_a_busy_machine_does_and_no_failure() -> None:
    nodes = Nodes(usual_ms=0.8)
    nodes.run(60)
    nodes.slower["d1"] = 1.9
    nodes.run(60)
    assert nodes.history == []
    nodes.slower["d1"] = 10.0
    nodes.run(30)
    assert Health.ISOLATED in nodes.states("d1"), "so much is one"


def test_a_step_during_which_the_machine_stood_still_is_no_failure() -> None:
    nodes = Nodes(count=2)
    nodes.run(60)
    nodes.tracker.measured("d0", 60_000.0, nodes.usual_ms)
    nodes.run(60)
    assert nodes.history == []
    nodes.tracker.measured("d1", 60_000.0, nodes.usual_ms)
    assert not nodes.tracker.is_slow("d1"), "it may have no further step for long"


def test_a_silent_node_is_suspected_within_three_seconds() -> None:
    nodes = Nodes()
    nodes.run(10)
    nodes.silent.add("d0")
    nodes.run(3)
    assert nodes.states("d0") == [Health.SUSPECTED]
    nodes.silent.clear()
    nodes.run(15)
    assert nodes.states("d0") == [Health.SUSPECTED, Health.HEALTHY], "a short pause is forgiven"


def test_a_suspect_is_one_no_longer_for_a_time_in_which_nobody_listened() -> None:
    nodes = Nodes()
    nodes.tracker.checksum_errors("d0", 2, nodes.now)
    nodes.run(2)
    nodes.now += 3600.0
    nodes.tracker.discount_pause(3600.0)
    nodes.run(2)
    assert nodes.states("d0") == [Health.SUSPECTED]
    nodes.run(4)
    assert nodes.states("d0")[1:] == [Health.DRAINING, Health.ISOLATED], "its errors are as old as before, too"


def test_corrupt_blocks_isolate() -> None:
    nodes = Nodes()
    nodes.run(10)
    for _ in range(8):
        nodes.tracker.checksum_errors("d4", 1, nodes.now)
        nodes.run(1)
    assert Health.ISOLATED in nodes.states("d4")


def test_what_a_node_counts_may_be_any_number() -> None:
    """It takes the conductor no longer, and says nothing of other nodes."""
    nodes = Nodes(count=2)
    nodes.tracker.checksum_errors("d0", 1 << 63, nodes.now)
    nodes.tracker.checksum_errors("d1", -(1 << 64), nodes.now)
    for ms in (math.inf, math.nan, -1.0):
        nodes.tracker.measured("d1", ms, nodes.usual_ms)
    nodes.run(60)
    assert Health.ISOLATED in nodes.states("d0") and nodes.states("d1") == []
    nodes.slower["d1"] = 10.0
    nodes.run(60)
    assert nodes.tracker.is_slow("d1")


def test_all_nodes_slow_is_load_and_no_failure() -> None:
    nodes = Nodes()
    nodes.run(60)
    nodes.slower = dict.fromkeys(nodes.slower, 3.0)
    nodes.run(5)
    assert all(nodes.tracker.state(name) in (Health.HEALTHY, Health.SUSPECTED) for name in nodes.slower)


def test_a_node_alone_in_its_role_is_not_suspected_when_its_host_is_busy() -> None:
    nodes = Nodes(count=1)
    nodes.run(60)
    nodes.slower["d0"] = 1.9
    nodes.run(60)
    assert nodes.history == [], "nobody else is there to compare it with, or to take its work"


def test_one_of_two_nodes_is_not_suspected_for_what_slows_the_other_almost_as_much() -> None:
    nodes = Nodes(count=2)
    nodes.run(60)
    nodes.slower = {"d0": 1.9, "d1": 1.4}
    nodes.run(60)
    assert nodes.history == []
    nodes.slower["d0"] = 5.0
    nodes.run(30)
    assert Health.ISOLATED in nodes.states("d0"), "this one is slow by itself"


def test_no_more_than_a_third_are_taken_out() -> None:
    nodes = Nodes()
    nodes.run(10)
    nodes.silent = {"d0", "d1", "d2", "d3"}
    nodes.run(60)
    out = [name for name in nodes.slower if nodes.tracker.state(name) in (Health.DRAINING, Health.ISOLATED)]
    assert len(out) == 2


def test_a_relapse_on_probation_isolates_at_once() -> None:
    nodes = Nodes()
    nodes.run(60)
    nodes.slower["d1"] = 5.0
    nodes.run(30)
    nodes.slower["d1"] = 1.0
    nodes.run(5)
    assert nodes.tracker.state("d1") is Health.PROBATION
    nodes.silent.add("d1")
    nodes.run(4)
    assert nodes.tracker.state("d1") is Health.ISOLATED


@pytest.mark.parametrize("state", Health)
def test_every_health_state_can_recover(state: Health) -> None:
    reached, before = {state}, set[Health]()
    while reached != before:
        before = set(reached)
        reached |= {to for (start, _), to in TRANSITIONS.items() if start in reached}
    assert Health.HEALTHY in reached
