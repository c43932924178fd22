"""The call to one node: whatever happens to it, its end arrives in the inbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from waiting import until

from conductor.dispatch.call_end import CallEnded
from conductor.dispatch.node_call import MOST_MESSAGES, Inbox, NodeCall
from conductor.registry import NodeInfo
from mooncake.errors import InternalError
from mooncake.rpc import decode_pb2
from mooncake.rpc.server import LAST_BATCH_KEY
from mooncake.types import Role


class BrokenCall:
    """gRPC's object for a call, that fails in a way it should not."""

    async def initial_metadata(self) -> dict[str, str]:
        return {}

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> Any:
        raise ValueError("nobody thought of this")
        yield


async def test_an_error_that_nobody_expected_ends_the_call_at_once(caplog: pytest.LogCaptureFixture) -> None:
    inbox, info = Inbox(4), NodeInfo("p0", Role.PREFILL, 1, "127.0.0.1:1")
    call = NodeCall(Role.PREFILL, info, BrokenCall(), inbox, lambda: False, lambda info: None)  # type: ignore[arg-type]
    role, ended = await asyncio.wait_for(inbox.get(), 5.0)
    assert role is Role.PREFILL and isinstance(ended, CallEnded)
    assert isinstance(ended.error, InternalError) and ended.is_retryable and not ended.is_lost
    assert "nobody thought of this" in caplog.text
    call.close()


class EndedCall:
    """One that said nothing itself: its last message was in this batch of the stream."""

    def __init__(self, batch: str) -> None:
        self._batch = batch

    async def initial_metadata(self) -> dict[str, str]:
        return {}

    async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((LAST_BATCH_KEY, self._batch),)

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> Any:
        for message in ():
            yield message


class Stream:
    """In place of an ``OutputStream``."""

    def __init__(self) -> None:
        self.hear: Callable[[Any], None]
        self.has_read = asyncio.Event()
        self.told: list[str] = []

    def listen(self, handoff_id: str, hear: Callable[[Any], None]) -> None:
        self.hear = hear

    def leave(self, handoff_id: str) -> None:
        self.told.append("leave")

    def hold(self, handoff_id: str) -> None:
        self.told.append("hold")

    def release(self, handoff_id: str) -> None:
        self.told.append("release")

    async def read_up_to(self, number: int) -> None:
        assert number == 2
        await self.has_read.wait()


def streamed_call(inbox: Inbox, stream: Stream, call: EndedCall | None = None) -> NodeCall:
    call = call or EndedCall("2")
    info = NodeInfo("d0", Role.DECODE, 1, "127.0.0.1:1")
    return NodeCall(Role.DECODE, info, call, inbox, lambda: False, lambda info: None, stream, "h")  # type: ignore[arg-type]


async def test_a_call_ends_after_what_the_node_said_in_its_stream() -> None:
    inbox, stream, said = Inbox(4), Stream(), decode_pb2.DecodeResponse(finish_reason="stop")
    call = streamed_call(inbox, stream)
    assert await call.end_within(0.01) is None
    stream.hear(said)
    stream.has_read.set()
    assert [await inbox.get(), await inbox.get()] == [(Role.DECODE, said), (Role.DECODE, CallEnded())]
    call.close()


class FailedCall(EndedCall):
    async def __aiter__(self) -> Any:
        told = grpc.aio.Metadata((LAST_BATCH_KEY, self._batch))
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), told, "no more")
        yield


@pytest.mark.parametrize("kind", [EndedCall, FailedCall])
async def test_a_number_of_a_batch_that_makes_no_sense_is_none(kind: type[EndedCall]) -> None:
    inbox = Inbox(4)
    call = streamed_call(inbox, Stream(), kind(5000 * "9"))  # more than Python reads
    _, ended = await asyncio.wait_for(inbox.get(), 5.0)
    assert isinstance(ended, CallEnded) and (ended.error is None) is (kind is EndedCall)
    call.close()


async def test_a_full_inbox_holds_the_node_until_half_of_it_is_read() -> None:
    inbox, stream, said = Inbox(4), Stream(), decode_pb2.DecodeResponse(finish_reason="stop")
    call = streamed_call(inbox, stream)
    for _ in range(5):
        stream.hear(said)
    await until(lambda: stream.told == ["hold"])
    await inbox.get()
    await inbox.get()
    await asyncio.sleep(0)
    assert stream.told == ["hold"]
    await inbox.get()
    await until(lambda: stream.told == ["hold", "release"])
    call.close()


async def test_a_node_that_does_not_stop_when_it_is_held_makes_no_sense() -> None:
    inbox, stream, said = Inbox(4), Stream(), decode_pb2.DecodeResponse(finish_reason="stop")
    call = streamed_call(inbox, stream)
    for _ in range(MOST_MESSAGES + 1):
        stream.hear(said)
    assert stream.told == ["leave"]
    messages = [await inbox.get() for _ in range(MOST_MESSAGES + 1)]
    assert messages[-1] == (Role.DECODE, None)
    call.close()


async def test_what_a_decode_node_says_waits_until_it_is_admitted_and_its_end_does_not() -> None:
    inbox, stream, said = Inbox(4, admits_decode=False), Stream(), decode_pb2.DecodeResponse(finish_reason="stop")
    call, lost = streamed_call(inbox, stream), CallEnded(is_lost=True)
    stream.hear(said)
    stream.hear(lost)
    assert await inbox.get() == (Role.DECODE, lost)
    inbox.admit_decode()
    assert await inbox.get() == (Role.DECODE, said)
    call.close()


@pytest.mark.parametrize("number", ["", "-1", "many"])
async def test_a_call_that_names_no_batch_at_its_end_waits_for_none(number: str) -> None:
    inbox, stream = Inbox(4), Stream()
    call = streamed_call(inbox, stream, EndedCall(number))
    assert await call.end_within(5.0) == CallEnded()
    call.close()
