"""A store on the client's own host: blocks are found and read through its board without a message, and put in one pass
into a slot granted in advance.

What cannot be done this way is not an error but left to the client, which asks the store.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.board.reader import BoardReader, Outcome
from kvstore.checksum import Checksums, checksums_to_wire
from kvstore.client.calls import UNHEARD_S, StoreCalls, left_s
from kvstore.client.far import FarStore
from kvstore.client.types import Reservation, slot_to_wire
from kvstore.transfer.protocol import Status
from kvstore.waiting import to_its_end
from mooncake.rpc import store_pb2 as pb
from mooncake.threads import Threads
from mooncake.types import SegmentAddress

INLINE_BYTES = 4 << 20  # copying this much takes under a millisecond; switching threads takes a tenth of one
RETURN_AHEAD_AFTER_S = 1.0  # a slot granted in advance is returned after this long without a put
ASK_AHEAD_AGAIN_S = 1.0
_NOWHERE = SegmentAddress("", 0, "", "", "", 1, 1)  # placeholder address of a slot written in place
_OUTCOMES: dict[Status | None, bool] = {Status.OK: True, Status.HERE: True, Status.REFUSED: False}

T = TypeVar("T")


class NearStore:
    """Does nothing until ``open``, or if the store is not on this host. Belongs to the client's event loop."""

    def __init__(self, calls: StoreCalls, far: FarStore | None, tenant: str) -> None:
        """``far`` reaches the same store over its data plane, which lists blocks sooner."""
        self._calls = calls
        self._far = far
        self._tenant = tenant
        self.board: BoardReader | None = None
        self._spare: list[Reservation] = []  # slots we got and did not need
        self._timer: asyncio.TimerHandle | None = None
        self._last_put_s = 0.0
        self._unheard_until_s = 0.0  # until then slots may arrive from a call whose answer we missed
        self._ask_ahead_after_s = 0.0

    async def open(self, board_path: str) -> None:
        if not board_path or self.board is not None:
            return
        opener = Threads(1, "board")  # its own thread: opening may take seconds
        opening = asyncio.get_running_loop().run_in_executor(opener, BoardReader.open, board_path)
        try:
            await to_its_end(opening)
        finally:
            self._take(opening.result())
            opener.shutdown(wait=False)

    def _take(self, board: BoardReader | None) -> None:
        if board is not None and self.board is not None:  # another call was quicker
            board.close()
        elif board is not None:
            self.board = board

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None
            self._spare.clear()  # slots of that incarnation

    # Reading

    def exists(self, keys: Sequence[bytes], has_ssd: bool) -> list[bool | None]:
        """Whether each is stored; None for what the board cannot tell: it does not list what is only on an SSD."""
        board = self.board
        lists_all = board is not None and board.lists_all and not has_ssd
        here = board.exists(keys) if board is not None else None
        if here is None:  # no board, or the store is gone
            self.close()
            return [None] * len(keys)
        return [is_here or (False if lists_all else None) for is_here in here]

    async def read(self, keys: Sequence[bytes], room: Callable[[int, int], memoryview]) -> list[int | None]:
        """Read what the board lists. None for the rest, and for blocks that changed meanwhile."""
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
        """One pass over the bytes, then one message. None when there is no slot in advance, or it has expired."""
        board = self.board
        if board is None or not board.takes(view.nbytes, ranges):
            return None
        try:
            return await self._put(board, name, view, ranges, timeout_s)
        except BaseException:
            self._unheard_until_s = time.monotonic() + UNHEARD_S
            raise
        finally:
            self._keep_for_next()

    async def _put(
        self, board: BoardReader, name: tuple[bytes, bytes], view: memoryview, ranges: int, timeout_s: float
    ) -> bool | None:
        deadline = time.monotonic() + timeout_s
        slot = self._take_ahead() or await self._ask_ahead(timeout_s)
        if slot is None:
            return None
        copy = functools.partial(board.write, slot.index, view, ranges)
        with self._calls.owing([slot]):
            sums = copy() if view.nbytes <= INLINE_BYTES else await _in_thread(copy)
            if self._far is not None and self._far.is_open:
                status = await self._far.commit(name, slot, view.nbytes, sums, deadline)
                if status is Status.HERE:
                    self._spare.append(slot)
                elif status is None:  # the store may have received it
                    self._unheard_until_s = time.monotonic() + UNHEARD_S
                    self._calls.later(self._calls.abort([slot]))
                return _OUTCOMES.get(status)
            return await self._commit(board.writer_id, name, slot, view.nbytes, sums, deadline)

    def return_ahead(self) -> None:
        """Return the slots held in advance."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        slots: list[Reservation] = []
        while (slot := self._take_ahead()) is not None:
            slots.append(slot)
        if slots:
            self._calls.later(self._calls.abort(slots))

    async def _commit(
        self, writer: str, name: tuple[bytes, bytes], slot: Reservation, length: int, sums: Checksums, deadline: float
    ) -> bool | None:
        """Commit a written slot by a call, for engines that do not use TCP."""
        request = pb.CommitRequest(
            writer_id=writer,
            slot=slot_to_wire(slot),
            block=pb.BlockName(key=name[0], parent=name[1]),
            length=length,
            checksums=checksums_to_wire(sums),
            tenant=self._tenant,
        )
        response = await self._calls.call(self._calls.fast.Commit(request, timeout=left_s(deadline)))
        return None if response.outcome == pb.CommitResponse.OVER else response.outcome == pb.CommitResponse.STORED

    async def _ask_ahead(self, timeout_s: float) -> Reservation | None:
        """Request a slot when the mailbox is empty, because the store is behind or has revoked the slots."""
        if self.board is None or time.monotonic() < self._ask_ahead_after_s:
            return None
        request = pb.CommitRequest(writer_id=self.board.writer_id)
        await self._calls.call(self._calls.fast.Commit(request, timeout=timeout_s))
        slot = self._take_ahead()
        if slot is None:
            self._ask_ahead_after_s = time.monotonic() + ASK_AHEAD_AGAIN_S
        return slot

    def _take_ahead(self) -> Reservation | None:
        if self._spare:
            return self._spare.pop()
        gift = self.board.receive() if self.board is not None else None
        return None if gift is None else Reservation(_NOWHERE, *gift)

    def _keep_for_next(self) -> None:
        """Hold slots for the next put if it comes soon; return those that arrive later."""
        self._last_put_s = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETURN_AHEAD_AFTER_S, self._return_unused)

    def _return_unused(self) -> None:
        self._timer, now = None, time.monotonic()
        left = self._last_put_s + RETURN_AHEAD_AFTER_S - now
        if left <= 0:
            self.return_ahead()
            left = RETURN_AHEAD_AFTER_S if now < self._unheard_until_s and self.board is not None else 0.0
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._return_unused)


async def _in_thread(work: Callable[[], T]) -> T:
    """Does not return before the work has ended, even when cancelled: it writes into the caller's memory."""
    return await to_its_end(asyncio.get_running_loop().run_in_executor(None, work))
