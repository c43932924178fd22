"""A small asynchronous driver for tests: token ids in, the whole answer out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from mooncake.rpc import cluster_pb2, cluster_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from mooncake.rpc.errors import error_from_rpc


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int = 0
    timings: Any = None


async def ask(
    channel: grpc.aio.Channel,
    prompt: list[int],
    max_tokens: int,
    *,
    timeout: float = 240.0,
    salt: str = "",
    model: str = "",
    **sampling: Any,
) -> Answer:
    """Ask for one answer: greedy and of full length unless ``sampling`` says otherwise. Raises the cluster's
    MooncakeError."""
    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    request = inference_pb2.GenerateRequest(
        model=model,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **settings),
        cache_salt=salt,
    )
    answer = Answer()
    try:
        async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout):
            for token in response.tokens:
                assert token.index == len(answer.tokens), "a gap or a repeat in the stream"
                answer.tokens.append(token.token_id)
            answer.text += response.text
            if response.finish_reason:
                answer.finish_reason = response.finish_reason
                answer.cached_tokens = response.usage.cached_tokens
                answer.timings = response.timings
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return answer


async def ask_all(
    channel: grpc.aio.Channel, prompts: list[list[int]], max_tokens: int, *, at_once: int, **kwargs: Any
) -> list[Answer]:
    """Ask all prompts, at most ``at_once`` at the same time."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> Answer:
        async with gate:
            return await ask(channel, prompt, max_tokens, **kwargs)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def check_twice(
    channel: grpc.aio.Channel, prompts: list[list[int]], wanted: list[list[int]], cached_tokens: int
) -> None:
    """The answers are those wanted, and when asked again, so many tokens of each prompt are reused."""
    for cached in (0, cached_tokens):
        pairs = zip(prompts, wanted, strict=True)
        answers = await asyncio.gather(*(ask(channel, prompt, len(tokens)) for prompt, tokens in pairs))
        assert [answer.tokens for answer in answers] == wanted
        assert [answer.cached_tokens for answer in answers] == [cached] * len(prompts)
        await wait_idle(channel)


async def check_two_turns(
    channel: grpc.aio.Channel,
    prompts: list[list[int]],
    max_tokens: int,
    expected: Callable[[list[int]], list[int]] | None,
) -> list[int]:
    """The answers, and those to turns that go on with them, are as ``expected`` (None: not compared), and nothing is
    held at the end. Returns how many tokens of each second turn were reused."""
    turns, cached = prompts, list[int]()
    for _ in range(2):
        answers = await ask_all(channel, turns, max_tokens, at_once=3)
        assert expected is None or [answer.tokens for answer in answers] == [expected(turn) for turn in turns]
        turns = [[*turn, *answer.tokens, 7, 8] for turn, answer in zip(turns, answers, strict=True)]
        cached = [answer.cached_tokens for answer in answers]
        await wait_idle(channel)
    assert not leaks(await status(channel))
    return cached


async def status(channel: grpc.aio.Channel) -> cluster_pb2.StatusResponse:
    return await cluster_pb2_grpc.ClusterStub(channel).Status(cluster_pb2.StatusRequest(), timeout=10)


async def counters(channel: grpc.aio.Channel, role: str) -> dict[str, int]:
    """Of the only node of a role."""
    [node] = [node for node in (await status(channel)).nodes if node.info.role == role]
    return dict(node.load.counters)


def leaks(status: cluster_pb2.StatusResponse) -> list[str]:
    """Resources that a node still holds although nothing runs, and inconsistent counters."""
    found = []
    for node in status.nodes:
        load, name = node.load, node.info.node_id
        quarantined = load.counters.get("blocks_quarantined", 0)
        if load.blocks_free + load.blocks_cached + load.blocks_in_use != load.blocks_total:
            found.append(
                f"{name}: {load.blocks_free} free + {load.blocks_cached} cached + {load.blocks_in_use} in use "
                f"is not {load.blocks_total}"
            )
        if load.blocks_in_use or quarantined:
            found.append(f"{name}: {load.blocks_in_use} blocks in use, {quarantined} quarantined")
        if load.running or load.waiting or load.counters.get("handoffs_open", 0):
            found.append(f"{name}: {load.running} running, {load.waiting} waiting, {dict(load.counters)}")
    if status.requests_running:
        found.append(f"conductor: {status.requests_running} requests running")
    return found


async def wait_idle(channel: grpc.aio.Channel, within_s: float = 30.0) -> float:
    """Wait until nothing is held anywhere, according to reports sent from now on. Returns the time that took (s)."""
    started_s = time.monotonic()
    while True:
        now = await status(channel)
        passed_s = time.monotonic() - started_s
        silent = [node.info.node_id for node in now.nodes if node.heartbeat_age_s >= passed_s]
        if not (found := leaks(now)) and not silent:
            return passed_s
        if passed_s > within_s:
            raise AssertionError(f"after {within_s} s: {'; '.join(found)}; silent: {silent}")
        await asyncio.sleep(0.02)


async def wait_running(channel: grpc.aio.Channel, requests: int) -> None:
    """Wait until the conductor has this many requests running."""
    started_s = time.monotonic()
    while (running := (await status(channel)).requests_running) < requests:
        assert time.monotonic() - started_s < 30, f"only {running} of {requests} requests are running"
        await asyncio.sleep(0.02)


async def computing_node(channel: grpc.aio.Channel, role: str) -> str:
    """The first node of this role that says, in a heartbeat, that it has a sequence."""
    async with asyncio.timeout(60):
        while True:
            for node in (await status(channel)).nodes:
                if node.info.role == role and node.load.running:
                    return node.info.node_id
            await asyncio.sleep(0.01)
