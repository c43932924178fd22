"""Bodies that arrive slowly, from anybody: others are answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from conductor.ingress.http.arriving_bodies import PATIENCE_S, ArrivingBodies
from conductor.ingress.http.errors import BodyGaveWay
from conductor.ingress.http.server import ConnectionLimits, HttpServer

BODY = b'{"prompt": "x"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@contextlib.asynccontextmanager
async def slow_clients(port, count):
    """Connections that have sent all of a request but the last byte."""
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in streams:
        writer.write(HEAD % len(BODY) + BODY[:-1])
    try:
        yield streams
    finally:
        for _, writer in streams:
            writer.close()


async def ended(streams):
    """The answers that have come without being waited for."""
    await asyncio.sleep(0.1)
    return [reader._buffer.partition(b"\r\n")[0] for reader, _ in streams if reader._buffer]


async def test_slow_bodies_give_way_to_requests_that_are_sent_at_once(open_front):
    async with open_front(max_requests=4) as front, slow_clients(front.http_port, 8) as slow:
        await asyncio.sleep(PATIENCE_S + 0.2)
        answers = [(await front.http.post("/v1/completions", json={"prompt": "x"})).status_code for _ in range(20)]
        assert answers == [200] * 20
        assert await ended(slow) == [b"HTTP/1.1 408 Request Timeout"], "the place of one is enough for them"
        assert b"retry-after: 1\r\n" in slow[0][0]._buffer
        reader, writer = slow[-1]
        writer.write(BODY[-1:])  # slow, but nobody needed its place
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")
        assert len(front.script.asked) == 21


async def test_requests_that_run_and_bodies_that_arrive_take_no_room_of_each_other(open_front):
    async with open_front(max_requests=4) as front, slow_clients(front.http_port, 7):
        front.script.first_delay_s = 60
        running = [asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"})) for _ in range(8)]
        await front.script.until(lambda: len(front.script.running) == 8)
        assert (await front.http.post("/v1/completions", json={"prompt": "x"})).status_code == 429
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await front.script.until_closed(count=8)
        front.script.first_delay_s = 0
        assert (await front.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_body_that_has_just_begun_gives_way_to_nobody():
    now = 0.0
    bodies, parts = ArrivingBodies(2, lambda: now), asyncio.Queue()
    first, _ = bodies.add(parts.get, lambda: None), bodies.add(parts.get, lambda: None)
    waiting = asyncio.create_task(first())
    await asyncio.sleep(0)
    now = PATIENCE_S / 2
    assert not bodies.make_room()
    now = PATIENCE_S
    assert bodies.make_room() and len(bodies) == 1
    with pytest.raises(BodyGaveWay):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(BodyGaveWay):
        await first()


async def test_a_body_counts_as_arriving_until_its_last_part():
    arrived, parts = [], asyncio.Queue()
    bodies = ArrivingBodies(2)
    body = bodies.add(parts.get, lambda: arrived.append(True))
    for is_last in (False, True):
        assert len(bodies) == 1 and not body.has_arrived
        parts.put_nowait({"type": "http.request", "body": b"x", "more_body": not is_last})
        await body()
    assert len(bodies) == 0 and body.has_arrived and arrived == [True]
    parts.put_nowait({"type": "http.disconnect"})
    assert (await body())["type"] == "http.disconnect", "what comes later is passed on"


ASKS = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def answer_late(scope, receive, send):
    """Requests for /slow are never answered."""
    while scope["path"] == "/slow":
        if (await receive())["type"] == "http.disconnect":
            return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def opened(port, first):
    """A connection that has sent this, and where it has been answered to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)
    if first.startswith(ASKS):
        await asyncio.wait_for(reader.readuntil(b"ok"), 5)
    return reader, writer


@pytest.mark.parametrize("first", [b"", b"GET / HT", ASKS, ASKS + b"GE"])
async def test_connections_without_a_request_give_way_to_new_ones(first):
    server = HttpServer(answer_late, limits=ConnectionLimits(max_open=3, quiet_s=0.2))
    port = await server.start("127.0.0.1", 0)
    try:
        streams = [await opened(port, sent) for sent in (b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n", first, ASKS)]
        await asyncio.sleep(0.3)
        streams.append(await opened(port, ASKS))
        assert await asyncio.wait_for(streams[1][0].read(), 5) == b"", "the one that has been quiet the longest ended"
        streams[2][1].write(ASKS)
        await asyncio.wait_for(streams[2][0].readuntil(b"ok"), 5)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKS)
        assert b"503" in await asyncio.wait_for(reader.readline(), 5), "those that were in use just now stay"
        assert not streams[0][0].at_eof(), "and so does one whose answer takes long"
        writer.close()
        for _, writer in streams:
            writer.close()
    finally:
        await server.stop()
