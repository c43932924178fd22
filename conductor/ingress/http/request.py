"""One HTTP request as it arrives: its body, read within bounds, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.types import Message, Receive

from conductor.ingress.http.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    UnsupportedCoding,
    UnsupportedMediaType,
)
from mooncake.errors import shown

MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 30.0


async def read_json_body(request: Request) -> bytes:
    """The raw body. Raises BodyTooLarge, BodyTooSlow, UnsupportedMediaType, UnsupportedCoding, or ClientGone."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise UnsupportedCoding(f"the body's Content-Encoding is {shown(coding)}: send it uncompressed")
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


def with_body(request: Request, body: bytes) -> Request:
    """The request as if its ``body``, which has been read, were still to come."""
    unread: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return unread.pop() if unread else await request.receive()

    return Request(request.scope, receive)


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Run ``work`` while the client is connected; cancel it and raise ClientGone when it disconnects."""
    try:
        async with asyncio.timeout(None) as connected:
            watching = asyncio.create_task(_end_when_gone(receive, connected), name="watch the client")
            try:
                await work
            finally:
                watching.cancel()
    except TimeoutError:
        if not connected.expired():
            raise
        raise ClientGone("the client went away") from None


async def _end_when_gone(receive: Receive, connected: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    connected.reschedule(asyncio.get_running_loop().time())
