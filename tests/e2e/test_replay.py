"""The open conversation trace, scaled to the demo model, against a live cluster of two prefill and two decode nodes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from drive import status, wait_idle

from mooncake.app.cluster.local import LocalCluster
from mooncake.app.latency import Outcome
from mooncake.app.traces.replay import Replay, ReplayOptions, ReplayReport
from mooncake.config import load_config
from mooncake.trace import TraceRequest, load_trace, scale

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl.xz"
BLOCK_TOKENS = 4  # stands for the trace's 512
REQUESTS = 200
MAX_OUTPUT = 8

needs_trace = pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not at ../shared/traces")


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[LocalCluster, grpc.aio.Channel]]:
    overrides = [
        "conductor.http_port=0",
        "conductor.grpc_port=0",
        f"block.tokens={BLOCK_TOKENS}",
        "cluster.prefill=2",
        "cluster.decode=2",
        "prefill.kv_gb=0.5",
        "decode.kv_gb=0.5",
        "store.dram_gb=3.0",
    ]
    async with (
        LocalCluster(load_config(None, overrides)) as running,
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        yield running, channel


def trace() -> list[TraceRequest]:
    return [scale(request, BLOCK_TOKENS, MAX_OUTPUT) for request in load_trace(TRACE, REQUESTS)]


async def replay(address: str, **options: float) -> ReplayReport:
    settings = ReplayOptions(tokens_per_block=BLOCK_TOKENS, **options)  # type: ignore[arg-type]
    return await Replay(address, settings).run(trace())


def assert_all_finished(report: ReplayReport) -> None:
    bad = [result for result in report.results if result.outcome is not Outcome.OK]
    assert not bad, bad[:3]
    assert len(report.results) == REQUESTS


@needs_trace
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_one_after_the_other_hits_exactly_what_the_trace_allows() -> None:
    async with cluster() as (running, channel):
        report = await replay(running.grpc_address, speed=0, concurrency=1)
        assert_all_finished(report)
        # the pool holds every block of these requests, so the exact count is that of an endless cache
        assert report.summary.hits == report.endless_cache
        assert report.endless_cache.block > 0.05
        await wait_idle(channel)


@needs_trace
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_at_the_trace_s_own_pace_all_finish_and_nothing_leaks() -> None:
    async with cluster() as (running, channel):
        report = await replay(running.grpc_address, speed=1, concurrency=64, jitter_ms=3000)
        assert_all_finished(report)
        # requests that run at the same time cannot reuse each other's blocks yet
        assert 0 < report.summary.hits.block <= report.endless_cache.block
        await wait_idle(channel)
        for node in (await status(channel)).nodes:
            load = node.load
            assert load.blocks_free + load.blocks_cached == load.blocks_total, node.info.node_id
