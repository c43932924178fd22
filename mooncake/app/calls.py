"""What commands ask of a running cluster over gRPC: an answer, streamed as text with figures at the end; its status.

When nobody answers, the error says what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from mooncake.errors import MooncakeError, NodeUnavailable
from mooncake.rpc import cluster_pb2, common_pb2, inference_pb2
from mooncake.rpc.cluster_pb2_grpc import ClusterStub
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.inference_pb2_grpc import InferenceStub

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: str
    usage: inference_pb2.Usage
    timings: inference_pb2.RequestTimings


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str


def chat_request(turns: Sequence[Turn], sampling: common_pb2.SamplingParams) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns]
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatMessages(messages=messages), sampling=sampling)


async def ask(
    channel: grpc.aio.Channel,
    request: inference_pb2.GenerateRequest,
    on_text: Callable[[str], None],
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Stream one answer. Raises the MooncakeError that the cluster raised. Cancelling cancels the request."""
    pieces: list[str] = []
    last = inference_pb2.GenerateResponse()
    try:
        async for last in InferenceStub(channel).Generate(request, timeout=timeout_s):
            if last.text:
                pieces.append(last.text)
                on_text(last.text)
    except grpc.RpcError as failure:
        raise _told(failure) from None
    return Answer("".join(pieces), last.finish_reason, last.usage, last.timings)


async def cluster_status(address: str, timeout_s: float = 5.0) -> cluster_pb2.StatusResponse:
    """What the conductor at ``address`` knows. Raises MooncakeError when it does not answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            status: cluster_pb2.StatusResponse = await ClusterStub(channel).Status(
                cluster_pb2.StatusRequest(), timeout=timeout_s
            )
        except grpc.RpcError as failure:
            raise _told(failure) from None
    return status


def _told(failure: grpc.RpcError) -> MooncakeError:
    """The cluster's own error; or what to do, when the call never reached a server (whose answers carry metadata)."""
    if (
        isinstance(failure, grpc.aio.AioRpcError)
        and failure.code() is grpc.StatusCode.UNAVAILABLE
        and not (failure.trailing_metadata() or failure.initial_metadata())
    ):
        return NodeUnavailable("no cluster answers there; start one with `mooncake serve`, or give its --address")
    return error_from_rpc(failure, "cluster")
