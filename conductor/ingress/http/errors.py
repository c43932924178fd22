"""Errors over HTTP: OpenAI's body, a status, and headers that say whether to retry.

Also the errors that only HTTP knows, plain JSON responses, and handlers that turn every error into a response.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mooncake.errors import (
    CallerError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MooncakeError,
    OutOfMemory,
    Overloaded,
    RetryElsewhere,
    TryLater,
    lacks_memory,
)

log = logging.getLogger(__name__)

_RETRY_S = 1.0

Handler = Callable[[Request], Awaitable[Response]]


class BodyTooLarge(CallerError):
    """More bytes than a request may have."""

    http_status = 413
    code = "body_too_large"


class BodyTooSlow(CallerError):
    """The client stopped sending before the end."""

    http_status = 408
    code = "request_timeout"


class BodyGaveWay(TryLater):
    """It arrived slowly, and another one needed its room."""

    http_status = 408
    code = "request_timeout"


class UnsupportedMediaType(CallerError):
    """The body is not declared to be JSON."""

    http_status = 415
    code = "unsupported_media_type"


class UnsupportedCoding(CallerError):
    """The body is compressed: a small one could become gigabytes."""

    http_status = 415
    code = "unsupported_content_encoding"


class ClientGone(Cancelled):
    """The client has disconnected: no response is due."""


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
    """Clients retry 408, 409, 429 and 5xx: say when, or that it is pointless."""
    if isinstance(error, (TryLater, RetryElsewhere)):
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else _RETRY_S
        return {"retry-after-ms": str(max(1, round(wait_s * 1e3))), "retry-after": str(max(1, math.ceil(wait_s)))}
    if isinstance(error, (DeadlineExceeded, BodyTooSlow)):
        return {"x-should-retry": "false"}
    if isinstance(error, UnsupportedCoding):
        return {"accept-encoding": "identity"}  # RFC 9110, 15.5.16: what would be taken
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
    """The error as one of ours. A foreign one is our bug: logged in full, reported in one sentence."""
    if isinstance(error, MooncakeError):
        return error
    if lacks_memory(error):
        return OutOfMemory("the conductor has no memory left for it")
    log.error("unexpected error in %s", what, exc_info=error)
    return InternalError("internal error; the server's log has the details")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def guarded(handler: Handler, refused: Callable[[MooncakeError], Response] = error_response) -> Handler:
    """Every error becomes an error body, OpenAI's or another API's; a client that disconnected gets nothing."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGone as error:
            return Response(status_code=error.http_status)
        except Exception as error:
            return refused(known_error(error, request.url.path))

    return endpoint
