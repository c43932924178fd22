"""Lets an event loop wait for work in other threads that uses the caller's memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(running: asyncio.Future[T], stop: Callable[[], object] = lambda: None) -> T:
    """The result of ``running``. Does not return before it has ended, however often it is cancelled; on the first
    cancellation ``stop`` is called, which may make it end sooner, and with an error that nobody wants."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # otherwise the event loop would log it
        raise
