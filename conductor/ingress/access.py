"""API keys over HTTP and over gRPC.

Health and metrics stay open, as in vLLM, for probes and scrapers without a key; so do the version and the status page,
which contains no data itself. Everything else needs a key once one is configured, including the nodes' own calls: a
stranger who could join the cluster would be sent what its users say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any

import grpc
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from conductor.ingress.http.errors import error_response
from mooncake.api_keys import HEADER, ApiKeys
from mooncake.errors import MooncakeError, Unauthenticated

Refused = Callable[[MooncakeError], Response]

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics", "/ping", "/version"})
ANTHROPIC_HEADER = b"x-api-key"  # where clients of Anthropic's API send their key
OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_MISSING = "an API key is needed, as Authorization: Bearer KEY"
_WRONG = "the API key is not one of this server's"


def _refusal(has_header: bool) -> Unauthenticated:
    return Unauthenticated(_WRONG if has_header else _MISSING)


class KeyMiddleware:
    """Answers 401 in place of ``app`` unless the request has a key or its path is open. ``worded`` are path prefixes
    with their own form of refusal."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, worded: Mapping[str, Refused]) -> None:
        self._app = app
        self._keys = keys
        self._worded = worded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS:
            shown = _shown(scope["headers"])
            if not self._keys.allow(shown):
                app = self._words(scope["path"])(_refusal(bool(shown)))
                app.headers["www-authenticate"] = "Bearer"
        await app(scope, receive, send)

    def _words(self, path: str) -> Refused:
        return next((words for begin, words in self._worded.items() if path.startswith(begin)), error_response)


def _shown(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in the ``Authorization`` form, from either header."""
    found = dict(reversed([*headers]))  # the first header of a name counts
    key = found.get(ANTHROPIC_HEADER)
    return found.get(HEADER.encode(), b"Bearer " + key if key else b"")


def caller_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Tells callers over HTTP apart, by the API key that they show; without one all are the same."""
    return sha256(_shown(headers).partition(b" ")[2].strip()).digest()


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """The same check for a gRPC server, on the metadata ``authorization``."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        shown = _metadata(handler_call_details)
        if handler_call_details.method.startswith(OPEN_SERVICES) or self._keys.allow(shown):
            return await continuation(handler_call_details)

        async def refuse(request: Any, context: Any) -> Any:
            raise _refusal(bool(shown))

        return grpc.unary_unary_rpc_method_handler(refuse)  # an abort needs no other kind, whatever was called


def _metadata(details: grpc.HandlerCallDetails) -> bytes:
    for key, value in details.invocation_metadata or ():
        if key == HEADER:
            return value if isinstance(value, bytes) else value.encode()
    return b""
