"""Server-sent events: frames, keep-alive comments, and a response whose events arrive one by one.

It knows nothing of the events' content.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conductor.ingress.http.edge import SEND_BODY
from conductor.ingress.http.errors import ClientGone, error_body, error_response, known_error
from conductor.ingress.http.request import unless_gone
from mooncake.errors import MooncakeError

KEEP_ALIVE_S = 5.0  # silence after which a comment is sent
LAST_WORD_S = 0.5  # time to send the error that ends a stream


def event_frame(data: bytes, name: str = "") -> bytes:
    """One server-sent event; ``data`` has no line breaks, like any compact JSON."""
    return (b"event: %b\n" % name.encode() if name else b"") + b"data: %b\n\n" % data


def _error_frame(error: MooncakeError) -> bytes:
    return event_frame(msgspec.json.encode(error_body(error)))


class EventStream:
    """Server-sent events on one response. The response starts with the first event or keep-alive comment, so an
    error before that still has its own status."""

    def __init__(
        self, send: Send, headers: Mapping[str, str], keep_alive_s: float, send_body: Send | None = None
    ) -> None:
        """``send_body``, if there is one, takes what follows the start of the response."""
        self._send = send
        self._send_body = send_body or send
        self._headers = headers
        self._keep_alive_s = keep_alive_s
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_at = self._loop.time()
        self.has_started = False

    async def event(self, data: bytes, name: str = "") -> None:
        await self._write(event_frame(data, name))

    async def end(self, frame: bytes) -> None:
        await self._write(frame, more=False)

    async def keep_alive(self) -> None:
        """Send a comment after every silence, so that neither the client nor a proxy considers the connection dead."""
        while True:
            left_s = self._last_at + self._keep_alive_s - self._loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self._write(b": keep-alive\n\n")

    async def _write(self, data: bytes, more: bool = True) -> None:
        self._last_at = self._loop.time()
        if not self.has_started:
            await self._start()
        await self._send_body({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self) -> None:
        async with self._lock:  # an event and a comment may both be the first
            if not self.has_started:
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                headers |= {"x-accel-buffering": "no", **self._headers}
                raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
                self.has_started = True  # not before: a comment that keeps the stream alive may be cancelled meanwhile


class StreamingAnswer(Response):
    """A response whose events ``produce`` writes. A failure before the first byte becomes the error response made by
    ``refused``, a later one the frame made by ``failed``; the frame ``last`` ends complete answers only."""

    def __init__(
        self,
        produce: Callable[[EventStream], Awaitable[None]],
        headers: Mapping[str, str],
        keep_alive_s: float,
        last: bytes = event_frame(b"[DONE]"),
        failed: Callable[[MooncakeError], bytes] = _error_frame,
        refused: Callable[[MooncakeError], Response] = error_response,
    ) -> None:
        super().__init__()
        self._refused = refused
        self._last = last
        self._failed = failed
        self._produce = produce
        self._stream_headers = headers
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, self._stream_headers, self._keep_alive_s, scope.get(SEND_BODY, send))
        try:
            await unless_gone(receive, self._run(stream))
        except ClientGone:
            return
        except Exception as failure:
            error = known_error(failure, scope["path"])
            if not stream.has_started:
                await self._refused(error)(scope, receive, send)
                return
            with contextlib.suppress(TimeoutError):  # a client that does not read will not read this either
                async with asyncio.timeout(LAST_WORD_S):
                    await stream.end(self._failed(error))

    async def _run(self, stream: EventStream) -> None:
        keeping_alive = asyncio.create_task(stream.keep_alive(), name="keep an event stream alive")
        try:
            await self._produce(stream)
        finally:
            keeping_alive.cancel()
            await asyncio.gather(keeping_alive, return_exceptions=True)
        await stream.end(self._last)
