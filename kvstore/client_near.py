"""A store of the client's own host: blocks are found and read on its board without a word to it, and put in one pass
into a slot that was had in advance.

Whatever cannot be done like this is not an error but left to the client, which asks the store.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.board import BoardReader, Outcome
from kvstore.checksum import checksums_to_wire
from kvstore.client_calls import StoreCalls, left_s
from kvstore.client_types import Reservation
from mooncake.rpc import store_pb2 as pb
from mooncake.types import SegmentAddress

INLINE_BYTES = 2 << 20  # a copy of so much within this host takes less time than a trip to another thread
RETURN_AHEAD_AFTER_S = 1.0  # a slot had in advance goes back when nothing has been put for so long
ASK_AHEAD_AGAIN_S = 1.0
_NOWHERE = SegmentAddress("", 0, "", "", "", 1, 1)  # where a slot is that is written in place

T = TypeVar("T")


class NearStore:
    """Knows nothing until ``open``, and when the store is not of this host. Belongs to the client's event loop."""

    def __init__(self, calls: StoreCalls, tenant: str) -> None:
        self._calls = calls
        self._tenant = tenant
        self.board: BoardReader | None = None
        self._has_ssd = True
        self._ahead: pb.Slot | None = None  # to be written next
        self._ahead_timer: asyncio.TimerHandle | None = None
        self._ask_ahead_after_s = 0.0

    async def open(self, stats: pb.StatsResponse) -> None:
        self._has_ssd = stats.ssd_capacity_bytes > 0
        if stats.board_path and self.board is None:
            self.board = await asyncio.to_thread(BoardReader.open, stats.board_path)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None

    # Reading

    @property
    def lists_all(self) -> bool:
        """Whether the board lists everything that the store has."""
        return self.board is not None and not self._has_ssd

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """What the board lists."""
        here = self.board.exists(keys) if self.board is not None else None
        if here is None:  # no board, or nobody behind it
            self.close()
            return [False] * len(keys)
        return here

    async def read(self, keys: Sequence[bytes], room: Callable[[int, int], memoryview]) -> list[int | None]:
        """What the board lists. None for the rest, also for what changed meanwhile."""
        lengths: list[int | None] = [None] * len(keys)
        for index, key in enumerate(keys):
            board = self.board
            length = board.length(key) if board is not None else None
            if board is None or not length:
                continue
            into = room(index, length)
            is_short = length <= INLINE_BYTES
            outcome = board.read(key, into) if is_short else await _in_thread(functools.partial(board.read, key, into))
            if outcome is Outcome.READ:
                lengths[index] = length
            elif outcome is Outcome.GONE:
                self.close()
            elif outcome is Outcome.CORRUPT:
                await self._calls.report_corrupt([key])
        return lengths

    # Writing

    async def put(self, name: tuple[bytes, bytes], view: memoryview, ranges: int, timeout_s: float) -> bool | None:
        """One pass over the bytes, then one message. None when there is no slot in advance, or it has run out."""
        board, deadline = self.board, time.monotonic() + timeout_s
        if board is None or not board.takes(view.nbytes, ranges):
            return None
        slot = self._take_ahead() or await self._ask_ahead(board.lane, timeout_s)
        if slot is None:
            return None
        reservation = Reservation(_NOWHERE, slot.index, slot.epoch)
        try:
            copy = functools.partial(board.write, slot.index, view, ranges)
            sums = copy() if view.nbytes <= INLINE_BYTES else await _in_thread(copy)
            commit_s = left_s(deadline)
        except BaseException:
            self._calls.later(self._calls.abort([reservation]))
            raise
        key, parent = name
        request = pb.CommitRequest(
            lane=board.lane,
            slot=slot,
            block=pb.BlockName(key=key, parent=parent),
            length=view.nbytes,
            checksums=checksums_to_wire(sums),
            tenant=self._tenant,
        )
        with self._calls.owing([reservation]):
            response = await self._calls.call(self._calls.fast.Commit(request, timeout=commit_s))
        self._keep_ahead(response)
        return None if response.outcome == pb.CommitResponse.OVER else response.outcome == pb.CommitResponse.STORED

    def return_ahead(self) -> None:
        """Give back the slot that is held in advance, if there is one."""
        if self._ahead_timer is not None:
            self._ahead_timer.cancel()
        self._ahead_timer = None
        if (slot := self._take_ahead()) is not None:
            self._calls.later(self._calls.abort([Reservation(_NOWHERE, slot.index, slot.epoch)]))

    async def _ask_ahead(self, lane: str, timeout_s: float) -> pb.Slot | None:
        if time.monotonic() < self._ask_ahead_after_s:
            return None
        request = pb.CommitRequest(lane=lane)
        self._keep_ahead(await self._calls.call(self._calls.fast.Commit(request, timeout=timeout_s)))
        return self._take_ahead()

    def _take_ahead(self) -> pb.Slot | None:
        slot, self._ahead = self._ahead, None
        return slot

    def _keep_ahead(self, response: pb.CommitResponse) -> None:
        """For the next put, if that comes soon."""
        if not response.HasField("next"):
            self._ask_ahead_after_s = time.monotonic() + ASK_AHEAD_AGAIN_S
            return
        self._ahead = response.next
        if self._ahead_timer is not None:
            self._ahead_timer.cancel()
        self._ahead_timer = asyncio.get_running_loop().call_later(RETURN_AHEAD_AFTER_S, self.return_ahead)


async def _in_thread(work: Callable[[], T]) -> T:
    """Does not return before the work has ended, also when it is cancelled: it writes into memory of the caller's."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
