"""The index follows every cache over real streams: snapshots, events, gaps and restarts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from conductor.prefixes.index import PrefixIndex
from conductor.prefixes.subscriber import Cursor, Subscriber
from conductor.registry import NodeInfo
from kvstore.metadata.memory import MemoryDirectory
from mooncake.events import EVENTS_PER_MESSAGE, UNFINISHED, CacheEventsServicer, EventLog
from mooncake.rpc import common_pb2 as pb
from mooncake.rpc import common_pb2_grpc
from mooncake.rpc.convert import event_to_wire
from mooncake.rpc.server import Channels, RpcServer
from mooncake.types import BlockEvent, BlockKey, Role, Tier

KEYS = [BlockKey(bytes([i]) * 32) for i in range(8)]


def stored(*numbers: int) -> list[BlockEvent]:
    return [BlockEvent(True, KEYS[number]) for number in numbers]


async def holds(index: PrefixIndex, *numbers: int) -> None:
    """Wait until the index knows exactly these blocks of the node."""
    wanted = {KEYS[number] for number in numbers}
    async with asyncio.timeout(5):
        while {key for key in KEYS if index.match([key])} != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


Serve = Callable[..., Awaitable[tuple[RpcServer, int]]]


@pytest.fixture
def serve(rpc_server: Callable[[], RpcServer]) -> Serve:
    async def serve(servicer: Any, port: int = 0) -> tuple[RpcServer, int]:
        server = rpc_server()
        server.add(common_pb2_grpc.add_CacheEventsServicer_to_server, servicer, "mooncake.v1.CacheEvents")
        return server, await server.start("127.0.0.1", port)

    return serve


@pytest.fixture
async def following() -> AsyncIterator[tuple[PrefixIndex, Subscriber]]:
    index, channels = PrefixIndex(), Channels()
    subscriber = Subscriber(index, channels, MemoryDirectory())
    yield index, subscriber
    await subscriber.close()
    await channels.close()


async def test_the_first_snapshot_tells_ssd_blocks_from_dram_blocks(
    following: tuple[PrefixIndex, Subscriber], serve: Serve
) -> None:
    index, subscriber = following
    log = EventLog(incarnation=5)
    log.append([*stored(0), BlockEvent(True, KEYS[1], KEYS[0], Tier.SSD)])
    _, port = await serve(CacheEventsServicer(log))
    subscriber.follow(NodeInfo("n0", Role.STORE, 5, f"127.0.0.1:{port}"))
    await holds(index, 0, 1)
    runs = index.runs(KEYS)
    assert (runs[index.slot("n0")], runs[index.dram_slot("n0")]) == (2, 1)


async def test_a_snapshot_comes_first_and_events_follow(
    following: tuple[PrefixIndex, Subscriber], serve: Serve
) -> None:
    index, subscriber = following
    log = EventLog(incarnation=5)
    log.append(stored(0, 1, 2))
    _, port = await serve(CacheEventsServicer(log))
    subscriber.follow(NodeInfo("n0", Role.STORE, 5, f"127.0.0.1:{port}"))
    await holds(index, 0, 1, 2)
    log.append([*stored(3), BlockEvent(False, KEYS[0])])
    await holds(index, 1, 2, 3)
    subscriber.forget("n0")
    assert index.num_blocks("n0") == 0


async def test_names_that_are_no_prompts_hide_nothing(following: tuple[PrefixIndex, Subscriber], serve: Serve) -> None:
    """Whoever uses a store by itself names blocks as they like."""
    index, subscriber = following
    log = EventLog(incarnation=5)
    log.append([BlockEvent(True, BlockKey(b"mine")), *stored(0)])
    _, port = await serve(CacheEventsServicer(log))
    subscriber.follow(NodeInfo("n0", Role.STORE, 5, f"127.0.0.1:{port}"))
    await holds(index, 0)
    log.append([BlockEvent(True, BlockKey(b"yours")), BlockEvent(False, BlockKey(b"mine")), *stored(1)])
    await holds(index, 0, 1)
    assert index.num_blocks("n0") == 2


async def test_a_restarted_cache_sends_a_new_snapshot(following: tuple[PrefixIndex, Subscriber], serve: Serve) -> None:
    index, subscriber = following
    first = EventLog(incarnation=5)
    first.append(stored(0, 1))
    server, port = await serve(CacheEventsServicer(first))
    subscriber.follow(NodeInfo("n0", Role.STORE, 5, f"127.0.0.1:{port}"))
    await holds(index, 0, 1)
    await server.stop(0)
    second = EventLog(incarnation=6)
    second.append(stored(4))
    await serve(CacheEventsServicer(second), port)
    await holds(index, 4)


class Forgetful(common_pb2_grpc.CacheEventsServicer):
    """Loses a message in its first stream; tells everything in the second."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    async def Subscribe(self, request: pb.SubscribeRequest, context: Any) -> AsyncIterator[pb.BlockEvents]:  # noqa: N802
        self.asked.append((request.incarnation, request.next_sequence))
        if len(self.asked) == 1:
            yield message(0, 2, 0, 1, reset=True)
            yield message(3, 4, 3)
        else:
            yield message(4, 4, 5, 6, reset=True)
        await asyncio.Event().wait()


def message(first: int, after: int, *numbers: int, reset: bool = False) -> pb.BlockEvents:
    return pb.BlockEvents(
        incarnation=5,
        first_sequence=first,
        next_sequence=after,
        reset=reset,
        events=[event_to_wire(event) for event in stored(*numbers)],
    )


async def test_a_gap_makes_it_subscribe_again(following: tuple[PrefixIndex, Subscriber], serve: Serve) -> None:
    index, subscriber = following
    cache = Forgetful()
    _, port = await serve(cache)
    subscriber.follow(NodeInfo("n0", Role.STORE, 5, f"127.0.0.1:{port}"))
    await holds(index, 5, 6)
    assert cache.asked == [(0, 0), (0, 0)], "it no longer trusts what it knew"


class BreaksOff(CacheEventsServicer):
    """Its first stream ends after the second message."""

    asked = 0

    async def Subscribe(self, request: pb.SubscribeRequest, context: Any) -> AsyncIterator[pb.BlockEvents]:  # noqa: N802
        self.asked += 1
        breaks, told = self.asked == 1, 0
        async for each in super().Subscribe(request, context):
            yield each
            told += 1
            if breaks and told == 2:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "reset")


async def test_an_interrupted_snapshot_starts_over(following: tuple[PrefixIndex, Subscriber], serve: Serve) -> None:
    index, subscriber = following
    log, num_blocks = EventLog(incarnation=5), 3 * EVENTS_PER_MESSAGE
    log.append(BlockEvent(True, BlockKey(number.to_bytes(32, "little"))) for number in range(num_blocks))
    cache = BreaksOff(log)
    _, port = await serve(cache)
    subscriber.follow(NodeInfo("n0", Role.STORE, 5, f"127.0.0.1:{port}"))
    async with asyncio.timeout(10):
        while index.num_blocks("n0") < num_blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert cache.asked == 2


def test_the_cursor_takes_what_fits_and_nothing_else() -> None:
    cursor = Cursor()
    assert not cursor.takes(message(0, 1, 0)), "knows no incarnation yet"
    assert cursor.takes(message(UNFINISHED, UNFINISHED, reset=True))
    assert cursor.takes(message(UNFINISHED, 7)), "the rest of the snapshot"
    assert cursor.takes(message(7, 9, 0, 1))
    assert not cursor.takes(message(7, 9, 0, 1)), "told twice"
    assert not cursor.takes(message(10, 11, 0)), "one is missing"
    assert (cursor.incarnation, cursor.next_sequence) == (5, 9), "a refusal changes nothing"
