"""The one way to start a gRPC server and to connect to one: error mapping, standard health checking, reflection,
limits."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mooncake.addresses import join_address
from mooncake.connection_cache import KEEP_S, ConnectionCache
from mooncake.errors import ConfigError, DeadlineExceeded, InvalidRequest, MooncakeError, OutOfMemory, lacks_memory
from mooncake.rpc.errors import status_of, trailing_metadata
from mooncake.rpc.limits import OpenStreams, RpcLimits, pings
from mooncake.rpc.wakeups import all_wakeups_read
from mooncake.tls import Tls

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20  # a 1 M-token prompt is 4 MiB; KV bytes never pass through gRPC
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)
TAKEN_KEY = "mooncake-taken"  # in a stream's initial metadata: the server has accepted the call
LAST_BATCH_KEY = "mooncake-last-batch"  # in a call's trailing metadata: of ``Outputs.Collect``, with its last message
KEEPALIVE_S = 10.0  # of silence before a peer with calls is pinged, and for its answer
# For a peer to take a connection. A first call waits as long for a machine that is cut off; and a connection that is
# begun meanwhile sends its packets ever more rarely, so that it is not there soon after the way is free again.
CONNECT_S = 5.0
_SERVER_OPTIONS = (
    *_OPTIONS,
    # By default servers treat pings on quiet streams as abuse; a queued request is quiet.
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.keepalive_permit_without_calls", 1),
)
_CHANNEL_OPTIONS = (
    *_OPTIONS,
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1e3)),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # What a name means is looked up again when its address does not answer, though not more often than this.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A shared one makes a new channel wait before it tries an address that was out of reach for another channel.
    ("grpc.use_local_subchannel_pool", 1),
)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns MooncakeError into its gRPC status, and a lack of time or memory into one. Anything else is our bug: logged
    in full, reported in one sentence.

    It wraps every call, and so counts the streams, too.
    """

    def __init__(self, streams: OpenStreams) -> None:
        self._streams = streams

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        read, serializer = _reader(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary is not None:
            unary = _guard_unary(handler.unary_unary, read, method)
            return grpc.unary_unary_rpc_method_handler(unary, response_serializer=serializer)
        if handler.unary_stream is not None and inspect.isasyncgenfunction(handler.unary_stream):
            stream = _guard_stream(handler.unary_stream, read, method, self._streams)
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=serializer)
        if handler.unary_stream is not None:  # it writes by itself
            writing = _guard_unary(handler.unary_stream, read, method, self._streams.one)
            return grpc.unary_stream_rpc_method_handler(writing, response_serializer=serializer)
        if handler.stream_stream is not None:
            read_all = partial(_read_each, read=read)
            stream = _guard_stream(handler.stream_stream, read_all, method, self._streams)
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=serializer)
        return handler


Read = Callable[[Any], Any]  # deserialises a request


def _reader(deserializer: Read | None) -> Read:
    """gRPC itself would report a client's garbage as our failure, in full."""

    def read(data: bytes) -> Any:
        try:
            return data if deserializer is None else deserializer(data)
        except DecodeError:
            raise InvalidRequest("the request is not the protobuf message that this method takes") from None

    return read


async def _read_each(requests: AsyncIterator[bytes], read: Read) -> AsyncIterator[Any]:
    async for data in requests:
        yield read(data)


def _guard_unary(
    inner: Callable[..., Awaitable[Any]],
    read: Read,
    method: str,
    counted: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            with counted():
                return await inner(read(request), context)
        except Exception as error:
            await _abort(context, error, method)

    return guarded


def _guard_stream(
    inner: Callable[..., AsyncIterator[Any]], read: Read, method: str, streams: OpenStreams
) -> Callable[..., Any]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with streams.one():
                message = read(request)
                await context.send_initial_metadata(((TAKEN_KEY, "1"),))
                async for response in inner(message, context):
                    yield response
        except Exception as error:
            await _abort(context, error, method)

    return guarded


async def _abort(context: Any, error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TimeoutError):
        error = DeadlineExceeded(f"{method.rpartition('/')[2]} did not finish in time")
    elif lacks_memory(error):
        error = OutOfMemory(f"no memory is left for {method.rpartition('/')[2]}")
    if isinstance(error, MooncakeError):
        told = context.trailing_metadata() or ()
        await context.abort(status_of(error), error.message, (*told, *trailing_metadata(error)))
    log.exception("unexpected error in %s", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


class RpcServer:
    """A grpc.aio server with its health service. ``add`` the servicers, then ``start``."""

    def __init__(self, *guards: grpc.aio.ServerInterceptor, limits: RpcLimits | None = None) -> None:
        """``guards`` see each call before the servicers; their errors are mapped in the same way."""
        limits = limits or RpcLimits()
        errors = ErrorInterceptor(OpenStreams(limits.max_streams))
        with all_wakeups_read():
            self._server = grpc.aio.server(interceptors=[errors, *guards], options=(*_SERVER_OPTIONS, *limits.options))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services: list[str] = []

    def add(self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object, service: str) -> None:
        """E.g. ``add(store_pb2_grpc.add_StoreServicer_to_server, servicer, "mooncake.v1.Store")``."""
        add_to_server(servicer, self._server)
        self._services.append(service)

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen, with ``credentials`` only for TLS; the port is chosen by the system when ``port`` is 0. Raises
        ConfigError when the address is unavailable."""
        names = (*self._services, reflection.SERVICE_NAME, health.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        address = join_address(host, port)
        try:
            bound = (
                self._server.add_secure_port(address, credentials)
                if credentials
                else self._server.add_insecure_port(address)
            )
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise ConfigError(f"cannot listen on {address}: the port is taken or the address is not local")
        await self._server.start()
        await self.set_serving(True)
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Standard health status of every service here, and of the whole server (the empty name)."""
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, value)

    async def stop(self, grace_s: float = 1.0) -> None:
        await self._server.stop(grace_s)


class Channels:
    """Channels by address, opened once and kept while in use. One owner, one event loop."""

    def __init__(self, keep_s: float = KEEP_S, tls: Tls | None = None, keepalive_s: float = KEEPALIVE_S) -> None:
        """A channel without a call for ``keep_s`` disconnects, and stops trying to reach a vanished peer; it is
        forgotten once nobody asks for it either. A peer that has been silent for ``keepalive_s`` and does not answer
        for as long again fails the channel's calls. Raises ConfigError for unusable files of ``tls``."""
        idle = (("grpc.client_idle_timeout_ms", int(keep_s * 1e3)),)
        options = (*_CHANNEL_OPTIONS, *idle, *pings(keepalive_s, keepalive_s))
        self._channels = ConnectionCache(opener(tls, options), keep_s, may_go=_is_idle)

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, address: str) -> grpc.aio.Channel:
        return self._channels.get(address)

    async def drop(self, address: str) -> None:
        """Close one channel: its peer is gone for good."""
        if channel := self._channels.pop(address):
            await channel.close()

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.pop_all()))


def opener(tls: Tls | None, options: Sequence[tuple[str, Any]]) -> Callable[[str], grpc.aio.Channel]:
    """Returns a function that opens channels to addresses. Raises ConfigError for unusable files of ``tls``."""
    credentials = None if tls is None else tls.credentials()
    if tls is not None:
        options = (*options, *tls.options)

    def open_channel(address: str) -> grpc.aio.Channel:
        with all_wakeups_read():
            if credentials is None:
                return grpc.aio.insecure_channel(address, options=options)
            return grpc.aio.secure_channel(address, credentials, options=options)

    return open_channel


def _is_idle(channel: grpc.aio.Channel) -> bool:
    """Whether it has no call."""
    return channel.get_state() is grpc.ChannelConnectivity.IDLE


class CleanUps:
    """Clean-up work of finished calls, run outside the call, which may be cancelled at any await."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def drain(self) -> None:
        """Wait for them."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MooncakeError):
            log.info("not everything that a call left was cleaned up: %s", error.message)
        elif error is not None:
            what = {"message": "not everything that a call left was cleaned up", "exception": error, "task": task}
            task.get_loop().call_exception_handler(what)  # for lack of memory, it ends the process


def check_arrived(content: object) -> None:
    """Raises OutOfMemory for a message without the content that each of its kind has: where gRPC has no memory for
    the bytes of a message, it sends none of them and says nothing. The sender may be lucky with another try or node."""
    if not content:
        raise OutOfMemory("an empty message came: its sender may have run out of memory")


def remaining_s(context: Any, most_s: float) -> float:
    """Seconds until the caller's deadline, if it set one, and at most ``most_s``."""
    left = context.time_remaining()
    return most_s if left is None else max(0.0, min(left, most_s))
