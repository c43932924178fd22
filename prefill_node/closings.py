"""Tells decode nodes which hand-offs have ended without a commit, until they have heard it.

A decode node whose memory we map cannot see whether a copy of ours is still in progress: it keeps such a hand-off's
blocks until we say that we have stopped, or our connections end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

import grpc

from mooncake.rpc import decode_pb2, decode_pb2_grpc
from mooncake.rpc.server import Channels
from prefill_node.deadline import CONTROL_TIMEOUT_S

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 15.0  # between two tries, doubled each time
GIVE_UP_AFTER_S = 3600.0  # a decode node that has not answered for so long is gone, and has freed all it had
MAX_OWED = 4096  # for more, the end of our connections has to do


class Closings:
    """Belongs to one event loop."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._owed: dict[str, deque[decode_pb2.CloseHandoffRequest]] = {}  # by address
        self._telling: set[asyncio.Task[None]] = set()  # one an address

    @property
    def num_owed(self) -> int:
        """Hand-offs whose end a decode node has not heard."""
        return sum(map(len, self._owed.values()))

    async def tell(self, address: str, request: decode_pb2.CloseHandoffRequest) -> None:
        """Close a hand-off, into which nothing may be written any more. Returns after the first try; if that fails,
        others follow in the background."""
        if await self._is_heard(address, request) or self.num_owed >= MAX_OWED:
            return
        if owed := self._owed.get(address):
            owed.append(request)
            return
        self._owed[address] = deque([request])
        task = asyncio.create_task(self._repeat(address))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def stop(self) -> None:
        """Tell nothing more: our connections end."""
        for task in self._telling:
            task.cancel()

    async def _repeat(self, address: str) -> None:
        owed, pause_s, heard_s = self._owed[address], FIRST_PAUSE_S, time.monotonic()
        try:
            while owed and time.monotonic() < heard_s + GIVE_UP_AFTER_S:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                while owed and await self._is_heard(address, owed[0]):
                    owed.popleft()
                    pause_s, heard_s = FIRST_PAUSE_S, time.monotonic()
        finally:
            del self._owed[address]

    async def _is_heard(self, address: str, request: decode_pb2.CloseHandoffRequest) -> bool:
        stub = decode_pb2_grpc.DecodeStub(self._channels.get(address))
        try:
            await stub.CloseHandoff(request, timeout=CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("closing hand-off %s: %s", request.handoff_id, error.details())
            return False
        return True
