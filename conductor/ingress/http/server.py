"""A listening socket and its connections: how many there may be, and how long each may take.

It knows sockets, request heads and timers, and nothing of the requests' content.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conductor.ingress.http.handshake import Handshakes, TlsProtocol
from mooncake.config import ConductorSection
from mooncake.errors import ConfigError
from mooncake.rpc.limits import share_of_files
from mooncake.vital import vital

MAX_HEADER_BYTES = 64 << 10
UNREAD_TIMEOUT_S = 60.0  # for a client to read what was sent
LINGER_S = 0.5
HEAD_LOOKS = 4  # for the head of a request, before it is late
STOP_GRACE_S = 2
# uvloop accepts one connection in a pass of the event loop from each file: where passes are slow, clients would wait in
# the kernel for a minute to be refused.
ACCEPTS_A_PASS = 16
TELL_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of one listening socket. Every connection costs a file descriptor, with or without a key."""

    head_s: float = 30.0  # for the head of a request to arrive
    idle_s: float = 30.0  # between two requests of a connection
    max_open: int = 4096  # connections at once; at most a quarter of the process's file descriptors
    quiet_s: float = 1.0  # without a request: then a connection ends where there are too many

    @property
    def num_open(self) -> int:
        return share_of_files(self.max_open)


class WarningRateLimit(logging.Filter):
    """Rate-limits log messages by format: any client can make uvicorn repeat a warning without end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._told_at: dict[object, float] = {}  # by format string: as many as in uvicorn's source

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        now = self._clock()
        if now - self._told_at.get(record.msg, -math.inf) < TELL_EVERY_S:
            return False
        self._told_at[record.msg] = now
        return True


_warning_rate_limit = WarningRateLimit()


class _Quiet:
    """The connections without a request, those that have been so the longest first. They give way to new ones: anybody
    can open as many as there may be and say nothing."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._since: dict[_BoundedProtocol, float] = {}

    def add(self, connection: _BoundedProtocol) -> None:
        self._since[connection] = time.monotonic()

    def discard(self, connection: _BoundedProtocol) -> None:
        self._since.pop(connection, None)

    def end_one(self) -> bool:
        """Whether there was one to end."""
        connection = next(iter(self._since), None)
        if connection is None or time.monotonic() - self._since[connection] < self._quiet_s:
            return False
        connection.give_way()
        return True


class _BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits: on connections, and on the size and duration of a request's head. What comes with
    a body in chunks (extensions, trailers) has the same limit of size; nobody reads it.

    At any time either a request is being answered or a timer runs that will close the connection.
    """

    _num_bytes = 0  # of a head, or since the last of a body
    _is_new = False  # what has just arrived ends a head, or has some of a body
    _is_in_head = True
    _is_refused = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, limits: ConnectionLimits, quiet: _Quiet, **settings: Any) -> None:
        """``settings`` are uvicorn's."""
        super().__init__(**settings)
        self._limits = limits
        self._quiet = quiet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._quiet.add(self)
        self._start_head()
        if len(self.connections) > self._limits.num_open and not self._quiet.end_one():
            self._quiet.discard(self)
            self.connections.discard(self)  # it is closing, and no longer takes a place
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1")

    def give_way(self) -> None:
        self._quiet.discard(self)
        self.connections.discard(self)
        self.transport.abort()  # its descriptor is free at once: closing waits for what a client has not read

    def connection_lost(self, exc: Exception | None) -> None:
        self._quiet.discard(self)
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # otherwise it is a trailer
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_bytes, self._is_new = 0, True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._num_bytes, self._is_new = 0, True
        self._is_in_head = False
        self._quiet.discard(self)
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
            raise ValueError("the head of the request is too large")  # stops parsing what has already been read
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._quiet.add(self)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._is_new = False
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_in_head or not self._is_new:
            self._num_bytes += len(data)
        if self._num_bytes > MAX_HEADER_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
        elif not self._is_in_head and self.cycle.response_complete and self._timer is None:
            # No request: an empty line, or more of an unread body. uvicorn has stopped its timer for it.
            self._timer = self.loop.call_later(self._limits.idle_s, self.transport.close)

    def _start_head(self) -> None:
        self._stop_timer()
        self._num_bytes = 0
        self._is_in_head = True
        self._look_for_head(HEAD_LOOKS)

    def _look_for_head(self, looks_left: int) -> None:
        """Time in which this process stood still is one look at most: its clients may have stood still with it."""
        if looks_left:
            pause_s = self._limits.head_s / HEAD_LOOKS
            self._timer = self.loop.call_later(pause_s, self._look_for_head, looks_left - 1)
        else:
            self._refuse(b"408 Request Timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes) -> None:
        """Answer, then discard what still arrives for a moment: closing at once would reset the connection before
        the client reads the answer."""
        if not (self._is_refused or self.transport.is_closing()):
            self._is_refused = True
            self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
            self.loop.call_later(LINGER_S, self.transport.close)


def _connection(
    limits: ConnectionLimits, quiet: _Quiet, handshakes: Handshakes | None, **settings: Any
) -> asyncio.Protocol:
    """What speaks with one client. ``settings`` are uvicorn's."""
    inner = _BoundedProtocol(limits, quiet, **settings)
    if handshakes is None:
        return inner

    def has_room() -> bool:
        if len(handshakes) + len(inner.connections) < limits.num_open:
            return True
        return handshakes.end_one(limits.quiet_s) or quiet.end_one()

    return TlsProtocol(inner, handshakes, has_room)


def _tls_context(tls: ConductorSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.ssl_certfile, tls.ssl_keyfile or None)
    context.verify_mode = ssl.VerifyMode(tls.ssl_cert_reqs)
    if tls.ssl_ca_certs:
        context.load_verify_locations(tls.ssl_ca_certs)
    return context


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
        """``tls`` names the HTTPS files, if any; ``check_tls`` has read them."""
        tls = tls or ConductorSection()
        limits = limits or ConnectionLimits()
        logging.getLogger("uvicorn.error").addFilter(_warning_rate_limit)
        self._handshakes = Handshakes(_tls_context(tls), limits.head_s) if tls.ssl_certfile else None
        config = uvicorn.Config(
            app,
            http=functools.partial(_connection, limits, _Quiet(limits.quiet_s), self._handshakes),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, chosen by the system when ``port`` is 0. Raises ConfigError when the address is
        unavailable."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address
            raise ConfigError(f"cannot listen on {host}:{port} for HTTP: {reason}") from None
        listener.setblocking(False)
        # What it accepts inherits both. Without the first, a response of two writes waits 40 ms for a client's delayed
        # ACK; with the second, the kernel drops a client that takes nothing of what is ready for it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_TIMEOUT_S * 1e3))
        bound = int(listener.getsockname()[1])
        listeners = [listener, *(listener.dup() for _ in range(ACCEPTS_A_PASS - 1))]
        self._task = vital(self._server.serve(listeners), "http server")
        await self._server.listening.wait()
        return bound

    async def stop(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            if self._handshakes is not None:
                self._handshakes.close()
            await self._task
            self._task = None
