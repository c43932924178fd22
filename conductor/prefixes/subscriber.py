"""Keeps the prefix index in step with every node's cache: one CacheEvents stream per node.

I/O only; the rule for when a message may be applied is in ``proto/common.proto`` and is the pure class ``Cursor``.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import grpc

from conductor.prefixes.index import PrefixIndex
from conductor.registry import NodeInfo
from mooncake.directory import RECORD_KEY_BYTES, BlockTable, Directory
from mooncake.rpc import common_pb2 as pb
from mooncake.rpc.common_pb2_grpc import CacheEventsStub
from mooncake.rpc.convert import event_from_wire
from mooncake.rpc.server import TAKEN_KEY, Channels
from mooncake.types import Role, Tier
from mooncake.vital import vital

log = logging.getLogger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0


@dataclass(slots=True)
class Cursor:
    """A subscriber's position in one cache's event stream."""

    incarnation: int = 0
    next_sequence: int = 0

    def takes(self, message: pb.BlockEvents) -> bool:
        """Advance past the message. Returns False if something was missed."""
        expected = message.incarnation == self.incarnation and message.first_sequence == self.next_sequence
        if not (message.reset or expected):
            return False
        self.incarnation, self.next_sequence = message.incarnation, message.next_sequence
        return True


class Subscriber:
    """One owner, one event loop. ``follow`` when a node joins, ``forget`` when it is gone."""

    def __init__(self, index: PrefixIndex, channels: Channels, directory: Directory) -> None:
        self._index = index
        self._channels = channels
        self._directory = directory
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._connected: dict[str, int] = {}  # incarnations by node id

    def follow(self, info: NodeInfo, table: BlockTable | None = None) -> None:
        """Continue from where ``table`` ends, whose blocks the index takes over; without one from the beginning."""
        self.forget(info.node_id)
        self._index.join(info.node_id, is_tiered=info.role is Role.STORE)
        for tier, keys in (table.blocks if table else {}).items():
            self._index.load(info.node_id, keys, tier)
        cursor = Cursor(table.incarnation, table.next_sequence) if table else Cursor()
        name = f"events of {info.node_id}"
        self._tasks[info.node_id] = vital(self._follow(info, cursor), name)

    def forget(self, node_id: str) -> None:
        if task := self._tasks.pop(node_id, None):
            task.cancel()
        self._index.forget(node_id)

    def is_connected(self, info: NodeInfo) -> bool:
        """Whether this process has taken our call for its events and has not ended since."""
        return self._connected.get(info.node_id) == info.incarnation

    async def close(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, info: NodeInfo, cursor: Cursor) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            before = cursor.next_sequence
            try:
                await self._stream(info, cursor)
            except grpc.RpcError as error:
                log.debug("events of %s: %s", info.node_id, error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # we were cancelled; otherwise the peer ended the call as cancelled
            except Exception:
                log.exception("events of %s could not be taken over", info.node_id)
                cursor = Cursor()
            moved = cursor.next_sequence != before
            pause_s = MIN_PAUSE_S if moved else min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _stream(self, info: NodeInfo, cursor: Cursor) -> None:
        """Runs until the stream ends or has a gap; the caller subscribes again."""
        stub = CacheEventsStub(self._channels.get(info.control_address))
        request = pb.SubscribeRequest(incarnation=cursor.incarnation, next_sequence=cursor.next_sequence)
        call = stub.Subscribe(request)
        try:
            if (await call.initial_metadata()).get(TAKEN_KEY):
                self._connected[info.node_id] = info.incarnation
            async for message in call:
                if not cursor.takes(message):
                    log.warning("events of %s have a gap; subscribing again", info.node_id)
                    cursor.incarnation = cursor.next_sequence = 0
                    return
                if message.reset:
                    self._index.clear(info.node_id)
                # Others may have put blocks with shorter names into a store: those are no prompt's.
                ours = (event for event in message.events if len(event.key) >= RECORD_KEY_BYTES)
                changes = list(map(event_from_wire, ours))
                for tier, events in groupby(changes, key=attrgetter("tier")):
                    self._index.apply(info.node_id, events, Tier(tier))
                self._directory.changed(info.node_id, cursor.incarnation, cursor.next_sequence, changes, message.reset)
        finally:
            call.cancel()
            if self.is_connected(info):
                del self._connected[info.node_id]
