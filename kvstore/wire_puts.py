"""Whole blocks that arrive over the data plane: its server lands them, this gives it slots ahead and makes them blocks.

A slot given ahead is reserved like any other, under a name of its own, and counts as reserved; it is granted to its own
epoch, so one that the store has taken back meanwhile is never landed in. When a block has landed, nobody but the
server's own thread has written into its slot, which is closed before the store seals it. Its sender hears of it after
that: a block that was put can be read by everybody, as one that was reserved, written and sealed. A sender that dies
half-way has landed nothing, and its slot is used for the next.

Slots are only held while blocks are being put, so that an idle store has all of its memory.
"""

from __future__ import annotations

import time

from kvstore.index_types import BlockName, Grant
from kvstore.service import checked_key, checked_parent, checked_tenant
from kvstore.store import WIRE, Committed, Store
from kvstore.transfer.native import MAX_AHEAD, Landed
from kvstore.transfer.protocol import Status
from kvstore.transfer.server import Put, SegmentServer
from mooncake.errors import InvalidRequest

AHEAD = 16  # slots: as many as four clients have connections
RETURN_AFTER_S = 1.0  # without a put

_ANSWERS = {Committed.STORED: Status.OK, Committed.BUSY: Status.REFUSED, Committed.OVER: Status.NO_SLOT}


class WirePuts:
    """Everything on the store's event loop."""

    def __init__(self, store: Store, server: SegmentServer) -> None:
        self._store = store
        self._server = server
        self._most = min(store.wire_slots, AHEAD, MAX_AHEAD)
        self._last_s = 0.0
        self._num_left = 0  # slots ahead, but for those that others have ended

    def came(self, put: Put | None) -> None:
        """A block has landed; or one has not, because there was no slot."""
        self._last_s = time.monotonic()
        if put is not None:
            put.answer(self._commit(put.landed))
            self._store.settle()
            self._num_left -= 1
        if put is None or self._num_left <= self._most // 2:  # several at a time cost little more than one
            self._fill()

    def sweep(self) -> None:
        """Take the slots back that nobody has put anything into for a while, and replace those that ran out."""
        if time.monotonic() >= self._last_s + RETURN_AFTER_S:
            while (slot := self._server.take_ahead()) is not None:
                self._store.abort([Grant(*slot)])
            self._num_left = 0
        else:
            self._fill()

    def _commit(self, landed: Landed) -> Status:
        grant = Grant(landed.slot, landed.epoch)
        try:
            name = BlockName(checked_key(landed.key), checked_parent(landed.parent))
            tenant = checked_tenant(landed.tenant)
            return _ANSWERS[self._store.commit(WIRE, grant, name, landed.length, landed.checksums, tenant)]
        except InvalidRequest:  # which it hears when it asks for a reservation
            self._store.abort([grant])
            return Status.NO_SLOT

    def _fill(self) -> None:
        grants = self._store.reserve_ahead(WIRE, self._most)
        taken = [grant for grant in grants if self._server.give_ahead(grant.slot, grant.epoch)]
        if len(taken) < len(grants):
            self._store.abort(set(grants).difference(taken))
        self._num_left = self._store.num_ahead(WIRE)
