"""Role switches: what makes the balancer move a node, and what does not."""

import math

import numpy as np
import pytest
from placing import Cluster
from placing import node as new_node

from conductor.control.balance import SWITCH_MOVES, BalanceLimits, Balancer, Switch, SwitchState
from conductor.registry import NodeInfo
from mooncake.types import Role


class Town:
    """Eight nodes whose roles can change; requests arrive at rates that the test sets."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.cluster = Cluster(prefill=prefill, decode=decode, stores=0)
        self.balancer = Balancer(tbt_ms=100.0, block_tokens=64)
        self.flips: list[tuple[float, Role]] = []
        self.rng = np.random.default_rng(5)

    def run(
        self, seconds: int, prefill_nodes: float, decode_nodes: float, noise: float = 0.0, arrivals: int = 1
    ) -> None:
        """Run with the work of so many nodes per second; draining for a switch takes ten seconds."""
        cluster, balancer = self.cluster, self.balancer
        for _ in range(seconds):
            cluster.now += 1.0
            view = cluster.fleet.view(cluster.now)
            factor = math.exp(self.rng.normal(0.0, noise)) if noise else 1.0
            for _ in range(arrivals):
                balancer.clock.arrived()
            balancer.prefill.add(1e3 * prefill_nodes * factor)
            balancer.decode.add(1e3 * decode_nodes * factor)
            for node in cluster.fleet.registry.nodes():
                cluster.fleet.registry.heartbeat(
                    node.info.node_id, node.info.incarnation, node.load, False, cluster.now
                )
            if balancer.tick(view, cluster.now) is None and balancer.switching is not None:
                self._go_on()

    def _go_on(self) -> None:
        found = self.balancer.switching
        assert found is not None
        switch, state = found
        since = self.balancer._running.since if self.balancer._running else 0.0
        if self.cluster.now - since < 10.0:
            return
        if state is SwitchState.DRAINING:
            self.balancer.moved(SwitchState.FLIPPING, self.cluster.now)
            return
        registry = self.cluster.fleet.registry
        node = registry.get(switch.node_id)
        assert node is not None
        info: NodeInfo = node.info
        flipped = NodeInfo(info.node_id, switch.to, info.incarnation + 1, info.control_address, info.segment, "kv", 64)
        registry.register(flipped, self.cluster.now)
        self.balancer.moved(SwitchState.DONE, self.cluster.now)
        self.flips.append((self.cluster.now, switch.to))

    @property
    def split(self) -> tuple[int, int]:
        view = self.cluster.fleet.view(self.cluster.now)
        return len(view.prefill.nodes), len(view.decode.nodes)


def test_it_follows_a_lasting_shift_and_then_holds_still() -> None:
    town = Town(6, 2)
    town.run(600, prefill_nodes=4.8, decode_nodes=1.5)
    assert town.flips == []
    town.run(900, prefill_nodes=2.2, decode_nodes=4.0)
    assert town.split == (3, 5)
    count = len(town.flips)
    town.run(1200, prefill_nodes=2.2, decode_nodes=4.0)
    assert len(town.flips) == count


def test_time_without_nodes_does_not_delay_a_switch() -> None:
    town = Town(0, 0)
    town.run(60, prefill_nodes=0.0, decode_nodes=0.0, arrivals=0)
    everybody = Town(6, 2)
    everybody.balancer, everybody.cluster.now = town.balancer, town.cluster.now
    everybody.run(900, prefill_nodes=2.2, decode_nodes=4.0)
    assert everybody.split == (3, 5)


def test_a_side_that_lost_its_last_node_gets_one() -> None:
    town = Town(0, 3)
    town.run(60, prefill_nodes=0.3, decode_nodes=0.3)
    assert town.split[0] == 1


def test_nodes_that_could_not_switch_are_asked_again() -> None:
    town = Town(1, 2)
    asked = []
    for _ in range(900):
        town.run(1, prefill_nodes=2.5, decode_nodes=0.2)
        if town.balancer.switching is not None:
            asked.append(town.balancer.switching[0].node_id)
            town.balancer.moved(SwitchState.GIVEN_UP, town.cluster.now)  # as when the other one reports late
    assert len(asked) >= 5
    assert set(asked) == {"d0", "d1"}


def test_nodes_that_have_rested_are_forgotten() -> None:
    """A node that is replaced may have another id each time."""
    town = Town(1, 2)
    registry = town.cluster.fleet.registry
    for number in range(1800):
        town.run(1, prefill_nodes=2.5, decode_nodes=0.2)
        if town.balancer.switching is not None:
            town.balancer.moved(SwitchState.GIVEN_UP, town.cluster.now)
            registry.register(new_node(f"d-new{number}", Role.DECODE), town.cluster.now)
            assert all(until > town.cluster.now for until in town.balancer._node_rests_until.values())


def test_noise_causes_no_switch() -> None:
    town = Town(4, 4)
    town.run(3600, prefill_nodes=2.8, decode_nodes=2.8, noise=0.6)
    assert len(town.flips) <= 6, "an hour"


def test_a_pause_between_two_bursts_is_no_shift() -> None:
    town = Town(5, 3)
    for _ in range(10):
        town.run(60, prefill_nodes=3.4, decode_nodes=1.0)
        town.run(240, prefill_nodes=0.0, decode_nodes=0.0, arrivals=0)
    assert town.flips == []


def test_idle_clusters_have_nothing_to_gain() -> None:
    town = Town(7, 1)
    town.run(600, prefill_nodes=0.2, decode_nodes=0.5)
    assert town.flips == []


def test_the_last_node_of_a_role_stays() -> None:
    town = Town(1, 1)
    town.run(600, prefill_nodes=0.1, decode_nodes=5.0)
    assert town.split == (1, 1)


def test_demand_counts_requests_in_nodes() -> None:
    cluster = Cluster(prefill=1, decode=1)
    balancer = Balancer(tbt_ms=110.0, block_tokens=64)
    view = cluster.fleet.view(cluster.now)
    balancer.tick(view, 0.0)
    for second in range(1, 121):
        for _ in range(10):  # a sequence costs 1 ms of the 100 that the step's fixed part leaves
            balancer.arrived(view, prefill_ms=50.0, num_tokens=64, expected_tokens=50.0)
        balancer.tick(view, float(second))
    assert balancer.prefill.level == pytest.approx(0.5, rel=0.02)
    assert balancer.decode.level == pytest.approx(10 * 50 * 0.110 / 100, rel=0.15)


def test_a_node_that_does_not_drain_keeps_its_role() -> None:
    limits = BalanceLimits(smoothing_s=1.0, patience_s=20.0)
    cluster = Cluster(prefill=3, decode=1)
    balancer = Balancer(100.0, 64, limits)
    switches = []
    for second in range(60):
        balancer.clock.arrived()
        balancer.decode.add(2e3)
        if (switch := balancer.tick(cluster.fleet.view(cluster.now), float(second))) is not None:
            switches.append(switch)
    assert switches == [Switch(switches[0].node_id, Role.DECODE)]
    assert balancer.switching is None
    assert balancer.switches == 0


def test_every_switch_ends() -> None:
    ends = {state for state, moves in SWITCH_MOVES.items() if not moves}
    assert ends == {SwitchState.DONE, SwitchState.GIVEN_UP}
    assert all(moves & ends for state, moves in SWITCH_MOVES.items() if state not in ends)
