"""A decode node that receives hand-offs from a real prefill node, both in this process, without a conductor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from decode_node.node import DecodeNode
from mooncake.config import Config, load_config
from mooncake.rpc import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from mooncake.types import SamplingParams
from prefill_node.node import PrefillNode

HANDOFF_TIMEOUT_S = 0.2
PROMPT = [7 * i % 101 + 1 for i in range(150)]


def config_of(node_id: str, model: Path) -> Config:
    return load_config(
        None,
        [
            f"node.id={node_id}",
            f"model.path={model}",
            "node.conductor='127.0.0.1:9'",  # nobody there
            "prefill.kv_gb=0.05",
            "decode.kv_gb=0.05",
            f"transfer.handoff_timeout_s={HANDOFF_TIMEOUT_S}",
        ],
    )


@contextlib.asynccontextmanager
async def pair(model: Path) -> AsyncIterator[tuple[PrefillNode, DecodeNode]]:
    prefill, decode = PrefillNode(config_of("prefill-t", model)), DecodeNode(config_of("decode-t", model))
    await decode.start()
    await prefill.start()
    try:
        yield prefill, decode
    finally:
        await prefill.stop()
        await decode.stop()


@pytest.mark.timeout(120)
async def test_a_prompt_may_take_longer_than_a_hand_off(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    channels, begun, may_go_on = Channels(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(layer: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        may_go_on.wait(60)

    async with pair(tmp_path / "model") as (prefill, decode):
        prefill.streamer.listeners.append(hold)
        common = {
            "request_id": "r",
            "handoff_id": "h",
            "epoch": 3,
            "tokens": tokens_to_wire(PROMPT),
            "num_prompt_tokens": len(PROMPT),
            "sampling": sampling_to_wire(SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)),
        }
        decoding = decode_pb2_grpc.DecodeStub(channels.get(decode.control_address)).Generate(
            decode_pb2.DecodeRequest(**common), timeout=60
        )
        prefilling = prefill_pb2_grpc.PrefillStub(channels.get(prefill.control_address)).Run(
            prefill_pb2.PrefillRequest(decode_address=decode.control_address, **common), timeout=60
        )

        async def tokens_decoded() -> list[int]:
            return [token.index async for response in decoding for token in response.tokens]

        async def reports() -> list[int]:
            return [response.report.prompt_tokens async for response in prefilling if response.HasField("report")]

        answer = asyncio.gather(tokens_decoded(), reports())
        await begun.wait()
        await asyncio.sleep(5 * HANDOFF_TIMEOUT_S)  # nothing is to happen in it
        may_go_on.set()
        indices, prompt_tokens = await answer
        assert indices[-1] == 3 and prompt_tokens == [len(PROMPT)]
        await channels.close()
