"""Events of a cache: a subscriber that replays them, from any number, knows exactly which blocks the cache has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.node import StoreNode
from mooncake.config import load_config
from mooncake.events import EVENTS_PER_MESSAGE, CacheEventsServicer, EventLog
from mooncake.rpc import common_pb2 as pb
from mooncake.rpc import common_pb2_grpc
from mooncake.rpc.server import Channels, RpcServer
from mooncake.types import BlockEvent, BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def stored(number: int, parent: int | None = None) -> BlockEvent:
    return BlockEvent(True, key(number), b"" if parent is None else key(parent))


def removed(number: int) -> BlockEvent:
    return BlockEvent(False, key(number))


def replay(held: dict[bytes, bytes], events: list[BlockEvent]) -> dict[bytes, bytes]:
    """The blocks known to a subscriber that had ``held`` and received ``events``."""
    held = dict(held)
    for event in events:
        if event.stored:
            held[event.key] = event.parent
        else:
            held.pop(event.key, None)
    return held


events = st.lists(
    st.builds(
        lambda number, is_stored: stored(number) if is_stored else removed(number), st.integers(0, 5), st.booleans()
    ),
    max_size=30,
)


@given(before=events, after=events, keep=st.integers(1, 20))
def test_whoever_catches_up_knows_what_the_cache_knows(
    before: list[BlockEvent], after: list[BlockEvent], keep: int
) -> None:
    log = EventLog(incarnation=1, keep=keep)
    log.append(before)
    known, at = replay({}, log.snapshot()), log.next_sequence
    log.append(after)
    missed = log.since(at)
    assert (missed is None) == (len(after) > keep), "the log forgets no sooner than it must"
    assert replay({}, log.snapshot()) == replay({}, before + after)
    if missed is not None:
        assert replay(known, missed) == replay({}, log.snapshot())


def test_numbers_from_another_life_are_not_understood() -> None:
    log = EventLog(incarnation=1)
    log.append([stored(1)])
    assert log.since(1) == []
    assert log.since(2) is None
    assert log.since(0) == [stored(1)]


@asynccontextmanager
async def served(log: EventLog) -> AsyncIterator[common_pb2_grpc.CacheEventsAsyncStub]:
    server, channels = RpcServer(), Channels()
    server.add(common_pb2_grpc.add_CacheEventsServicer_to_server, CacheEventsServicer(log), "mooncake.v1.CacheEvents")
    port = await server.start("127.0.0.1", 0)
    try:
        yield common_pb2_grpc.CacheEventsStub(channels.get(f"127.0.0.1:{port}"))
    finally:
        await channels.close()
        await server.stop(0)


class Follower:
    """The rule of the protocol's own comment: take a reset, or exactly what is expected; anything else is a gap."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.expected = 0
        self.held: dict[bytes, bytes] = {}
        self.resets = 0

    def take(self, message: pb.BlockEvents) -> None:
        if message.reset:
            self.held = {}
            self.resets += 1
        else:
            assert (message.incarnation, message.first_sequence) == (self.incarnation, self.expected), "a gap"
        self.incarnation, self.expected = message.incarnation, message.next_sequence
        self.held = replay(self.held, [BlockEvent(e.stored, BlockKey(e.key), e.parent) for e in message.events])

    async def follow(self, stub: common_pb2_grpc.CacheEventsAsyncStub, log: EventLog) -> None:
        """Until everything that the log holds now is known."""
        request = pb.SubscribeRequest(incarnation=self.incarnation, next_sequence=self.expected)
        call = stub.Subscribe(request, timeout=20)
        async for message in call:
            self.take(message)
            if (self.incarnation, self.expected) == (log.incarnation, log.next_sequence) and self.held == replay(
                {}, log.snapshot()
            ):
                break
        call.cancel()


async def test_a_newcomer_gets_a_snapshot_and_one_who_was_away_only_the_rest() -> None:
    log, follower = EventLog(incarnation=7), Follower()
    log.append([stored(1), stored(2, 1), stored(3, 2), removed(3)])
    async with served(log) as stub:
        await follower.follow(stub, log)
        assert follower.held == {key(1): b"", key(2): key(1)}
        log.append([stored(4, 2), removed(1)])
        await follower.follow(stub, log)
        assert follower.held == {key(2): key(1), key(4): key(2)}
        assert follower.resets == 1


async def test_events_reach_a_subscriber_that_waits() -> None:
    log, follower = EventLog(incarnation=7), Follower()
    async with served(log) as stub:
        call = stub.Subscribe(pb.SubscribeRequest(), timeout=20)
        messages = aiter(call)
        follower.take(await anext(messages))
        assert follower.held == {}
        for number in range(3):
            log.append([stored(number)])
            follower.take(await anext(messages))
            assert set(follower.held) == {key(n) for n in range(number + 1)}
        call.cancel()


@pytest.mark.parametrize("behind", ["another life", "too far back", "ahead"])
async def test_whoever_cannot_go_on_starts_over(behind: str) -> None:
    log, follower = EventLog(incarnation=7, keep=4), Follower()
    log.append([stored(number) for number in range(10)])
    follower.incarnation = 6 if behind == "another life" else 7
    follower.expected = {"another life": 10, "too far back": 5, "ahead": 11}[behind]
    follower.held = {key(99): b""}  # of what it knew before
    async with served(log) as stub:
        await follower.follow(stub, log)
    assert follower.resets == 1
    assert set(follower.held) == {key(number) for number in range(10)}


async def test_a_large_cache_comes_in_parts_while_it_changes() -> None:
    log, follower = EventLog(incarnation=7), Follower()
    log.append([stored(number) for number in range(3 * EVENTS_PER_MESSAGE)])
    async with served(log) as stub:
        call = stub.Subscribe(pb.SubscribeRequest(), timeout=20)
        parts = 0
        async for message in call:
            follower.take(message)
            parts += 1
            assert len(message.events) <= EVENTS_PER_MESSAGE
            if parts == 1:
                log.append([removed(0), stored(10**6)])
            if set(follower.held) == set(replay({}, log.snapshot())):
                break
        call.cancel()
    assert (parts, follower.resets) == (4, 1)


async def test_a_node_that_stops_ends_the_streams_of_its_subscribers() -> None:
    """Otherwise the server would wait for them and finally cut them off, which gRPC reports as errors of ours."""
    node, channels = StoreNode(load_config(None, ["store.dram_gb=0.001"]), 4096, join_cluster=False), Channels()
    await node.start()
    call = common_pb2_grpc.CacheEventsStub(channels.get(node.control_address)).Subscribe(pb.SubscribeRequest())
    await call.read()

    await node.stop()

    assert await call.read() == grpc.aio.EOF and await call.code() == grpc.StatusCode.OK
    await channels.close()


async def test_a_subscriber_that_leaves_is_forgotten() -> None:
    log = EventLog(incarnation=7)
    async with served(log) as stub:
        before = len(asyncio.all_tasks())
        calls = [stub.Subscribe(pb.SubscribeRequest(), timeout=20) for _ in range(8)]
        for call in calls:
            await call.read()
        assert len(asyncio.all_tasks()) > before
        for call in calls:
            call.cancel()
            with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
                await call.read()
        async with asyncio.timeout(5):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - there is nothing to wait on
                await asyncio.sleep(0.01)
