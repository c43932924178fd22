"""RDMA: slices travel as one-sided writes and reads between registered memory, without the owner's processor.

A path is one queue pair, set up over a TCP connection that then stays silent: its end is the end of either side. For
reads, a peer gets the keys of the whole segment. For writes, it requests a memory window per granted block over the
queue pair, and the owner closes the window when it revokes the grant; so an epoch fences these writes as strictly as
those over TCP. A key that has become invalid breaks the queue pair, with all that is in flight on it, and so do too
many lost packets in a row; the path then goes on over a new one, asks again, and so learns whose grant is gone: only
those slices fail. The old connection ends after the new one has begun, because an owner gives up all hand-offs of a
writer that has none. Unregistered memory is copied through registered memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from kvstore.pointers import address_of
from kvstore.transfer.protocol import MAX_FRAME_BYTES, MAX_RANGES, Operation
from kvstore.transfer.rdma.find import VerbsUnavailable
from kvstore.transfer.rdma.link import FIRST_SLICE_TAG, NO_WINDOW, NOTICE_TAG, REFUSED, Attach, Link, LinkBroken
from kvstore.transfer.rdma.memory import RegisteredMemory, Staging, merge
from kvstore.transfer.rdma.verbs import (
    Completion,
    Device,
    QueuePair,
    Status,
    VerbsFailed,
)
from kvstore.transfer.tcp import attach
from kvstore.transfer.transport import Caller, PathFailed, Piece, Slice, Work
from mooncake.errors import DeadlineExceeded, StaleEpoch
from mooncake.types import SegmentAddress

WINDOW = 4  # slices in flight on one queue pair
MAX_IN_VAIN = 2  # new links in a row over which no slice ended
_RENEW_TIMEOUT_S = 5.0

_SEND_DEPTH = WINDOW * MAX_RANGES + 16


class RdmaTransport:
    """The transport ``rdma``. ``unavailable`` says in one line why this process cannot use it, or is empty."""

    name = "rdma"
    max_slice_bytes = MAX_FRAME_BYTES

    def __init__(self) -> None:
        self.unavailable = ""
        self._device: Device | None = None
        self._memory: RegisteredMemory | None = None
        try:
            self._device = Device()
            self._memory = RegisteredMemory(self._device)
        except VerbsUnavailable as error:
            self.unavailable = str(error)

    def paths_to(self, address: SegmentAddress) -> int:
        return 1 if self._device is not None and address.rdma else 0

    def open(self, address: SegmentAddress, caller: Caller, index: int, deadline: float) -> RdmaPath:
        """Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        if self._device is None or self._memory is None:
            raise PathFailed(self.unavailable)
        path = RdmaPath(
            self._device,
            self._memory,
            address,
            lambda request, deadline: attach(address, caller, self.name, request, deadline),
        )
        path.connect(deadline)
        return path

    def register(self, memory: memoryview) -> None:
        """Pins the memory in the background, for the lifetime of this transport. Until then it is copied."""
        if self._memory is not None:
            self._memory.add(memory)

    def close(self) -> None:
        if self._device is not None and self._memory is not None:
            self._memory.close()
            self._device.close()


class RdmaPath:
    """One queue pair to one segment."""

    window_bytes = 2 * MAX_FRAME_BYTES

    def __init__(self, device: Device, memory: RegisteredMemory, address: SegmentAddress, attach: Attach) -> None:
        self._device = device
        self._memory = memory
        self._address = address
        self._attach = attach
        self._link: Link | None = None
        self._cutting = threading.Lock()  # between ``cut`` and the end of a link
        self._is_cut = False
        self._staging: list[Staging] = []
        self._flights: deque[_Flight] = deque()  # every slice taken and not finished, the oldest first
        self._next_tag = FIRST_SLICE_TAG
        self._num_ended = 0  # slices that have arrived, or were refused
        self._moved_bytes = 0
        self._unannounced_bytes = 0  # written, but not yet reported to the owner

    @property
    def progress(self) -> int:
        return self._moved_bytes

    @property
    def is_gone(self) -> bool:
        return self._link is not None and self._link.is_gone

    @property
    def queue_pair(self) -> QueuePair:
        """For tests that break it."""
        assert self._link is not None
        return self._link.queue_pair

    @property
    def window_keys(self) -> dict[int, tuple[int, int]]:
        """Block -> (epoch, key) of the windows open to us; for tests that corrupt them."""
        assert self._link is not None
        return self._link.windows

    def connect(self, deadline: float) -> None:
        """Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        link = Link.open(self._device, self._address, self._attach, _SEND_DEPTH, deadline)
        with self._cutting:
            self._link = link
            if not self._is_cut:
                return
        self._disconnect()
        raise PathFailed(f"the path to {self._address.node_id} was cut")

    def carry(self, work: Work) -> None:
        in_vain = 0
        try:
            while True:
                num_ended = self._num_ended
                try:
                    self._drive(work)
                    return
                except LinkBroken:
                    in_vain = in_vain + 1 if self._num_ended == num_ended else 0
                    if in_vain > MAX_IN_VAIN or self._is_cut:
                        raise
                    self._renew(work)
        except BaseException as error:
            self._disconnect()  # from here on nothing touches the local memory of slices given back
            parts = [flight.part for flight in self._flights]
            for flight in self._flights:
                self._let_go(flight)
            self._flights.clear()
            work.give_back(parts)
            if isinstance(error, (VerbsFailed, StaleEpoch)):  # stale: the owner we reconnected to is another one
                raise PathFailed(f"{self._address.node_id}: {error}") from None
            raise

    def cut(self) -> None:
        with self._cutting:
            self._is_cut = True
            if self._link is not None:
                self._link.cut()

    def close(self) -> None:
        self._disconnect()
        for staging in self._staging:
            staging.close()
        self._staging.clear()

    def _renew(self, work: Work) -> None:
        """Connect a new queue pair, over which all in flight is to be posted again; late slices are given back.

        Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        with self._cutting:
            old, self._link = self._link, None
        assert old is not None
        try:
            old.queue_pair.close()  # from here on nothing touches local memory
            now = time.monotonic()
            late = [flight for flight in self._flights if flight.part.deadline <= now]
            for flight in late:
                self._flights.remove(flight)
                self._let_go(flight)
            work.give_back([flight.part for flight in late])
            for flight in self._flights:
                flight.is_posted = False
            self.connect(min((flight.part.deadline for flight in self._flights), default=now + _RENEW_TIMEOUT_S))
        finally:
            old.close()

    def _disconnect(self) -> None:
        with self._cutting:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def _drive(self, work: Work) -> None:
        """Raises PathFailed (LinkBroken where a new link may carry the rest), VerbsFailed or DeadlineExceeded."""
        if self._link is None:
            raise PathFailed(f"the path to {self._address.node_id} is closed")
        link = self._link
        for flight in list(self._flights):  # after a reconnection
            if not flight.is_posted:
                self._post(flight, link, work)
        while True:
            while len(self._flights) < WINDOW and (part := work.take()) is not None:
                flight = _Flight(part)
                self._flights.append(flight)
                self._post(flight, link, work)
            if not self._flights:
                self._announce(link)
                return
            self._take_completions(link, work)

    def _post(self, flight: _Flight, link: Link, work: Work) -> None:
        """Start a slice, or have it refused."""
        part = flight.part
        if part.operation is Operation.WRITE:
            try:
                self._open_windows(part, link, work)
            except StaleEpoch as error:
                self._flights.remove(flight)
                self._let_go(flight)
                self._num_ended += 1
                work.refuse(part, error)
                return
        strips = [self._local(piece) for piece in part.pieces]
        if None in strips:
            self._stage(flight)
        flight.tag = self._next_tag
        self._next_tag += 1
        runs = merge(
            [
                (*local, *link.remote(piece.wire.block, piece.wire.offset, part.operation), piece.wire.length)
                for piece, local in zip(part.pieces, flight.locals_or(strips), strict=True)
            ]
        )
        post = link.queue_pair.post_write if part.operation is Operation.WRITE else link.queue_pair.post_read
        for index, (address, lkey, remote, rkey, nbytes) in enumerate(runs):
            post(flight.tag, address, lkey, nbytes, remote, rkey, index == len(runs) - 1)
        flight.is_posted = True

    def _local(self, piece: Piece) -> tuple[int, int] | None:
        return self._memory.find(address_of(piece.local), piece.local.nbytes)

    def _stage(self, flight: _Flight) -> None:
        """Give the slice staging memory; written bytes are copied there now."""
        if flight.staging is None:
            for staging in self._staging:
                if not staging.is_busy:
                    break
            else:
                staging = Staging(self._device)
                self._staging.append(staging)
            staging.is_busy = True
            flight.staging = staging
        flight.staging.fit(flight.part.nbytes)
        if flight.part.operation is Operation.WRITE:
            flight.staging.fill(flight.part)

    def _let_go(self, flight: _Flight) -> None:
        if flight.staging is not None:
            flight.staging.is_busy = False
            flight.staging = None

    def _open_windows(self, part: Slice, link: Link, work: Work) -> None:
        """Get a key for every block of a write. Raises StaleEpoch when the owner refuses one."""
        wanted = {piece.wire.block: piece.wire.epoch for piece in part.pieces}
        if len({(piece.wire.block, piece.wire.epoch) for piece in part.pieces}) != len(wanted):
            raise StaleEpoch("one slice names two epochs of one block")
        missing = [(block, epoch) for block, epoch in wanted.items() if not link.has_window(block, epoch)]
        if not missing:
            return
        link.ask_for_windows(missing)
        while link.reply is None:
            self._take_completions(link, work, part.deadline)
        keys = link.take_reply(len(missing))
        for (block, epoch), key in zip(missing, keys, strict=True):
            if key == NO_WINDOW:
                raise PathFailed(f"{self._address.node_id} has no more memory windows")
            if key == REFUSED:
                raise StaleEpoch(f"{self._address.node_id}: block {block} is not granted to epoch {epoch}")
            link.windows[block] = (epoch, key)

    def _take_completions(self, link: Link, work: Work, deadline: float = float("inf")) -> None:
        """Sleep until something has ended, and account for it."""
        deadline = min([deadline, *(flight.part.deadline for flight in self._flights)])
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{self._address.node_id}: RDMA was not done by the deadline")
        found = link.queue_pair.wait(left)
        if not found:
            link.check_alive()
        for completion in found:
            self._account(completion, link, work)

    def _account(self, completion: Completion, link: Link, work: Work) -> None:
        if completion.status == Status.REMOTE_ACCESS:
            raise LinkBroken(f"{self._address.node_id} does not accept a memory key (status {completion.status})")
        if completion.status == Status.NO_ANSWER:
            raise LinkBroken(f"{self._address.node_id} acknowledges nothing (status {completion.status})")
        if completion.status != Status.SUCCESS:
            raise PathFailed(f"the queue pair to {self._address.node_id} broke (status {completion.status})")
        if completion.is_received:
            link.received(completion.nbytes)
            return
        if completion.tag < FIRST_SLICE_TAG:
            return
        flight = self._flights[0]
        if flight.tag != completion.tag:  # slices end in the order they were posted
            raise PathFailed(f"a completion of slice {completion.tag} where {flight.tag} was due")
        part = flight.part
        if part.operation is Operation.WRITE:
            self._unannounced_bytes += part.nbytes
        elif flight.staging is not None:
            flight.staging.drain(part)
        self._flights.popleft()
        self._let_go(flight)
        self._num_ended += 1
        self._moved_bytes += part.nbytes
        work.done(part)

    def _announce(self, link: Link) -> None:
        """Tell the owner how much was written: it cannot see one-sided writes. Nobody waits for this to arrive."""
        if self._unannounced_bytes:
            link.queue_pair.post_notice(NOTICE_TAG, min(self._unannounced_bytes, 0xFFFFFFFF))
            self._unannounced_bytes = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A slice in flight."""

    part: Slice
    tag: int = 0
    is_posted: bool = False
    staging: Staging | None = None

    def locals_or(self, strips: list[tuple[int, int] | None]) -> list[tuple[int, int]]:
        """(address, key) of each piece's local memory: in the staging memory, or in place."""
        if self.staging is not None:
            return self.staging.places(self.part)
        return [strip for strip in strips if strip is not None]
