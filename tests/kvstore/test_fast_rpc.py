"""Fast RPC to a store: errors keep their class, garbage ends the connection, and without it gRPC is used."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from store_alone import connect_store

from kvstore.client.calls import LOOK_AGAIN_S, StoreCalls
from kvstore.client.types import Reservation
from kvstore.fast_rpc import MAX_CALLS, MAX_FRAMES, FastRpc, FastRpcServer
from kvstore.node import StoreNode
from kvstore.transfer.sockets import bound_to
from mooncake.app.cluster.role_main import run_async
from mooncake.config import load_config
from mooncake.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MooncakeError,
    NodeUnavailable,
    OutOfBlocks,
    OutOfMemory,
    Overloaded,
)
from mooncake.rpc import store_pb2, store_pb2_grpc
from mooncake.rpc.errors import error_from_parts, parts_of_error
from mooncake.rpc.server import Channels, RpcServer
from mooncake.types import SegmentAddress

BLOCK = 4096


@pytest.fixture
async def node() -> AsyncIterator[StoreNode]:
    config = load_config(None, ["node.id=store", f"store.dram_gb={4 * BLOCK / 1e9 + 1e-9}"])
    node = StoreNode(config, BLOCK, join_cluster=False)
    await node.start()
    yield node
    await node.stop()


async def test_errors_arrive_as_they_were_raised(node: StoreNode) -> None:
    async with await connect_store(node.control_address) as client:
        assert client._calls.fast_rpc is not None and client._calls.fast_rpc.is_open
        with pytest.raises(InvalidRequest, match="do not fit") as caught:
            await client.put(b"k", bytes(BLOCK + 1))
        assert caught.value.param == "length"
        leases = []
        for i in range(4):
            await client.put(b"%d" % i, b"x")
            leases.append(await client.ranges.acquire([b"%d" % i]))
        with pytest.raises(OutOfBlocks):
            await client.put(b"more", b"x")
        await client.ranges.release(leases)
        assert await client.put(b"more", b"x")
        with pytest.raises(DeadlineExceeded):
            await client.ranges.acquire([b"k"], timeout_s=0.0)


def no_memory(*given: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("way", ["fast RPC", "gRPC"])
@pytest.mark.parametrize("lacks_it", ["store", "gRPC of the store", "client"])
async def test_slots_of_an_answer_that_found_no_memory_are_given_back(
    node: StoreNode, lacks_it: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows their epochs: the store would hold them as long as the client lives."""
    async with await connect_store(node.control_address) as client:
        assert client._calls.fast_rpc is not None
        if way == "gRPC":
            client._calls.fast_rpc.close()
            client._calls.fast_rpc = None
        ask = client._calls._reserve

        async def empty_answer(*given: Any) -> store_pb2.ReserveResponse:
            await ask(*given)
            return store_pb2.ReserveResponse()

        with monkeypatch.context() as patched:
            match lacks_it:
                case "store":
                    patched.setattr("kvstore.service._offer_to_wire", no_memory)
                case "client":
                    patched.setattr("kvstore.client.ranges.reservations_from_wire", no_memory)
                case _:
                    patched.setattr(client._calls, "_reserve", empty_answer)
            with pytest.raises(MemoryError if lacks_it == "client" else OutOfMemory):
                await client.ranges.reserve([(b"a", b""), (b"b", b"")], BLOCK, 1)
        assert (await client.stats()).free == 2
        async with asyncio.timeout(10):
            while (await client.stats()).free < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_an_end_of_reservations_that_arrives_empty_is_told_again(node: StoreNode) -> None:
    async with await connect_store(node.control_address) as client:
        for call in (client._calls.fast.Abort, client._calls.stub.Abort):
            with pytest.raises((MooncakeError, grpc.aio.AioRpcError), match="an empty message came"):
                await call(store_pb2.AbortRequest(), timeout=5)
        for call in (client._calls.fast.Seal, client._calls.stub.Seal):
            with pytest.raises((MooncakeError, grpc.aio.AioRpcError), match="an empty message came"):
                await call(store_pb2.SealRequest(), timeout=5)


@pytest.mark.parametrize(
    "error", [InvalidRequest("no\nway", "field"), Overloaded("later", 2.5), OutOfBlocks("full"), InvalidRequest("")]
)
def test_parts_of_an_error_make_the_same_error(error: MooncakeError) -> None:
    back = error_from_parts(parts_of_error(error))
    assert type(back) is type(error) and back.message == error.message.replace("\n", " ")
    assert getattr(back, "param", None) == getattr(error, "param", None)
    assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)


async def test_without_it_grpc_carries_on_until_it_is_back(node: StoreNode) -> None:
    async with await connect_store(node.control_address) as client:
        assert client._calls.fast_rpc is not None
        client._calls.fast_rpc.abort()  # as if the network had cut it
        with pytest.raises(NodeUnavailable):  # whatever was on its way
            await client.put(b"k", b"bytes")
        assert not client._calls.fast_rpc.is_open and await client.put(b"k", b"bytes")
        assert await client.get(b"k") == b"bytes"
        async with asyncio.timeout(10):  # nobody has to ask for it
            while not client._calls.fast_rpc.is_open:
                await asyncio.sleep(0.01)
                await client.ranges.acquire([b"k"])
        assert await client.get(b"k") == b"bytes"


async def serve(servicer: Any, **options: Any) -> tuple[FastRpcServer, int]:
    """And its port."""
    sock = bound_to("127.0.0.1")
    return await FastRpcServer.start(sock, servicer, **options), int(sock.getsockname()[1])


class Shelf:
    """A service with one method that answers on the spot and one that waits."""

    async def Exists(self, request: store_pb2.ExistsRequest, context: None) -> store_pb2.ExistsResponse:  # noqa: N802
        return store_pb2.ExistsResponse(stored=[key == b"k" for key in request.keys])

    async def Acquire(self, request: store_pb2.AcquireRequest, context: None) -> store_pb2.AcquireResponse:  # noqa: N802
        await asyncio.sleep(0)
        return store_pb2.AcquireResponse(lease_id=len(request.keys))


def test_it_carries_calls_on_the_event_loop_that_nodes_run_on() -> None:
    pytest.importorskip("uvloop")

    async def ask() -> tuple[list[bool], int]:
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        server, port = await serve(Shelf())
        connection = await FastRpc.open("shelf", "127.0.0.1", port)
        try:
            exists = await connection.Exists(store_pb2.ExistsRequest(keys=[b"k", b"x"]), timeout=5)
            acquired = await connection.Acquire(store_pb2.AcquireRequest(keys=[b"k"]), timeout=5)
            return list(exists.stored), acquired.lease_id
        finally:
            connection.close()
            await server.stop()

    assert run_async(ask()) == ([True, False], 1)


class Shop(store_pb2_grpc.StoreServicer):
    """A store that reports its fast RPC port, and counts its calls."""

    def __init__(self) -> None:
        self.fast_rpc_port = self.num_asked = 0

    async def Stats(self, request: Any, context: Any) -> store_pb2.StatsResponse:  # noqa: N802
        self.num_asked += 1
        return store_pb2.StatsResponse(fast_rpc_port=self.fast_rpc_port)

    async def Exists(self, request: Any, context: Any) -> store_pb2.ExistsResponse:  # noqa: N802
        return store_pb2.ExistsResponse(stored=[True])


async def test_one_that_broke_is_looked_for_now_and_then_and_found_elsewhere(
    rpc_server: Callable[[], RpcServer],
) -> None:
    shop, server, channels = Shop(), rpc_server(), Channels()
    server.add(store_pb2_grpc.add_StoreServicer_to_server, shop, "mooncake.v1.Store")
    calls = StoreCalls(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", channels)
    first, port = await serve(shop)
    await calls.open_fast_rpc(port)
    request, started_s = store_pb2.ExistsRequest(keys=[b"k"]), time.monotonic()
    assert isinstance(calls.fast, FastRpc)
    await first.stop()
    async with asyncio.timeout(10):
        while isinstance(calls.fast, FastRpc):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for _ in range(100):
        assert (await calls.call(calls.fast.Exists(request, timeout=5))).stored == [True]
    assert 1 <= shop.num_asked <= 1 + (time.monotonic() - started_s) / LOOK_AGAIN_S
    second, shop.fast_rpc_port = await serve(shop)
    async with asyncio.timeout(10):
        while not isinstance(calls.fast, FastRpc):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await calls.call(calls.fast.Exists(request, timeout=5))).stored == [True]
    await calls.close()
    await channels.close()
    await second.stop()


async def test_garbage_ends_the_connection_and_nothing_else(node: StoreNode) -> None:
    rng = random.Random(0)
    async with await connect_store(node.control_address) as client:
        await client.put(b"k", b"bytes")
        response = await client._calls.stub.Stats(store_pb2.StatsRequest())
        for _ in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", response.fast_rpc_port)
            writer.write(rng.randbytes(rng.randrange(1, 200)))
            writer.write_eof()
            async with asyncio.timeout(5):
                await reader.read()
            writer.close()
        assert await client.get(b"k") == b"bytes"
        node.store.check()


async def test_an_answer_that_is_none_ends_the_call_at_once_and_tells_who_does_not_wait() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(FRAME.pack(0, TAKEN, 0))
        length, kind, call = FRAME.unpack(await reader.readexactly(FRAME.size))
        await reader.readexactly(length)
        writer.write(FRAME.pack(4, kind, call) + b"\xff\xff\xff\xff")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        connection = await FastRpc.open("s", "127.0.0.1", server.sockets[0].getsockname()[1])
        unheard: list[store_pb2.ReserveResponse | None] = []
        async with asyncio.timeout(5):
            with pytest.raises(NodeUnavailable, match="has ended"):
                await connection.Reserve(store_pb2.ReserveRequest(), 60.0, unheard.append)
        assert unheard == [None]
        assert not connection.is_open


async def test_a_store_that_stays_silent_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.fast_rpc.SILENT_S", 0.3)
    gone = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(FRAME.pack(0, TAKEN, 0))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    connection = await FastRpc.open("s", "127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(DeadlineExceeded):
        await connection.Exists(store_pb2.ExistsRequest(), 0.1)
    assert connection.is_open, "one late answer says little"
    await asyncio.sleep(0.3)
    with pytest.raises(DeadlineExceeded):
        await connection.Exists(store_pb2.ExistsRequest(), 0.1)
    assert not connection.is_open
    await asyncio.wait_for(gone.wait(), 5)
    server.close()


FRAME = struct.Struct("<IBI")
ACQUIRE, EXISTS, TAKEN = 3, 5, 254


async def test_connections_beyond_the_most_are_refused_and_their_clients_use_grpc(
    rpc_server: Callable[[], RpcServer],
) -> None:
    shop, server, channels = Shop(), rpc_server(), Channels()
    server.add(store_pb2_grpc.add_StoreServicer_to_server, shop, "mooncake.v1.Store")
    calls = StoreCalls(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", channels)
    request = store_pb2.ExistsRequest(keys=[b"k"])
    fast_rpc, port = await serve(shop, max_callers=2)
    shop.fast_rpc_port = port
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2)]
        await asyncio.sleep(0.1)
        await calls.open_fast_rpc(port)
        assert not isinstance(calls.fast, FastRpc), "it was refused before anybody's call went there"
        assert (await calls.call(calls.fast.Exists(request, timeout=5))).stored == [True]
        silent.pop().close()
        async with asyncio.timeout(10):
            while not isinstance(calls.fast, FastRpc):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await calls.call(calls.fast.Exists(request, timeout=5))).stored == [True]
    await calls.close()
    await channels.close()
    await fast_rpc.stop()


async def test_a_client_that_is_refused_asks_ever_more_rarely(
    rpc_server: Callable[[], RpcServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.calls.LOOK_AGAIN_S", 0.01)
    shop, server, channels = Shop(), rpc_server(), Channels()
    server.add(store_pb2_grpc.add_StoreServicer_to_server, shop, "mooncake.v1.Store")
    calls = StoreCalls(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", channels)
    fast_rpc, port = await serve(shop, max_callers=0)
    shop.fast_rpc_port = port
    await calls.open_fast_rpc(port)
    begin_s, asked_s = time.monotonic(), 0.0
    while asked_s < 1.0 or shop.num_asked < 2:
        assert not isinstance(calls.fast, FastRpc)
        await asyncio.sleep(0.005)
        asked_s = time.monotonic() - begin_s
    assert 2 <= shop.num_asked <= 2 + math.log2(asked_s / 0.01)
    await calls.close()
    await channels.close()
    await fast_rpc.stop()


async def test_a_store_that_does_not_say_that_it_has_taken_the_connection_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.fast_rpc.OPEN_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        async with asyncio.timeout(5):
            with pytest.raises(NodeUnavailable, match="no answer"):
                await FastRpc.open("s", "127.0.0.1", hanging.getsockname()[1])


async def test_one_who_gives_up_as_the_store_takes_the_connection_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would ever close it, and the store would keep a place for it."""
    fast_rpc, port = await serve(Shelf())
    opening = asyncio.create_task(FastRpc.open("s", "127.0.0.1", port))
    frame = FastRpc.frame

    def take_and_cancel(connection: FastRpc, kind: int, call: int, message: bytes) -> None:
        frame(connection, kind, call, message)
        opening.cancel()

    monkeypatch.setattr(FastRpc, "frame", take_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with asyncio.timeout(5):
        while fast_rpc._callers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await fast_rpc.stop()


class CountingShelf(Shelf):
    """Counts its calls, and blocks ``acquire`` until its door is open."""

    def __init__(self) -> None:
        self.asked = self.running = self.most = 0
        self.door = asyncio.Event()

    async def Exists(self, request: store_pb2.ExistsRequest, context: None) -> store_pb2.ExistsResponse:  # noqa: N802
        self.asked += 1
        return await super().Exists(request, context)

    async def Acquire(self, request: store_pb2.AcquireRequest, context: None) -> store_pb2.AcquireResponse:  # noqa: N802
        self.running += 1
        self.most = max(self.most, self.running)
        await self.door.wait()
        self.running -= 1
        return await super().Acquire(request, context)


async def count_answers(sock: socket.socket, wanted: int) -> None:
    """Read ``wanted`` answers; fails if they do not come."""
    loop, answered, heads = asyncio.get_running_loop(), 0, b""
    async with asyncio.timeout(60):
        while answered < wanted:
            heads += await loop.sock_recv(sock, 1 << 20)
            at = 0
            while len(heads) - at >= FRAME.size and len(heads) - at >= FRAME.size + FRAME.unpack_from(heads, at)[0]:
                length, kind, _ = FRAME.unpack_from(heads, at)
                at += FRAME.size + length
                answered += kind != TAKEN
            heads = heads[at:]


async def send_until_it_blocks(sock: socket.socket, data: bytes, most: int) -> int:
    """Bytes sent when nothing has been taken for a while."""
    sent, stuck_at = 0, time.monotonic() + 0.5
    while sent < most and time.monotonic() < stuck_at:
        try:
            sent += sock.send(data[sent % len(data) :])
            stuck_at = time.monotonic() + 0.5
        except BlockingIOError:
            pass
        await asyncio.sleep(0)
    return sent


async def test_after_some_frames_of_one_connection_it_is_the_turn_of_others() -> None:
    shelf, loop = CountingShelf(), asyncio.get_running_loop()
    (server, port), before, most = await serve(shelf), 0, 0
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setblocking(False)
        sending = loop.create_task(loop.sock_sendall(sock, FRAME.pack(0, EXISTS, 1) * 30_000))
        answers = loop.create_task(count_answers(sock, 30_000))
        while not answers.done():
            await asyncio.sleep(0)  # once around the loop
            most, before = max(most, shelf.asked - before), shelf.asked
        await asyncio.gather(sending, answers)
    assert shelf.asked == 30_000 and 0 < most <= MAX_FRAMES
    await server.stop()


@pytest.mark.parametrize("kind", [ACQUIRE, EXISTS])
async def test_who_asks_without_end_and_reads_nothing_waits_and_is_answered_when_it_reads(kind: int) -> None:
    shelf, keys = CountingShelf(), [b"k"] * 400
    request = store_pb2.ExistsRequest(keys=keys) if kind == EXISTS else store_pb2.AcquireRequest(keys=keys)
    frame = FRAME.pack(request.ByteSize(), kind, 1) + request.SerializeToString()
    server, port = await serve(shelf)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setblocking(False)
        sent = await send_until_it_blocks(sock, frame * 200, 100_000 * len(frame))
        assert sent < 100_000 * len(frame) and shelf.most <= MAX_CALLS
        shelf.door.set()
        await count_answers(sock, sent // len(frame))
    await server.stop()


async def test_what_is_to_be_told_once_the_channels_are_closed_is_dropped_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channels = Channels()
    calls = StoreCalls("127.0.0.1:9", channels)
    await calls.close()
    await channels.close()
    calls.later(calls.abort([Reservation(SegmentAddress("store", 1, "host", "", "", 1, 1), 0, 1)]))
    while calls._background:  # noqa: ASYNC110
        await asyncio.sleep(0)
    gc.collect()
    assert not caplog.records, "the end of its connections tells the store"
