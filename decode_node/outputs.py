"""What the engine says of one request, on its way from the engine's thread into the messages of its call.

A message costs the node, and the conductor that passes it on, about the same however many tokens it has: with many
requests on short steps, messages would take more time than the steps. So the next one waits a little for each running
request, and takes along what comes meanwhile. Few requests, or long steps, are not delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

from mooncake.engine.contract import StepOutput
from mooncake.errors import MooncakeError

GAP_S = 0.00025  # between the messages of a request, for each that runs: at most 4,000 messages a second
MAX_GAP_S = 0.05  # however many run: clients see an answer grow 20 times a second


def least_gap_s(num_running: int) -> float:
    """The least time between two messages of a request, in seconds."""
    return min(num_running * GAP_S, MAX_GAP_S)


class Outputs:
    """Made on the event loop that takes them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: list[StepOutput | MooncakeError] = []
        self._filled = asyncio.Event()
        self._ended = asyncio.Event()  # an answer, or all of them, since the last ``take``
        self._taken_at = -math.inf

    def put(self, output: StepOutput | MooncakeError) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._put, output)

    async def take(self, gap_s: float) -> list[StepOutput | MooncakeError]:
        """All since the last call, in order, once there is something: not before ``gap_s`` after that call's return,
        except for the end of an answer."""
        await self._filled.wait()
        left_s = self._taken_at + gap_s - self._loop.time()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._ended.wait()
        items, self._items = self._items, []
        self._filled.clear()
        self._ended.clear()
        self._taken_at = self._loop.time()
        return items

    def _put(self, output: StepOutput | MooncakeError) -> None:
        self._items.append(output)
        self._filled.set()
        if isinstance(output, MooncakeError) or output.finish_reason is not None:
            self._ended.set()
