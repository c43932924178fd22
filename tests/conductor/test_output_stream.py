"""One stream from each node, with what it says of all requests: slow clients, streams that end, what comes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from waiting import until

from conductor.dispatch.attempt import INBOX_LIMIT
from conductor.dispatch.call_end import CallEnded
from conductor.dispatch.output_stream import OutputStream, OutputStreams
from mooncake.config import load_config
from mooncake.errors import NodeUnavailable, OutOfMemory
from mooncake.rpc import common_pb2, decode_pb2, outputs_pb2, outputs_pb2_grpc
from mooncake.rpc.server import Channels, RpcServer
from mooncake.types import FinishReason

PROMPT = [5, 6, 7, 8, 9]
LONG = 3 * INBOX_LIMIT


async def test_a_node_waits_for_a_slow_client_and_for_it_alone(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    (node,) = cluster.decode
    node.script.token_s = 0.001  # a message or two are on their way when it is asked to wait
    async with aclosing(cluster.core.dispatcher.generate(cluster.request(PROMPT, LONG))) as slow:
        got = [*(await anext(slow)).tokens]
        await until(lambda: any(outbox._held for outbox in node.outboxes._open.values()))
        (stream,) = cluster.core.dispatcher._streams._streams.values()
        (hear,) = stream._listeners.values()
        assert INBOX_LIMIT <= len(hear.__self__._inbox) < LONG - 1  # type: ignore[attr-defined]

        tokens, _ = await cluster.generate(cluster.request([1, 2, 3], 8))
        assert tokens == cluster.answer([1, 2, 3], 8)
        async for delta in slow:
            got += delta.tokens
    assert [token.token_id for token in got] == cluster.answer(PROMPT, LONG)
    assert node.calls == 2, "nothing was tried again"
    await cluster.is_quiet()
    await until(lambda: not any(outbox._held for outbox in node.outboxes._open.values()))


async def test_an_answer_goes_on_elsewhere_when_the_stream_ends(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 2)
    first = cluster.decode[0]
    first.script.token_s = 0.01
    async with aclosing(cluster.core.dispatcher.generate(cluster.request(PROMPT, 30))) as deltas:
        got = [*(await anext(deltas)).tokens, *(await anext(deltas)).tokens]
        first.outboxes.end()
        async for delta in deltas:
            got += delta.tokens
    assert [token.token_id for token in got] == cluster.answer(PROMPT, 30)
    assert cluster.decode[1].calls == 1
    await cluster.is_quiet()


async def test_a_stream_that_has_ended_is_opened_anew(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    await cluster.generate(cluster.request(PROMPT, 3))
    (stream,) = cluster.core.dispatcher._streams._streams.values()
    await cluster.decode[0].relay.cut()
    await until(lambda: stream.has_ended)
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].summary.retries == 0
    assert cluster.core.dispatcher._streams._streams.keys() == {cluster.decode[0].address}


@pytest.mark.parametrize(
    ("asked", "uses_it"),
    [({"max_tokens": 8}, True), ({"max_tokens": 8, "prompt_logprobs": 0}, False), ({"max_tokens": 1}, False)],
)
async def test_nodes_that_answer_alone_use_their_stream_for_what_is_short_and_often(
    fake_cluster_of: Any, asked: dict[str, int], uses_it: bool
) -> None:
    settings = ("cluster.coupled=1", "conductor.grpc_port=0", "conductor.heartbeat_interval_s=0.1")
    cluster = await fake_cluster_of(load_config(overrides=[*settings]), 1, 0)
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, **asked))
    assert tokens == cluster.answer(PROMPT, 1), "this node tells no more"
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert bool(cluster.prefill[0].last_request.output_stream) is uses_it
    await cluster.is_quiet()


class Node(outputs_pb2_grpc.OutputsServicer):
    """Sends these batches, and waits after each until it is told to go on."""

    def __init__(self, *batches: outputs_pb2.OutputBatch) -> None:
        self.batches = batches
        self.go_on = asyncio.Semaphore(1)

    async def Collect(self, requests: Any, context: Any) -> AsyncIterator[outputs_pb2.OutputBatch]:  # noqa: N802
        async for _ in requests:
            for batch in self.batches:
                await self.go_on.acquire()
                yield batch
            return


def batch(number: int, *handoffs: str) -> outputs_pb2.OutputBatch:
    said = decode_pb2.DecodeResponse(tokens=[common_pb2.SampledToken(index=number)])
    return outputs_pb2.OutputBatch(
        number=number, outputs=[outputs_pb2.Output(handoff_id=handoff, decode=said) for handoff in handoffs]
    )


Heard = dict[str, list[Any]]


@asynccontextmanager
async def hearing(node: Node, *handoffs: str) -> AsyncIterator[tuple[OutputStream, Heard]]:
    """What the node says of these."""
    server, channels = RpcServer(), Channels()
    server.add(outputs_pb2_grpc.add_OutputsServicer_to_server, node, "mooncake.v1.Outputs")
    streams = OutputStreams(channels)
    stream = streams.of(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", "decode node d0")
    heard: Heard = {handoff: [] for handoff in handoffs}
    for handoff, messages in heard.items():
        stream.listen(handoff, messages.append)
    try:
        yield stream, heard
    finally:
        await streams.close()
        await channels.close()
        await server.stop(0)


async def test_whoever_waits_for_a_batch_has_heard_it_and_no_later_one() -> None:
    node = Node(batch(1, "a"), batch(2, "a", "b"), batch(3, "a"))  # the last is kept back, and so is the end behind it
    async with hearing(node, "a", "b") as (stream, heard):
        await stream.read_up_to(1)
        assert [said.tokens[0].index for said in heard["a"]] == [1]
        reading = asyncio.create_task(stream.read_up_to(2))
        assert not heard["b"] and not reading.done()
        node.go_on.release()
        await reading
        assert [len(messages) for messages in heard.values()] == [2, 1]


async def test_a_batch_wakes_nobody_who_waits_for_a_later_one() -> None:
    node = Node(batch(1, "a"), batch(2, "a"))
    async with hearing(node, "a") as (stream, _):
        waiting = stream.read_up_to(2)
        woken = waiting.send(None)
        await stream.read_up_to(1)
        assert not woken.done()
        node.go_on.release()
        await stream.read_up_to(2)
        assert woken.done()
        with pytest.raises(StopIteration):
            waiting.send(None)


async def test_whoever_gives_up_waiting_leaves_nothing_behind() -> None:
    """A node may promise batches that it never sends."""
    async with hearing(Node(), "a") as (stream, _):
        for promised in range(7, 10):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await stream.read_up_to(promised)
        assert not stream._awaited


async def test_at_its_end_everybody_is_told_and_nobody_waits_any_longer() -> None:
    async with hearing(Node(batch(1, "a", "gone")), "a", "b") as (stream, heard):
        await stream.read_up_to(7)
        end = CallEnded(NodeUnavailable("decode node d0 stopped"), is_lost=True)
        assert [str(messages[-1]) for messages in heard.values()] == [str(end)] * 2


async def test_after_a_batch_that_came_empty_nothing_is_believed() -> None:
    """gRPC sends one where it has no memory for the bytes of a message."""
    node = Node(batch(1, "a"), outputs_pb2.OutputBatch(), batch(3, "a"))
    async with hearing(node, "a") as (stream, heard):
        node.go_on.release()
        node.go_on.release()
        await stream.read_up_to(3)
        _, end = heard["a"]
        assert isinstance(end.error, OutOfMemory) and not end.is_lost
