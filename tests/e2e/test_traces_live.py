"""A real cluster's traces, as a collector gets them: a cold prompt, its prefix found again, and a node that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from collector import Collector, Received, running_collector
from drive import wait_idle
from forked_nodes import fork_module
from live import small_config
from tiny_model import write_tiny_model

from mooncake.app.cluster.local import LocalCluster
from mooncake.rpc import common_pb2, inference_pb2, inference_pb2_grpc

PROMPT = [(7 * i) % 300 + 10 for i in range(200)]  # three blocks and a rest
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def collector() -> Any:
    with running_collector() as collector:
        yield collector


@pytest_asyncio.fixture
async def cluster(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[LocalCluster, grpc.aio.Channel]]:
    write_tiny_model(tmp_path / "model", hidden_size=256, num_hidden_layers=8, max_position_embeddings=1024)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "of the test")
    config = small_config(
        f"model.path={tmp_path / 'model'}",
        f"conductor.otlp_traces_endpoint={collector.endpoint}",
        *("cluster.prefill=2", "cluster.decode=2", "prefill.kv_gb=0.05", "decode.kv_gb=0.05", "store.dram_gb=0.05"),
    )
    async with (
        LocalCluster(config, restart=False, start_module=fork_module) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        yield cluster, channel


async def pieces(channel: grpc.aio.Channel, call_id: str, tokens: int) -> AsyncIterator[inference_pb2.GenerateResponse]:
    request = inference_pb2.GenerateRequest(
        request_id=call_id,
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
    )
    parent = ("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01")
    async for piece in inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=[parent], timeout=60):
        yield piece


def check_times(root: Received) -> None:
    """Every span is within its parent, and of one trace."""
    for span in root.walk():
        for part in span.parts:
            assert part.trace_id == TRACE_ID
            assert span.span.start_time_unix_nano <= part.span.start_time_unix_nano
            assert part.span.end_time_unix_nano <= span.span.end_time_unix_nano


@pytest.mark.slow
async def test_where_the_time_of_requests_went(
    cluster: tuple[LocalCluster, grpc.aio.Channel], collector: Collector
) -> None:
    processes, channel = cluster

    [*_, last] = [piece async for piece in pieces(channel, "cold", 20)]
    root = await collector.root_of("cold")
    check_times(root)
    assert collector.resources[-1]["service.name"] == "of the test"
    assert root.names == ["receive", "attempt"]
    attempt = root.one("attempt")
    assert attempt.names == ["admission", "placement", "queue", "prefill", "handoff", "decode"]
    assert attempt.attributes["mooncake.prefill_node"] == last.timings.prefill_node
    assert attempt.attributes["mooncake.decode_node"] == last.timings.decode_node
    assert attempt.one("prefill").ms == pytest.approx(last.timings.prefill.timings.prefill_ms, abs=0.1)
    handoff, decode = attempt.one("handoff").attributes, attempt.one("decode").attributes
    assert (handoff["mooncake.state"], handoff["mooncake.transport"]) == ("committed", "shm")
    assert handoff["mooncake.bytes"] == last.timings.prefill.sent_bytes > 0
    assert 0 < decode["mooncake.decode_ms"] <= attempt.one("decode").ms + 0.1
    assert root.attributes["gen_ai.usage.completion_tokens"] == 20
    ttft_ms = 1e3 * root.attributes["gen_ai.latency.time_to_first_token"]
    assert ttft_ms == pytest.approx(last.timings.ttft_ms, abs=20)
    await wait_idle(channel)

    assert [piece async for piece in pieces(channel, "again", 20)]
    again = (await collector.root_of("again")).one("attempt")
    assert again.attributes["mooncake.local_cached_tokens"] == 192
    assert again.attributes["mooncake.predicted_ttft_ms"] > 0, "the first one has been measured"
    await wait_idle(channel)

    told, victim = 0, again.attributes["mooncake.decode_node"]
    async for piece in pieces(channel, "retried", 400):
        told += len(piece.tokens)
        if told >= 20 and victim:
            os.kill(processes.pids[victim], signal.SIGKILL)
            dead, victim = victim, ""
    assert told == 400
    root = await collector.root_of("retried")
    check_times(root)
    lost, retried = root.all("attempt")
    assert root.attributes["mooncake.failed_attempts"] == 1
    assert root.span.status.code != root.span.status.STATUS_CODE_ERROR
    assert lost.span.status.code == lost.span.status.STATUS_CODE_ERROR
    assert (lost.attributes["error.type"], lost.attributes["mooncake.decode_node"]) == ("unavailable", dead)
    assert lost.names[-1] == "decode"
    assert retried.attributes["mooncake.decode_node"] != dead
    await wait_idle(channel)

    os.kill(processes.pids[again.attributes["mooncake.prefill_node"]], signal.SIGKILL)
    assert [piece async for piece in pieces(channel, "from-the-pool", 20)]
    root = await collector.root_of("from-the-pool")
    check_times(root)
    last_attempt = root.all("attempt")[-1]
    [load] = last_attempt.one("prefill").parts
    assert (load.name, load.attributes["mooncake.store"]) == ("load", "store-0")
    assert load.attributes["mooncake.tokens"] >= 192
