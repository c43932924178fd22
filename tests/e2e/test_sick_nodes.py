"""A node of a live cluster becomes slow, or sends wrong bytes: it is found, taken out, and no answer suffers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from drive import ask, ask_all, status, wait_idle
from tiny_model import write_tiny_model

from mooncake.app.cluster.local import LocalCluster
from mooncake.config import load_config

SETTINGS = [
    "cluster.decode=1",
    "conductor.http_port=0",
    "conductor.grpc_port=0",
    "conductor.heartbeat_interval_s=0.1",
    "conductor.node_timeout_s=20",
    "conductor.retries=3",
    "health.slow_ratio=3",
    "health.confirm_s=0.5",
    "health.clear_s=1",
    "health.probation_s=1",
    "health.probe_interval_s=0.3",
    "health.probe_timeout_s=20",
    "prefill.kv_gb=0.1",
    "prefill.chunk_tokens=64",
    "decode.kv_gb=0.1",
    "store.dram_gb=0.1",
    "prefill.threads=1",
    "decode.threads=1",
]
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sick") / "model"
    write_tiny_model(folder, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, max_position_embeddings=1024)
    return folder


def prompts(count: int, first: int, tokens: int = 256) -> list[list[int]]:
    return [[(7 * k + i * (k % 11 + 1)) % 300 + 10 for i in range(tokens)] for k in range(first, first + count)]


@contextlib.asynccontextmanager
async def cluster(model: Path, *overrides: str) -> AsyncIterator[tuple[LocalCluster, grpc.aio.Channel]]:
    async with (
        LocalCluster(load_config(None, [*SETTINGS, f"model.path={model}", *overrides])) as running,
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        yield running, channel


async def wait_health(channel: grpc.aio.Channel, node_id: str, *wanted: str) -> str:
    """Wait until the node has one of these states. Returns the reason."""
    async with asyncio.timeout(90):
        while True:
            nodes = {node.info.node_id: node for node in (await status(channel)).nodes}
            if node_id in nodes and nodes[node_id].health in wanted:
                return str(nodes[node_id].health_reason)
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def sick_node(script: str, config_file: Path, node_id: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process beside the cluster that joins it."""
    node = ["--config", str(config_file), "--set", f"node.id={node_id}"]
    process = await asyncio.create_subprocess_exec(sys.executable, str(SUPPORT / script), *node)
    try:
        yield process
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_slow_node_is_taken_out_and_comes_back_when_it_is_well(model: Path) -> None:
    # Alternately: a scheduler that has seen one node do better may leave the other idle, which then has no samples.
    async with (
        cluster(model, "cluster.prefill=1", "conductor.policy=round_robin") as (running, channel),
        sick_node("slow_prefill_node.py", running.config_file, "slow") as slow,
    ):
        await wait_health(channel, "slow", "healthy")
        # Long enough for each node to show what is usual of it, and one at a time on each: only a chunk that is
        # computed alone is a measurement.
        usual = await ask_all(channel, prompts(8, 0, tokens=768), 2, at_once=2)
        assert {answer.timings.prefill_node for answer in usual} == {"prefill-0", "slow"}
        slow.send_signal(signal.SIGUSR1)
        under_way = asyncio.create_task(ask_all(channel, prompts(4, 24, tokens=768), 2, at_once=2))
        why = await wait_health(channel, "slow", "suspected", "draining", "isolated")
        assert "times as long as usual" in why
        answers = await under_way
        await wait_health(channel, "slow", "isolated")
        elsewhere = await ask_all(channel, prompts(4, 48), 2, at_once=4)
        assert {answer.timings.prefill_node for answer in elsewhere} == {"prefill-0"}
        slow.send_signal(signal.SIGUSR2)
        await wait_health(channel, "slow", "healthy")
        again = await ask_all(channel, prompts(4, 24, tokens=768), 2, at_once=2)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
        await wait_idle(channel)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_node_that_sends_wrong_bytes_is_isolated_and_no_answer_is_wrong(model: Path) -> None:
    async with cluster(model, "cluster.prefill=1") as (running, channel):
        right = await ask_all(channel, prompts(8, 0), 4, at_once=4, salt="a")
        async with sick_node("bad_prefill_node.py", running.config_file, "bad"):
            await wait_health(channel, "bad", "healthy")
            asked = 0
            async with asyncio.timeout(120):
                while not {"suspected", "draining", "isolated"} & {
                    node.health for node in (await status(channel)).nodes if node.info.node_id == "bad"
                }:
                    salt = f"b{asked}"  # nothing is cached, so both nodes get work
                    answers = await ask_all(channel, prompts(8, 0), 4, at_once=8, salt=salt)
                    assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]
                    asked += 1
            assert "checksum" in await wait_health(channel, "bad", "isolated", "probation")
        last = await ask(channel, prompts(1, 0)[0], 4, salt="c")
        assert last.tokens == right[0].tokens
