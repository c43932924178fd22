"""Transfer requests: ranges of a peer's segment paired with local memory, and how they are cut into slices.

Whether a request has ended is decided in one place: by its peer's link, under the link's lock. Knows no sockets, no
mappings and no threads but the waiting ones. Per-request values are named tuples: a frozen dataclass takes three times
as long to create.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from typing_extensions import Buffer

from kvstore.checksum import Checksums
from kvstore.segment import check_range
from kvstore.transfer.piece_table import PieceTable
from kvstore.transfer.protocol import MAX_FRAME_BYTES, MAX_RANGES, Operation, WireRange
from kvstore.transfer.transport import Piece, Priority, Slice
from kvstore.waiting import to_its_end
from mooncake.errors import InvalidRequest, MooncakeError
from mooncake.types import SegmentAddress

_READ, _WRITE = Operation.READ, Operation.WRITE  # enum members are slow to look up


class WriteRange(NamedTuple):
    """Write ``data`` (contiguous) at ``offset`` of ``block``. ``epoch`` is what the block's owner granted."""

    block: int
    offset: int
    data: Buffer
    epoch: int


class ReadRange(NamedTuple):
    """Fill ``into`` (contiguous, writable) from ``offset`` of ``block``."""

    block: int
    offset: int
    into: Buffer


class Request(NamedTuple):
    """Ranges of one segment, all to be read or all to be written, before ``deadline`` (on ``time.monotonic``).

    With ``checksum_bytes`` (up to MAX_FRAME_BYTES) the report has one checksum per this many bytes of each range, and
    one for the remainder, computed from the local memory as the bytes pass: for a read, of what has arrived. A table,
    for thousands of short ranges to be read, has none.
    """

    address: SegmentAddress
    ranges: Sequence[WriteRange] | Sequence[ReadRange] | PieceTable
    deadline: float
    priority: Priority = Priority.NORMAL
    checksum_bytes: int = 0


class TransferReport(NamedTuple):
    """How one request travelled. ``transport`` is the one that finished it ("" for an empty request)."""

    transport: str
    nbytes: int
    seconds: float
    checksums: tuple[Checksums, ...] = ()  # per range, if requested


class TransferStatus(StrEnum):
    WAITING = "waiting"  # nothing of it is in flight yet
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class Transfer:
    """One request being transferred. ``wait``, ``result`` and ``cancel`` may be called from any thread."""

    __slots__ = (
        "_callbacks",
        "_cancel",
        "_event",
        "_lock",
        "checksums",
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

    def __init__(
        self,
        slices: Sequence[Slice],
        request: Request,
        checksums: tuple[Checksums, ...],
        cancel: Callable[[Transfer], None],
    ) -> None:
        """``cancel`` is the link's."""
        self.deadline = request.deadline
        self.priority = request.priority
        self.checksums = checksums
        self.nbytes = sum(part.nbytes for part in slices)
        # The rest belongs to the link.
        self.num_waiting = len(slices)
        self.num_on_way = 0
        self.moved_bytes = 0
        self.error: MooncakeError | None = None  # the first; slices in flight still have to end
        self.transport = ""
        self.started = time.monotonic()
        self.ended = 0.0
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Transfer], object]] = []
        self._cancel = cancel

    @property
    def has_ended(self) -> bool:
        """Whether nothing touches the request's memory any more."""
        return self.ended > 0

    @property
    def status(self) -> TransferStatus:
        if self.has_ended:
            return TransferStatus.DONE if self.error is None else TransferStatus.FAILED
        return TransferStatus.MOVING if self.num_on_way or self.moved_bytes else TransferStatus.WAITING

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended, at the latest soon after its deadline. False on timeout."""
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
        return TransferReport(self.transport, self.moved_bytes, self.ended - self.started, self.checksums)

    async def wait_async(self) -> TransferReport:
        """``result`` for an event loop. Cancelling the task cancels the transfer; the task then still waits for its
        end, so that the memory is the caller's again."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self.when_ended(lambda _: loop.call_soon_threadsafe(_settle, ended))
        await to_its_end(ended, self.cancel)
        return self.result()

    def cancel(self) -> None:
        """Start nothing more of it. It ends, with Cancelled, when what is in flight has ended; a stalled path is not
        waited for."""
        self._cancel(self)

    def when_ended(self, callback: Callable[[Transfer], object]) -> None:
        """Call ``callback`` once, now or from the thread that ends the transfer. It must be quick and not raise."""
        with self._lock:
            if not self.has_ended:
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, now: float) -> None:
        """For the link only."""
        with self._lock:
            self.ended = now
            callbacks, self._callbacks = self._callbacks, []
            event = self._event
        if event is not None:
            event.set()
        for callback in callbacks:
            callback(self)


def cut(request: Request, slice_bytes: Callable[[int], int]) -> tuple[list[Slice], tuple[Checksums, ...]]:
    """The slices of a request, about as long as ``slice_bytes`` returns for its size, and the memory for its checksums.

    Raises InvalidRequest for a range outside the segment, memory that is not contiguous (or, for a read, not writable),
    and reads mixed with writes.
    """
    unit = request.checksum_bytes
    if not 0 <= unit <= MAX_FRAME_BYTES:
        raise InvalidRequest(f"checksums of {unit} bytes each; {MAX_FRAME_BYTES} at most")
    if not request.ranges:
        return [], ()
    if type(request.ranges) is PieceTable:  # isinstance would go through abc for each request
        return _cut_table(request, request.ranges, slice_bytes), ()
    operation = _WRITE if type(request.ranges[0]) is WriteRange else _READ
    if len(request.ranges) == 1:  # the usual case, without loops over one element
        block, offset, local, epoch = row = _row(request.ranges[0], operation, request.address)
        nbytes = local.nbytes
        checksums: tuple[Checksums, ...] = (np.empty(-(-nbytes // unit), np.uint64),) if unit else ()
        size = slice_bytes(nbytes)
        if nbytes <= size:
            pieces = (Piece(WireRange(block, offset, nbytes, epoch), local),)
            return [Slice(operation, pieces, nbytes, request.deadline, unit, checksums)], checksums
        return _cut(request, operation, [row], checksums, size), checksums
    rows = [_row(item, operation, request.address) for item in request.ranges]
    checksums = tuple(np.empty(-(-row[2].nbytes // unit), np.uint64) for row in rows) if unit else ()
    size = slice_bytes(sum(row[2].nbytes for row in rows))
    return _cut(request, operation, rows, checksums, size), checksums


def _cut_table(request: Request, table: PieceTable, slice_bytes: Callable[[int], int]) -> list[Slice]:
    if request.checksum_bytes:
        raise InvalidRequest("a table of ranges takes no checksums")
    table.check(request.address.block_bytes, request.address.num_blocks)
    parts = table.cut(slice_bytes(table.nbytes))
    return [Slice(_READ, part, part.nbytes, request.deadline) for part in parts]


_Row = tuple[int, int, memoryview, int]  # block, offset, memory, epoch


def _row(item: WriteRange | ReadRange, operation: Operation, address: SegmentAddress) -> _Row:
    if (type(item) is WriteRange) is not (operation is _WRITE):
        raise InvalidRequest("a request either reads or writes")
    block, offset, data, epoch = item if type(item) is WriteRange else (*item, 0)
    try:
        local = memoryview(data).cast("B")
    except (TypeError, ValueError):
        raise InvalidRequest("a range needs contiguous memory") from None
    if operation is _READ and local.readonly:
        raise InvalidRequest("cannot read into read-only memory")
    check_range(block, offset, local.nbytes, address.block_bytes, address.num_blocks)
    return block, offset, local, epoch


def _cut(
    request: Request, operation: Operation, rows: Sequence[_Row], sums: Sequence[Checksums], slice_bytes: int
) -> list[Slice]:
    """Fill slices to ``slice_bytes``, splitting a range where a slice is full, but never within one checksum."""
    unit = request.checksum_bytes or 1
    slices: list[Slice] = []
    pieces: list[Piece] = []
    piece_sums: list[Checksums] = []
    filled = 0

    def close() -> None:
        nonlocal pieces, piece_sums, filled
        slices.append(
            Slice(operation, tuple(pieces), filled, request.deadline, request.checksum_bytes, tuple(piece_sums))
        )
        pieces, piece_sums, filled = [], [], 0

    for number, (block, offset, local, epoch) in enumerate(rows):
        start = 0
        while start < local.nbytes:
            left, room = local.nbytes - start, slice_bytes - filled
            length = left if left <= room else room // unit * unit
            if length == 0 and pieces:
                close()
                continue
            length = length or min(left, unit)
            pieces.append(Piece(WireRange(block, offset + start, length, epoch), local[start : start + length]))
            if sums:
                piece_sums.append(sums[number][start // unit : -(-(start + length) // unit)])
            start += length
            filled += length
            if filled >= slice_bytes or len(pieces) == MAX_RANGES:
                close()
    if pieces:
        close()
    return slices


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
