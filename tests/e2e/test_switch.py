"""A node changes its role while the cluster answers: no request is lost, and what was cached stays so."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest
from drive import ask, ask_all, status, wait_idle

from mooncake.app.cluster.local import LocalCluster
from mooncake.config import load_config
from mooncake.rpc import cluster_pb2, cluster_pb2_grpc

SETTINGS = [
    "cluster.switchable=true",
    "conductor.max_tail_tokens=0",  # who computes is told by name below
    "cluster.prefill=2",
    "cluster.decode=1",
    "conductor.http_port=0",
    "conductor.grpc_port=0",
    "conductor.heartbeat_interval_s=0.1",
    "prefill.kv_gb=0.5",
    "decode.kv_gb=0.5",
    "store.dram_gb=0.4",
    "prefill.threads=1",
    "decode.threads=1",
]
PROMPTS = [list(range(1000 * k, 1000 * k + 200)) for k in range(1, 5)]


async def set_role(channel: grpc.aio.Channel, node_id: str, role: str) -> None:
    request = cluster_pb2.SetRoleRequest(node_id=node_id, role=role)
    await cluster_pb2_grpc.ClusterStub(channel).SetRole(request, timeout=10)


async def wait_role(channel: grpc.aio.Channel, node_id: str, role: str) -> None:
    """Until the node is live in its role and has told how long the switch took."""
    async with asyncio.timeout(60):
        while True:
            nodes = {node.info.node_id: node for node in (await status(channel)).nodes}
            node = nodes.get(node_id)
            if (
                node is not None
                and node.info.role == role
                and node.state == "live"
                and node.load.counters["last_switch_us"]
            ):
                return
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_node_switches_there_and_back_under_load() -> None:
    async with (
        LocalCluster(load_config(None, SETTINGS)) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        before = await ask_all(channel, PROMPTS, 16, at_once=4)
        await wait_idle(channel)
        held = {node.info.node_id: node.load.blocks_cached for node in (await status(channel)).nodes}

        with pytest.raises(grpc.aio.AioRpcError, match="last decode node"):
            await set_role(channel, "decode-0", "prefill")
        with pytest.raises(grpc.aio.AioRpcError, match="no such role"):
            await set_role(channel, "prefill-1", "pigeon")
        with pytest.raises(grpc.aio.AioRpcError, match="stores do not change their role"):
            await set_role(channel, "store-0", "decode")

        under_way = asyncio.create_task(ask_all(channel, PROMPTS * 3, 16, at_once=4))
        await asyncio.sleep(0.3)
        await set_role(channel, "prefill-1", "decode")
        await wait_role(channel, "prefill-1", "decode")
        during = await under_way
        assert [answer.tokens for answer in during] == [answer.tokens for answer in before] * 3

        # The node that is left prefills, and what either cached is still found.
        after = await ask_all(channel, PROMPTS * 2, 16, at_once=8)
        assert [answer.tokens for answer in after] == [answer.tokens for answer in before] * 2
        assert {answer.timings.prefill_node for answer in after} == {"prefill-0"}
        assert all(answer.cached_tokens >= 128 for answer in after)

        # The one that came may be the only one that decodes, so that the first one goes.
        await set_role(channel, "decode-0", "prefill")
        await wait_role(channel, "decode-0", "prefill")
        alone = await ask_all(channel, PROMPTS, 16, at_once=4)
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in before]
        assert {answer.timings.decode_node for answer in alone} == {"prefill-1"}
        await set_role(channel, "decode-0", "decode")
        await wait_role(channel, "decode-0", "decode")
        await wait_idle(channel)
        now = {node.info.node_id: node.load.blocks_cached for node in (await status(channel)).nodes}
        assert now["prefill-1"] >= held["prefill-1"], "the switch dropped cached blocks"

        await set_role(channel, "prefill-1", "prefill")
        await wait_role(channel, "prefill-1", "prefill")
        again = await ask(channel, PROMPTS[0], 16)
        assert again.tokens == before[0].tokens
        await wait_idle(channel)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_command_ends_when_the_node_does() -> None:
    settings = [*SETTINGS, "conductor.node_timeout_s=2"]
    mooncake = str(Path(sys.executable).parent / "mooncake")

    async with (
        LocalCluster(load_config(None, settings), restart=True) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):

        async def command(role: str) -> asyncio.subprocess.Process:
            arguments = ("role", "prefill-1", role, "--address", cluster.grpc_address)
            return await asyncio.create_subprocess_exec(
                mooncake, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )

        os.kill(cluster.pids["prefill-1"], signal.SIGSTOP)  # it hears nothing, and after a while it is taken as dead
        process = await command("decode")
        async with asyncio.timeout(60):
            _, said = await process.communicate()
        assert process.returncode == 1
        assert said.decode() == "mooncake: prefill-1 ended before it could become a decode node\n"

        os.kill(cluster.pids["prefill-1"], signal.SIGKILL)  # the launcher starts another one
        await cluster.wait_ready()
        await asyncio.sleep(1.0)  # several heartbeats, with which it would be told of an old wish
        async with asyncio.timeout(60):  # a late heartbeat makes a node a suspect
            while True:
                nodes = {node.info.node_id: node for node in (await status(channel)).nodes}
                assert "prefill-1" not in nodes or nodes["prefill-1"].info.role == "prefill"
                if "prefill-1" in nodes and nodes["prefill-1"].state == "live":
                    break
                await asyncio.sleep(0.02)

        async with asyncio.timeout(60):
            told, _ = await (await command("decode")).communicate()
        assert told.decode().splitlines()[-1] == "prefill-1 is a decode node"
