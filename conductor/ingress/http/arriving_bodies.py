"""Bodies that are still arriving: how many there may be at once, and which of them gives way to the next.

Anybody can send one slowly. So these take no room of the requests that are complete, and where there are too many the
one that has been arriving the longest ends: those that come promptly are there for a moment only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import Message, Receive

from conductor.ingress.http.errors import BodyGaveWay

PATIENCE_S = 1.0  # a body that began to arrive since then is not slow


class ArrivingBody:
    """Call it as the request's ``receive``. ``has_arrived`` once nothing of the body is missing."""

    def __init__(self, receive: Receive, begun_s: float, on_arrival: Callable[[], None]) -> None:
        self.begun_s = begun_s
        self.has_arrived = False
        self._receive = receive
        self._on_arrival = on_arrival  # called once
        self._is_given_up = False
        self._wait: asyncio.Timeout | None = None

    async def __call__(self) -> Message:
        """Raises BodyGaveWay once it has been given up."""
        if self.has_arrived:
            return await self._receive()
        try:
            if self._is_given_up:
                raise TimeoutError
            async with asyncio.timeout(None) as self._wait:
                message = await self._receive()
        except TimeoutError:
            raise BodyGaveWay("the request body arrives slowly, and many others wait for its room") from None
        finally:
            self._wait = None
        if not message.get("more_body", False):
            self.has_arrived = True
            self._on_arrival()
        return message

    def give_up(self) -> None:
        self._is_given_up = True
        if self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())


class ArrivingBodies:
    """At most ``most`` of them. One event loop; ``clock`` gives monotonic seconds."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._bodies: dict[ArrivingBody, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._bodies)

    def make_room(self) -> bool:
        """Whether there is room for one more, after giving up the oldest if need be."""
        if len(self._bodies) >= self._most:
            oldest = next(iter(self._bodies))
            if self._clock() - oldest.begun_s < PATIENCE_S:
                return False
            self.remove(oldest)
            oldest.give_up()
        return True

    def add(self, receive: Receive, on_arrival: Callable[[], None]) -> ArrivingBody:
        """``on_arrival`` is called when it has arrived, which ends its stay here. ``remove`` it when its request
        ends."""

        def arrived() -> None:
            self.remove(body)
            on_arrival()

        body = ArrivingBody(receive, self._clock(), arrived)
        self._bodies[body] = None
        return body

    def remove(self, body: ArrivingBody) -> None:
        self._bodies.pop(body, None)
