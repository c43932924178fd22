"""An open loop: each request is sent at its time, however slow the answers are, up to a limit of requests in flight."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

from mooncake.app.latency import Outcome, RequestResult


class Timed(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def at_s(self) -> float: ...


T = TypeVar("T", bound=Timed)


class OpenLoop(ABC, Generic[T]):
    """One run. ``results`` fills as requests end, so an interrupted run can be reported."""

    def __init__(self, concurrency: int, on_result: Callable[[RequestResult], None]) -> None:
        self.results: list[RequestResult] = []
        self.sent = 0
        self._concurrency = concurrency
        self._on_result = on_result
        self._start_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start_s

    async def send_all(self, requests: Iterable[T]) -> None:
        """In their order; waits until all have ended. When it is cancelled, so are those in flight. A request that
        fails is a result, not an error."""
        self._start_s = time.monotonic()
        slots = asyncio.Semaphore(self._concurrency)
        tasks: set[asyncio.Task[None]] = set()

        async def one(request: T) -> None:
            try:
                result = await self._measure(request)
                self.results.append(result)
                self._on_result(result)
            finally:
                slots.release()

        try:
            for request in requests:
                await asyncio.sleep(request.at_s - self.now_s)
                await slots.acquire()
                task = asyncio.create_task(one(request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @abstractmethod
    async def _measure(self, request: T) -> RequestResult:
        """Send one request and wait for its end."""

    def _answered(
        self, request: T, sent_s: float, times_s: Sequence[float], prompt_tokens: int, cached_tokens: int
    ) -> RequestResult:
        """The result of a request that ends now, whose tokens came at ``times_s``."""
        return RequestResult(
            index=request.index,
            planned_s=request.at_s,
            sent_s=sent_s,
            outcome=Outcome.OK,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(times_s),
            cached_tokens=cached_tokens,
            ttft_ms=(times_s[0] - sent_s) * 1000,
            gaps_ms=tuple((after - before) * 1000 for before, after in pairwise(times_s)),
            total_ms=(self.now_s - sent_s) * 1000,
        )
