"""Requests to change a node's role, by an operator or the balancer, and when they are withdrawn."""

from __future__ import annotations

import pytest

from conductor.core import Core
from conductor.model_facts import ModelFacts
from conductor.placement.view import Shape
from conductor.registry import NodeInfo
from kvstore.metadata.memory import MemoryDirectory
from mooncake.config import load_config
from mooncake.errors import InvalidRequest
from mooncake.types import Role

FACTS = ModelFacts("kv", Shape(block_tokens=64, block_bytes=1024, num_layers=2), eos_ids=(1,))


async def test_a_request_for_another_role_ends_with_the_process_that_was_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    core = Core(load_config(), FACTS, MemoryDirectory(), clock=lambda: now[0])

    def join(node_id: str, role: Role, incarnation: int) -> None:
        address = f"127.0.0.1:{4000 + incarnation}"
        core.register(NodeInfo(node_id, role, incarnation, address, None, "kv", 64, can_switch=True))

    join("p0", Role.PREFILL, 1)
    join("p1", Role.PREFILL, 2)
    core.role_requests.request("p1", Role.DECODE)
    assert core.role_requests.of("p1") is Role.DECODE
    join("p1", Role.PREFILL, 3)  # its process died and was restarted
    assert core.role_requests.of("p1") is None and core.role_requests.num_switches == 0
    assert caplog.messages[-1] == "prefill node p1 was started anew"

    core.role_requests.request("p1", Role.DECODE)
    now[0] = 100.0
    join("p0", Role.PREFILL, 4)
    core.tick()
    assert core.registry.get("p1") is None and core.role_requests.of("p1") is None

    join("p1", Role.PREFILL, 5)
    core.role_requests.request("p1", Role.DECODE)
    join("p1", Role.DECODE, 6)
    assert core.role_requests.of("p1") is None and core.role_requests.num_switches == 1
    assert caplog.messages[-1] == "prefill node p1 becomes a decode node"
    await core.stop()


async def test_a_store_is_told_to_stay_one_and_no_node_becomes_a_store() -> None:
    core = Core(load_config(), FACTS, MemoryDirectory())
    core.register(NodeInfo("s", Role.STORE, 1, "127.0.0.1:4001", None, "kv", 64))
    core.register(NodeInfo("p", Role.PREFILL, 2, "127.0.0.1:4002", None, "kv", 64, can_switch=True))
    for node_id, role in (("s", Role.DECODE), ("p", Role.STORE)):
        with pytest.raises(InvalidRequest, match="stores do not change their role"):
            core.role_requests.request(node_id, role)
    await core.stop()
