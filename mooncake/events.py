"""A cache's numbered events about the blocks it holds, and the service that publishes them.

The owner appends; subscribers continue from the number they expect. A subscriber that fell behind the bounded log, or
names another incarnation, gets a snapshot instead. The owner's cache is authoritative; every index built from this is
soft state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any

from mooncake.rpc import common_pb2 as pb
from mooncake.rpc import common_pb2_grpc
from mooncake.rpc.convert import event_to_wire
from mooncake.types import BlockEvent, BlockKey, Tier

EVENTS_PER_MESSAGE = 4096
UNFINISHED = 2**64 - 1  # position inside a snapshot: no log gets that far, so resuming from it starts over


class EventLog:
    """Numbered events of one cache in one ``incarnation``. One owner: append on the event loop only."""

    def __init__(self, incarnation: int, keep: int = 65536) -> None:
        self.incarnation = incarnation
        self.next_sequence = 0
        self._kept: deque[BlockEvent] = deque(maxlen=keep)
        self._stored: dict[BlockKey, tuple[bytes, Tier]] = {}  # parent, tier; in order of storing
        self._changed = asyncio.Event()
        self._has_ended = False

    def begin_anew(self, incarnation: int) -> None:
        """The same blocks under a new incarnation: all subscribers start over with a snapshot."""
        self.incarnation = incarnation

    def append(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            if event.stored:
                self._stored[event.key] = event.parent, event.tier
            else:
                self._stored.pop(event.key, None)
            self._kept.append(event)
            self.next_sequence += 1
            self._changed.set()

    def since(self, sequence: int) -> list[BlockEvent] | None:
        """Events from ``sequence`` on, or None when the log no longer reaches back that far."""
        behind = self.next_sequence - sequence
        if not 0 <= behind <= len(self._kept):
            return None
        return list(islice(self._kept, len(self._kept) - behind, None))

    def snapshot(self) -> list[BlockEvent]:
        return [BlockEvent(True, key, parent, tier) for key, (parent, tier) in self._stored.items()]

    async def wait(self, sequence: int) -> bool:
        """Return once there is something after ``sequence``; False when the log has ended."""
        while self.next_sequence <= sequence and not self._has_ended:
            self._changed.clear()  # all earlier waiters have been woken already
            await self._changed.wait()
        return not self._has_ended

    def end(self) -> None:
        """Release subscribers before the server stops: it would wait for them, and then cut them off."""
        self._has_ended = True
        self._changed.set()


class CacheEventsServicer(common_pb2_grpc.CacheEventsServicer):
    """Serves an EventLog. A hanging subscriber is held back by gRPC's own flow control."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    async def Subscribe(  # noqa: N802
        self, request: pb.SubscribeRequest, context: Any
    ) -> AsyncIterator[pb.BlockEvents]:
        sequence = request.next_sequence
        known = request.incarnation == self._log.incarnation
        while True:
            events = self._log.since(sequence) if known else None
            reset, known = events is None, True
            if events is None:
                first = sequence = self._log.next_sequence
                events = self._log.snapshot()
            else:
                first, sequence = sequence, sequence + len(events)
            for message in self._messages(events, first, sequence, reset):
                yield message
            if not await self._log.wait(sequence):
                return

    def _messages(self, events: list[BlockEvent], first: int, end: int, reset: bool) -> Iterator[pb.BlockEvents]:
        """Split into parts. Event numbers advance by one each; only a snapshot's last part leads to ``end``."""
        for start in range(0, max(len(events), 1), EVENTS_PER_MESSAGE):
            part = events[start : start + EVENTS_PER_MESSAGE]
            is_last = start + len(part) == len(events)
            yield pb.BlockEvents(
                incarnation=self._log.incarnation,
                first_sequence=UNFINISHED if reset else first + start,
                next_sequence=(end if is_last else UNFINISHED) if reset else first + start + len(part),
                reset=reset and start == 0,
                events=[event_to_wire(event) for event in part],
            )
