"""A small asynchronous driver for tests: token ids in, the whole answer out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc

from mooncake.rpc import common_pb2, inference_pb2, inference_pb2_grpc
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
    **sampling: Any,
) -> Answer:
    """Greedy and to full length unless ``sampling`` says otherwise. Raises the MooncakeError that the cluster gives."""
    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    request = inference_pb2.GenerateRequest(
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
    """All prompts, at most ``at_once`` running."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> Answer:
        async with gate:
            return await ask(channel, prompt, max_tokens, **kwargs)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
