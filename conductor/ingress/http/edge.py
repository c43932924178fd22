"""The outermost layer of the HTTP application: limits open requests, assigns request ids, and counts outcomes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.ingress.http.arriving_bodies import ArrivingBodies
from conductor.ingress.http.errors import error_response
from mooncake.errors import Cancelled, Overloaded

_CLIENT_REQUEST_ID = re.compile(rb"[\w.:\-]{1,128}", re.ASCII)

TRACE = "mooncake.trace"  # in the scope of a request that is traced: what knows the ``traceresponse``, or "" if none
SEND_BODY = "mooncake.send_body"  # in the scope: takes the body of a response that has begun past all layers
TRACE_RESPONSE = "traceresponse"  # the header that tells which trace a request has (W3C)

Observe = Callable[[str, int], None]  # (route, status)


class EdgeMiddleware:
    """Limits the POSTs that are open, and apart from them those whose body is still arriving; adds the request id to
    every response, and counts it. A connection whose client was not told to send its body ends with the answer."""

    def __init__(self, app: ASGIApp, observe: Observe, max_posts: int) -> None:
        self._app = app
        self._observe = observe
        self._max_posts = max_posts
        self._arriving = ArrivingBodies(max_posts)
        self._posts = 0  # whose body has arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = _client_request_id(scope) or uuid.uuid4().hex.encode()
        status = Cancelled.http_status
        is_body_held_back = _expects_continue(scope)

        async def receive_body() -> Message:
            nonlocal is_body_held_back
            is_body_held_back = False  # uvicorn tells the client to send it
            return await receive()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = ((name, request_id) for name in _id_headers(scope))
                message["headers"] = [*message.get("headers", ()), *named]
                if (trace := scope.get(TRACE)) is not None and trace.traceresponse:
                    message["headers"].append((TRACE_RESPONSE.encode(), trace.traceresponse.encode()))
                if is_body_held_back:  # it may never come, and the next request would be taken for it
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        scope[SEND_BODY] = send
        try:
            if scope["method"] == "POST":
                await self._post(scope, receive_body, send_with_id)
            else:
                await self._app(scope, receive_body, send_with_id)
        finally:
            route = scope.get("route")
            self._observe(getattr(route, "path", "unknown"), status)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._posts >= self._max_posts or not self._arriving.make_room():
            refusal = error_response(Overloaded(f"{self._posts + len(self._arriving)} requests are open already"))
            await refusal(scope, receive, send)
            return
        body = self._arriving.add(receive, self._count)
        try:
            await self._app(scope, body, send)
        finally:
            self._arriving.remove(body)
            self._posts -= body.has_arrived

    def _count(self) -> None:
        self._posts += 1


def _expects_continue(scope: Scope) -> bool:
    """Whether the client waits to be told to send the body (RFC 9110, 10.1.1)."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])


def _id_headers(scope: Scope) -> tuple[bytes, ...]:
    """Where the client looks for the request id: Anthropic's elsewhere than others."""
    is_anthropic_s = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return (b"x-request-id", b"request-id") if is_anthropic_s else (b"x-request-id",)


def _client_request_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _CLIENT_REQUEST_ID.fullmatch(value):
            return bytes(value)
    return None
