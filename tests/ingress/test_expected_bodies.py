"""Clients that send a body only when they are told to (``Expect: 100-continue``, RFC 9110, 10.1.1)."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
HEALTH = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


def head(path, media_type, size):
    fields = f"host: x\r\ncontent-type: {media_type}\r\ncontent-length: {size}\r\nexpect: 100-continue"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def connected(front):
    reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
    try:
        async with asyncio.timeout(5):
            yield reader, writer
    finally:
        writer.close()


async def answer(reader):
    """Status, fields and body of the next response."""
    line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().strip().lower().split("\r\n")
    fields = dict(field.split(": ", 1) for field in fields)
    return int(line.split()[1]), fields, await reader.readexactly(int(fields.get("content-length", 0)))


@pytest.mark.parametrize(
    ("path", "media_type", "status"),
    [
        ("/nowhere", "application/json", 404),
        ("/version", "application/json", 405),
        ("/v1/completions", "text/xml", 415),
    ],
)
async def test_a_client_that_is_refused_before_its_body_does_not_have_its_next_request_taken_for_it(
    front, path, media_type, status
):
    async with connected(front) as (reader, writer):
        writer.write(head(path, media_type, len(HEALTH)))
        told, fields, body = await answer(reader)

        assert told == status and json.loads(body)["error"]
        assert fields["connection"] == "close"
        writer.write(HEALTH)  # in place of the body
        with contextlib.suppress(ConnectionResetError):  # either is a connection that has ended
            assert await reader.read() == b""


async def test_a_full_server_refuses_it_before_its_body_with_a_retry_time(open_front):
    async with open_front(max_requests=1) as front, connected(front) as (reader, writer):
        front.script.first_delay_s = 60
        waiting = [asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"})) for _ in range(2)]
        await front.script.until(lambda: len(front.script.running) == 2)

        writer.write(head("/v1/chat/completions", "application/json", len(CHAT)))
        told, fields, body = await answer(reader)

        assert (told, fields["retry-after"], fields["connection"]) == (429, "1", "close")
        assert json.loads(body)["error"]["code"]
        assert await reader.read() == b""
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await front.script.until_closed(count=2)


async def test_a_client_that_sends_its_body_unasked_reads_why_it_is_refused(front):
    """After a while it need not wait any longer to be told."""
    async with connected(front) as (reader, writer):
        writer.write(head("/nowhere", "application/json", len(CHAT)) + CHAT)

        assert (await answer(reader))[0] == 404
        assert await reader.read() == b""


async def test_a_client_that_is_told_to_send_its_body_keeps_its_connection(front):
    async with connected(front) as (reader, writer):
        for _ in range(2):
            writer.write(head("/v1/chat/completions", "application/json", len(CHAT)))
            assert (await answer(reader))[0] == 100
            writer.write(CHAT)
            told, fields, _ = await answer(reader)
            assert told == 200 and "connection" not in fields
