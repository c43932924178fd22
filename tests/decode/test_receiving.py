"""A decode node that receives hand-offs, from a real prefill node or with none yet, without a conductor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tiny_model import write_tiny_model
from waiting import until

from decode_node.node import DecodeNode
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, load_config
from mooncake.engine.engine import Engine
from mooncake.errors import RetryElsewhere
from mooncake.rpc import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.server import Channels
from mooncake.sampling import SamplingParams
from prefill_node.node import PrefillNode

HANDOFF_TIMEOUT_S = 0.2
PROMPT = [7 * i % 101 + 1 for i in range(150)]


def config_of(node_id: str, model: Path, *overrides: str) -> Config:
    return load_config(
        None,
        [
            f"node.id={node_id}",
            f"model.path={model}",
            "node.conductor='127.0.0.1:9'",  # nobody there
            "prefill.kv_gb=0.05",
            "decode.kv_gb=0.05",
            f"transfer.handoff_timeout_s={HANDOFF_TIMEOUT_S}",
            *overrides,
        ],
    )


@contextlib.asynccontextmanager
async def pair(model: Path, *overrides: str) -> AsyncIterator[tuple[PrefillNode, DecodeNode]]:
    """``overrides`` are the decode node's."""
    prefill, decode = PrefillNode(config_of("prefill-t", model)), DecodeNode(config_of("decode-t", model, *overrides))
    await decode.start()
    await prefill.start()
    try:
        yield prefill, decode
    finally:
        await prefill.stop()
        await decode.stop()


class HeldPrompt:
    """Keeps a prefill node between two layers, until it may go on."""

    def __init__(self, prefill: PrefillNode) -> None:
        self.begun = asyncio.Event()
        self.may_go_on = threading.Event()
        self._loop = asyncio.get_running_loop()
        prefill.streamer.listeners.append(self._wait)

    def _wait(self, layer: int) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        self.may_go_on.wait(60)


def ask(channels: Channels, prefill: PrefillNode, decode: DecodeNode, expected_ms: float = 0.0) -> tuple[Any, Any]:
    """Both calls of one request, as a conductor makes them."""
    common = {
        "request_id": "r",
        "handoff_id": "h",
        "epoch": 3,
        "tokens": tokens_to_wire(PROMPT),
        "num_prompt_tokens": len(PROMPT),
        "sampling": sampling_to_wire(SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)),
    }
    decoding = decode_pb2_grpc.DecodeStub(channels.get(decode.control_address)).Generate(
        decode_pb2.DecodeRequest(expected_ms=expected_ms, **common), timeout=60
    )
    prefilling = prefill_pb2_grpc.PrefillStub(channels.get(prefill.control_address)).Run(
        prefill_pb2.PrefillRequest(decode_address=decode.control_address, **common), timeout=60
    )
    return decoding, prefilling


@pytest.mark.timeout(120)
async def test_whoever_leaves_just_when_the_hand_off_is_committed_leaves_no_block_behind(tmp_path: Path) -> None:
    """The engine is in the middle of a step, and does not know yet that the sequence may run."""
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    channels, step_ends = Channels(), threading.Event()

    async with pair(tmp_path / "model") as (prefill, decode):
        prompt = HeldPrompt(prefill)
        calls = ask(channels, prefill, decode)
        reading = [asyncio.create_task(anext(aiter(call))) for call in calls]
        await prompt.begun.wait()
        await until(lambda: bool(decode.receiver._handoffs) and decode.host.engine.block_pool.num_in_use > 0, 30)
        decode.host.thread.call(lambda engine: step_ends.wait(60))
        prompt.may_go_on.set()
        await until(lambda: not decode.receiver._handoffs, 30)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await asyncio.sleep(0.5)  # for the node to hear of it
        step_ends.set()
        await until(lambda: decode.host.engine.block_pool.num_in_use == 0, 30)
        await channels.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("limit_ms", "rest_s"), [(0, 0.03), (25, 0.01125), (11, 0.0)])
async def test_decode_steps_leave_their_cores_to_prompts_that_this_node_waits_for(
    limit_ms: int, rest_s: float, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    channels = Channels()

    overrides = ("node.decode_share=0.25", f"conductor.tbt_limit_ms={limit_ms}")
    async with pair(tmp_path / "model", *overrides) as (prefill, decode):
        rest_after_s = decode._role.rest_after_s
        assert rest_after_s(0.01) == 0
        prompt = HeldPrompt(prefill)
        calls = ask(channels, prefill, decode)
        reading = [asyncio.create_task(anext(aiter(call))) for call in calls]
        await prompt.begun.wait()
        await until(lambda: decode.receiver.awaits_prompts, 30)
        assert max(rest_after_s(0.01), 0) == pytest.approx(rest_s)
        decode.host._hook.computed_prompts = True
        assert rest_after_s(0.01) == 0
        decode.host._hook.computed_prompts = False
        prompt.may_go_on.set()
        await asyncio.gather(*reading)
        await until(lambda: not decode.receiver.awaits_prompts, 30)
        assert rest_after_s(0.01) == 0
        for call in calls:
            call.cancel()
        await channels.close()


@pytest.mark.timeout(120)
async def test_decode_steps_do_not_wait_for_a_prompt_that_takes_much_longer_than_was_predicted(tmp_path: Path) -> None:
    """Its prefill node may hang: the decode node's other answers would come at a third of their pace until somebody
    finds out."""
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    channels = Channels()
    async with pair(tmp_path / "model", "node.decode_share=0.25") as (prefill, decode):
        prompt = HeldPrompt(prefill)
        calls = ask(channels, prefill, decode, expected_ms=10)
        reading = [asyncio.create_task(anext(aiter(call))) for call in calls]
        await prompt.begun.wait()
        await until(lambda: decode._role.rest_after_s(0.01) > 0, 30)
        await until(lambda: decode._role.rest_after_s(0.01) == 0, 30)
        assert decode.receiver.num_open == 1, "it is still awaited"
        prompt.may_go_on.set()
        await asyncio.gather(*reading)
        for call in calls:
            call.cancel()
        await channels.close()


@pytest.mark.timeout(120)
async def test_an_empty_message_is_told_at_once_and_is_nobody_s_request(tmp_path: Path) -> None:
    """gRPC sends one where it has no memory for the bytes of a message. When a conductor lacked it for a moment, its
    client was told that the request was wrong; a prefill node's close was answered, and the hand-off stayed open."""
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    channels = Channels()
    async with pair(tmp_path / "model") as (prefill, decode):
        to_decode = decode_pb2_grpc.DecodeStub(channels.get(decode.control_address))
        to_prefill = prefill_pb2_grpc.PrefillStub(channels.get(prefill.control_address))
        calls: list[Any] = [
            _all(to_prefill.Run(prefill_pb2.PrefillRequest(), timeout=5)),
            _all(to_decode.Generate(decode_pb2.DecodeRequest(), timeout=5)),
            to_decode.OpenHandoff(decode_pb2.OpenHandoffRequest(), timeout=5),
            to_decode.CommitHandoff(decode_pb2.CommitHandoffRequest(), timeout=5),
            to_decode.CloseHandoff(decode_pb2.CloseHandoffRequest(), timeout=5),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError, match="an empty message came") as caught:
                await call
            assert isinstance(error_from_rpc(caught.value), RetryElsewhere)
        assert decode.receiver.num_open == 0
        await channels.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("broken", ["_checks.check_first_tokens", "_processor.start_answers"])
async def test_a_sequence_that_a_bug_of_ours_keeps_from_starting_leaves_no_block_behind(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who waits for it is told at once."""
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    channels = Channels()

    def fail(*given: object) -> None:
        raise ZeroDivisionError("a bug")

    async with pair(tmp_path / "model") as (prefill, decode):
        part, _, function = broken.partition(".")
        monkeypatch.setattr(getattr(decode.host.engine, part), function, fail)
        for call in ask(channels, prefill, decode):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.INTERNAL
        await until(lambda: decode.host.engine.block_pool.num_in_use == 0, 30)
        await channels.close()


@pytest.mark.timeout(120)
async def test_a_prompt_may_take_longer_than_a_hand_off(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    channels = Channels()

    async with pair(tmp_path / "model") as (prefill, decode):
        prompt = HeldPrompt(prefill)
        decoding, prefilling = ask(channels, prefill, decode)

        async def tokens_decoded() -> list[int]:
            return [token.index async for response in decoding for token in response.tokens]

        async def reports() -> list[int]:
            return [response.report.prompt_tokens async for response in prefilling if response.HasField("report")]

        answer = asyncio.gather(tokens_decoded(), reports())
        await prompt.begun.wait()
        await asyncio.sleep(5 * HANDOFF_TIMEOUT_S)  # nothing is to happen in it
        prompt.may_go_on.set()
        indices, prompt_tokens = await answer
        assert indices[-1] == 3 and prompt_tokens == [len(PROMPT)]
        await channels.close()


@pytest.mark.timeout(120)
async def test_when_room_is_short_a_long_prompt_is_not_overtaken_by_short_ones(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    block_bytes = open_checkpoint(str(tmp_path / "model")).kv_layout(64, "float32").block_bytes
    node, channels = (
        DecodeNode(config_of("decode-t", tmp_path / "model", f"decode.kv_gb={6.5 * block_bytes / 1e9}")),
        Channels(),
    )
    await node.start()
    stub = decode_pb2_grpc.DecodeStub(channels.get(node.control_address))
    generating, answered = [], []

    async def open_handoff(name: str, num_blocks: int, priority: int = 0) -> None:
        tokens = [3 + (7 * i + len(name)) % 300 for i in range(64 * num_blocks - 1)]
        generating.append(
            stub.Generate(
                decode_pb2.DecodeRequest(
                    request_id=name,
                    handoff_id=name,
                    epoch=3,
                    tokens=tokens_to_wire(tokens),
                    num_prompt_tokens=len(tokens),
                    sampling=sampling_to_wire(SamplingParams(max_tokens=1, temperature=0.0)),
                    cache_salt=name,
                    priority=priority,
                ),
                timeout=60,
            )
        )
        await stub.OpenHandoff(decode_pb2.OpenHandoffRequest(handoff_id=name, epoch=3, writer_id="nobody"), timeout=60)
        answered.append(name)

    async def close(name: str) -> None:
        await stub.CloseHandoff(decode_pb2.CloseHandoffRequest(handoff_id=name, epoch=3), timeout=60)

    async def waiting(count: int) -> None:
        async with asyncio.timeout(60):
            while True:
                if node.receiver.num_waiting >= count:
                    return
                await asyncio.sleep(0.01)

    try:
        await open_handoff("first", 4)
        long = asyncio.create_task(open_handoff("long", 5))
        await waiting(1)
        short = asyncio.create_task(open_handoff("short", 1))  # for which there is room
        await waiting(2)
        urgent = asyncio.create_task(open_handoff("urgent", 6, priority=-1))
        await waiting(3)
        assert answered == ["first"]
        await close("first")
        await urgent
        await close("urgent")
        await asyncio.gather(long, short)
        assert answered == ["first", "urgent", "long", "short"]
    finally:
        for call in generating:
            call.cancel()
        await channels.close()
        await node.stop()


def break_it(engine: Engine) -> None:
    """Make the next step fail, and also the ending of its sequences."""
    engine._model = None  # type: ignore[assignment]
    engine._scheduler.finish = None  # type: ignore[assignment, method-assign]


@pytest.mark.timeout(120)
async def test_a_node_whose_engine_is_broken_tells_its_callers_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=512)
    channels = Channels()
    with caplog.at_level(logging.CRITICAL):
        async with pair(tmp_path / "model") as (prefill, decode):
            ending = asyncio.create_task(decode.wait_fatal())
            await asyncio.wrap_future(decode.host.thread.call(break_it))
            decoding, prefilling = ask(channels, prefill, decode)
            with pytest.raises(grpc.aio.AioRpcError, match="the engine is broken") as told:
                await asyncio.gather(*(_all(call) for call in (decoding, prefilling)))
            assert told.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the engine is broken" in (await asyncio.wait_for(ending, 10)).message
            await channels.close()


async def _all(call: Any) -> None:
    async for _ in call:
        pass
