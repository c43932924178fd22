"""HTTP without OpenAI: the server, its limits, bodies, errors in OpenAI's shape, event streams, clients that go away.

It knows sockets, headers and framing, and nothing of prompts or answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import re
import resource
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mooncake.config import ConductorSection
from mooncake.errors import (
    CallerError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MooncakeError,
    Overloaded,
    RetryElsewhere,
    TryLater,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
MAX_HEADER_BYTES = 64 << 10
BODY_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 5.0  # silence on an event stream after which a comment is sent
UNREAD_TIMEOUT_S = 60.0  # for a client to take what was sent
LINGER_S = 0.5
STOP_GRACE_S = 2

_CLIENT_REQUEST_ID = re.compile(rb"[\w.:\-]{1,128}", re.ASCII)
_RETRY_S = 1.0

Observe = Callable[[str, int], None]  # route, status


class BodyTooLarge(CallerError):
    """More bytes than a request may have."""

    http_status = 413
    code = "body_too_large"


class BodyTooSlow(CallerError):
    """The client stopped sending half-way."""

    http_status = 408
    code = "request_timeout"


class UnsupportedMediaType(CallerError):
    """The body is not declared to be JSON."""

    http_status = 415
    code = "unsupported_media_type"


class ClientGone(Cancelled):
    """Nobody listens any more: no response is due."""


class NoSuchRoute(CallerError):
    http_status = 404
    code = "not_found"


class WrongMethod(CallerError):
    http_status = 405
    code = "method_not_allowed"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(error: MooncakeError) -> ErrorBody:
    param = error.param if isinstance(error, InvalidRequest) else None
    return ErrorBody(ErrorDetail(error.message, _error_type(error), param, error.code))


def error_response(error: MooncakeError) -> Response:
    return json_response(error_body(error), error.http_status, error_headers(error))


def error_headers(error: MooncakeError) -> dict[str, str]:
    """Clients try 408, 409, 429 and 5xx again: say when, and say so when it is of no use."""
    if isinstance(error, (TryLater, RetryElsewhere)):
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else _RETRY_S
        return {"retry-after-ms": str(max(1, round(wait_s * 1e3))), "retry-after": str(max(1, math.ceil(wait_s)))}
    if isinstance(error, (DeadlineExceeded, BodyTooSlow)):
        return {"x-should-retry": "false"}
    return {}


def _error_type(error: MooncakeError) -> str:
    if isinstance(error, CallerError):
        return "invalid_request_error"
    if isinstance(error, TryLater):
        return "rate_limit_error"
    if isinstance(error, RetryElsewhere):
        return "service_unavailable_error"
    return "timeout_error" if isinstance(error, DeadlineExceeded) else "server_error"


def known_error(error: Exception, what: str) -> MooncakeError:
    """The error as one of ours. A foreign one is our bug: logged in full, told as one sentence."""
    if isinstance(error, MooncakeError):
        return error
    log.error("unexpected error in %s", what, exc_info=error)
    return InternalError("internal error; the server's log has the details")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def read_json_body(request: Request) -> bytes:
    """The raw body. Raises BodyTooLarge, BodyTooSlow, UnsupportedMediaType, or ClientGone."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType("the body must be JSON; send the header Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client went away")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise BodyTooLarge(f"a request body may have at most {MAX_BODY_BYTES} bytes")
                more = message.get("more_body", False)
    except TimeoutError:
        raise BodyTooSlow(f"the request body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do ``work`` while the client stays; cancel it and raise ClientGone as soon as the client goes."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_until_gone(receive), name="watch the client")
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client went away")
        working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event_frame(data: bytes, name: str = "") -> bytes:
    """One server-sent event; ``data`` has no line breaks, as JSON has none."""
    return (b"event: %b\n" % name.encode() if name else b"") + b"data: %b\n\n" % data


def _error_frame(error: MooncakeError) -> bytes:
    return event_frame(msgspec.json.encode(error_body(error)))


class EventStream:
    """Server-sent events on one response. The response starts with the first event or keep-alive comment, so that an
    error before it still has a status of its own."""

    def __init__(self, send: Send, headers: Mapping[str, str], keep_alive_s: float) -> None:
        self._send = send
        self._headers = headers
        self._keep_alive_s = keep_alive_s
        self._lock = asyncio.Lock()
        self._last_at = asyncio.get_running_loop().time()
        self.has_started = False

    async def event(self, data: bytes, name: str = "") -> None:
        await self._write(event_frame(data, name))

    async def end(self, frame: bytes) -> None:
        await self._write(frame, more=False)

    async def keep_alive(self) -> None:
        """Comment on every silence, so that neither the client nor a proxy takes it for a dead connection."""
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._last_at + self._keep_alive_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self._write(b": keep-alive\n\n")

    async def _write(self, data: bytes, more: bool = True) -> None:
        async with self._lock:
            self._last_at = asyncio.get_running_loop().time()
            if not self.has_started:
                self.has_started = True
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                headers |= {"x-accel-buffering": "no", **self._headers}
                raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


class StreamingAnswer(Response):
    """A response whose events ``produce`` writes. A failure is a plain error response before the first byte, and the
    frame that ``failed`` makes of it after that; the frame ``last`` ends a whole answer only."""

    def __init__(
        self,
        produce: Callable[[EventStream], Awaitable[None]],
        headers: Mapping[str, str],
        keep_alive_s: float,
        last: bytes = event_frame(b"[DONE]"),
        failed: Callable[[MooncakeError], bytes] = _error_frame,
    ) -> None:
        super().__init__()
        self._last = last
        self._failed = failed
        self._produce = produce
        self._stream_headers = headers
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, self._stream_headers, self._keep_alive_s)
        try:
            await unless_gone(receive, self._run(stream))
        except ClientGone:
            return
        except Exception as failure:
            error = known_error(failure, scope["path"])
            if not stream.has_started:
                await error_response(error)(scope, receive, send)
                return
            with contextlib.suppress(TimeoutError):  # a client that does not read will not read this either
                async with asyncio.timeout(LINGER_S):
                    await stream.end(self._failed(error))

    async def _run(self, stream: EventStream) -> None:
        keeping_alive = asyncio.create_task(stream.keep_alive(), name="keep an event stream alive")
        try:
            await self._produce(stream)
        finally:
            keeping_alive.cancel()
            await asyncio.gather(keeping_alive, return_exceptions=True)
        await stream.end(self._last)


class EdgeMiddleware:
    """Outermost: bounds the POSTs that are open, bodies still arriving included; gives every response the id of its
    request, and counts it."""

    def __init__(self, app: ASGIApp, observe: Observe, max_posts: int) -> None:
        self._app = app
        self._observe = observe
        self._max_posts = max_posts
        self._posts = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = _client_request_id(scope) or uuid.uuid4().hex.encode()
        status = Cancelled.http_status

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        is_post = scope["method"] == "POST"
        app: ASGIApp = self._app
        if is_post and self._posts >= self._max_posts:
            app = error_response(Overloaded(f"{self._posts} requests are open already"))
        self._posts += is_post
        try:
            await app(scope, receive, send_with_id)
        finally:
            self._posts -= is_post
            route = scope.get("route")
            self._observe(getattr(route, "path", "unknown"), status)


def _client_request_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _CLIENT_REQUEST_ID.fullmatch(value):
            return bytes(value)
    return None


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of one listening socket. Every connection costs a file descriptor, with or without a key."""

    head_s: float = 30.0  # for the head of a request to arrive
    idle_s: float = 30.0  # of a connection between requests
    max_open: int = 4096  # connections at once; a quarter of the process's file descriptors, if that is less

    @property
    def num_open(self) -> int:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.max_open if most == resource.RLIM_INFINITY else min(self.max_open, most // 4)


class _BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds: on connections, on the size of a request's head and on the time it may take.

    At any time a request is answered, or a timer runs that will close the connection.
    """

    _head_bytes = 0
    _is_in_head = True
    _is_refused = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, limits: ConnectionLimits, **settings: Any) -> None:
        """``settings`` are uvicorn's."""
        super().__init__(**settings)
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head()
        if len(self.connections) > self._limits.num_open:
            self.connections.discard(self)  # it is on its way out, and keeps nobody else out
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
            raise ValueError("the head of the request is too large")  # ends the parsing of what is read already
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")
        elif self.cycle.response_complete and self._timer is None:
            # No request: an empty line, or more of a body that nobody reads. uvicorn has stopped its timer for it.
            self._timer = self.loop.call_later(self._limits.idle_s, self.transport.close)

    def _start_head(self) -> None:
        self._stop_timer()
        self._head_bytes = 0
        self._is_in_head = True
        self._timer = self.loop.call_later(self._limits.head_s, self._refuse, b"408 Request Timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes) -> None:
        """Answer, then drop what still arrives for a moment: closing at once would reset the answer away."""
        if not (self._is_refused or self.transport.is_closing()):
            self._is_refused = True
            self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
            self.loop.call_later(LINGER_S, self.transport.close)


class _Server(uvicorn.Server):
    """uvicorn inside our event loop: signals belong to whoever runs the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One listening socket and its uvicorn server."""

    def __init__(
        self, app: ASGIApp, tls: ConductorSection | None = None, limits: ConnectionLimits | None = None
    ) -> None:
        """``tls`` names the files of HTTPS, if it names any; ``check_tls`` has read them."""
        tls = tls or ConductorSection()
        limits = limits or ConnectionLimits()
        config = uvicorn.Config(
            app,
            http=functools.partial(_BoundedProtocol, limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=STOP_GRACE_S,
            ssl_certfile=tls.ssl_certfile or None,
            ssl_keyfile=tls.ssl_keyfile or None,
            ssl_ca_certs=tls.ssl_ca_certs or None,
            ssl_cert_reqs=tls.ssl_cert_reqs,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port chosen when ``port`` is 0. Raises ConfigError when the address cannot be had."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} for HTTP: {error.strerror or error}") from None
        listener.setblocking(False)
        # What it accepts inherits both. Without the first, a response of two writes waits 40 ms for a client's delayed
        # ACK; with the second, the kernel drops a client that takes nothing of what is ready for it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_TIMEOUT_S * 1e3))
        bound = int(listener.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve([listener]), name="http server")
        await self._server.listening.wait()
        return bound

    async def stop(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
