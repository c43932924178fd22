"""A node that is stopped finishes its requests; those that do not end in time continue elsewhere without an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from drive import ask, wait_idle
from in_process import InProcessCluster, held
from tiny_model import write_tiny_model
from waiting import until

from decode_node.node import DecodeNode
from mooncake.app.cluster.compute_node.node import ComputeNode
from prefill_node.node import PrefillNode

PROMPT = [7 * i % 101 + 1 for i in range(100)]
PAUSE_S = 1.5  # more than the server gives a stream once it stops, and than a conductor waits for a silent node


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcessCluster]:
    write_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    settings = ("conductor.retries=0", "conductor.node_timeout_s=5", "cluster.switchable=true", "node.drain_s=60")
    cluster = InProcessCluster(tmp_path / "model", *settings)
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [DecodeNode, ComputeNode])
async def test_a_decode_node_finishes_what_it_has(
    cluster: InProcessCluster, kind: type[DecodeNode] | type[ComputeNode]
) -> None:
    prefill = await cluster.join(PrefillNode, "prefill-0")
    leaving = await cluster.join(kind, "decode-0")
    asking = asyncio.create_task(ask(cluster.channel, PROMPT, 300))
    await until(lambda: leaving.host.engine.has_work)
    with held(leaving):
        other = await cluster.join(DecodeNode, "decode-1")
        stopping = asyncio.create_task(leaving.stop())
        await asyncio.sleep(PAUSE_S)
        assert (await cluster.states())["decode-0"] == "draining", "it is heard all the while"
        elsewhere = await ask(cluster.channel, PROMPT, 300)
    answer = await asking
    assert answer.timings.decode_node == "decode-0"
    assert elsewhere.timings.decode_node == "decode-1"
    assert answer.tokens == elsewhere.tokens
    await asyncio.wait_for(stopping, 10)
    await prefill.stop()
    await other.stop()


@pytest.mark.timeout(120)
async def test_a_prefill_node_finishes_what_it_has(cluster: InProcessCluster) -> None:
    decode = await cluster.join(DecodeNode, "decode-0")
    leaving = await cluster.join(PrefillNode, "prefill-0")
    with held(leaving):
        asking = asyncio.create_task(ask(cluster.channel, PROMPT, 30))
        await until(lambda: leaving.streamer.prompts)
        stopping = asyncio.create_task(leaving.stop())
        await asyncio.sleep(PAUSE_S)
    answer = await asking
    assert len(answer.tokens) == 30
    assert answer.timings.prefill_node == "prefill-0"
    await asyncio.wait_for(stopping, 10)
    await decode.stop()


@pytest.mark.timeout(120)
async def test_what_does_not_end_in_time_goes_on_elsewhere_and_costs_no_try(cluster: InProcessCluster) -> None:
    prefill = await cluster.join(PrefillNode, "prefill-0")
    leaving = await cluster.join(DecodeNode, "decode-0", "node.drain_s=0.2")
    expected = await ask(cluster.channel, PROMPT, 300, salt="another")
    asking = asyncio.create_task(ask(cluster.channel, PROMPT, 300))
    await until(lambda: leaving.host.engine.has_work)
    with held(leaving):
        other = await cluster.join(DecodeNode, "decode-1")
        stopping = asyncio.create_task(leaving.stop())
        answer = await asking
        assert answer.timings.decode_node == "decode-1"
        assert answer.tokens == expected.tokens
    await asyncio.wait_for(stopping, 10)
    await wait_idle(cluster.channel)
    await prefill.stop()
    await other.stop()
