"""Two processes with one node id: the second is refused while the first is alive, and takes over once it is not."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mooncake.rpc import cluster_pb2
from mooncake.rpc.cluster_pb2_grpc import ClusterStub


@contextlib.asynccontextmanager
async def store_process(cluster: Any, *settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    all_settings = (f"node.conductor={cluster.address}", "store.dram_gb=0.001", "store.block_bytes=4096", *settings)
    arguments = [argument for setting in all_settings for argument in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvstore", "--log-level", "WARNING", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def incarnation(cluster: Any, node_id: str = "s9") -> int:
    node = cluster.core.registry.get(node_id)
    return node.info.incarnation if node is not None else 0


async def test_the_second_of_two_live_processes_is_refused_and_the_first_goes_on(start_cluster: Any) -> None:
    cluster = await start_cluster(0, 0, heartbeat_interval_s=20.0, node_timeout_s=100.0)  # one that is late may be dead
    async with store_process(cluster, "node.id=s9") as first:
        await cluster.eventually(lambda: incarnation(cluster), within_s=30)
        here = cluster.core.registry.get("s9").info
        await cluster.eventually(lambda: cluster.core.subscriber.is_connected(here))
        for _ in range(2):  # as a supervisor would try
            async with store_process(cluster, "node.id=s9") as second:
                _, said = await asyncio.wait_for(second.communicate(), 30)
                assert second.returncode == 1
                words = f"the id 's9' is taken: the store node at {here.control_address} has it and is alive"
                assert words in said.decode()
        assert first.returncode is None and incarnation(cluster) == here.incarnation
        assert cluster.core.registry.get("s9").state == "live"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restarted_process_takes_over_at_once(start_cluster: Any, how: signal.Signals) -> None:
    """Long before the heartbeats of the first are late."""
    cluster = await start_cluster(0, 0, heartbeat_interval_s=20.0, node_timeout_s=100.0)
    async with store_process(cluster, "node.id=s9") as first:
        await cluster.eventually(lambda: incarnation(cluster), within_s=30)
        before = cluster.core.registry.get("s9").info
        await cluster.eventually(lambda: cluster.core.subscriber.is_connected(before))
        first.send_signal(how)
        await first.wait()
        async with store_process(cluster, "node.id=s9") as second:
            await cluster.eventually(lambda: incarnation(cluster) != before.incarnation, within_s=15)
            assert second.returncode is None


async def test_a_second_process_is_refused_before_it_loads_its_model(start_cluster: Any) -> None:
    """``Check`` comes from a process that has no address yet."""
    cluster = await start_cluster(1, 0)
    here = cluster.core.registry.get("p0").info
    await cluster.eventually(lambda: cluster.core.subscriber.is_connected(here))
    stub = ClusterStub(cluster.channels.get(cluster.address))
    info = cluster_pb2.NodeInfo(node_id="p0", role="prefill", incarnation=5, kv_fingerprint="kv", block_tokens=4)
    with pytest.raises(Exception, match="the id 'p0' is taken: the prefill node at "):
        await stub.Check(cluster_pb2.CheckRequest(node=info), timeout=5)
    await cluster.prefill[0].die()
    await cluster.eventually(lambda: not cluster.core.subscriber.is_connected(here))
    await stub.Check(cluster_pb2.CheckRequest(node=info), timeout=5)
