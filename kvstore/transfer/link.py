"""One peer: the slices waiting for it, and the threads that carry them.

A thread that wants something moved drives a free path itself, so that a small request costs no thread switch; helpers
drive the other paths while there is more to share. One lock guards ``accounts``, which know what waits and what is in
flight, and ``routes``, which know the paths; nobody holds it while bytes move. ``schedule`` decides what travels next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvstore.transfer.requests import Transfer, TransferReport
from kvstore.transfer.scheduling.accounts import Accounts
from kvstore.transfer.scheduling.limiter import Pacer
from kvstore.transfer.scheduling.routes import Rail, Routes, TransportStats
from kvstore.transfer.scheduling.schedule import Pace, Watch
from kvstore.transfer.scheduling.work import LoneWork, QueuedWork
from kvstore.transfer.transport import Caller, Path, PathFailed, Slice, Transport
from mooncake.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    MooncakeError,
    NodeUnavailable,
    StaleEpoch,
    as_ours,
)
from mooncake.threads import Threads
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)

RETRY_AFTER_S = 10.0  # a transport that failed is the last choice for this long
OPEN_TIMEOUT_S = 2.0  # for opening a path while there is another to try
_OVERDUE_S = 1.0  # a path that exceeds its slices' deadlines by this much is cut


class Link:
    """All traffic with one segment. Thread-safe."""

    def __init__(
        self,
        address: SegmentAddress,
        transports: Sequence[Transport],
        caller: Caller,
        helpers: Threads,
        pacer: Pacer | None,
        retry_after_s: float,
        look_after: Callable[[], None],
    ) -> None:
        """``transports`` in order of preference; those that do not reach the address are left out. ``look_after`` is
        called when ``tick`` is needed."""
        self.address = address
        self._caller = caller
        self._helpers = helpers
        self._is_paced = pacer is not None
        self._look_after = look_after
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for threads waiting for the rate limit
        self._closed = False
        self.used_at = time.monotonic()  # last request through the engine
        self._routes = Routes(address, transports, retry_after_s)
        self._accounts = Accounts(self._routes, pacer)

    def check(self) -> None:
        """Raises NodeUnavailable when no configured transport reaches the peer, or this has been closed."""
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._closed:
            raise NodeUnavailable("this transfer engine has been closed")
        self._routes.check()

    def slice_bytes(self, request_bytes: int) -> int:
        """How to cut a request of this size, for the transport that will carry it."""
        return self._routes.slice_bytes(request_bytes)

    def run_alone(self, part: Slice) -> TransferReport | None:
        """Move a request's only slice on this thread, bypassing the queue, if a path is free and nothing waits.

        None if that is not so, or the path broke: use ``run``. Otherwise raises what ended it.
        """
        self._look_after()
        with self._lock:
            settled = not (self._closed or self._accounts.waiting_bytes or self._is_paced)
            rail = self._routes.free_rail() if settled else None
            if rail is None or rail.path is None:
                return None
            path, rail.is_driven, started = rail.path, True, time.monotonic()
            rail.pace.began(part.nbytes, started)
            rail.route.began(started)
        work = LoneWork(part)
        failure: Exception | None = None
        try:
            path.carry(work)
        except (PathFailed, OSError, MooncakeError) as error:
            failure = error
        except BaseException as error:
            failure = as_ours(error, "a bug, or an interrupt")
            raise
        finally:
            self._finish_alone(rail, part, work, failure)
        if work.error is not None:
            raise work.error
        if isinstance(failure, DeadlineExceeded):
            raise failure
        if not work.ended:
            return None
        return TransferReport(rail.route.transport.name, part.nbytes, work.ended - started, part.sums)

    def run(self, transfer: Transfer, slices: Sequence[Slice]) -> None:
        """Move it, on this thread as far as possible, and return when it has ended."""
        rail, crew = self._accept(transfer, slices, is_driver=True)
        self._send_out(crew)
        if rail is not None:
            self._drive(rail, transfer)
        if not transfer.has_ended:
            self._await(transfer)

    def start(self, transfer: Transfer, slices: Sequence[Slice]) -> None:
        """Let helpers move it."""
        _, crew = self._accept(transfer, slices, is_driver=False)
        self._send_out(crew)

    def cancel(self, transfer: Transfer) -> None:
        """Start nothing more of it."""
        with self._lock:
            self._accounts.fail(transfer, Cancelled("the transfer was cancelled"), time.monotonic())
            self._changed.notify_all()
        self._tell()

    def tick(self) -> bool:
        """Check for late and stalled transfers. True while there is anything to check."""
        with self._lock:
            now = time.monotonic()
            self._accounts.fail_late(DeadlineExceeded("the deadline of the transfer is past"), now)
            stalled = self._routes.stalled(now, self._accounts.has_failed)
            for rail, _ in stalled:
                rail.was_cut = True
            crew = self._crew(now)
            is_busy = self._accounts.is_live or any(rail.is_driven for rail in self._routes.rails)
        for rail, path in stalled:
            log.info("%s: %s path %d stands still", self.address.node_id, rail.route.transport.name, rail.index)
            path.cut()
        self._send_out(crew)
        self._tell()
        return is_busy

    def stats(self) -> list[TransportStats]:
        with self._lock:
            return self._routes.stats()

    @property
    def is_gone(self) -> bool:
        """Whether nothing is in flight, and everything open leads nowhere."""
        with self._lock:
            return not self._accounts.is_live and self._routes.is_gone

    @property
    def is_busy(self) -> bool:
        """Whether something waits or is in flight."""
        with self._lock:
            return self._accounts.is_live or any(rail.is_driven for rail in self._routes.rails)

    @property
    def transport(self) -> str:
        """The transport of the next transfer, or ""."""
        return self._routes.transport

    def close(self) -> None:
        """Running transfers fail, or end within their deadlines."""
        with self._lock:
            self._closed = True
            now = time.monotonic()
            self._accounts.fail_all(NodeUnavailable("this transfer engine has been closed"), now)
            rails = self._routes.rails
            driven = [rail.path for rail in rails if rail.path is not None and rail.is_driven]
            idle = self._routes.take_idle_paths(rails)
            self._changed.notify_all()
        for path in driven:
            path.cut()
        _close(idle)
        self._tell()

    # Driving paths

    def _accept(self, transfer: Transfer, slices: Sequence[Slice], is_driver: bool) -> tuple[Rail | None, list[Rail]]:
        """Queue the slices. Returns the rail that the caller should drive, and those for helpers."""
        self._look_after()
        with self._lock:
            self._check()
            now = time.monotonic()
            self._routes.choose(now)
            self._accounts.accept(transfer, slices, now)
            rail = self._claim(now, self._routes.has_open_rail) if is_driver else None
            alone = rail is not None and self._accounts.num_waiting == 1
            return rail, [] if alone else self._crew(now, skip=int(rail is not None))

    def _drive(self, rail: Rail, until: Transfer | None = None) -> None:
        """Drive a claimed rail: until nothing of ``until`` waits, or, without it, until nothing waits."""
        while True:
            failed = False
            try:
                path = rail.path or self._open(rail)
                if path is not None:
                    path.carry(QueuedWork(self, rail, until))
            except (PathFailed, OSError, MooncakeError) as error:
                self._failed(rail, error)
                failed = True
            except Exception as error:
                log.exception("%s: %s", self.address.node_id, rail.route.transport.name)
                self._failed(rail, as_ours(error, "a bug"))
                failed = True
            except BaseException:  # such as KeyboardInterrupt: nobody waits for the rest
                self._failed(rail, InternalError("interrupted"))
                rail.is_driven = False
                if until is not None:
                    until.cancel()
                raise
            with self._lock:
                now = time.monotonic()
                wanted = until is None or (until.num_waiting > 0 and not (failed and self._routes.has_open_rail))
                if wanted and self._accounts.would_take(rail, now):
                    continue
                rail.is_driven = False
                left = self._routes.take_idle_paths([rail]) if self._closed else []
                crew = self._crew(now) if self._accounts.waiting_bytes else []
            _close(left)
            self._send_out(crew)
            return

    def _finish_alone(self, rail: Rail, part: Slice, work: LoneWork, failure: Exception | None) -> None:
        with self._lock:
            now = work.ended or time.monotonic()
            if work.ended:
                self._routes.carried(rail, part.nbytes, now)
            else:
                rail.pace.gave_back(part.nbytes)
                rail.route.on_way -= 1
            if failure is None and not self._closed and not self._accounts.waiting_bytes:  # the usual case
                rail.is_driven = False
                return
        if failure is not None:
            self._failed(rail, failure)
        with self._lock:
            rail.is_driven = False
            left = self._routes.take_idle_paths([rail]) if self._closed else []
            crew = self._crew(now) if self._accounts.waiting_bytes else []
        _close(left)
        self._send_out(crew)

    def _await(self, transfer: Transfer) -> None:
        """Others carry it. They enforce its deadline for slices in flight; this does so for waiting ones."""
        if transfer.wait(max(0.0, transfer.deadline - time.monotonic())):
            return
        with self._lock:
            self._accounts.fail(transfer, DeadlineExceeded("the deadline of the transfer is past"), time.monotonic())
        self._tell()
        if not transfer.wait(_OVERDUE_S):
            with self._lock:
                overdue = [rail.path for rail in self._routes.rails if rail.path is not None]
            for path in overdue:
                path.cut()
            transfer.wait()

    def _claim(self, now: float, only_open: bool) -> Rail | None:
        """The best idle rail that would take the next slice. A caller does not open a rail while another could
        carry."""
        for rail in self._routes.idle(now):
            if (rail.path is not None or not only_open) and self._accounts.would_take(rail, now):
                rail.is_driven = True
                return rail
        return None

    def _crew(self, now: float, skip: int = 0) -> list[Rail]:
        """Claim idle rails for helpers: at most one per waiting slice, apart from the ``skip`` that others will
        take."""
        crew: list[Rail] = []
        if self._accounts.num_waiting > skip:
            for rail in self._routes.idle(now):
                if len(crew) < self._accounts.num_waiting - skip and self._accounts.would_take(rail, now):
                    rail.is_driven = True
                    crew.append(rail)
        return crew

    def _send_out(self, crew: Iterable[Rail]) -> None:
        for rail in crew:
            try:
                self._helpers.submit(self._drive, rail)
            except RuntimeError:  # the engine is closing
                with self._lock:
                    rail.is_driven = False

    # Called by paths through Work

    def take(self, rail: Rail, until: Transfer | None) -> Slice | None:
        while True:
            with self._lock:
                part, wait_s = self._accounts.take(rail, until, time.monotonic())
                if wait_s > 0 and not self._accounts.has_ended:
                    self._changed.wait(wait_s)
            if self._accounts.has_ended:
                self._tell()
            if wait_s == 0:
                return part

    def done(self, rail: Rail, part: Slice) -> None:
        with self._lock:
            self._accounts.arrived(rail, part, time.monotonic())
        if self._accounts.has_ended:
            self._tell()

    def refuse(self, rail: Rail, part: Slice, error: MooncakeError) -> None:
        with self._lock:
            self._accounts.refused(rail, part, error, time.monotonic())
        self._tell()

    def give_back(self, rail: Rail, parts: Iterable[Slice]) -> None:
        with self._lock:
            self._accounts.came_back(rail, parts, time.monotonic())
        self._tell()

    # The end of a transfer

    def _tell(self) -> None:
        """Call without the lock: waiters may call us again."""
        with self._lock:
            ended = self._accounts.take_ended()
        for transfer in ended:
            transfer.end(time.monotonic())

    # Failures and failover

    def _open(self, rail: Rail) -> Path | None:
        """Open the rail's path now. Raises PathFailed, StaleEpoch or DeadlineExceeded. None when nothing waits."""
        with self._lock:
            now = time.monotonic()
            part = self._accounts.first(now)
            if part is None:
                return None
            has_other = self._routes.has_other
        soon = min(part.deadline, now + OPEN_TIMEOUT_S) if has_other else part.deadline
        try:
            path = rail.route.transport.open(self.address, self._caller, rail.index, soon)
        except DeadlineExceeded as error:
            if soon < part.deadline:
                raise PathFailed(error.message) from None
            raise
        with self._lock:
            rail.path = path
            rail.watch = Watch()
            is_late = self._closed
        if is_late:
            path.cut()
        return path

    def _failed(self, rail: Rail, error: Exception) -> None:
        """A path broke, or could not be opened."""
        broken: list[Path] = []
        with self._lock:
            now = time.monotonic()
            was_open = rail.path is not None
            if rail.path is not None:
                broken.append(rail.path)
                rail.path, rail.pace = None, Pace()
            if isinstance(error, StaleEpoch):
                self._accounts.fail_waiting(error, now)
            elif isinstance(error, DeadlineExceeded):
                self._accounts.fail_late(error, now)
            elif not self._closed:
                if was_open:  # the idle ones may be broken too
                    broken += self._routes.take_idle_paths(rail.route.rails)
                if hopeless := self._routes.failed(rail, error, was_open, now):
                    self._accounts.fail_waiting(NodeUnavailable(f"{self.address.node_id}: {hopeless}"), now)
        _close(broken)
        self._tell()


def _close(paths: Iterable[Path]) -> None:
    for path in paths:
        path.close()
