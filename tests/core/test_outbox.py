"""What a node says of many requests goes into one stream, from which each can be held back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest
from waiting import until

from mooncake.errors import InvalidRequest, MooncakeError, NodeUnavailable
from mooncake.outbox import MAX_OF_ONE, MAX_OUTPUTS, Outbox, Outboxes, diverted
from mooncake.rpc import common_pb2, decode_pb2, outputs_pb2, outputs_pb2_grpc
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.server import LAST_BATCH_KEY, Channels, RpcServer


def said(index: int) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=[common_pb2.SampledToken(index=index, token_id=7)])


def output(handoff_id: str, index: int = 0) -> outputs_pb2.Output:
    return outputs_pb2.Output(handoff_id=handoff_id, decode=said(index))


def names(batch: outputs_pb2.OutputBatch | None) -> list[str]:
    assert batch is not None
    return [each.handoff_id for each in batch.outputs]


async def is_waiting(putting: asyncio.Task[int]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return not putting.done()


async def test_a_batch_has_all_that_was_said_before_it() -> None:
    outbox = Outbox()
    assert [await outbox.put(output(name)) for name in "aba"] == [1, 1, 1]
    batch = await outbox.take()
    assert batch is not None and (batch.number, names(batch)) == (1, ["a", "b", "a"])
    taking = asyncio.create_task(outbox.take())
    assert await outbox.put(output("c")) == 2
    assert names(await taking) == ["c"]


async def test_what_is_held_waits_and_nobody_else_does() -> None:
    outbox = Outbox()
    outbox.hold("slow")
    putting = asyncio.create_task(outbox.put(output("slow")))
    assert await is_waiting(putting)
    await outbox.put(output("quick"))
    assert names(await outbox.take()) == ["quick"]
    assert await is_waiting(putting), "room alone does not release it"
    outbox.release("slow")
    assert await putting == 2
    assert names(await outbox.take()) == ["slow"]


@pytest.mark.parametrize(("requests", "most"), [(1, MAX_OF_ONE), (MAX_OUTPUTS, MAX_OUTPUTS)])
async def test_no_more_waits_than_a_batch_may_have(requests: int, most: int) -> None:
    outbox = Outbox()
    for number in range(most):
        await outbox.put(output(str(number % requests)))
    putting = asyncio.create_task(outbox.put(output("0")))
    assert await is_waiting(putting)
    assert len(names(await outbox.take())) == most
    assert await putting == 2


async def test_whoever_waits_hears_that_the_stream_has_ended() -> None:
    outbox = Outbox()
    outbox.hold("slow")
    putting = asyncio.create_task(outbox.put(output("slow")))
    assert await is_waiting(putting)
    outbox.end()
    with pytest.raises(NodeUnavailable, match="has ended"):
        await putting
    assert await outbox.take() is None


class Context:
    def __init__(self) -> None:
        self.told: tuple[tuple[str, str], ...] = ()

    def set_trailing_metadata(self, told: tuple[tuple[str, str], ...]) -> None:
        self.told = told


async def saying(count: int, error: MooncakeError | None = None) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
    for index in range(count):
        yield said(index)
    if error is not None:
        raise error


async def test_without_a_stream_a_call_says_everything_itself() -> None:
    context = Context()
    assert [message async for message in diverted(None, "a", saying(3), context)] == [said(index) for index in range(3)]
    assert context.told == ()


@pytest.mark.parametrize("error", [None, NodeUnavailable("no")])
async def test_however_a_call_ends_it_tells_which_batch_was_its_last(error: MooncakeError | None) -> None:
    context, outbox = Context(), Outbox()
    await outbox.put(output("b"))
    await outbox.take()
    try:
        assert [message async for message in diverted(outbox, "a", saying(2, error), context)] == []
    except NodeUnavailable as raised:
        assert raised is error
    assert context.told == ((LAST_BATCH_KEY, "2"),)


class Live:
    def __init__(self, outboxes: Outboxes, stub: Any) -> None:
        self.outboxes = outboxes
        self.stub = stub

    def collect(self, stream: int, *more: outputs_pb2.CollectRequest) -> Any:
        async def requests() -> AsyncIterator[outputs_pb2.CollectRequest]:
            yield outputs_pb2.CollectRequest(output_stream=stream)
            for request in more:
                yield request
            await asyncio.Event().wait()

        return self.stub.Collect(requests(), timeout=20)


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    server, outboxes, channels = RpcServer(), Outboxes(), Channels()
    server.add(outputs_pb2_grpc.add_OutputsServicer_to_server, outboxes, "mooncake.v1.Outputs")
    port = await server.start("127.0.0.1", 0)
    yield Live(outboxes, outputs_pb2_grpc.OutputsStub(channels.get(f"127.0.0.1:{port}")))
    outboxes.end()
    await channels.close()
    await server.stop()


async def test_two_conductors_collect_their_own(live: Live) -> None:
    calls = [live.collect(5), live.collect(6)]
    for stream in (6, 5):  # a call that names one may come before it
        outbox = await live.outboxes.of(stream)
        assert outbox is not None
        await outbox.put(output(str(stream)))
    assert [names(await call.read()) for call in calls] == [["5"], ["6"]]
    assert await live.outboxes.of(0) is None


async def test_a_conductor_holds_a_request_back(live: Live) -> None:
    call = live.collect(5, outputs_pb2.CollectRequest(held="slow"))
    outbox = await live.outboxes.of(5)
    assert outbox is not None
    await until(lambda: outbox._held)
    putting = asyncio.create_task(outbox.put(output("slow")))
    await outbox.put(output("quick"))
    assert names(await call.read()) == ["quick"]
    assert not putting.done()
    outbox.release("slow")
    assert names(await call.read()) == ["slow"]


async def test_what_nobody_collects_any_more_is_not_said(live: Live) -> None:
    call = live.collect(5)
    outbox = await live.outboxes.of(5)
    assert outbox is not None
    call.cancel()
    await until(lambda: outbox.has_ended)
    with pytest.raises(NodeUnavailable):
        await outbox.put(output("a"))


@pytest.mark.parametrize("stream", [0, 5])
async def test_a_stream_needs_a_name_of_its_own(live: Live, stream: int) -> None:
    first = live.collect(5)
    await live.outboxes.of(5)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await live.collect(stream).read()
    assert isinstance(error_from_rpc(failure.value), InvalidRequest)
    first.cancel()


async def test_a_node_that_stops_ends_its_streams(live: Live) -> None:
    call = live.collect(5)
    await live.outboxes.of(5)
    live.outboxes.end()
    assert await call.read() is grpc.aio.EOF
