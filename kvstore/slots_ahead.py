"""Slots that a store grants in advance, before anyone has named the blocks for them, and the blocks that arrived in
them.

The writer of such slots is either a client on this host, which fills its slots in place, or ``WIRE``, the data plane
itself, where the blocks of all others arrive. Such a slot is an ordinary reservation without a name, granted to its own
epoch. The data plane lists most blocks on the board without asking the store, which learns of them in ``catch_up``; the
store decides about the others in ``commit``. Code that asks the index what it has must catch up first; code that
reserves blocks by name or takes slots back must do so inside ``alone``. This module knows neither the SSD nor who
reads.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from enum import Enum

from kvstore.board.board import Board
from kvstore.board.library import MAX_GIFTS
from kvstore.checksum import Checksums
from kvstore.index.store_index import StoreIndex
from kvstore.index.types import OWN, BlockName, Grant
from kvstore.transfer.owner.native_owner import Landed
from kvstore.transfer.owner.server import SegmentServer
from mooncake.errors import InvalidRequest
from mooncake.types import BlockKey

log = logging.getLogger(__name__)

WIRE = f"{OWN}wire"  # the writer of blocks that arrive over the data plane
NEAR_AHEAD = MAX_GIFTS  # slots for each client on this host

Give = Callable[[int, int], bool]
"""Lets a writer fill a slot under an epoch, unless it has enough already."""


class Committed(Enum):
    OVER = "the slot was not the writer's any more"
    STORED = "by this or before"
    BUSY = "another writer is at this block"


class SlotsAhead:
    """The slots of one store, on its event loop."""

    def __init__(
        self,
        index: StoreIndex,
        server: SegmentServer,
        board: Board | None,
        block_bytes: int,
        num_slots: int,
        is_elsewhere: Callable[[BlockName], bool],
        on_stored: Callable[[BlockName, bool], object],
    ) -> None:
        """At most ``num_slots`` are granted. ``on_stored`` is called with each block put and whether it is new;
        blocks that are ``is_elsewhere`` count as stored already."""
        self._index = index
        self._server = server
        self._board = board
        self._block_bytes = block_bytes
        self._is_elsewhere = is_elsewhere
        self._on_stored = on_stored
        self._writers: dict[str, Give] = {WIRE: server.give_ahead}
        self._short: set[str] = set()  # writers that have used slots since they were last topped up
        self.wire_slots = num_slots // 2  # half for each kind of writer, so that neither starves the other
        self._near_slots = num_slots - self.wire_slots
        self.num_adopted = 0  # blocks the data plane has listed, in total

    def __contains__(self, writer: str) -> bool:
        return writer in self._writers

    def open(self, writer: str, give: Give) -> None:
        self._writers[writer] = give

    def close(self, writer: str) -> None:
        """Its process no longer maps the segment."""
        self._short.discard(writer)
        with self.alone():
            del self._writers[writer]
            self._server.revoke([grant.slot for grant in self._index.reservations.writer_gone(writer)])

    def num_held(self, writer: str) -> int:
        return self._index.reservations.num_held(writer)

    def fill_up(self, writer: str, count: int) -> None:
        """Grant slots until the writer has ``count``, but none that would have to wait for room."""
        self._short.discard(writer)
        give = self._writers.get(writer)
        wanted = min(count - self.num_held(writer), self._num_left(writer))
        if give is None or wanted <= 0:
            return
        for grant in self._index.reserve_ahead(wanted, writer, self._block_bytes, time.monotonic()):
            if self._board is not None:
                self._board.expect(grant.slot, grant.epoch)
            self._server.grant([grant.slot], grant.epoch)
            if not give(grant.slot, grant.epoch):
                self.take_back(grant)

    def fill_short(self) -> None:
        """Top up the writers on this host that have used slots."""
        for writer in self._short - {WIRE}:
            self.fill_up(writer, NEAR_AHEAD)

    def take_back(self, grant: Grant) -> bool:
        """Revoke a grant, whoever holds it. False if it is not held."""
        is_held = self._index.reservations.abort(grant)
        if is_held:
            self._server.revoke([grant.slot])
        return is_held

    def _num_left(self, writer: str) -> int:
        """Slots that may still be granted to writers of this kind."""
        if writer == WIRE:
            return self.wire_slots - self.num_held(WIRE)
        return self._near_slots - sum(self.num_held(other) for other in self._writers if other != WIRE)

    # Arrivals

    def catch_up(self) -> None:
        """Take blocks the data plane has listed since the last call into the index."""
        board = self._board
        arrived = board.take_arrived() if board is not None else []
        if board is None or not arrived:
            return
        now = time.monotonic()
        adopted = [block.slot for block in arrived if self._adopt(board, block, now)]
        self.num_adopted += len(adopted)
        self._server.revoke(adopted)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside it nothing arrives, and everything that arrived before is known."""
        if self._board is None:
            yield
            return
        with self._board.held():
            self.catch_up()
            yield

    def writer_of(self, grant: Grant) -> str | None:
        """The writer of this slot; None if it was not granted in advance, or no longer is."""
        writer = self._index.reservations.writer_of(grant)
        return writer if writer in self._writers else None

    def be_patient(self, is_patient: bool) -> None:
        """Wake the loop only when a writer may have used half of its slots, instead of for every block that arrives."""
        if self._board is not None:
            held = [count for writer in self._writers if (count := self.num_held(writer))]
            self._board.be_patient((min(held, default=1) + 1) // 2 if is_patient else 1)

    def commit(
        self, writer: str, grant: Grant, name: BlockName, length: int, checksums: Checksums, tenant: str
    ) -> Committed:
        """Make a slot granted in advance readable as this block. The checksums were computed from the bytes as they
        arrived, by this process or by one that may write anywhere in the segment; every reader verifies them."""
        if not 1 <= len(checksums) <= length <= self._block_bytes or length % len(checksums):
            raise InvalidRequest(f"{length} bytes in {len(checksums)} ranges do not fit a slot", "length")
        with self.alone():
            if writer not in self._writers or self._index.reservations.writer_of(grant) != writer:
                return Committed.OVER
            self._short.add(writer)
            self._server.revoke([grant.slot])
            is_busy = self._index.reservations.is_reserved(name.key)
            is_stored = self._index.exists([name.key])[0] or self._is_elsewhere(name)
            now = time.monotonic()
            is_new = not is_stored and self._index.adopt(grant, name, length, checksums, now, tenant)
            if not is_new:
                self._index.touch(name.key, now)
                self._index.reservations.abort(grant)
        self._on_stored(name, is_new)
        return Committed.STORED if is_stored or is_new else Committed.BUSY if is_busy else Committed.OVER

    def _adopt(self, board: Board, block: Landed, now: float) -> bool:
        grant, name = Grant(block.slot, block.epoch), BlockName(BlockKey(block.key), block.parent)
        self._short.add(self._index.reservations.writer_of(grant))
        if self._index.adopt(grant, name, block.length, block.checksums, now, block.tenant, is_listed=True):
            self._on_stored(name, True)
            return True
        # A bug of ours, for which the blocks that arrived with it are not to blame.
        log.error("a block was listed in slot %d, which was not free for it, or is stored elsewhere", block.slot)
        self._index.counters["refused_listings"] += 1
        board.hide(block.slot)
        self.take_back(grant)
        return False
