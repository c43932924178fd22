"""Whole blocks that arrive over the data plane: its server lists them; this keeps it supplied with slots and decides
the exceptions.

A block is listed before its sender is answered, so a block that was put can be read by everybody; the store learns of
it a moment later, in batches. Only if the board cannot tell (another writer may be writing that block, or slots are
just being taken back) is the store asked while the sender waits. A sender that dies half-way leaves nothing, and its
slot is reused.

The first block wakes the store. While more follow, the store polls every LOOK_S and is woken only when slots run low: a
wake-up per block would cost more than the block. Slots are held only while blocks are being put, so an idle store has
all its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from kvstore.block_names import checked_key, checked_parent, checked_tenant
from kvstore.index.types import BlockName, Grant
from kvstore.slots_ahead import WIRE, Committed
from kvstore.store import Store
from kvstore.transfer.owner.native_owner import MAX_AHEAD, Landed
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.owner.server_connection import Put
from kvstore.transfer.protocol import Status
from mooncake.errors import InvalidRequest

AHEAD = 16  # slots: as many as four clients have connections
RETURN_AFTER_S = 1.0  # without a put
LOOK_S = 0.02  # an event, or a reader's note, may wait this long

_ANSWERS = {Committed.STORED: Status.OK, Committed.BUSY: Status.REFUSED, Committed.OVER: Status.NO_SLOT}


class WirePuts:
    """Everything on the store's event loop."""

    def __init__(self, store: Store, server: SegmentServer, wake_fd: int) -> None:
        """``wake_fd`` is the board's."""
        self._store = store
        self._server = server
        self._wake_fd = wake_fd
        self._most = min(store.ahead.wire_slots, AHEAD, MAX_AHEAD)
        self._last_s = 0.0
        self._num_seen = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Call ``heard`` whenever the board wakes us."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._wake_fd, self.heard)

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._wake_fd)
        self._loop = None
        if self._looking is not None:
            self._looking.cancel()

    def heard(self) -> None:
        """Blocks have arrived, or one waits for a slot."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._go_on()
        if self._looking is None and self._loop is not None:
            self._look_later(self._loop)

    def came(self, put: Put) -> None:
        """A block has arrived, and may have to be refused."""
        put.answer(self._commit(put.landed))
        self._go_on()

    def sweep(self) -> None:
        """Return slots unused for a while, and replace those that have expired."""
        if time.monotonic() >= self._last_s + RETURN_AFTER_S:
            while (slot := self._server.take_ahead()) is not None:
                self._store.abort([Grant(*slot)])
        else:
            self._store.give_ahead(WIRE, self._most)

    def _go_on(self) -> None:
        self._last_s = time.monotonic()
        self._store.settle()
        self._store.give_ahead(WIRE, self._most)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_seen = self._store.ahead.num_adopted
        self._store.ahead.be_patient(True)
        self._looking = loop.call_later(LOOK_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looking = None
        self._store.settle()
        if self._store.ahead.num_adopted != self._num_seen:
            self._store.give_ahead(WIRE, self._most)
            self._look_later(loop)
        else:
            self._store.ahead.be_patient(False)

    def _commit(self, landed: Landed) -> Status:
        grant, ahead = Grant(landed.slot, landed.epoch), self._store.ahead
        writer = ahead.writer_of(grant)
        if writer is None:  # not ours: we know only what the sender says
            return Status.NO_SLOT
        try:
            name = BlockName(checked_key(landed.key), checked_parent(landed.parent))
            tenant = checked_tenant(landed.tenant)
            return _ANSWERS[ahead.commit(writer, grant, name, landed.length, landed.checksums, tenant)]
        except InvalidRequest:  # the sender learns of it when it asks for a reservation
            self._store.abort([grant])
            return Status.NO_SLOT
