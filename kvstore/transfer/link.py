"""One peer: the slices that wait for it, the transports that reach it, and the threads that carry.

A thread that wants something moved drives a path itself when one is free, so that a small request costs no change of
threads; helpers drive the other paths while there is more to share. One lock guards the books; nobody holds it while
bytes move. What travels next and where is decided in ``schedule``; this module does as it says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.transfer.limiter import Pacer
from kvstore.transfer.protocol import SLICE_BYTES
from kvstore.transfer.requests import Transfer, TransferReport
from kvstore.transfer.schedule import Pace, Patience, Queue, Watch, backoff_s, slice_bytes, takes
from kvstore.transfer.transport import Caller, Path, PathFailed, Slice, Transport
from mooncake.errors import Cancelled, DeadlineExceeded, InternalError, MooncakeError, NodeUnavailable, StaleEpoch
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)

RETRY_AFTER_S = 10.0  # a transport that failed is the last choice for so long
OPEN_TIMEOUT_S = 2.0  # for a path to come up while there is another to try
MAX_FAILURES = 3  # paths that break one after the other, with nothing arriving between, before a transport is given up
_RATE_SAMPLE_S = 0.050
_RATE_SAMPLE_BYTES = 64 << 10  # less measures latency, not rate
_EWMA_WEIGHT = 0.2
_OVERDUE_S = 1.0  # a path that does not keep its slices' deadlines is cut


@dataclass(frozen=True, slots=True)
class TransportStats:
    """One transport to one peer, since the peer was first met."""

    node_id: str
    transport: str
    nbytes: int
    gb_per_s: float  # moving average while something was on its way, 1e9 bytes
    failures: int
    is_current: bool  # carries what comes next
    paths: int  # open now
    reason: str  # why it failed the last time


@dataclass(eq=False, slots=True)
class _Lane:
    """One path's place: the path may be broken, resting, or not open yet."""

    route: _Route
    index: int
    path: Path | None = None
    is_driven: bool = False
    pace: Pace = field(default_factory=Pace)
    watch: Watch = field(default_factory=Watch)
    failures: int = 0  # in a row
    was_cut: bool = False  # for standing still, and has delivered nothing since
    rest_until: float = 0.0


@dataclass(eq=False, slots=True)
class _Route:
    """One transport to the peer."""

    transport: Transport
    lanes: list[_Lane] = field(default_factory=list)
    nbytes: int = 0
    gb_per_s: float = 0.0
    failures: int = 0
    failed_in_row: int = 0
    avoid_until: float = 0.0
    reason: str = ""
    on_way: int = 0
    sample_since: float = 0.0
    sample_bytes: int = 0

    def began(self, now: float) -> None:
        if self.on_way == 0:
            self.sample_since, self.sample_bytes = now, 0
        self.on_way += 1

    def arrived(self, nbytes: int, now: float) -> None:
        self.on_way -= 1
        self.nbytes += nbytes
        self.sample_bytes += nbytes
        seconds = now - self.sample_since
        if self.sample_bytes >= _RATE_SAMPLE_BYTES and (self.on_way == 0 or seconds >= _RATE_SAMPLE_S) and seconds > 0:
            rate = self.sample_bytes / seconds / 1e9
            self.gb_per_s = rate if self.gb_per_s == 0 else self.gb_per_s + _EWMA_WEIGHT * (rate - self.gb_per_s)
            self.sample_since, self.sample_bytes = now, 0


class Link:
    """All traffic with one segment. Thread-safe."""

    def __init__(
        self,
        address: SegmentAddress,
        transports: Sequence[Transport],
        caller: Caller,
        helpers: ThreadPoolExecutor,
        pacer: Pacer | None,
        retry_after_s: float,
        look_after: Callable[[], None],
    ) -> None:
        """``transports`` in the order of preference; those that do not reach the address are left out.
        ``look_after`` is called when there is something to call ``tick`` for."""
        self.address = address
        self._caller = caller
        self._helpers = helpers
        self._pacer = pacer
        self._retry_after_s = retry_after_s
        self._look_after = look_after
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who wait for the rate limit
        self._queue: Queue[Slice] = Queue()
        self._waiting_bytes = 0
        self._transfers: dict[Slice, Transfer] = {}  # of every slice that waits or is on its way
        self._live: set[Transfer] = set()
        self._ended: list[Transfer] = []  # to be told so once the lock is free
        self._closed = False
        self._routes = [_route(transport, address) for transport in transports if transport.paths_to(address)]
        self._current = self._routes[0] if self._routes else None
        self._patience = Patience()
        self._tried: dict[str, str] = {}  # transports that failed since anything arrived, and why

    def slice_bytes(self, request_bytes: int) -> int:
        """How to cut a request of this size, for whatever transport will carry it."""
        route = self._current
        if route is None or request_bytes <= 2 * SLICE_BYTES:
            return SLICE_BYTES
        largest = min(each.transport.max_slice_bytes for each in self._routes)
        return slice_bytes(request_bytes, len(route.lanes), route.gb_per_s * 1e9, largest)

    def run_alone(self, part: Slice) -> TransferReport | None:
        """Move the only slice of a request past the queue, in this thread, when a path is free and nothing waits.

        None when that is not so, or the path broke: ``run`` will see to it. Raises what ended it otherwise.
        """
        self._look_after()
        with self._lock:
            lane = self._free_lane()
            if lane is None or lane.path is None:
                return None
            path, lane.is_driven, started = lane.path, True, time.monotonic()
            lane.pace.began(part.nbytes, started)
            lane.route.began(started)
        work = _Alone(part)
        failure: Exception | None = None
        try:
            path.carry(work)
        except (PathFailed, OSError, MooncakeError) as error:
            failure = error
        except BaseException as error:
            failure = InternalError(f"a bug, or an interrupt: {error!r}")
            raise
        finally:
            self._finish_alone(lane, part, work, failure)
        if work.error is not None:
            raise work.error
        if isinstance(failure, DeadlineExceeded):
            raise failure
        if not work.ended:
            return None
        return TransferReport(lane.route.transport.name, part.nbytes, work.ended - started, part.sums)

    def run(self, transfer: Transfer, slices: Sequence[Slice]) -> None:
        """Move it, in this thread as far as possible, and return when it has ended."""
        lane, crew = self._accept(transfer, slices, is_driver=True)
        self._send_out(crew)
        if lane is not None:
            self._drive(lane, transfer)
        if not transfer.has_ended:
            self._await(transfer)

    def start(self, transfer: Transfer, slices: Sequence[Slice]) -> None:
        """Have helpers move it."""
        _, crew = self._accept(transfer, slices, is_driver=False)
        self._send_out(crew)

    def tick(self) -> bool:
        """Look for what is late and what stands still. True while there is anything to look after."""
        with self._lock:
            now = time.monotonic()
            for transfer in [each for each in self._live if now >= each.deadline]:
                self._fail(transfer, DeadlineExceeded("the deadline of the transfer is past"), now)
            stalled = self._stalled(now)
            for lane, _ in stalled:
                lane.was_cut = True
            crew = self._crew(now)
            is_busy = bool(self._live) or any(lane.is_driven for route in self._routes for lane in route.lanes)
        for lane, path in stalled:
            log.info("%s: %s path %d stands still", self.address.node_id, lane.route.transport.name, lane.index)
            path.cut()
        self._send_out(crew)
        self._tell()
        return is_busy

    def stats(self) -> list[TransportStats]:
        with self._lock:
            return [
                TransportStats(
                    self.address.node_id,
                    route.transport.name,
                    route.nbytes,
                    route.gb_per_s,
                    route.failures,
                    route is self._current,
                    sum(lane.path is not None for lane in route.lanes),
                    route.reason,
                )
                for route in self._routes
                if route.nbytes or route.failures
            ]

    @property
    def transport(self) -> str:
        """The one that carries what comes next, or ""."""
        return self._current.transport.name if self._current else ""

    def close(self) -> None:
        """What is running fails, or ends within its deadline."""
        with self._lock:
            self._closed = True
            now = time.monotonic()
            for transfer in list(self._live):
                self._fail(transfer, NodeUnavailable("this transfer engine has been closed"), now)
            lanes = [lane for route in self._routes for lane in route.lanes]
            driven = [lane.path for lane in lanes if lane.path is not None and lane.is_driven]
            idle = self._take_idle_paths(lanes)
            self._changed.notify_all()
        for path in driven:
            path.cut()
        _close(idle)
        self._tell()

    # Who drives

    def _accept(self, transfer: Transfer, slices: Sequence[Slice], is_driver: bool) -> tuple[_Lane | None, list[_Lane]]:
        """Queue the slices. Returns the lane that the caller is to drive, and those for helpers."""
        transfer.on_cancel(self._cancel)
        self._look_after()
        with self._lock:
            if self._closed:
                raise NodeUnavailable("this transfer engine has been closed")
            now = time.monotonic()
            self._choose_route(now)
            self._live.add(transfer)
            for part in slices:
                self._transfers[part] = transfer
                self._enqueue(part, transfer, now)
            lane = self._claim(now, self._has_open_lane()) if is_driver else None
            alone = lane is not None and len(self._queue) == 1
            return lane, [] if alone else self._crew(now, skip=int(lane is not None))

    def _drive(self, lane: _Lane, until: Transfer | None = None) -> None:
        """Carry over one lane that has been claimed: until ``until`` has nothing waiting, or else until nobody has."""
        while True:
            failed = False
            try:
                path = lane.path or self._open(lane)
                if path is not None:
                    path.carry(_Work(self, lane, until))
            except (PathFailed, OSError, MooncakeError) as error:
                self._failed(lane, error)
                failed = True
            except Exception as error:
                log.exception("%s: %s", self.address.node_id, lane.route.transport.name)
                self._failed(lane, InternalError(f"a bug: {error!r}"))
                failed = True
            except BaseException:  # an interrupt of the program: nobody waits for the rest
                self._failed(lane, InternalError("interrupted"))
                lane.is_driven = False
                if until is not None:
                    until.cancel()
                raise
            with self._lock:
                now = time.monotonic()
                wanted = until is None or (until.num_waiting > 0 and not (failed and self._has_open_lane()))
                if wanted and self._would_take(lane, now):
                    continue
                lane.is_driven = False
                left = self._take_idle_paths([lane]) if self._closed else []
                crew = self._crew(now) if self._waiting_bytes else []
            _close(left)
            self._send_out(crew)
            return

    def _free_lane(self) -> _Lane | None:
        """The fastest open lane that is idle, if nothing at all asks for a decision."""
        route = self._current
        if self._closed or self._waiting_bytes or self._tried or self._pacer or route is None:
            return None
        if route is not self._routes[0]:  # it may be time to try a better one again
            return None
        best: _Lane | None = None
        for lane in route.lanes:
            if lane.path is not None and not lane.is_driven and (best is None or lane.pace.rate > best.pace.rate):
                best = lane
        return best

    def _finish_alone(self, lane: _Lane, part: Slice, work: _Alone, failure: Exception | None) -> None:
        with self._lock:
            now = work.ended or time.monotonic()
            if work.ended:
                lane.pace.arrived(part.nbytes, now)
                lane.route.arrived(part.nbytes, now)
                self._proved_sound(lane, now)
            else:
                lane.pace.gave_back(part.nbytes)
                lane.route.on_way -= 1
            if failure is None and not self._closed and not self._waiting_bytes:  # as nearly always
                lane.is_driven = False
                return
        if failure is not None:
            self._failed(lane, failure)
        with self._lock:
            lane.is_driven = False
            left = self._take_idle_paths([lane]) if self._closed else []
            crew = self._crew(now) if self._waiting_bytes else []
        _close(left)
        self._send_out(crew)

    def _await(self, transfer: Transfer) -> None:
        """Others carry it. They keep its deadline for what is on its way; this looks after what is not."""
        if transfer.wait(max(0.0, transfer.deadline - time.monotonic())):
            return
        with self._lock:
            self._fail(transfer, DeadlineExceeded("the deadline of the transfer is past"), time.monotonic())
        self._tell()
        if not transfer.wait(_OVERDUE_S):
            with self._lock:
                overdue = [lane.path for route in self._routes for lane in route.lanes if lane.path is not None]
            for path in overdue:
                path.cut()
            transfer.wait()

    def _claim(self, now: float, only_open: bool) -> _Lane | None:
        """The best idle lane that would take the next slice. A caller does not open one while another could carry."""
        for lane in self._idle(now):
            if (lane.path is not None or not only_open) and self._would_take(lane, now):
                lane.is_driven = True
                return lane
        return None

    def _crew(self, now: float, skip: int = 0) -> list[_Lane]:
        """Claim idle lanes for helpers: no more than there are slices beside the ``skip`` that others will take."""
        crew: list[_Lane] = []
        if len(self._queue) > skip:
            for lane in self._idle(now):
                if len(crew) < len(self._queue) - skip and self._would_take(lane, now):
                    lane.is_driven = True
                    crew.append(lane)
        return crew

    def _idle(self, now: float) -> list[_Lane]:
        """Open ones first, fast ones first."""
        if self._current is None:
            return []
        lanes = [lane for lane in self._current.lanes if not lane.is_driven and lane.rest_until <= now]
        if len(lanes) > 1:
            lanes.sort(key=lambda lane: (lane.path is None, -lane.pace.rate))
        return lanes

    def _has_open_lane(self) -> bool:
        return self._current is not None and any(lane.path is not None for lane in self._current.lanes)

    def _send_out(self, crew: Iterable[_Lane]) -> None:
        for lane in crew:
            try:
                self._helpers.submit(self._drive, lane)
            except RuntimeError:  # the engine is closing
                with self._lock:
                    lane.is_driven = False

    # What a path asks for and reports

    def take(self, lane: _Lane, until: Transfer | None) -> Slice | None:
        while True:
            with self._lock:
                part, wait_s = self._next(lane, until, time.monotonic())
                if wait_s > 0 and not self._ended:
                    self._changed.wait(wait_s)
            if self._ended:
                self._tell()
            if wait_s == 0:
                return part

    def done(self, lane: _Lane, part: Slice) -> None:
        with self._lock:
            now = time.monotonic()
            lane.pace.arrived(part.nbytes, now)
            lane.route.arrived(part.nbytes, now)
            self._proved_sound(lane, now)
            if self._tried:
                self._tried.clear()
            transfer = self._transfers.pop(part)
            transfer.num_on_way -= 1
            transfer.moved_bytes += part.nbytes
            transfer.transport = lane.route.transport.name
            self._check_end(transfer, now)
        if self._ended:
            self._tell()

    def refuse(self, lane: _Lane, part: Slice, error: MooncakeError) -> None:
        with self._lock:
            now = time.monotonic()
            transfer = self._came_back(lane, part)
            del self._transfers[part]
            self._fail(transfer, error, now)
        self._tell()

    def give_back(self, lane: _Lane, parts: Iterable[Slice]) -> None:
        with self._lock:
            now = time.monotonic()
            for part in parts:
                transfer = self._came_back(lane, part)
                if transfer.error is None and now < part.deadline:
                    transfer.num_waiting += 1
                    self._enqueue(part, transfer, now)
                else:
                    del self._transfers[part]
                    self._fail(transfer, DeadlineExceeded("the peer did not answer until the deadline"), now)
        self._tell()

    def _came_back(self, lane: _Lane, part: Slice) -> Transfer:
        lane.pace.gave_back(part.nbytes)
        lane.route.on_way -= 1
        transfer = self._transfers[part]
        transfer.num_on_way -= 1
        return transfer

    def _next(self, lane: _Lane, until: Transfer | None, now: float) -> tuple[Slice | None, float]:
        """A slice for this lane; or None, and how long to wait for the rate limit before asking again."""
        if until is not None and until.num_waiting == 0:
            return None, 0.0
        while (part := self._queue.peek(now)) is not None:
            transfer = self._transfers[part]
            if now >= part.deadline:
                self._fail(transfer, DeadlineExceeded("the deadline of the transfer is past"), now)
                continue
            if not self._would_take(lane, now, part):
                return None, 0.0
            wait_s = self._pacer.try_take(part.nbytes) if self._pacer else 0.0
            if wait_s > 0 and now + wait_s >= part.deadline:
                message = f"the rate limit asks for {wait_s:.2f} s more, past the transfer's deadline"
                self._fail(transfer, DeadlineExceeded(message), now)
                continue
            if wait_s > 0:  # first bring home what is on its way
                return None, 0.0 if lane.pace.on_way else wait_s
            self._queue.pop(now)
            self._waiting_bytes -= part.nbytes
            transfer.num_waiting -= 1
            transfer.num_on_way += 1
            lane.pace.began(part.nbytes, now)
            lane.route.began(now)
            return part, 0.0
        return None, 0.0

    def _would_take(self, lane: _Lane, now: float, part: Slice | None = None) -> bool:
        part = part or self._queue.peek(now)
        if part is None or lane.route is not self._current or lane.rest_until > now:
            return False
        others = [other.pace for other in lane.route.lanes if other is not lane and other.path is not None]
        window = lane.path.window_bytes if lane.path is not None else part.nbytes
        return takes(lane.pace, others, part.nbytes, self._waiting_bytes, window, now)

    def _enqueue(self, part: Slice, transfer: Transfer, now: float) -> None:
        self._queue.push(part, transfer.priority, part.deadline, now)
        self._waiting_bytes += part.nbytes

    # How a transfer ends

    def _cancel(self, transfer: Transfer) -> None:
        with self._lock:
            self._fail(transfer, Cancelled("the transfer was cancelled"), time.monotonic())
            self._changed.notify_all()
        self._tell()

    def _fail(self, transfer: Transfer, error: MooncakeError, now: float) -> None:
        """Nothing more of it begins; it ends when nothing of it is on its way. The first error counts."""
        if transfer not in self._live:
            return
        transfer.error = transfer.error or error
        if transfer.num_waiting:
            for part in self._queue.discard(lambda part: self._transfers[part] is transfer):
                self._waiting_bytes -= part.nbytes
                del self._transfers[part]
            transfer.num_waiting = 0
        self._check_end(transfer, now)

    def _check_end(self, transfer: Transfer, now: float) -> None:
        if transfer.num_on_way == 0 and transfer.num_waiting == 0 and transfer in self._live:
            self._live.remove(transfer)
            self._ended.append(transfer)

    def _tell(self) -> None:
        """Without the lock: whoever waits may call us again."""
        with self._lock:
            ended, self._ended = self._ended, []
        for transfer in ended:
            transfer.end(time.monotonic())

    # What fails, and what takes over

    def _open(self, lane: _Lane) -> Path | None:
        """Open the lane's path now. Raises PathFailed, StaleEpoch or DeadlineExceeded. None when nothing waits."""
        with self._lock:
            now = time.monotonic()
            part = self._queue.peek(now)
            if part is None:
                return None
            has_other = len(self._tried) < len(self._routes) - 1 or self._has_open_lane()
        soon = min(part.deadline, now + OPEN_TIMEOUT_S) if has_other else part.deadline
        try:
            path = lane.route.transport.open(self.address, self._caller, lane.index, soon)
        except DeadlineExceeded as error:
            if soon < part.deadline:
                raise PathFailed(error.message) from None
            raise
        with self._lock:
            lane.path = path
            lane.watch = Watch()
            is_late = self._closed
        if is_late:
            path.cut()
        return path

    def _failed(self, lane: _Lane, error: Exception) -> None:
        """A path broke, or did not open."""
        broken: list[Path] = []
        with self._lock:
            now = time.monotonic()
            route, was_open = lane.route, lane.path is not None
            if lane.path is not None:
                broken.append(lane.path)
                lane.path, lane.pace = None, Pace()
            if isinstance(error, StaleEpoch):
                self._fail_all(error, now)
            elif isinstance(error, DeadlineExceeded):
                for transfer in [each for each in self._live if now >= each.deadline]:
                    self._fail(transfer, error, now)
            elif not self._closed:
                if was_open:  # the idle ones may be broken, too
                    broken += self._take_idle_paths(route.lanes)
                self._note_failure(lane, error, was_open, now)
        _close(broken)
        self._tell()

    def _note_failure(self, lane: _Lane, error: Exception, was_open: bool, now: float) -> None:
        route = lane.route
        lane.failures += 1
        route.failed_in_row += 1
        route.reason = str(error)
        if any(other.path is not None for other in route.lanes):
            lane.rest_until = now + backoff_s(lane.failures + (not was_open))
            log.info("%s: one %s path of %d failed: %s", *self._names(route), len(route.lanes), error)
        elif route is self._current and (not was_open or route.failed_in_row >= MAX_FAILURES):
            self._give_up(route, str(error), now)

    def _give_up(self, route: _Route, reason: str, now: float) -> None:
        """Nothing more over this transport for a while; the next one takes over what waits."""
        route.failures += 1
        route.failed_in_row = 0
        route.avoid_until = now + self._retry_after_s
        self._tried[route.transport.name] = reason
        untried = [each for each in self._ranked(now) if each.transport.name not in self._tried]
        if untried:
            self._current = untried[0]
            log.warning("%s: %s does not work (%s); using %s", *self._names(route), reason, self.transport)
        else:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._tried.items())
            self._tried.clear()
            self._fail_all(NodeUnavailable(f"{self.address.node_id}: {reasons}"), now)

    def _choose_route(self, now: float) -> None:
        """Raises NodeUnavailable when no transport was configured that reaches the peer."""
        if not self._routes:
            raise NodeUnavailable(f"no configured transport reaches {self.address.node_id}")
        best = self._ranked(now)[0]
        if best is not self._current and not self._tried:
            log.info("%s: trying %s again", *self._names(best))
            self._current = best

    def _ranked(self, now: float) -> list[_Route]:
        """In the order of preference; those that failed lately come last."""
        if len(self._routes) == 1:
            return self._routes
        return sorted(self._routes, key=lambda route: route.avoid_until > now)

    def _proved_sound(self, lane: _Lane, now: float) -> None:
        lane.failures = lane.route.failed_in_row = 0
        if lane.was_cut:
            lane.was_cut = False
            self._patience.grow(now)

    def _names(self, route: _Route) -> tuple[str, str]:
        return self.address.node_id, route.transport.name

    def _fail_all(self, error: MooncakeError, now: float) -> None:
        for transfer in [each for each in self._live if each.num_waiting]:
            self._fail(transfer, error, now)

    def _stalled(self, now: float) -> list[tuple[_Lane, Path]]:
        """Paths that stand still while others of this peer move."""
        seen: list[tuple[_Lane, Path]] = []
        patience = self._patience.at(now)
        for route in self._routes:
            for lane in route.lanes:
                if lane.path is not None:
                    lane.watch.saw(lane.path.progress, lane.pace.on_way > 0, now)
                    seen.append((lane, lane.path))
        return [
            (lane, path)
            for lane, path in seen
            if lane.watch.is_stalled(
                [other.watch for other, _ in seen if other is not lane], patience, lane.failures > 0, now
            )
        ]

    def _take_idle_paths(self, lanes: Iterable[_Lane]) -> list[Path]:
        paths: list[Path] = []
        for lane in lanes:
            if lane.path is not None and not lane.is_driven:
                paths.append(lane.path)
                lane.path, lane.pace = None, Pace()
        return paths


class _Work:
    """What one lane's path draws from."""

    __slots__ = ("_lane", "_link", "_until")

    def __init__(self, link: Link, lane: _Lane, until: Transfer | None) -> None:
        self._link = link
        self._lane = lane
        self._until = until

    def take(self) -> Slice | None:
        return self._link.take(self._lane, self._until)

    def done(self, part: Slice, hashed: bool = False) -> None:
        if not hashed and part.checksum_bytes:
            part.hash()
        self._link.done(self._lane, part)

    def refuse(self, part: Slice, error: MooncakeError) -> None:
        self._link.refuse(self._lane, part, error)

    def give_back(self, parts: Iterable[Slice]) -> None:
        self._link.give_back(self._lane, parts)


class _Alone:
    """One slice that passes the queue."""

    __slots__ = ("_part", "ended", "error")

    def __init__(self, part: Slice) -> None:
        self._part: Slice | None = part
        self.error: MooncakeError | None = None
        self.ended = 0.0  # 0: not well

    def take(self) -> Slice | None:
        part, self._part = self._part, None
        return part

    def done(self, part: Slice, hashed: bool = False) -> None:
        if not hashed and part.checksum_bytes:
            part.hash()
        self.ended = time.monotonic()

    def refuse(self, part: Slice, error: MooncakeError) -> None:
        self.error = error

    def give_back(self, parts: Iterable[Slice]) -> None:
        pass


def _route(transport: Transport, address: SegmentAddress) -> _Route:
    route = _Route(transport)
    route.lanes = [_Lane(route, index) for index in range(transport.paths_to(address))]
    return route


def _close(paths: Iterable[Path]) -> None:
    for path in paths:
        path.close()


__all__: Sequence[str] = ("Link", "TransportStats")
