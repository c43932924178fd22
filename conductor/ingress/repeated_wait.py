"""Waiting for one thing after the other under one timer: a timeout for each would cost more than the things."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")


class RepeatedWait:
    """Until ``left_s`` seconds from now, or ``stop``. Call ``close`` when done."""

    def __init__(self, left_s: float) -> None:
        self._is_over = left_s <= 0
        self._task: asyncio.Task[object] | None = None  # that waits now
        self._timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), self.stop)

    async def next(self, items: AsyncGenerator[T, None]) -> T:
        """The next of them. Raises TimeoutError once the time is over; what came at that moment may be lost."""
        if self.is_over():
            raise TimeoutError
        task = self._task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        try:
            return await anext(items)
        except asyncio.CancelledError:
            if self.is_over() and task.uncancel() <= num_cancelled:
                raise TimeoutError from None
            raise
        finally:
            self._task = None

    def is_over(self) -> bool:
        return self._is_over

    def stop(self) -> None:
        """As if the time were over."""
        if not self._is_over:
            self._is_over = True
            if self._task is not None:
                self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()
