"""The outermost layer of the HTTP application: limits open requests, assigns request ids, and counts outcomes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.ingress.http_errors import error_response
from mooncake.errors import Cancelled, Overloaded

_CLIENT_REQUEST_ID = re.compile(rb"[\w.:\-]{1,128}", re.ASCII)

Observe = Callable[[str, int], None]  # (route, status)


class EdgeMiddleware:
    """Limits the POSTs that are open, including those whose body is still arriving; adds the request id to every
    response, and counts it."""

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
