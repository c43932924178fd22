"""Shortcuts to a store for whole blocks: its board, on this host, or its data plane; looked up again when it restarts.

What no shortcut can do is not an error but left to the client, which asks the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.block_names import checked_key, checked_parent
from kvstore.client.calls import DEFAULT_TIMEOUT_S, StoreCalls
from kvstore.client.far import FarStore
from kvstore.client.near import NearStore
from kvstore.transfer.engine import TransferEngine
from mooncake.rpc import store_pb2 as pb
from mooncake.rpc.convert import segment_from_wire

UNHEARD = -1  # the store's incarnation is not known yet


def allowed_shortcuts(transports: Sequence[str], max_mb_per_s: float) -> tuple[bool, bool]:
    """``copies_inline`` and ``is_keyed`` of clients over an engine like this."""
    is_free = max_mb_per_s == 0
    return is_free and "shm" in transports, is_free and "tcp" in transports and "rdma" not in transports


class Shortcuts:
    """Has none until ``look_up``. Belongs to the client's event loop."""

    def __init__(
        self, transfer: TransferEngine, calls: StoreCalls, tenant: str, copies_inline: bool, is_keyed: bool
    ) -> None:
        """See ``StoreClient``."""
        self._calls = calls
        self._uses_board = copies_inline
        self._far = FarStore(transfer, tenant) if is_keyed else None
        self._near = NearStore(calls, self._far, tenant)
        self.has_ssd = True  # as far as we know
        self._incarnation = 0  # the store's when it was last asked; 0: never
        self._is_looking_up = False

    async def look_up(self, timeout_s: float) -> pb.StatsResponse:
        """Ask the store which there are."""
        self._incarnation = self._incarnation or UNHEARD
        response = await self._calls.call(self._calls.stub.Stats(pb.StatsRequest(), timeout=timeout_s))
        if self._incarnation != response.segment.incarnation:
            self._near.close()  # the board of an earlier incarnation
            self._incarnation = response.segment.incarnation
        self.has_ssd = response.ssd_capacity_bytes > 0
        await self._calls.open_fast_rpc(response.fast_rpc_port)
        if self._uses_board:
            await self._near.open(response.board_path)
        if self._far is not None and response.HasField("segment"):
            self._far.open(segment_from_wire(response.segment))
        return response

    def heard_from(self, incarnation: int) -> None:
        """A store has answered; 0 when it did not give its incarnation. Looks up again if it was restarted."""

        async def look_up() -> None:
            try:
                await self.look_up(DEFAULT_TIMEOUT_S)
            finally:
                self._is_looking_up = False

        if self._incarnation and incarnation not in (0, self._incarnation) and not self._is_looking_up:
            self._is_looking_up = True
            self._calls.later(look_up())

    async def knock(self, deadline: float) -> None:
        """Raises InvalidRequest when the store's data plane refuses us."""
        if self._far is not None and self._near.board is None:
            await self._far.knock(deadline)

    def return_slots(self) -> None:
        """Return the slots granted in advance."""
        self._near.return_ahead()

    def close(self) -> None:
        self._near.close()
        if self._far is not None:
            self._far.close()

    @property
    def far(self) -> FarStore | None:
        """For a store that is not on this host, as long as its data plane answers."""
        far = self._far
        return far if far is not None and self._near.board is None and far.is_open else None

    async def put(self, name: tuple[bytes, bytes], view: memoryview, ranges: int, timeout_s: float) -> bool | None:
        """Into a slot granted in advance: one pass over the bytes, and one message. None when there is no such slot, or
        it has expired: then the block must be reserved first."""
        checked_key(name[0])
        checked_parent(name[1])
        if self._near.board is not None:
            return await self._near.put(name, view, ranges, timeout_s)
        if (far := self.far) is not None:
            return await far.put(name, view, ranges, time.monotonic() + timeout_s)
        return None

    def get_here(self, key: bytes, into: object) -> int | None:
        """Read a block of this host's DRAM, if it fits into this buffer, without yielding to the event loop. Returns
        its length; None in all other cases."""
        board = self._near.board
        return board.get(key, into) if board is not None else None

    async def read(
        self, keys: Sequence[bytes], room: Callable[[int, int], memoryview], deadline: float
    ) -> list[int | None]:
        """The lengths of the blocks that were read; None for the rest."""
        if (far := self.far) is not None:
            return await far.read(keys, room, deadline)
        return await self._near.read(keys, room)

    async def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool | None]:
        """Whether each is stored; None for what only the store itself can say."""
        known = self._near.exists(keys, self.has_ssd)
        if (far := self.far) is not None:
            known = await far.exists(keys, deadline)
        return known
