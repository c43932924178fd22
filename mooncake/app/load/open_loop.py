"""An open loop: each request is sent at its time, however slow the answers are, up to a limit of requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar


class Timed(Protocol):
    @property
    def at_s(self) -> float: ...


T = TypeVar("T", bound=Timed)


async def send_all(
    requests: Iterable[T], send: Callable[[T], Awaitable[None]], most: int, now_s: Callable[[], float]
) -> None:
    """Sends them in their order and waits until all have ended, with ``most`` in flight. When it is cancelled, so are
    they."""
    slots = asyncio.Semaphore(most)
    tasks: set[asyncio.Task[None]] = set()

    async def one(request: T) -> None:
        try:
            await send(request)
        finally:
            slots.release()

    try:
        for request in requests:
            await asyncio.sleep(request.at_s - now_s())
            await slots.acquire()
            task = asyncio.create_task(one(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
