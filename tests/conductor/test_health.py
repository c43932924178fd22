"""Sick nodes: found by what they do, taken out step by step, and taken back when they are well."""

import numpy as np
import pytest

from conductor.health import MOVES, Health, HealthWatch

USUAL_MS = 20.0


class Ward:
    """Six decode nodes that report ten steps a second and are probed once a second."""

    def __init__(self) -> None:
        self.watch = HealthWatch()
        self.now = 0.0
        self.rng = np.random.default_rng(3)
        self.slower = dict.fromkeys([f"d{i}" for i in range(6)], 1.0)
        self.silent: set[str] = set()
        self.history: list[tuple[float, str, Health]] = []
        for name in self.slower:
            self.watch.join(name, "decode", 0.0)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for name, slower in self.slower.items():
                isolated = self.watch.state(name) is Health.ISOLATED
                if name not in self.silent and not isolated:
                    for _ in range(10):
                        self.watch.measured(name, USUAL_MS * slower * self.rng.lognormal(0.0, 0.1), USUAL_MS)
                self.watch.probed(name, name not in self.silent and slower < 2.0)
            for move in self.watch.tick(self.now, empty=list(self.slower)):
                self.history.append((self.now, move.node_id, move.to))

    def states(self, name: str) -> list[Health]:
        return [to for _, node_id, to in self.history if node_id == name]


def test_an_hour_of_noise_isolates_nobody() -> None:
    ward = Ward()
    ward.run(3600)
    assert ward.history == []


def test_a_slow_node_is_drained_within_half_a_minute_and_comes_back_when_it_is_well() -> None:
    ward = Ward()
    ward.run(60)
    ward.slower["d2"] = 5.0
    ward.run(30)
    assert ward.states("d2") == [Health.SUSPECTED, Health.DRAINING, Health.ISOLATED]
    assert {name for _, name, _ in ward.history} == {"d2"}
    ward.run(120)
    assert ward.watch.state("d2") is Health.ISOLATED, "it is still slow"
    ward.slower["d2"] = 1.0
    ward.run(90)
    assert ward.states("d2")[3:] == [Health.PROBATION, Health.HEALTHY]


def test_a_silent_node_is_suspected_within_three_seconds() -> None:
    ward = Ward()
    ward.run(10)
    ward.silent.add("d0")
    ward.run(3)
    assert ward.states("d0") == [Health.SUSPECTED]
    ward.silent.clear()
    ward.run(15)
    assert ward.states("d0") == [Health.SUSPECTED, Health.HEALTHY], "a short pause is forgiven"


def test_corrupt_blocks_isolate() -> None:
    ward = Ward()
    ward.run(10)
    for _ in range(8):
        ward.watch.checksum_error("d4", ward.now)
        ward.run(1)
    assert Health.ISOLATED in ward.states("d4")


def test_everybody_slow_is_load_and_not_sickness() -> None:
    ward = Ward()
    ward.run(60)
    ward.slower = dict.fromkeys(ward.slower, 3.0)
    ward.run(5)
    assert all(ward.watch.state(name) in (Health.HEALTHY, Health.SUSPECTED) for name in ward.slower)


def test_no_more_than_a_third_are_taken_out() -> None:
    ward = Ward()
    ward.run(10)
    ward.silent = {"d0", "d1", "d2", "d3"}
    ward.run(60)
    out = [name for name in ward.slower if ward.watch.state(name) in (Health.DRAINING, Health.ISOLATED)]
    assert len(out) == 2


def test_a_relapse_on_probation_isolates_at_once() -> None:
    ward = Ward()
    ward.run(60)
    ward.slower["d1"] = 5.0
    ward.run(30)
    ward.slower["d1"] = 1.0
    ward.run(5)
    assert ward.watch.state("d1") is Health.PROBATION
    ward.silent.add("d1")
    ward.run(4)
    assert ward.watch.state("d1") is Health.ISOLATED


@pytest.mark.parametrize("state", Health)
def test_every_state_can_get_well(state: Health) -> None:
    reached, before = {state}, set[Health]()
    while reached != before:
        before = set(reached)
        reached |= {to for (start, _), to in MOVES.items() if start in reached}
    assert Health.HEALTHY in reached
