"""What waits for one peer and what is in flight to it: slices, the transfers that they belong to, and when each ends.

No locks, no threads and no sockets: the link calls it under its own lock, and notifies the transfers that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.transfer.requests import Transfer
from kvstore.transfer.scheduling.limiter import Pacer
from kvstore.transfer.scheduling.routes import Rail, Routes
from kvstore.transfer.scheduling.schedule import Queue, takes
from kvstore.transfer.transport import Slice
from mooncake.errors import DeadlineExceeded, MooncakeError


class Accounts:
    """``pacer`` limits the rate at which slices leave, if given."""

    def __init__(self, routes: Routes, pacer: Pacer | None) -> None:
        self.waiting_bytes = 0
        self._routes = routes
        self._pacer = pacer
        self._queue: Queue[Slice] = Queue()
        self._transfers: dict[Slice, Transfer] = {}  # by slice waiting or in flight
        self._live: set[Transfer] = set()
        self._ended: list[Transfer] = []  # to be notified once the lock is released

    @property
    def num_waiting(self) -> int:
        """Slices that wait."""
        return len(self._queue)

    @property
    def is_live(self) -> bool:
        """Whether any transfer has not ended."""
        return bool(self._live)

    @property
    def has_failed(self) -> bool:
        """Whether a transfer has failed of which something is still in flight."""
        return any(transfer.error is not None for transfer in self._live)

    @property
    def has_ended(self) -> bool:
        """Whether ``take_ended`` has any."""
        return bool(self._ended)

    def take_ended(self) -> list[Transfer]:
        """Those that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # Slices

    def accept(self, transfer: Transfer, slices: Sequence[Slice], now: float) -> None:
        self._live.add(transfer)
        for part in slices:
            self._transfers[part] = transfer
            self._enqueue(part, transfer, now)

    def first(self, now: float) -> Slice | None:
        """The slice whose turn it is."""
        return self._queue.peek(now)

    def take(self, rail: Rail, until: Transfer | None, now: float) -> tuple[Slice | None, float]:
        """A slice for this rail; or None, and how long to wait for the rate limit before asking again."""
        if until is not None and until.num_waiting == 0:
            return None, 0.0
        while (part := self._queue.peek(now)) is not None:
            transfer = self._transfers[part]
            if now >= part.deadline:
                self.fail(transfer, DeadlineExceeded("the deadline of the transfer is past"), now)
                continue
            if not self.would_take(rail, now, part):
                return None, 0.0
            wait_s = self._pacer.try_take(part.nbytes) if self._pacer else 0.0
            if wait_s > 0 and now + wait_s >= part.deadline:
                message = f"the rate limit asks for {wait_s:.2f} s more, past the transfer's deadline"
                self.fail(transfer, DeadlineExceeded(message), now)
                continue
            if wait_s > 0:  # first finish what is in flight
                return None, 0.0 if rail.pace.on_way else wait_s
            self._queue.pop(now)
            self.waiting_bytes -= part.nbytes
            transfer.num_waiting -= 1
            transfer.num_on_way += 1
            rail.pace.began(part.nbytes, now)
            rail.route.began(now)
            return part, 0.0
        return None, 0.0

    def would_take(self, rail: Rail, now: float, part: Slice | None = None) -> bool:
        """Whether this rail should carry ``part``, or the slice whose turn it is."""
        part = part or self._queue.peek(now)
        if part is None or rail.route is not self._routes.current or rail.rest_until > now:
            return False
        others = [other.pace for other in rail.route.rails if other is not rail and other.path is not None]
        window = rail.path.window_bytes if rail.path is not None else part.nbytes
        return takes(rail.pace, others, part.nbytes, self.waiting_bytes, window, now)

    def arrived(self, rail: Rail, part: Slice, now: float) -> None:
        self._routes.carried(rail, part.nbytes, now)
        transfer = self._transfers.pop(part)
        transfer.num_on_way -= 1
        transfer.moved_bytes += part.nbytes
        transfer.transport = rail.route.transport.name
        self._check_end(transfer, now)

    def refused(self, rail: Rail, part: Slice, error: MooncakeError, now: float) -> None:
        """The peer does not allow it, which fails its transfer."""
        transfer = self._came_back(rail, part)
        del self._transfers[part]
        self.fail(transfer, error, now)

    def came_back(self, rail: Rail, parts: Iterable[Slice], now: float) -> None:
        """They were not carried: they wait again, unless their transfer has failed or it is too late."""
        for part in parts:
            transfer = self._came_back(rail, part)
            if transfer.error is None and now < part.deadline:
                transfer.num_waiting += 1
                self._enqueue(part, transfer, now)
            else:
                del self._transfers[part]
                self.fail(transfer, DeadlineExceeded("the peer did not answer until the deadline"), now)

    def _came_back(self, rail: Rail, part: Slice) -> Transfer:
        rail.pace.gave_back(part.nbytes)
        rail.route.on_way -= 1
        transfer = self._transfers[part]
        transfer.num_on_way -= 1
        return transfer

    def _enqueue(self, part: Slice, transfer: Transfer, now: float) -> None:
        self._queue.push(part, transfer.priority, part.deadline, now)
        self.waiting_bytes += part.nbytes

    # The end of a transfer

    def fail(self, transfer: Transfer, error: MooncakeError, now: float) -> None:
        """Start nothing more of it; it ends when nothing of it is in flight. The first error counts."""
        if transfer not in self._live:
            return
        transfer.error = transfer.error or error
        if transfer.num_waiting:
            for part in self._queue.discard(lambda part: self._transfers[part] is transfer):
                self.waiting_bytes -= part.nbytes
                del self._transfers[part]
            transfer.num_waiting = 0
        self._check_end(transfer, now)

    def fail_late(self, error: DeadlineExceeded, now: float) -> None:
        """Fail all whose deadline is past."""
        for transfer in [each for each in self._live if now >= each.deadline]:
            self.fail(transfer, error, now)

    def fail_waiting(self, error: MooncakeError, now: float) -> None:
        """Fail all of which something waits."""
        for transfer in [each for each in self._live if each.num_waiting]:
            self.fail(transfer, error, now)

    def fail_all(self, error: MooncakeError, now: float) -> None:
        for transfer in list(self._live):
            self.fail(transfer, error, now)

    def _check_end(self, transfer: Transfer, now: float) -> None:
        if transfer.num_on_way == 0 and transfer.num_waiting == 0 and transfer in self._live:
            self._live.remove(transfer)
            self._ended.append(transfer)
