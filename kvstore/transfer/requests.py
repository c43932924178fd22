"""What is to be moved: requests of ranges of a peer's segment paired with local memory, cut into slices.

Whether a request has ended is decided in one place: by the link of its peer, under the link's lock. Knows no sockets,
no mappings and no threads but the ones that wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from typing_extensions import Buffer

from kvstore.segment import check_range
from kvstore.transfer.protocol import MAX_RANGES, Operation, WireRange
from kvstore.transfer.transport import Piece, Priority, Slice
from mooncake.errors import InvalidRequest, MooncakeError
from mooncake.types import SegmentAddress


@dataclass(frozen=True, slots=True)
class WriteRange:
    """Put ``data`` (contiguous) at ``offset`` of ``block``. ``epoch`` is what the block's owner granted."""

    block: int
    offset: int
    data: Buffer
    epoch: int


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Fill ``into`` (contiguous, writable) from ``offset`` of ``block``."""

    block: int
    offset: int
    into: Buffer


@dataclass(frozen=True, slots=True)
class Request:
    """Ranges of one segment, all to be read or all to be written, before ``deadline`` (on ``time.monotonic``)."""

    address: SegmentAddress
    ranges: Sequence[WriteRange] | Sequence[ReadRange]
    deadline: float
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class TransferReport:
    """How one request travelled. ``transport`` is the one that finished it ("" for an empty request)."""

    transport: str
    nbytes: int
    seconds: float


class TransferStatus(StrEnum):
    WAITING = "waiting"  # nothing of it is on its way yet
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class Transfer:
    """One request on its way. ``wait``, ``result`` and ``cancel`` may be called from any thread."""

    __slots__ = (
        "_callbacks",
        "_cancel",
        "_event",
        "_lock",
        "deadline",
        "ended",
        "error",
        "moved_bytes",
        "nbytes",
        "num_on_way",
        "num_waiting",
        "priority",
        "started",
        "transport",
    )

    def __init__(self, slices: Sequence[Slice], deadline: float, priority: Priority) -> None:
        self.deadline = deadline
        self.priority = priority
        self.nbytes = sum(part.nbytes for part in slices)
        # What follows belongs to the link.
        self.num_waiting = len(slices)
        self.num_on_way = 0
        self.moved_bytes = 0
        self.error: MooncakeError | None = None  # the first; what is on its way still has to end
        self.transport = ""
        self.started = time.monotonic()
        self.ended = 0.0
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Transfer], object]] = []
        self._cancel: Callable[[Transfer], None] | None = None

    @property
    def has_ended(self) -> bool:
        """Nothing touches the request's memory any more."""
        return self.ended > 0

    @property
    def status(self) -> TransferStatus:
        if self.has_ended:
            return TransferStatus.DONE if self.error is None else TransferStatus.FAILED
        return TransferStatus.MOVING if self.num_on_way or self.moved_bytes else TransferStatus.WAITING

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended. It ends soon after its deadline at the latest. False when the time is up first."""
        with self._lock:
            if self.has_ended:
                return True
            self._event = event = self._event or threading.Event()
        return event.wait(timeout_s)

    def result(self) -> TransferReport:
        """Wait for the end. Raises what ended it, as ``TransferEngine.write`` describes."""
        self.wait()
        if self.error is not None:
            raise self.error
        return TransferReport(self.transport, self.moved_bytes, self.ended - self.started)

    async def wait_async(self) -> TransferReport:
        """``result`` for an event loop. When the task is cancelled the transfer is, too; the task then still waits
        for its end, so that the memory is the caller's again."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self.when_ended(lambda _: loop.call_soon_threadsafe(_settle, ended))
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([ended])
            raise
        return self.result()

    def cancel(self) -> None:
        """Let nothing more of it begin. It ends, with Cancelled, when what is on its way has."""
        if self._cancel is not None:
            self._cancel(self)

    def when_ended(self, callback: Callable[[Transfer], object]) -> None:
        """Call ``callback`` once, now or from the thread that ends the transfer. It must be quick and not raise."""
        with self._lock:
            if not self.has_ended:
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, now: float) -> None:
        """For the link alone."""
        with self._lock:
            self.ended = now
            callbacks, self._callbacks = self._callbacks, []
            event = self._event
        if event is not None:
            event.set()
        for callback in callbacks:
            callback(self)

    def on_cancel(self, cancel: Callable[[Transfer], None]) -> None:
        """For the link alone."""
        self._cancel = cancel


def cut(request: Request, slice_bytes: Callable[[int], int]) -> list[Slice]:
    """The slices of a request, as long as ``slice_bytes`` says for one of so many bytes.

    Raises InvalidRequest for a range outside the segment, memory that is not contiguous (or, for a read, not
    writable), and reads mixed with writes.
    """
    if not request.ranges:
        return []
    if len(request.ranges) == 1 and (alone := _alone(request, request.ranges[0], slice_bytes)) is not None:
        return [alone]
    writes = isinstance(request.ranges[0], WriteRange)
    rows = list(map(_write_row if writes else _read_row, request.ranges))
    size = slice_bytes(sum(local.nbytes for _, _, local, _ in rows))
    return _cut(request, Operation.WRITE if writes else Operation.READ, rows, size)


def _alone(request: Request, item: WriteRange | ReadRange, slice_bytes: Callable[[int], int]) -> Slice | None:
    """The usual small request: one range, no longer than a slice."""
    writes = isinstance(item, WriteRange)
    block, offset, local, epoch = _write_row(item) if writes else _read_row(item)
    size = local.nbytes
    if size > slice_bytes(size):
        return None
    check_range(block, offset, size, request.address.block_bytes, request.address.num_blocks)
    piece = Piece(WireRange(block, offset, size, epoch), local)
    return Slice(Operation.WRITE if writes else Operation.READ, (piece,), size, request.deadline)


_Row = tuple[int, int, memoryview, int]  # block, offset, memory, epoch


def _write_row(item: WriteRange | ReadRange) -> _Row:
    if not isinstance(item, WriteRange):
        raise InvalidRequest("a request either reads or writes")
    return item.block, item.offset, _bytes_of(item.data), item.epoch


def _read_row(item: WriteRange | ReadRange) -> _Row:
    if not isinstance(item, ReadRange):
        raise InvalidRequest("a request either reads or writes")
    local = _bytes_of(item.into)
    if local.readonly:
        raise InvalidRequest("cannot read into read-only memory")
    return item.block, item.offset, local, 0


def _cut(request: Request, operation: Operation, rows: Iterable[_Row], slice_bytes: int) -> list[Slice]:
    """Fill slices to ``slice_bytes``, splitting a range where a slice is full."""
    address, deadline = request.address, request.deadline
    slices: list[Slice] = []
    pieces: list[Piece] = []
    room = slice_bytes
    for block, offset, local, epoch in rows:
        check_range(block, offset, local.nbytes, address.block_bytes, address.num_blocks)
        start = 0
        while start < local.nbytes:
            length = min(room, local.nbytes - start)
            pieces.append(Piece(WireRange(block, offset + start, length, epoch), local[start : start + length]))
            start += length
            room -= length
            if room == 0 or len(pieces) == MAX_RANGES:
                slices.append(Slice(operation, tuple(pieces), slice_bytes - room, deadline))
                pieces, room = [], slice_bytes
    if pieces:
        slices.append(Slice(operation, tuple(pieces), slice_bytes - room, deadline))
    return slices


def _bytes_of(data: Buffer) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except (TypeError, ValueError):
        raise InvalidRequest("a range needs contiguous memory") from None


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
