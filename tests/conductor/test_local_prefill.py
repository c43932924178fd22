"""A prompt of which a decode node has nearly everything stays there, when that is predicted to be faster."""

from dataclasses import replace

import pytest
from placing import Cluster, incarnation, incarnations

from conductor.placement.local_prefill import local_prefill
from conductor.placement.scheduler import Placement
from conductor.registry import NodeLoad

TAIL = 64


@pytest.fixture
def cluster() -> Cluster:
    """Its decode nodes can switch, and compute as fast as the others."""
    cluster = Cluster()
    for node in list(cluster.fleet.registry.nodes()):
        if node.info.role == "decode":
            info = replace(node.info, can_switch=True)
            cluster.fleet.registry.register(info, cluster.now)
            for size in (1, 10, 100):
                cluster.fleet.costs.observe_prefill(info.node_id, size, 0, float(size))
    cluster.fleet.registry.version += 1  # so that the view is built of what they are now
    return cluster


def choose(cluster: Cluster, runs: dict[str, int], num_tokens: int = 640, **changes: object) -> Placement | None:
    facts = cluster.facts(num_tokens, runs, **changes)
    query = cluster.scheduler.query(facts, cluster.now)
    return local_prefill(query, cluster.scheduler.answer(query), cluster.fleet.costs, TAIL)


def test_the_decode_node_that_has_all_but_a_block_computes_it(cluster: Cluster) -> None:
    placement = choose(cluster, {"d1": 9})
    assert placement is not None
    assert (placement.prefill.node_id, placement.decode, placement.new_tokens) == ("d1", None, 64)
    assert placement.predicted_ttft_ms == pytest.approx(64, rel=0.05)


def test_a_longer_uncached_part_goes_to_a_prefill_node(cluster: Cluster) -> None:
    assert choose(cluster, {"d1": 8}) is None


def test_a_prefill_node_that_has_it_too_is_preferred(cluster: Cluster) -> None:
    cluster.fleet.registry.heartbeat("d1", incarnation("d1"), NodeLoad(), False, cluster.now)
    cluster.fleet.heartbeat("d1", NodeLoad(running=8, context_tokens=4096))
    assert choose(cluster, {"d1": 9, "p0": 9}) is None


def test_nodes_that_cannot_or_must_not_are_left_out(cluster: Cluster) -> None:
    assert choose(cluster, {"d1": 9}, excluded=incarnations("d1")) is None
    assert choose(Cluster(), {"d1": 9}) is None, "its decode nodes do nothing but decode"
