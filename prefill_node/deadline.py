"""The time by which a request must be done, and a limit for single calls."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from mooncake.errors import DeadlineExceeded

CONTROL_TIMEOUT_S = 5.0  # of one small call to a store or a decode node

T = TypeVar("T")


class Deadline:
    def __init__(self, at_s: float) -> None:
        """``at_s`` is monotonic, in seconds."""
        self.at_s = at_s

    @property
    def left_s(self) -> float:
        """Timeout for a call (s): never 0, which some APIs take as no limit."""
        return max(0.001, self.at_s - time.monotonic())

    async def wait_for(self, future: asyncio.Future[T]) -> T:
        """The future's result. Raises DeadlineExceeded, after cancelling the future."""
        try:
            return await asyncio.wait_for(future, self.left_s)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed during prefill") from None
