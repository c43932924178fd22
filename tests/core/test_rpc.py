"""gRPC as all roles use it: errors keep their class, health and reflection work, and calls end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from machines import missing

from mooncake import errors
from mooncake.addresses import join_address, split_address
from mooncake.errors import MooncakeError
from mooncake.rpc import inference_pb2 as pb
from mooncake.rpc import inference_pb2_grpc
from mooncake.rpc.errors import error_from_parts, error_from_rpc, status_of
from mooncake.rpc.server import MAX_MESSAGE_BYTES, Channels, RpcServer, remaining_s

SERVICE = "mooncake.v1.Inference"


async def test_a_port_for_http_is_told_as_such() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received.")
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=10)
    told = error_from_rpc(failed.value, address)
    assert told.message == f"{address}: it does not speak gRPC: is this the port for HTTP?"


async def test_a_port_that_another_process_has_taken_is_told_as_such() -> None:
    """A node that dies leaves its port to whoever comes next; callers know of it for some seconds more."""
    server = RpcServer()
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=10)
    await server.stop()
    told = error_from_rpc(failed.value, address)
    assert isinstance(told, errors.NodeUnavailable)
    assert told.message == f"{address}: another service answers there, or another version of this one"


@pytest.mark.parametrize("said", ["", "soon", "²", "-1", "9" * 5000])
def test_a_peer_that_says_nonsense_about_when_to_return_is_told_as_overloaded(said: str) -> None:
    metadata = grpc.aio.Metadata(("grpc-retry-pushback-ms", said))
    refused = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), metadata, "full")
    for told in (error_from_rpc(refused), error_from_parts(f"overloaded\n\n{said}\nfull".encode())):
        assert isinstance(told, errors.Overloaded)
        assert told.retry_after_s == 1.0


MOVES = """
import asyncio, pathlib, time
from grpc_health.v1 import health_pb2, health_pb2_grpc
from mooncake.rpc.server import Channels, RpcServer

async def main():
    hosts, (one, other) = pathlib.Path("/etc/hosts"), (RpcServer(), RpcServer())
    hosts.write_text("127.0.0.1 conductor.test")
    port = await one.start("127.0.0.1", 0)
    stub = health_pb2_grpc.HealthStub(Channels().get(f"conductor.test:{port}"))
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    await one.stop(0)
    hosts.write_text("127.0.0.2 conductor.test")
    await other.start("127.0.0.2", port)
    began = time.monotonic()
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=40, wait_for_ready=True)
    print(time.monotonic() - began)

asyncio.run(main())
"""


@pytest.mark.skipif(bool(missing()), reason=f"names need a file of a test's own: {missing()}")
def test_a_peer_whose_name_means_another_address_is_found_soon(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.touch()
    script = f'mount --bind {hosts} /etc/hosts; exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-ec", script, sys.executable, MOVES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10


class Servicer(inference_pb2_grpc.InferenceServicer):
    """A scripted service that records its calls."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.after = 0  # responses of a stream before the error
        self.running = 0
        self.remaining_s = 0.0
        self.payload = "x"

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        self.remaining_s = remaining_s(context, 300.0)
        if self.error is not None:
            raise self.error
        return pb.TokenizeResponse(ids=[len(request.text)])

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1
        raise AssertionError

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.running += 1
        try:
            sent = 0
            while True:
                if self.error is not None and sent == self.after:
                    raise self.error
                yield pb.GenerateResponse(text=self.payload)
                sent += 1
        finally:
            self.running -= 1


class Live:
    def __init__(self, servicer: Servicer, port: int, channels: Channels) -> None:
        self.servicer = servicer
        self.port = port
        self.channel = channels.get(f"127.0.0.1:{port}")
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    async def quiet(self) -> None:
        async with asyncio.timeout(1):
            while self.servicer.running:  # noqa: ASYNC110 - there is nothing to wait on
                await asyncio.sleep(0.005)


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    server, servicer, channels = RpcServer(), Servicer(), Channels()
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, servicer, SERVICE)
    port = await server.start("127.0.0.1", 0)
    yield Live(servicer, port, channels)
    await channels.close()
    await server.stop(0)


def tree(cls: type[MooncakeError]) -> list[type[MooncakeError]]:
    below = [leaf for child in cls.__subclasses__() for leaf in tree(child)]
    return [cls, *below] if cls.__module__ == errors.__name__ else below


async def test_a_call_that_takes_too_long_is_told_as_such(live: Live) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await live.stub.Detokenize(pb.DetokenizeRequest(), timeout=0.05)
    told = error_from_rpc(failed.value, "host:1")
    assert type(told) is errors.DeadlineExceeded
    assert told.message == "host:1: no answer came in the time that the call allows"


ENDED_BY_ITS_PEER = """
import threading
from concurrent.futures import ThreadPoolExecutor

import mooncake.rpc
import grpc

server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.http2.max_ping_strikes", 1)])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
states, ended = [], threading.Event()

def changed(state):
    states.append(state)
    if states[-2:-1] == [grpc.ChannelConnectivity.READY]:
        ended.set()

pings = [("grpc.keepalive_time_ms", 100), ("grpc.keepalive_permit_without_calls", 1)]
channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[*pings, ("grpc.http2.max_pings_without_data", 0)])
channel.subscribe(changed, try_to_connect=True)
print(ended.wait(20))
"""


def test_a_connection_that_its_peer_ends_is_no_news_on_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED_BY_ITS_PEER], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"
    assert done.stderr == ""


def test_what_callers_are_told_of_is_no_news_on_stderr() -> None:
    script = """
import asyncio, socket
from mooncake.errors import ConfigError
from mooncake.rpc.server import RpcServer

async def main():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        try:
            await RpcServer().start("127.0.0.1", taken.getsockname()[1])
        except ConfigError as error:
            print(error.message)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "the port is taken" in done.stdout
    assert done.stderr == ""


GROUPS = (MooncakeError, errors.CallerError, errors.RetryElsewhere, errors.TryLater)
RAISED = [cls for cls in tree(MooncakeError) if cls not in GROUPS]


@pytest.mark.parametrize("cls", RAISED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("call", ["unary", "stream"])
async def test_every_error_arrives_as_what_it_is(live: Live, cls: type[MooncakeError], call: str) -> None:
    live.servicer.error, live.servicer.after = cls("what is wrong: é\u20ac, 100 %"), 2
    responses = 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if call == "unary":
            await live.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=20)
        else:
            async for _ in live.stub.Generate(pb.GenerateRequest(), timeout=20):
                responses += 1
    arrived = error_from_rpc(caught.value, "peer")
    assert responses == (0 if call == "unary" else 2)
    assert caught.value.code() == status_of(live.servicer.error)
    assert (arrived.message, arrived.code) == (live.servicer.error.message, cls.code)
    # A class without a code of its own arrives as the parent whose code it shares, never as a mere group.
    assert issubclass(cls, type(arrived)) and type(arrived) not in GROUPS
    if "code" in vars(cls):
        assert type(arrived) is cls


async def test_details_of_an_error_arrive_with_it(live: Live) -> None:
    async def caught(error: MooncakeError) -> MooncakeError:
        live.servicer.error = error
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await live.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=20)
        return error_from_rpc(raised.value)

    overloaded = await caught(errors.Overloaded("no room", retry_after_s=2.5))
    assert isinstance(overloaded, errors.Overloaded) and overloaded.retry_after_s == 2.5
    invalid = await caught(errors.InvalidRequest("too hot", "temperature"))
    assert isinstance(invalid, errors.InvalidRequest) and invalid.param == "temperature"
    long = await caught(errors.ContextTooLong("too long", "messages"))
    assert isinstance(long, errors.ContextTooLong) and long.param == "messages"


@pytest.mark.parametrize("call", ["unary", "stream"])
async def test_a_bug_is_logged_in_full_and_told_in_a_sentence(
    live: Live, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    live.servicer.error = ZeroDivisionError("secret detail")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if call == "unary":
            await live.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=20)
        else:
            await anext(aiter(live.stub.Generate(pb.GenerateRequest(), timeout=20)))
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert "ZeroDivisionError: secret detail" in caplog.text


async def test_a_server_without_memory_says_that_another_may_have_it(live: Live) -> None:
    live.servicer.error = MemoryError()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=20)
    told = error_from_rpc(caught.value)
    assert isinstance(told, errors.OutOfMemory) and isinstance(told, errors.RetryElsewhere)


@pytest.mark.parametrize(
    "method",
    [f"/{SERVICE}/Tokenize", f"/{SERVICE}/Generate", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"],
)
async def test_bytes_that_are_no_message_are_the_callers_fault_and_nothing_to_log(
    live: Live, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_stream = method.endswith(("Generate", "Watch"))
    open_call = live.channel.unary_stream if is_stream else live.channel.unary_unary
    call = open_call(method)(b"\xff\xff", timeout=20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (anext(aiter(call)) if is_stream else call)
    assert isinstance(error_from_rpc(caught.value), errors.InvalidRequest)
    assert caplog.text == "" and live.servicer.running == 0


async def test_bytes_that_are_no_message_end_a_stream_of_requests(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    call = live.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(timeout=20)
    await call.write(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.text == ""


async def test_a_time_out_inside_is_a_deadline_outside(live: Live) -> None:
    live.servicer.error = TimeoutError()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=20)
    assert isinstance(error_from_rpc(caught.value), errors.DeadlineExceeded)


async def test_failures_of_the_transport_name_the_peer() -> None:
    channels = Channels()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        stub = inference_pb2_grpc.InferenceStub(channels.get(address))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=20)
    await channels.close()
    error = error_from_rpc(caught.value, "the store")
    assert isinstance(error, errors.NodeUnavailable)
    assert error.message.startswith("the store: ")


async def test_a_peer_that_is_cut_off_is_found_unavailable_within_seconds() -> None:
    """Its packets are lost, as between machines: here because a port takes no more connections."""
    channels = Channels()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(socket.socket())
        port.bind(("127.0.0.1", 0))
        port.listen(0)
        for _ in range(2):  # one more than wait there to be accepted
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(port.getsockname())
        stub = inference_pb2_grpc.InferenceStub(channels.get(f"127.0.0.1:{port.getsockname()[1]}"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=8)
    await channels.close()
    assert isinstance(error_from_rpc(caught.value), errors.NodeUnavailable), "the call's own time was not needed"


async def test_callers_deadlines_pass_through_and_end_the_work(live: Live) -> None:
    await live.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=50)
    assert 40 < live.servicer.remaining_s <= 50.1, "on the wire, 50 s less a moment are 50.0 s in tenths, rounded up"
    await live.stub.Tokenize(pb.TokenizeRequest(text="a"))
    assert live.servicer.remaining_s == 300
    await live.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=5000)
    assert live.servicer.remaining_s == 300, "no more than a server gives anybody"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live.stub.Detokenize(pb.DetokenizeRequest(), timeout=0.2)
    assert isinstance(error_from_rpc(caught.value), errors.DeadlineExceeded)
    await live.quiet()


@pytest.mark.parametrize("payload", ["x", "x" * 1_000_000], ids=["between responses", "inside a full pipe"])
async def test_a_client_that_goes_away_ends_the_stream_within_a_second(live: Live, payload: str) -> None:
    live.servicer.payload = payload
    call = live.stub.Generate(pb.GenerateRequest(), timeout=60)
    await call.read()
    assert live.servicer.running == 1
    call.cancel()
    await live.quiet()


async def test_a_client_that_goes_away_ends_a_call_within_a_second(live: Live) -> None:
    call = live.stub.Detokenize(pb.DetokenizeRequest(), timeout=60)
    async with asyncio.timeout(5):
        while not live.servicer.running:  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.005)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await live.quiet()


async def test_a_call_that_the_other_side_cuts_off_finds_it_unavailable() -> None:
    """As gRPC does with calls that come in the moment in which a server stops."""

    class Stopping(inference_pb2_grpc.InferenceServicer):
        async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
            return await context.abort(grpc.StatusCode.CANCELLED)

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Stopping(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=10)
    await server.stop(0)
    told = error_from_rpc(failed.value, address)
    assert isinstance(told, errors.NodeUnavailable)
    assert told.message == f"{address}: it has cut the call off, and probably stops"


async def test_a_message_beyond_the_limit_is_refused_not_taken_in(live: Live) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live.stub.Tokenize(pb.TokenizeRequest(text="x" * (MAX_MESSAGE_BYTES + 1)), timeout=20)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await live.stub.Tokenize(pb.TokenizeRequest(text="x" * (MAX_MESSAGE_BYTES - 99)), timeout=20)).ids


async def test_health_is_told_for_the_server_and_each_service(live: Live) -> None:
    stub = health_pb2_grpc.HealthStub(live.channel)
    for service in ("", SERVICE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="mooncake.v1.Nothing"), timeout=20)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_health_can_be_watched(live: Live) -> None:
    call = health_pb2_grpc.HealthStub(live.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
    assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
    call.cancel()


async def test_a_server_that_drains_says_so(rpc_server: Callable[[], RpcServer]) -> None:
    server, channels = rpc_server(), Channels()
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Servicer(), SERVICE)
    port = await server.start("127.0.0.1", 0)
    await server.set_serving(False)
    stub = health_pb2_grpc.HealthStub(channels.get(f"127.0.0.1:{port}"))
    for service in ("", SERVICE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await channels.close()


async def test_a_process_that_starts_where_another_ended_is_reached_at_once(
    rpc_server: Callable[[], RpcServer],
) -> None:
    """Others of our process have called the one that ended, so that gRPC waits before it tries the address for them."""
    server, waiting, channels = rpc_server(), Channels(), Channels()
    host = "127.0.0.8"  # where no server of another test can get the port meanwhile
    port = await server.start(host, 0)
    address = f"{host}:{port}"
    await server.stop(0)
    for _ in range(8):
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(waiting.get(address)).Check(health_pb2.HealthCheckRequest(), timeout=20)
        await asyncio.sleep(0.15)
    successor = rpc_server()
    assert await successor.start(host, port) == port
    await health_pb2_grpc.HealthStub(channels.get(address)).Check(health_pb2.HealthCheckRequest(), timeout=20)
    await asyncio.gather(waiting.close(), channels.close())


async def test_reflection_lists_what_is_served(live: Live) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(live.channel)
    call = stub.ServerReflectionInfo(timeout=20)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    assert {service.name for service in answer.list_services_response.service} == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_a_port_that_is_taken_is_a_sentence(live: Live, rpc_server: Callable[[], RpcServer]) -> None:
    server = rpc_server()
    with pytest.raises(errors.ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{live.port}"):
        await server.start("127.0.0.1", live.port)


async def test_a_channel_that_was_dropped_is_opened_anew(live: Live) -> None:
    channels, address = Channels(), f"127.0.0.1:{live.port}"
    first = channels.get(address)
    assert channels.get(address) is first
    await channels.drop(address)
    await channels.drop(address)
    assert channels.get(address) is not first
    answer = await inference_pb2_grpc.InferenceStub(channels.get(address)).Tokenize(
        pb.TokenizeRequest(text="abc"), timeout=20
    )
    assert list(answer.ids) == [3]
    await channels.close()


async def test_a_peer_that_has_gone_is_sought_for_a_while_and_then_forgotten(
    live: Live, rpc_server: Callable[[], RpcServer]
) -> None:
    channels, attempts = Channels(keep_s=1.0), 0
    server = rpc_server()
    port = await server.start("127.0.0.1", 0)

    async def check(address: str) -> None:
        stub = health_pb2_grpc.HealthStub(channels.get(address))
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    here, gone = f"127.0.0.1:{live.port}", f"127.0.0.1:{port}"
    call = inference_pb2_grpc.InferenceStub(channels.get(here)).Detokenize(pb.DetokenizeRequest(), timeout=60)
    await check(gone)
    await server.stop(0)
    async with await asyncio.start_server(refuse, "127.0.0.1", port):
        with pytest.raises(grpc.aio.AioRpcError):
            await check(gone)
        channel = channels.get(gone)
        async with asyncio.timeout(20):
            while channel.get_state() is not grpc.ChannelConnectivity.IDLE:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        before = attempts
        await asyncio.sleep(1.5)
        assert attempts == before > 0
    assert len(channels) == 2
    channels.get("127.0.0.1:9")
    assert len(channels) == 2, "the one with a call stays, however long ago it was asked for"
    assert not call.done()
    call.cancel()
    await channels.close()


@pytest.mark.parametrize(
    ("host", "port", "address"), [("127.0.0.1", 80, "127.0.0.1:80"), ("::1", 80, "[::1]:80"), ("node-1", 0, "node-1:0")]
)
def test_addresses_are_joined_and_split(host: str, port: int, address: str) -> None:
    assert join_address(host, port) == address
    assert split_address(address) == (host, port)
