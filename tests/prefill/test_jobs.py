"""Requests answered entirely on one prefill node: they do not affect each other."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
from tiny_model import write_tiny_model

from mooncake.config import load_config
from mooncake.engine.engine import Engine
from mooncake.rpc import prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from mooncake.sampling import SamplingParams
from prefill_node.node import PrefillNode

PROMPT = [7 * i % 101 + 1 for i in range(150)]
NUM_TOKENS = 300


REQUEST = prefill_pb2.PrefillRequest(
    handoff_id="h",
    epoch=3,
    tokens=tokens_to_wire(PROMPT),
    num_prompt_tokens=len(PROMPT),
    sampling=sampling_to_wire(SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)),
)


async def start_node(folder: Path) -> PrefillNode:
    write_tiny_model(folder, max_position_embeddings=512)
    settings = ["node.id=alone", f"model.path={folder}", "node.conductor='127.0.0.1:9'", "prefill.kv_gb=0.05"]
    node = PrefillNode(load_config(None, settings))
    await node.start()
    return node


@pytest.mark.timeout(120)
async def test_what_is_reused_of_a_prompt_is_told_before_its_first_token(tmp_path: Path) -> None:
    node, channels = await start_node(tmp_path / "model"), Channels()
    stub = prefill_pb2_grpc.PrefillStub(channels.get(node.control_address))
    try:
        for handoff_id, num_reused in (("h", {0}), ("i", {128, len(PROMPT) - 1})):  # the first one may be here still
            request = prefill_pb2.PrefillRequest()
            request.MergeFrom(REQUEST)
            request.handoff_id = handoff_id
            responses = [response async for response in stub.Run(request, timeout=60)]
            assert [response.WhichOneof("event") for response in responses[:2]] == ["early_report", "first_token"]
            early, whole = responses[0].early_report, responses[-1].report
            assert early.local_cached_tokens == whole.local_cached_tokens
            assert early.local_cached_tokens in num_reused
            assert early.prompt_tokens == len(PROMPT) and early.timings.prefill_ms > 0
    finally:
        await channels.close()
        await node.stop()


@pytest.mark.timeout(120)
async def test_a_request_that_comes_twice_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    node, channels = await start_node(tmp_path / "model"), Channels()
    stub = prefill_pb2_grpc.PrefillStub(channels.get(node.control_address))
    try:
        indices = []
        async for response in stub.Run(REQUEST, timeout=60):
            if response.HasField("first_token"):
                indices.append(response.first_token.index)
            if len(indices) == 1:
                with pytest.raises(grpc.aio.AioRpcError, match="h is here already"):
                    await anext(aiter(stub.Run(REQUEST, timeout=60)))
        assert indices == list(range(NUM_TOKENS))
        await asyncio.wait_for(node.drained(), 10)
        assert node.host.engine.block_pool.num_in_use == 0
        assert not node.streamer.prompts
    finally:
        await channels.close()
        await node.stop()


def break_it(engine: Engine) -> None:
    """Make the next step fail, and also the ending of its sequences."""
    engine._model = None  # type: ignore[assignment]
    engine._requests._sequences.clear()


@pytest.mark.timeout(120)
async def test_a_node_whose_engine_is_broken_tells_its_callers_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node, channels = await start_node(tmp_path / "model"), Channels()
    ending = asyncio.create_task(node.wait_fatal())
    stub = prefill_pb2_grpc.PrefillStub(channels.get(node.control_address))
    with caplog.at_level(logging.CRITICAL):
        with pytest.raises(grpc.aio.AioRpcError, match="the engine is broken") as told:
            async for response in stub.Run(REQUEST, timeout=60):
                if response.HasField("first_token") and response.first_token.index == 0:
                    node.host.thread.call(break_it)
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the engine is broken" in (await asyncio.wait_for(ending, 10)).message
        await channels.close()
        await asyncio.wait_for(node.stop(), 10)
