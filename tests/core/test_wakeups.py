"""gRPC's events reach an event loop however slow its passes are."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from mooncake.app.cluster.role_main import run_async
from mooncake.rpc.server import Channels
from mooncake.rpc.wakeups import all_wakeups_read

CALLS = 1000  # more than gRPC has bytes in its socket when it stands still, by far


async def passes_until_answered(address: str) -> int:
    """How many passes of a slow loop it takes until as many calls have been answered."""
    channels, passes = Channels(), 0
    stub: Any = health_pb2_grpc.HealthStub(channels.get(address))
    await stub.Check(health_pb2.HealthCheckRequest())

    async def slow() -> None:
        nonlocal passes
        while True:
            time.sleep(0.02)  # noqa: ASYNC251
            await asyncio.sleep(0)
            passes += 1

    slowing = asyncio.create_task(slow())
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(stub.Check(health_pb2.HealthCheckRequest()) for _ in range(CALLS)))
    finally:
        slowing.cancel()
        await channels.close()
    return passes


def test_calls_take_no_pass_of_the_loop_each() -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert run_async(passes_until_answered(f"127.0.0.1:{port}")) < CALLS / 4
    finally:
        server.stop(None)


def test_two_loops_at_one_socket_lose_no_event() -> None:
    """As gRPC does it: each byte stands for an event, and whoever reads a byte handles all events so far."""
    ours, its = socket.socketpair()
    ours.setblocking(False)
    events: list[int] = []
    handled: list[int] = []
    taking = threading.Lock()
    total = 20_000

    def handle() -> None:
        ours.recv(1)
        with taking:
            while events:
                handled.append(events.pop())

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        with all_wakeups_read():
            loop.add_reader(ours, handle)
        async with asyncio.timeout(30):
            while len(handled) < total:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        loop.remove_reader(ours)

    loops = [threading.Thread(target=asyncio.run, args=(listen(),)) for _ in range(2)]
    for thread in loops:
        thread.start()
    for number in range(total):
        with taking:
            events.append(number)
        its.send(b"1")
    for thread in loops:
        thread.join()
    ours.close()
    its.close()
    assert sorted(handled) == list(range(total))


async def test_an_event_that_fails_does_not_hold_up_those_behind_it() -> None:
    """As when it belongs to a loop that has been closed: gRPC takes it, fails, and has the others wait for a byte."""
    ours, its = socket.socketpair()
    ours.setblocking(False)
    events, handled = ["first", "closed", "second", "third"], []

    def handle() -> None:
        ours.recv(1)
        while events:
            event = events.pop(0)
            if event == "closed":
                raise RuntimeError("Event loop is closed")
            handled.append(event)

    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    its.send(b"1" * len(events))
    with all_wakeups_read():
        loop.add_reader(ours, handle)
    try:
        async with asyncio.timeout(5):
            while len(handled) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    finally:
        loop.remove_reader(ours)
        ours.close()
        its.close()
    assert handled == ["first", "second", "third"] and len(failures) == 1
