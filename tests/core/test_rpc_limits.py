"""What strangers can take of a gRPC port: a bounded number of connections and streams, and those not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mooncake.client import Client
from mooncake.errors import NodeUnavailable, Overloaded
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.limits import RpcLimits, share_of_files
from mooncake.rpc.server import Channels, RpcServer

BEGINS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # of HTTP/2: the preface, and empty settings
SERVER = """
import asyncio
from mooncake.rpc.server import RpcServer
async def serve():
    server = RpcServer()
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()
asyncio.run(serve())
"""
CONDUCTOR = """
import asyncio
from mooncake.rpc import inference_pb2 as pb, inference_pb2_grpc
from mooncake.rpc.server import RpcServer
class Inference(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request, context):
        yield pb.GenerateResponse(text="Once upon")
        await asyncio.Event().wait()
async def serve():
    server = RpcServer()
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Inference(), "mooncake.v1.Inference")
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()
asyncio.run(serve())
"""
WATCHER = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    for _ in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
        print("watches", flush=True)
"""


@contextlib.asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[str]:
    server = RpcServer(limits=RpcLimits(**limits))  # type: ignore[arg-type]
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def said(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)


@contextlib.asynccontextmanager
async def child(script: str, *arguments: str) -> AsyncIterator[Child]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *arguments, stdout=pipe)
    try:
        yield Child(process)
    finally:
        process.kill()
        await process.wait()


@contextlib.contextmanager
def connections(address: str, number: int, say: bytes) -> Iterator[list[socket.socket]]:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(number)]
        for one in opened:
            one.sendall(say)
            one.setblocking(False)
        yield opened


def num_open(opened: list[socket.socket]) -> int:
    return sum(map(is_open, opened))


def is_open(one: socket.socket) -> bool:
    try:
        while one.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def until_open(opened: list[socket.socket], number: int) -> None:
    async with asyncio.timeout(10):
        while num_open(opened) != number:  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.02)


async def check(address: str) -> None:
    channels = Channels()
    try:
        stub = health_pb2_grpc.HealthStub(channels.get(address))
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    except grpc.RpcError as failure:
        raise error_from_rpc(failure, address) from None
    finally:
        await channels.close()


SILENT = pytest.mark.parametrize("say", [b"", BEGINS[:8], BEGINS], ids=["silent", "half a greeting", "idle"])


@SILENT
async def test_connections_are_bounded(say: bytes) -> None:
    async with serving(max_connections=8) as address:
        with connections(address, 20, say) as opened:
            await until_open(opened, 8)
            with pytest.raises(NodeUnavailable, match=r"hangs up: it may .* have too many connections"):
                await check(address)


@SILENT
async def test_connections_without_calls_end(say: bytes) -> None:
    async with serving(handshake_s=1.0, idle_s=1.0) as address:
        with connections(address, 8, say) as opened:
            await until_open(opened, 0)
        await check(address)


async def test_a_connection_with_a_call_outlasts_the_idle_time() -> None:
    async with serving(idle_s=0.3) as address, grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await call.read()
        await asyncio.sleep(1.0)
        assert not call.done()
        call.cancel()


async def test_streams_beyond_the_most_are_refused_and_one_that_ends_makes_room() -> None:
    async with serving(max_streams=3) as address, grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def watch() -> grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]:
            call = stub.Watch(health_pb2.HealthCheckRequest())
            await call.read()
            return call

        calls = [await watch() for _ in range(3)]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watch()
        error = error_from_rpc(refused.value)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error, Overloaded) and error.message == "3 streams are open here already"
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)  # is no stream
        calls.pop().cancel()
        async with asyncio.timeout(5):
            while len(calls) < 3:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    calls.append(await watch())
        for call in calls:
            call.cancel()


async def test_calls_beyond_the_most_of_a_connection_wait_in_their_client() -> None:
    async with serving(max_connection_streams=2) as address, grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for call in calls:
            await call.read()
        waiting = asyncio.ensure_future(stub.Check(health_pb2.HealthCheckRequest(), timeout=20))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await check(address)  # another client has connections of its own
        calls[0].cancel()
        await waiting
        calls[1].cancel()


async def test_a_client_that_vanished_with_a_call_open_is_given_up() -> None:
    async with serving(max_streams=1, ping_after_s=1.0, ping_s=1.0) as address, child(WATCHER, address) as client:
        assert await client.said() == b"watches\n"
        client.hang()  # as if its host was gone: its kernel still takes bytes
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
            stub, answered = health_pb2_grpc.HealthStub(channel), False
            while not answered:
                call = stub.Watch(health_pb2.HealthCheckRequest())
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answered = bool(await call.read())
                await asyncio.sleep(0.1)
            call.cancel()


async def test_a_server_that_hangs_fails_its_calls_after_two_keepalive_times() -> None:
    channels = Channels(keepalive_s=2.0)
    async with child(SERVER) as server:
        stub = health_pb2_grpc.HealthStub(channels.get(f"127.0.0.1:{int(await server.said())}"))
        call = stub.Watch(health_pb2.HealthCheckRequest())
        await call.read()
        server.hang()
        async with asyncio.timeout(15):  # gRPC's own default is a minute
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call.read()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    await channels.close()


async def test_a_client_notices_that_its_conductor_is_gone_though_its_call_has_no_deadline() -> None:
    async with child(CONDUCTOR) as conductor:
        with Client(f"127.0.0.1:{int(await conductor.said())}", keepalive_s=2.0) as client:
            answer = client.stream("A story:")
            assert (await asyncio.to_thread(next, answer)).text == "Once upon"
            conductor.hang()
            async with asyncio.timeout(15):
                with pytest.raises(NodeUnavailable):
                    await asyncio.to_thread(next, answer)


def test_a_port_takes_at_most_a_quarter_of_the_files() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert share_of_files(10) == 10
    assert files == resource.RLIM_INFINITY or share_of_files(files) == files // 4
