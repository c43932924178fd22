"""Nodes and the conductor find each other over real gRPC, in any order and after any restart."""

import asyncio
import logging
import signal
import socket
import sys
import threading
from typing import Any, ClassVar

import pytest
from waiting import until

from conductor.ingress.metrics import Metrics
from conductor.prefixes.table import INDEX_KEY_BYTES
from conductor.prefixes.table_native import new_table
from conductor.registry import Health, NodeInfo
from conductor.service import ClusterServicer
from mooncake.app.show import show_status
from mooncake.config import load_config
from mooncake.errors import ConfigError
from mooncake.membership import Membership
from mooncake.rpc import cluster_pb2
from mooncake.rpc.cluster_pb2_grpc import ClusterStub
from mooncake.rpc.server import RpcServer
from mooncake.types import Role


def info(node_id: str = "p9", incarnation: int = 1, fingerprint: str = "kv") -> cluster_pb2.NodeInfo:
    return cluster_pb2.NodeInfo(
        node_id=node_id,
        role="prefill",
        incarnation=incarnation,
        control_address="127.0.0.1:9",
        kv_fingerprint=fingerprint,
        block_tokens=4,
    )


def report() -> cluster_pb2.HeartbeatRequest:
    sample = cluster_pb2.PrefillSample(new_tokens=100, ms=50)
    return cluster_pb2.HeartbeatRequest(
        load=cluster_pb2.Load(waiting=2, waiting_tokens=200), samples=cluster_pb2.CostSamples(prefill=[sample])
    )


def member(address: str, node: cluster_pb2.NodeInfo) -> Membership:
    overrides = [f"node.conductor={address}", "conductor.heartbeat_interval_s=0.05"]
    return Membership(load_config(overrides=overrides), node, report)


async def test_a_node_registers_reports_and_drains(start_cluster: Any) -> None:
    cluster = await start_cluster(0, 0)
    node = member(cluster.address, info())
    await node.start()
    assert node.is_registered
    [status] = cluster.servicer.status()().nodes
    assert (status.info.node_id, status.state, status.load.waiting_tokens) == ("p9", "live", 200)
    assert cluster.core.costs.prefill("p9").ms(100, 0) == pytest.approx(50, rel=0.01)
    await node.stop()
    [status] = cluster.servicer.status()().nodes
    assert status.state == "draining"


async def test_a_node_may_come_before_its_conductor_and_says_so_once(
    start_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mooncake.membership")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    node = member(address, info())
    await node.start()
    assert not node.is_registered
    await asyncio.sleep(0.5)  # a few attempts
    cluster = await start_cluster(0, 0, grpc_port=int(address.partition(":")[2]))
    await until(lambda: node.is_registered, 5.0)
    assert [status.info.node_id for status in cluster.servicer.status()().nodes] == ["p9"]
    assert sum("waits for the conductor" in record.message for record in caplog.records) == 1
    await node.stop()


async def test_a_node_waits_while_another_process_has_its_conductors_port(
    start_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = RpcServer()
    port = await other.start("127.0.0.1", 0)
    node = member(f"127.0.0.1:{port}", info())
    await node.start()
    await until(lambda: [record for record in caplog.records if record.levelno >= logging.WARNING])
    await asyncio.sleep(0.5)  # a few more attempts, of which nothing is told
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "another service answers there" in record.message
    await other.stop(0)
    await start_cluster(0, 0, grpc_port=port)
    await until(lambda: node.is_registered, 5.0)
    await node.stop()


async def test_nodes_register_again_with_a_conductor_that_starts_anew(start_cluster: Any) -> None:
    first = await start_cluster(0, 0)
    node = member(first.address, info())
    await node.start()
    port = int(first.address.partition(":")[2])
    await first.server.stop(0)
    second = await start_cluster(0, 0, grpc_port=port)
    await first.eventually(lambda: second.core.registry.get("p9") is not None)
    assert second.core.costs.prefill("p9").is_known, "what it measured before is told again"
    await node.stop()


async def test_a_node_of_another_model_is_refused_in_one_sentence(start_cluster: Any) -> None:
    cluster = await start_cluster(0, 0)
    node = member(cluster.address, info(fingerprint="other"))
    with pytest.raises(ConfigError, match="give every node the same model"):
        await node.start()
    await node.stop()
    assert list(cluster.core.registry.nodes()) == []


async def test_a_replaced_process_leaves_and_stays_away(start_cluster: Any) -> None:
    cluster = await start_cluster(0, 0)
    old, new = member(cluster.address, info(incarnation=1)), member(cluster.address, info(incarnation=2))
    await old.start()
    await new.start()
    error = await asyncio.wait_for(old.wait_replaced(), 5)
    assert "another process has registered as 'p9'" in error.message
    assert not old.is_registered
    for _ in range(3):
        await asyncio.sleep(0.1)
        node = cluster.core.registry.get("p9")
        assert node is not None and node.info.incarnation == 2
    await old.stop()
    assert cluster.core.registry.get("p9").state == "live", "its good-bye says nothing of its successor"
    await new.stop()


async def test_a_heartbeat_that_arrives_after_its_sender_has_changed_its_role_does_not_end_the_node(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = ClusterServicer.Heartbeat
    is_registered, is_on_its_way, has_changed, is_heard = (asyncio.Event() for _ in range(4))

    async def hear_late(self: ClusterServicer, request: cluster_pb2.HeartbeatRequest, context: Any) -> Any:
        if not is_registered.is_set() or request.incarnation != 1:
            return await hear(self, request, context)
        is_on_its_way.set()
        await has_changed.wait()
        try:
            return await hear(self, request, context)
        finally:
            is_heard.set()

    monkeypatch.setattr(ClusterServicer, "Heartbeat", hear_late)
    cluster = await start_cluster(0, 0)
    node = member(cluster.address, info(incarnation=1))
    await node.start()
    is_registered.set()
    async with asyncio.timeout(20):
        await is_on_its_way.wait()
        await node.change(info(incarnation=2))
        has_changed.set()
        await is_heard.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(node.wait_replaced(), 0.3)
    assert node.is_registered and cluster.core.registry.get("p9").info.incarnation == 2
    await node.stop()


ACTOR = """
import sys, time, msgspec
from mooncake.app.cluster.ray_node import RayNode
from mooncake.config import load_config
actor = RayNode("store", msgspec.json.encode(load_config(None, sys.argv[2::2])), "WARNING")
time.sleep(60)
"""


@pytest.mark.parametrize("how", [["-m", "kvstore"], ["-c", ACTOR]], ids=["role", "actor"])
async def test_a_process_that_was_replaced_ends_with_an_error(start_cluster: Any, how: list[str]) -> None:
    cluster = await start_cluster(0, 0, node_timeout_s=60.0)
    settings = (f"node.conductor={cluster.address}", "node.id=s9", "store.dram_gb=0.001", "store.block_bytes=4096")
    arguments = [argument for setting in settings for argument in ("--set", setting)]

    def incarnation() -> int:
        node = cluster.core.registry.get("s9")
        return node.info.incarnation if node is not None else 0

    pipe = asyncio.subprocess.PIPE
    old = await asyncio.create_subprocess_exec(sys.executable, *how, *arguments, stderr=pipe)
    await cluster.eventually(incarnation, within_s=30)
    first = incarnation()
    old.send_signal(signal.SIGSTOP)  # it hangs, and while it answers nobody may replace it
    await cluster.eventually(lambda: cluster.core.registry.get("s9").state == "suspect")
    new = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvstore", *arguments, stderr=pipe)
    try:
        await cluster.eventually(lambda: incarnation() != first, within_s=30)
        old.send_signal(signal.SIGCONT)
        _, said = await asyncio.wait_for(old.communicate(), 60)
        assert old.returncode == 1
        assert "another process has registered as 's9'" in said.decode()
        assert new.returncode is None
    finally:
        for process in (old, new):
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def test_a_silent_node_is_gone_and_comes_back_by_itself(start_cluster: Any) -> None:
    cluster = await start_cluster(0, 0, node_timeout_s=0.3)
    node = member(cluster.address, info())
    await node.start()
    assert node._task is not None
    node._task.cancel()
    await cluster.eventually(lambda: cluster.core.registry.get("p9") is None)
    again = member(cluster.address, info())
    await again.start()
    assert cluster.core.registry.get("p9") is not None
    await again.stop()
    await node.stop()


async def test_status_names_the_missing_roles(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 0)
    async with asyncio.timeout(5):
        status = await ClusterStub(cluster.channels.get(cluster.address)).Status(cluster_pb2.StatusRequest())
    assert (status.ready, list(status.waiting_for)) == (False, ["decode"])
    cluster = await start_cluster(1, 1)
    await cluster.generate(cluster.request())
    status = cluster.servicer.status()()
    assert status.ready
    assert (status.requests_total, status.requests_running, status.prompt_tokens, status.block_hits) == (1, 0, 5, 1)


class WatchedInfo(NodeInfo):
    """Knows the threads in which its settings are read."""

    read_in: ClassVar[set[int]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name == "settings":
            WatchedInfo.read_in.add(threading.get_ident())
        return super().__getattribute__(name)


async def test_a_status_is_as_it_was_when_asked_for_and_made_beside_the_event_loop(start_cluster: Any) -> None:
    """A thousand nodes would hold up requests."""
    cluster = await start_cluster(1, 1)
    cluster.core.register(WatchedInfo("p9", Role.PREFILL, 9, "127.0.0.1:1", kv_fingerprint="kv", block_tokens=4))
    as_it_was = cluster.servicer.status()
    cluster.core.registry.set_health("p9", Health.ISOLATED, "slow")
    WatchedInfo.read_in.clear()

    async with asyncio.timeout(5):
        status = await ClusterStub(cluster.channels.get(cluster.address)).Status(cluster_pb2.StatusRequest())

    assert {node.info.node_id: node.health for node in status.nodes}["p9"] == "isolated"
    assert WatchedInfo.read_in
    assert threading.get_ident() not in WatchedInfo.read_in
    assert {node.info.node_id: node.health for node in as_it_was().nodes}["p9"] == "healthy"


async def test_an_operator_sees_that_the_prefix_index_was_full(start_cluster: Any, capsys: Any) -> None:
    cluster = await start_cluster(1, 1)
    pages = Metrics("m", cluster.servicer.status, cluster.core.dispatcher.stats)
    assert b"mooncake_index_dropped_blocks_total 0.0" in pages.page()()[0]
    await asyncio.to_thread(show_status, cluster.address, as_json=False)
    assert "prefix index" not in capsys.readouterr().out

    cluster.core.index._table = new_table(max_blocks=2)
    cluster.core.index.load("p0", [bytes([number]) * INDEX_KEY_BYTES for number in range(5)])

    assert b"mooncake_index_dropped_blocks_total 3.0" in pages.page()()[0]
    await asyncio.to_thread(show_status, cluster.address, as_json=False)
    assert "the prefix index was full and lacks 3 blocks" in capsys.readouterr().out


async def test_an_operator_sees_what_was_reused_of_prompts_and_what_was_blended(
    start_cluster: Any, capsys: Any
) -> None:
    cluster = await start_cluster(1, 1)
    for blended, told in (
        (0, "10 prompt tokens, 40.0% reused;"),
        (5, "20 prompt tokens, 40.0% reused, 25.0% blended;"),
    ):
        cluster.prefill[0].script.blended_tokens = blended
        await cluster.generate(cluster.request([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 2))
        await asyncio.to_thread(show_status, cluster.address, as_json=False)
        assert told in capsys.readouterr().out
    assert cluster.servicer.status()().blended_tokens == 5


async def test_a_role_that_does_not_exist_is_refused(start_cluster: Any) -> None:
    cluster = await start_cluster(0, 0)
    node = info()
    node.role = "chef"
    with pytest.raises(Exception, match="no such role"):
        await member(cluster.address, node).start()
