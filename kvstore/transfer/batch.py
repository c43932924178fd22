"""What is to be moved: ranges of a peer's segment paired with local memory, cut into slices that paths share out.

A batch is worked on by several threads and, when a transport fails, by several transports one after the other. Writing
a slice twice is harmless, so a slice whose fate is unknown is simply given back. Knows no sockets and no mappings.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from kvstore.segment import check_range
from kvstore.transfer.limiter import Pacer
from kvstore.transfer.protocol import MAX_RANGES, Operation, WireRange
from mooncake.errors import Cancelled, DeadlineExceeded, InvalidRequest, MooncakeError
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


class PathFailed(Exception):
    """This path cannot finish the batch; another may."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one range, no longer than a slice."""

    wire: WireRange
    local: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Pieces that travel together."""

    pieces: tuple[Piece, ...]
    nbytes: int


class Batch:
    """Slices to move before ``deadline`` (monotonic). Thread-safe.

    ``pacer`` limits the rate; setting ``cancelled`` ends the batch early.
    """

    def __init__(
        self,
        operation: Operation,
        slices: Iterable[Slice],
        deadline: float,
        pacer: Pacer | None,
        cancelled: threading.Event,
    ) -> None:
        self.operation = operation
        self.deadline = deadline
        self.cancelled = cancelled
        self.refused: MooncakeError | None = None  # by the owner: no other path would fare better
        self.moved_bytes = 0
        self._pacer = pacer
        self._lock = threading.Lock()
        self._waiting = deque(slices)
        self._unfinished = len(self._waiting)

    @property
    def is_finished(self) -> bool:
        return self._unfinished == 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self) -> Slice | None:
        """The next slice to move, or None when there is none waiting (any more). Sleeps as the pace demands.

        Raises DeadlineExceeded when the pace would end after the deadline, and Cancelled.
        """
        with self._lock:
            if self.refused is not None or not self._waiting:
                return None
            part = self._waiting.popleft()
        try:
            self._wait_turn(part.nbytes)
        except MooncakeError:
            self.give_back([part])
            raise
        return part

    def done(self, part: Slice) -> None:
        with self._lock:
            self._unfinished -= 1
            self.moved_bytes += part.nbytes

    def give_back(self, parts: Iterable[Slice]) -> None:
        """Slices that may or may not have arrived."""
        with self._lock:
            self._waiting.extendleft(parts)

    def refuse(self, error: MooncakeError) -> None:
        """The owner will not have it. The first refusal counts."""
        with self._lock:
            self.refused = self.refused or error

    def _wait_turn(self, nbytes: int) -> None:
        if self.cancelled.is_set():
            raise Cancelled("the transfer was cancelled")
        wait_s = self._pacer.take(nbytes) if self._pacer else 0.0
        if self._pacer is None or wait_s <= 0:
            return
        if time.monotonic() + wait_s >= self.deadline:
            self._pacer.give_back(nbytes)
            raise DeadlineExceeded(f"the rate limit asks for {wait_s:.2f} s more, past the transfer's deadline")
        if self.cancelled.wait(wait_s):
            self._pacer.give_back(nbytes)
            raise Cancelled("the transfer was cancelled")


def plan_write(address: SegmentAddress, ranges: Sequence[WriteRange], slice_bytes: int) -> list[Slice]:
    """Raises InvalidRequest for a range outside the segment, or memory that is not contiguous."""
    rows = ((item.block, item.offset, _bytes_of(item.data), item.epoch) for item in ranges)
    return _cut(address, rows, slice_bytes)


def plan_read(address: SegmentAddress, ranges: Sequence[ReadRange], slice_bytes: int) -> list[Slice]:
    """Raises InvalidRequest for a range outside the segment, or memory that is not contiguous and writable."""
    rows = [(item.block, item.offset, _bytes_of(item.into), 0) for item in ranges]
    if any(local.readonly for _, _, local, _ in rows):
        raise InvalidRequest("cannot read into read-only memory")
    return _cut(address, rows, slice_bytes)


def _cut(address: SegmentAddress, rows: Iterable[tuple[int, int, memoryview, int]], slice_bytes: int) -> list[Slice]:
    """Fill slices to ``slice_bytes``, splitting a range where a slice is full."""
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
                slices.append(Slice(tuple(pieces), slice_bytes - room))
                pieces, room = [], slice_bytes
    if pieces:
        slices.append(Slice(tuple(pieces), slice_bytes - room))
    return slices


def _bytes_of(data: Buffer) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except (TypeError, ValueError):
        raise InvalidRequest("a range needs contiguous memory") from None
