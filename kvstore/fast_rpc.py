"""A fast path to a store for the calls that every block needs: the messages of ``store.proto`` over a plain socket.

A gRPC round trip costs several times as much as moving a megabyte; a frame on an open connection costs a tenth of it.
gRPC remains the complete interface, and clients use it when this connection is unavailable. A frame is ``length, kind,
call`` and a protobuf message; answers arrive in any order and name their call. The store's first frame says that it has
taken the connection. This module does not know what the messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, cast

from google.protobuf.message import DecodeError, Message

from kvstore.transfer.sockets import keep_alive
from mooncake.errors import (
    DeadlineExceeded,
    InternalError,
    MooncakeError,
    NodeUnavailable,
    OutOfMemory,
    lacks_memory,
)
from mooncake.rpc import store_pb2 as pb
from mooncake.rpc.errors import error_from_parts, parts_of_error
from mooncake.rpc.limits import share_of_files
from mooncake.rpc.server import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

MAX_CALLERS = 8192  # connections, and at most a quarter of the process's files; others are refused, and use gRPC
MAX_CALLS = 256  # of one connection at once; more wait in its socket
MAX_FRAMES = 256  # of one connection in a row, before others have a turn
OPEN_TIMEOUT_S = 2.0
SILENT_S = 5.0  # silence while calls time out: fall back to gRPC, whose pings find out why
_HEAD = struct.Struct("<IBI")  # message length, kind, call number
_TAKEN, _FAILED = 254, 255

_METHODS: tuple[tuple[str, type[Message], type[Message]], ...] = (
    ("Reserve", pb.ReserveRequest, pb.ReserveResponse),
    ("Seal", pb.SealRequest, pb.SealResponse),
    ("Abort", pb.AbortRequest, pb.AbortResponse),
    ("Acquire", pb.AcquireRequest, pb.AcquireResponse),
    ("Release", pb.ReleaseRequest, pb.ReleaseResponse),
    ("Exists", pb.ExistsRequest, pb.ExistsResponse),
    ("Commit", pb.CommitRequest, pb.CommitResponse),
)
_NEVER_WAIT = frozenset({"Abort", "Release", "Exists", "Commit"})  # answered at once, without a task
_NUMBERS = {name: number for number, (name, _, _) in enumerate(_METHODS)}


class Servicer(Protocol):
    """The gRPC service, whose methods are called with None as context."""

    def __getattribute__(self, name: str, /) -> Any: ...


class _Frames(asyncio.Protocol, ABC):
    """Splits the stream into frames. Anything invalid ends the connection.

    Frames that nobody has room for wait: those already read in the buffer, the others in the socket.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._is_held = False  # frames wait in the buffer, and reading is paused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)  # a vanished host sends nothing

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_held:
            self._cut()

    def has_room(self) -> bool:
        """Whether another frame can be taken. After False the implementation calls ``go_on`` when there is room."""
        return True

    def go_on(self) -> None:
        if not self._is_held or self._transport is None or self._transport.is_closing() or not self.has_room():
            return
        self._is_held = False
        self._cut()
        if not (self._is_held or self._transport.is_closing()):
            self._transport.resume_reading()

    def _cut(self) -> None:
        at, most = 0, MAX_FRAMES
        while len(self._buffer) - at >= _HEAD.size:
            if most == 0 or not self.has_room():
                self._hold(is_turn_over=most == 0)
                break
            length, kind, call = _HEAD.unpack_from(self._buffer, at)
            if length > MAX_MESSAGE_BYTES:
                self.abort()
                return
            if len(self._buffer) - at - _HEAD.size < length:
                break
            at += _HEAD.size
            message = bytes(memoryview(self._buffer)[at : at + length])
            at += length
            most -= 1
            try:
                self.frame(kind, call, message)
            except (DecodeError, LookupError):
                self.abort()
                return
        del self._buffer[:at]

    def _hold(self, is_turn_over: bool) -> None:
        self._is_held = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        if is_turn_over:
            asyncio.get_running_loop().call_soon(self.go_on)

    @abstractmethod
    def frame(self, kind: int, call: int, message: bytes) -> None:
        """A complete frame. Raises DecodeError or LookupError for an invalid one."""

    def send(self, kind: int, call: int, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEAD.pack(len(message), kind, call) + message)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Caller(_Frames):
    """The store's end of one connection."""

    def __init__(self, servicer: Servicer, callers: set[_Caller], most: int) -> None:
        """``callers`` are those of the server, ``most`` as many as there may be."""
        super().__init__()
        self._servicer = servicer
        self._callers = callers
        self._most = most
        self._running: set[asyncio.Task[None]] = set()
        self._is_unread = False  # the client does not read its answers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._callers) >= self._most:
            self.abort()
        else:
            self._callers.add(self)
            self.send(_TAKEN, 0, b"")

    def connection_lost(self, error: Exception | None) -> None:
        self._callers.discard(self)
        for task in self._running:
            task.cancel()

    def pause_writing(self) -> None:
        self._is_unread = True

    def resume_writing(self) -> None:
        self._is_unread = False
        self.go_on()

    def has_room(self) -> bool:
        return len(self._running) < MAX_CALLS and not self._is_unread

    def frame(self, kind: int, call: int, message: bytes) -> None:
        name, request_type, _ = _METHODS[kind]
        request = request_type.FromString(message)
        if name in _NEVER_WAIT:
            self._run_now(name, kind, call, request)
            return
        task = asyncio.get_running_loop().create_task(self._run(name, kind, call, request))
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._is_held:
            self.go_on()

    async def _run(self, name: str, kind: int, call: int, request: Message) -> None:
        try:
            response: Message = await getattr(self._servicer, name)(request, None)
            self.send(kind, call, response.SerializeToString())
        except Exception as error:
            self._refuse(name, call, error)

    def _run_now(self, name: str, kind: int, call: int, request: Message) -> None:
        work = getattr(self._servicer, name)(request, None)
        try:
            work.send(None)
            work.close()
            raise RuntimeError(f"{name} waits for something")
        except StopIteration as done:
            self.send(kind, call, done.value.SerializeToString())
        except Exception as error:
            self._refuse(name, call, error)

    def _refuse(self, name: str, call: int, error: Exception) -> None:
        if lacks_memory(error):
            error = OutOfMemory(f"no memory is left for {name}")
        if not isinstance(error, MooncakeError):
            log.error("%s failed", name, exc_info=error)
            error = InternalError(f"{name} failed; the store's log says why")
        self.send(_FAILED, call, parts_of_error(error))


class FastRpcServer:
    """Listens beside the gRPC server, on the same loop."""

    def __init__(self, listener: asyncio.Server, callers: set[_Caller]) -> None:
        """Use ``start``."""
        self._listener = listener
        self._callers = callers

    @classmethod
    async def start(cls, sock: socket.socket, servicer: Servicer, max_callers: int = MAX_CALLERS) -> FastRpcServer:
        """At this socket, which is bound. Raises OSError."""
        callers: set[_Caller] = set()
        most = share_of_files(max_callers)
        listener = await asyncio.get_running_loop().create_server(lambda: _Caller(servicer, callers, most), sock=sock)
        return cls(listener, callers)

    async def stop(self) -> None:
        self._listener.close()
        for caller in list(self._callers):
            caller.abort()


class _Asked(NamedTuple):
    answer: asyncio.Future[Any]
    response_type: type[Message]
    unheard: Callable[[Any], object] | None  # gets an answer that arrived after its caller stopped waiting


class FastRpc(_Frames):
    """The client's end: the same methods as the gRPC stub's, for the calls that it carries."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self._store = store
        self._waiting: dict[int, _Asked] = {}
        self._next = 0
        self._silent_since: float | None = None  # time of the first call since the last message from the store
        self._taken = asyncio.Event()  # by the store, or ended
        self.is_open = False

    @classmethod
    async def open(cls, store: str, host: str, port: int) -> FastRpc:
        """Raises NodeUnavailable, also when the store has as many connections as it takes."""
        connection = cls(store)
        with contextlib.ExitStack() as failed:
            failed.callback(connection.close)
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
                    await connection._taken.wait()
            except OSError as error:  # TimeoutError is one
                raise NodeUnavailable(f"store {store}: {str(error) or 'no answer'}") from None
            if not connection.is_open:
                raise NodeUnavailable(f"store {store}: it takes no more connections")
            failed.pop_all()
        return connection

    def Reserve(  # noqa: N802
        self,
        request: pb.ReserveRequest,
        timeout: float,
        unheard: Callable[[pb.ReserveResponse | None], object] | None = None,
    ) -> Awaitable[pb.ReserveResponse]:
        """``unheard`` gets the answer if the caller was cancelled or timed out before it arrived, None if that was an
        error, and None if the connection ended before it arrived, whether or not anyone was waiting."""
        return self._call("Reserve", request, timeout, unheard)

    def Seal(self, request: pb.SealRequest, timeout: float) -> Awaitable[pb.SealResponse]:  # noqa: N802
        return self._call("Seal", request, timeout)

    def Commit(self, request: pb.CommitRequest, timeout: float) -> Awaitable[pb.CommitResponse]:  # noqa: N802
        return self._call("Commit", request, timeout)

    def Abort(self, request: pb.AbortRequest, timeout: float) -> Awaitable[pb.AbortResponse]:  # noqa: N802
        return self._call("Abort", request, timeout)

    def Acquire(  # noqa: N802
        self,
        request: pb.AcquireRequest,
        timeout: float,
        unheard: Callable[[pb.AcquireResponse | None], object] | None = None,
    ) -> Awaitable[pb.AcquireResponse]:
        """``unheard`` as for ``Reserve``."""
        return self._call("Acquire", request, timeout, unheard)

    def Release(self, request: pb.ReleaseRequest, timeout: float) -> Awaitable[pb.ReleaseResponse]:  # noqa: N802
        return self._call("Release", request, timeout)

    def Exists(self, request: pb.ExistsRequest, timeout: float) -> Awaitable[pb.ExistsResponse]:  # noqa: N802
        return self._call("Exists", request, timeout)

    def close(self) -> None:
        self.is_open = False
        self.abort()

    async def _call(
        self, name: str, request: Message, timeout: float, unheard: Callable[[Any], object] | None = None
    ) -> Any:
        loop = asyncio.get_running_loop()
        if not self.is_open:
            raise NodeUnavailable(f"store {self._store}: the connection has ended")
        self._next = call = (self._next + 1) & 0xFFFFFFFF
        number = _NUMBERS[name]
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting[call] = _Asked(answer, _METHODS[number][2], unheard)
        if self._silent_since is None:
            self._silent_since = loop.time()
        self.send(number, call, request.SerializeToString())
        timer = loop.call_later(timeout, self._late, answer)
        try:
            return await answer
        except asyncio.CancelledError:
            if unheard is not None and not answer.cancelled() and answer.exception() is None:
                unheard(answer.result())  # it arrived at the very moment its caller was cancelled
            raise
        finally:
            timer.cancel()
            if unheard is None:
                self._waiting.pop(call, None)

    def _late(self, answer: asyncio.Future[Any]) -> None:
        _fail(answer, DeadlineExceeded(f"store {self._store}: Deadline Exceeded"))
        now = asyncio.get_running_loop().time()
        if self._silent_since is not None and now - self._silent_since > SILENT_S:
            self.close()

    def frame(self, kind: int, call: int, message: bytes) -> None:
        self._silent_since = None
        if kind == _TAKEN:
            self.is_open = True
            self._taken.set()
            return
        asked = self._waiting.get(call)
        if asked is None:  # nobody waits any more
            return
        if kind == _FAILED:
            if asked.unheard is not None and asked.answer.done():
                asked.unheard(None)
            _fail(asked.answer, error_from_parts(message))
        else:
            response = asked.response_type.FromString(message)  # if invalid, ends the connection and this call
            if not asked.answer.done():
                asked.answer.set_result(response)
            elif asked.unheard is not None:
                asked.unheard(response)
        self._waiting.pop(call, None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._taken.set()
        waiting, self._waiting = self._waiting, {}
        for asked in waiting.values():
            _fail(asked.answer, NodeUnavailable(f"store {self._store}: {error or 'the connection has ended'}"))
            if asked.unheard is not None:
                asked.unheard(None)


def _fail(answer: asyncio.Future[Any], error: MooncakeError) -> None:
    if not answer.done():
        answer.set_exception(error)
