"""Work for a client lasts as long as the client is there."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message
from waiting import until

from conductor.ingress.http.errors import ClientGone
from conductor.ingress.http.request import unless_gone


class Client:
    def __init__(self) -> None:
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.is_watched = False

    async def receive(self) -> Message:
        self.is_watched = True
        try:
            return await self.said.get()
        finally:
            self.is_watched = False

    def goes(self) -> None:
        self.said.put_nowait({"type": "http.disconnect"})


async def test_work_needs_no_task_of_its_own_and_its_client_is_watched_no_longer() -> None:
    client, caller = Client(), asyncio.current_task()

    async def work() -> None:
        assert asyncio.current_task() is caller
        client.said.put_nowait({"type": "http.request"})  # more of a body that nobody reads
        await until(lambda: client.is_watched and client.said.empty())

    await unless_gone(client.receive, work())
    await until(lambda: not client.is_watched)


async def test_a_client_that_goes_ends_the_work() -> None:
    client, was_ended = Client(), asyncio.Event()

    async def work() -> None:
        client.goes()
        try:
            await asyncio.Event().wait()
        finally:
            was_ended.set()

    with pytest.raises(ClientGone):
        await unless_gone(client.receive, work())
    task = asyncio.current_task()
    assert was_ended.is_set() and task is not None and not task.cancelling()


@pytest.mark.parametrize("error", [TimeoutError("of the work itself"), asyncio.CancelledError(), ValueError()])
async def test_what_the_work_raises_is_raised(error: BaseException) -> None:
    async def work() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await unless_gone(Client().receive, work())
    assert raised.value is error


async def test_whoever_cancels_the_caller_ends_the_work() -> None:
    client = Client()
    waiting = asyncio.create_task(unless_gone(client.receive, asyncio.Event().wait()))  # type: ignore[arg-type]
    await until(lambda: client.is_watched)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: not client.is_watched)
