"""The registry: who is in the cluster, who gets work, who is refused."""

from dataclasses import replace
from itertools import product
from typing import ClassVar

import pytest

from conductor.registry import GONE_KEPT, TRANSITIONS, Health, NodeEvent, NodeInfo, NodeLoad, NodeState, Registry
from mooncake.errors import ConfigError, StaleEpoch
from mooncake.types import Role, SegmentAddress

SETTINGS = {"model.dtype": "float32", "block.windows": "on"}


def prefill(node_id: str = "p0", incarnation: int = 1, **changes: object) -> NodeInfo:
    values: dict[str, object] = {
        "node_id": node_id,
        "role": Role.PREFILL,
        "incarnation": incarnation,
        "control_address": f"127.0.0.1:{4000 + incarnation}",
        "kv_fingerprint": "kv",
        "block_tokens": 64,
        **changes,
    }
    return NodeInfo(**values)  # type: ignore[arg-type]


def registry() -> Registry:
    return Registry("kv", 64, interval_s=0.5, timeout_s=5.0, max_model_len=256, settings=SETTINGS, slot_bytes=1024)


def beat(nodes: Registry, now: float, node_id: str = "p0", incarnation: int = 1, draining: bool = False) -> bool:
    return nodes.heartbeat(node_id, incarnation, NodeLoad(waiting=3), draining, now)


def usable(nodes: Registry, barred: int = 0) -> list[str]:
    return [node.info.node_id for node in nodes.usable(Role.PREFILL, frozenset({barred} - {0}))]


def state(nodes: Registry, node_id: str = "p0") -> NodeState:
    node = nodes.get(node_id)
    assert node is not None
    return node.state


def test_a_node_without_heartbeats_becomes_suspect_and_then_gone() -> None:
    nodes = registry()
    assert nodes.register(prefill(), now=0.0) is None
    assert beat(nodes, now=0.5)
    assert state(nodes) is NodeState.LIVE
    assert nodes.get("p0").load.waiting == 3  # type: ignore[union-attr]

    assert nodes.tick(now=1.9) == []
    assert state(nodes) is NodeState.LIVE
    assert nodes.tick(now=2.1) == []
    assert state(nodes) is NodeState.SUSPECT
    assert beat(nodes, now=2.2)
    assert state(nodes) is NodeState.LIVE

    assert [(node.info.node_id, node.state) for node in nodes.tick(now=7.3)] == [("p0", NodeState.GONE)]
    assert nodes.get("p0") is None
    assert not beat(nodes, now=7.4), "it must register again"
    nodes.register(prefill(), now=7.5)
    assert state(nodes) is NodeState.LIVE


def test_a_failed_call_makes_a_node_suspect_until_a_newer_heartbeat() -> None:
    nodes = registry()
    nodes.register(prefill("p0"), now=0.0)
    nodes.register(prefill("p1", 2), now=0.0)
    nodes.call_failed(prefill("p0"), now=1.0)
    assert usable(nodes) == ["p1"]
    beat(nodes, now=1.1)  # may have been on its way when the node died
    assert usable(nodes) == ["p1"]
    beat(nodes, now=2.1)
    assert usable(nodes) == ["p0", "p1"]


def test_suspects_work_when_nobody_else_is_left() -> None:
    nodes = registry()
    nodes.register(prefill(), now=0.0)
    nodes.call_failed(prefill(), now=0.1)
    assert usable(nodes) == ["p0"]


def test_a_failed_call_to_an_earlier_incarnation_is_ignored() -> None:
    nodes = registry()
    old = prefill(incarnation=1)
    nodes.register(old, now=0.0)
    nodes.register(prefill(incarnation=2), now=1.0)
    nodes.call_failed(old, now=1.1)
    assert state(nodes) is NodeState.LIVE


def test_a_pause_of_the_conductor_makes_no_node_suspect() -> None:
    nodes = registry()
    nodes.register(prefill(), now=0.0)
    nodes.discount_pause(60.0)
    assert nodes.tick(now=60.5) == []
    assert state(nodes) is NodeState.LIVE


def test_a_new_incarnation_replaces_the_old_one_for_ever() -> None:
    nodes = registry()
    nodes.register(prefill(incarnation=1), now=0.0)
    replaced = nodes.register(prefill(incarnation=2), now=1.0)
    assert replaced is not None and replaced.incarnation == 1
    with pytest.raises(StaleEpoch):
        beat(nodes, now=1.1, incarnation=1)
    with pytest.raises(StaleEpoch):
        nodes.register(prefill(incarnation=1), now=1.2)
    assert beat(nodes, now=1.3, incarnation=2)


def test_so_many_ids_whose_processes_were_replaced_are_remembered_and_no_more() -> None:
    nodes = registry()
    for number in range(GONE_KEPT + 1):
        now = 10.0 * number
        nodes.register(prefill(f"p{number}", 2 * number + 1), now)
        nodes.register(prefill(f"p{number}", 2 * number + 2), now)
        nodes.tick(now + 9.0)
    with pytest.raises(StaleEpoch):
        nodes.register(prefill("p1", 3), now + 9.0)
    nodes.register(prefill("p0", 1), now + 9.0)


def test_a_paused_process_does_not_replace_its_successor() -> None:
    nodes = registry()
    nodes.register(prefill(incarnation=1), now=0.0)
    assert nodes.tick(now=5.1)
    nodes.register(prefill(incarnation=2), now=6.0)
    for now in (7.0, 100.0):
        with pytest.raises(StaleEpoch):
            beat(nodes, now, incarnation=1)
        with pytest.raises(StaleEpoch):
            nodes.register(prefill(incarnation=1), now)
        assert beat(nodes, now, incarnation=2)


def test_draining_gets_no_work_and_a_restart_ends_it() -> None:
    nodes = registry()
    nodes.register(prefill(), now=0.0)
    beat(nodes, now=0.5, draining=True)
    assert usable(nodes) == []
    nodes.register(prefill(incarnation=2), now=1.0)
    assert usable(nodes) == ["p0"]


def test_a_node_that_announced_it_has_left() -> None:
    nodes = registry()
    nodes.register(prefill(), now=0.0)
    beat(nodes, now=0.5, draining=True)
    assert nodes.tick(now=2.5) == []
    assert state(nodes) is NodeState.DRAINING, "nobody waits for its heartbeats"
    assert [(node.info.node_id, node.state) for node in nodes.tick(now=7.3)] == [("p0", NodeState.LEFT)]


def test_the_memory_for_a_sequence_is_that_of_the_largest_node_of_a_role() -> None:
    nodes = registry()
    nodes.register(prefill("p0"), now=0.0)
    for number in (1, 2):
        nodes.register(prefill(f"d{number}", number + 1, role=Role.DECODE), now=0.0)
    assert nodes.most_pages(Role.DECODE) == 0, "nobody has said"
    nodes.heartbeat("p0", 1, NodeLoad(blocks_total=99), False, 0.5)
    nodes.heartbeat("d1", 2, NodeLoad(blocks_total=10), False, 0.5)
    nodes.heartbeat("d2", 3, NodeLoad(blocks_total=7), False, 0.5)
    assert (nodes.most_pages(Role.DECODE), nodes.most_pages(Role.PREFILL)) == (10, 99)
    nodes.heartbeat("d2", 3, NodeLoad(blocks_total=12), False, 1.0)
    assert nodes.most_pages(Role.DECODE) == 12
    nodes.heartbeat("d1", 2, NodeLoad(blocks_total=10), False, 5.0)
    assert [node.info.node_id for node in nodes.tick(8.0)] == ["p0", "d2"]
    assert (nodes.most_pages(Role.DECODE), nodes.most_pages(Role.PREFILL)) == (10, 0)


class CountedLoad(NodeLoad):
    """Knows how often anybody asked for its memory."""

    asked: ClassVar[int] = 0

    @property
    def blocks_total(self) -> int:
        CountedLoad.asked += 1
        return 10


def test_each_request_asks_for_the_memory_but_nodes_are_looked_at_only_when_one_has_changed() -> None:
    nodes = registry()
    for number in range(50):
        nodes.register(prefill(f"p{number}", number + 1), now=0.0)
        nodes.heartbeat(f"p{number}", number + 1, CountedLoad(), False, 0.5)
    assert nodes.most_pages(Role.PREFILL) == 10
    CountedLoad.asked = 0
    for _ in range(5):
        assert nodes.most_pages(Role.PREFILL) == 10
    assert CountedLoad.asked == 0


def test_a_sick_node_works_only_when_there_is_no_other() -> None:
    nodes = registry()
    nodes.register(prefill("p0"), now=0.0)
    nodes.register(prefill("p1", incarnation=2), now=0.0)
    nodes.set_health("p0", Health.SUSPECTED, "slow")
    assert usable(nodes) == ["p1"]
    assert usable(nodes, barred=2) == ["p0"]
    nodes.set_health("p1", Health.ISOLATED, "wrong bytes")
    assert usable(nodes) == ["p0"], "a suspect before one that was taken out"
    assert usable(nodes, barred=1) == []
    nodes.set_health("p0", Health.ISOLATED, "slow")
    assert usable(nodes) == ["p0", "p1"], "slow answers are better than none"
    nodes.set_health("p1", Health.PROBATION, "")
    assert usable(nodes) == ["p1"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_fingerprint": "other"}, "the same model"),
        ({"block_tokens": 16}, "blocks of 16"),
        ({"max_model_len": 64}, "a context of 64 tokens, this cluster 256"),
        (
            {"settings": (("model.dtype", "bfloat16"),)},
            "'p0' has model.dtype = bfloat16 where this cluster has float32:",
        ),
        ({"node_id": ""}, "an id"),
        ({"control_address": ""}, "control address"),
    ],
)
def test_a_node_of_another_model_or_configuration_is_refused(changes: dict[str, object], says: str) -> None:
    nodes = registry()
    with pytest.raises(ConfigError, match=says):
        nodes.register(prefill(**changes), now=0.0)
    assert list(nodes.nodes()) == []


def test_a_store_keeps_blocks_of_any_kind() -> None:
    nodes = registry()
    nodes.register(prefill("s0", role=Role.STORE, kv_fingerprint="", block_tokens=0), now=0.0)
    assert [node.info.node_id for node in nodes.usable(Role.STORE)] == ["s0"]
    roomy = SegmentAddress("s1", 1, "host", "127.0.0.1:1", "", 1024, 8)
    nodes.register(prefill("s1", role=Role.STORE, kv_fingerprint="", segment=roomy), now=0.0)
    with pytest.raises(ConfigError, match="slots of 1023 bytes, too few for this cluster's blocks of 1024"):
        nodes.register(prefill("s2", role=Role.STORE, segment=replace(roomy, block_bytes=1023)), now=0.0)


def test_every_differing_setting_is_named_and_a_missing_one_is_no_difference() -> None:
    nodes = registry()
    nodes.register(prefill("p0", settings=(("model.dtype", "float32"), ("new here", "1"))), now=0.0)
    both = (("block.windows", "off"), ("model.dtype", "bfloat16"))
    words = "has block.windows = off where this cluster has on, model.dtype = bfloat16 where this cluster has float32: "
    with pytest.raises(ConfigError, match=words):
        nodes.register(prefill("s0", role=Role.STORE, settings=both), now=0.0)


def test_the_state_table_is_complete() -> None:
    alive = set(NodeState) - {NodeState.GONE, NodeState.LEFT}
    assert set(TRANSITIONS) == set(product(alive, NodeEvent))
