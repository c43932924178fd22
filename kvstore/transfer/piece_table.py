"""Thousands of short pieces of blocks: checked, cut and packed without one object each.

Data split over heads or tokens is in runs of a few KiB, which a socket moves in less time than Python needs to look at
one. Which runs of a block are wanted, and where they go, is the same for many blocks: it is a *pattern*, packed once. A
table is a sequence of pieces like any other, created one by one on request; TCP packs it directly, one slice at a time
while others are in flight. It knows nothing of layouts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, final, overload

import numpy as np
import numpy.typing as npt

from kvstore.transfer.protocol import MAX_RANGES, SLICE_BYTES, WireRange
from kvstore.transfer.transport import Piece
from mooncake.errors import InvalidRequest

WIRE_ROW = np.dtype([("block", "<u4"), ("offset", "<u4"), ("length", "<u4"), ("epoch", "<u8")])  # a range on the wire


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Ranges of any block, and their destinations in any memories. Ranges adjacent in the block are one range on the
    wire; pieces adjacent in a memory are received as one part."""

    moves: npt.NDArray[np.int64]  # [4, n]: offset in the block, bytes (<= SLICE_BYTES), memory's index, offset there
    wire: npt.NDArray[Any]  # of WIRE_ROW, for block 0
    parts: npt.NDArray[np.uint64]  # [m, 3], ``Part`` of wire.cpp, for memories at address 0
    owners: npt.NDArray[np.int64]  # [m]: index of each part's memory
    nbytes: int
    block_bytes: int  # the size a block must have
    memory_bytes: tuple[int, ...]  # and each memory

    @classmethod
    def of(cls, moves: npt.NDArray[np.int64]) -> Pattern:
        """From ``moves`` in any order, which may be longer than a slice. Raises InvalidRequest for invalid numbers."""
        offset, length, owner, place = moves = _split(moves[:, moves[0].argsort(kind="stable")])
        if moves.shape[1] == 0 or min(moves.min(), length.min() - 1) < 0 or offset.max() >> 32:
            raise InvalidRequest("a row outside any block or memory")
        ends = place + length
        runs = _starts(offset[1:] != offset[:-1] + length[:-1])
        wire = np.zeros(len(runs), WIRE_ROW)
        wire["offset"], wire["length"] = offset[runs], np.add.reduceat(length, runs)
        runs = _starts((place[1:] != ends[:-1]) | (owner[1:] != owner[:-1]))
        parts = np.zeros((len(runs), 3), np.uint64)
        parts[:, 0], parts[:, 1] = place[runs], np.add.reduceat(length, runs)
        memory_bytes = tuple(int(ends[owner == each].max(initial=0)) for each in range(int(owner.max()) + 1))
        block_bytes = int((offset + length).max())
        return cls(moves, wire, parts, owner[runs], int(length.sum()), block_bytes, memory_bytes)

    def cut(self, slice_bytes: int) -> tuple[Pattern, ...]:
        """In order, as many rows at a time as fill ``slice_bytes``, but at least one."""
        if self.nbytes <= slice_bytes and len(self.wire) <= MAX_RANGES:
            return (self,)
        return _cut(self, slice_bytes)


class Lot(NamedTuple):
    """One block by one pattern, into its memories."""

    pattern: Pattern
    block: int
    memories: Sequence[memoryview]


@final
@dataclass(frozen=True, slots=True, eq=False)
class PieceTable(Sequence[Piece]):
    """Pieces of one segment's blocks, to be read."""

    lots: Sequence[Lot]
    nbytes: int
    num_ranges: int  # on the wire

    @classmethod
    def reading(cls, lots: Sequence[Lot]) -> PieceTable:
        """Raises InvalidRequest for memory that is too short for its pattern, or not writable."""
        for pattern, _, memories in lots:
            if any(memory.readonly for memory in memories):
                raise InvalidRequest("cannot read into read-only memory")
            if any(memory.nbytes < size for memory, size in zip(memories, pattern.memory_bytes, strict=True)):
                raise InvalidRequest("a row outside its memory")
        return cls(lots, sum(lot.pattern.nbytes for lot in lots), sum(len(lot.pattern.wire) for lot in lots))

    def __len__(self) -> int:
        return sum(lot.pattern.moves.shape[1] for lot in self.lots)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Piece]:
        for pattern, block, memories in self.lots:
            for offset, length, owner, place in pattern.moves.T.tolist():
                yield Piece(WireRange(block, offset, length, 0), memories[owner][place : place + length])

    def check(self, block_bytes: int, num_blocks: int) -> None:
        """Raises InvalidRequest unless every row is inside one block of such a segment."""
        if any(pattern.block_bytes > block_bytes or not 0 <= block < num_blocks for pattern, block, _ in self.lots):
            raise InvalidRequest(f"a row outside a segment of {num_blocks} blocks of {block_bytes} bytes")

    def cut(self, slice_bytes: int) -> Iterator[PieceTable]:
        """In order, as many lots at a time as fit ``slice_bytes``; one that is longer, or has too many rows, in
        several slices of its own."""
        together: list[Lot] = []
        nbytes = ranges = 0
        for whole, block, memories in self.lots:
            for pattern in whole.cut(slice_bytes):
                more = len(pattern.wire)
                if together and (nbytes + pattern.nbytes > slice_bytes or ranges + more > MAX_RANGES):
                    yield PieceTable(together, nbytes, ranges)
                    together, nbytes, ranges = [], 0, 0
                together.append(Lot(pattern, block, memories))
                nbytes, ranges = nbytes + pattern.nbytes, ranges + more
        if together:
            yield PieceTable(together, nbytes, ranges)

    def ranges(self) -> list[WireRange]:
        """Rows in wire format."""
        return [WireRange(*row) for row in np.frombuffer(self.packed(), WIRE_ROW).tolist()]

    def packed(self) -> bytes:
        """All ``ranges``."""
        packed = []
        for pattern, block, _ in self.lots:
            wire = pattern.wire.copy()
            wire["block"] = block
            packed.append(wire.tobytes())
        return b"".join(packed)

    def parts(self) -> bytes:
        """Their destinations, as ``Part`` of wire.cpp."""
        packed = []
        for pattern, _, memories in self.lots:
            starts = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
            parts = pattern.parts.copy()
            parts[:, 0] += np.array(starts, np.uint64)[pattern.owners]
            packed.append(parts.tobytes())
        return b"".join(packed)


def _starts(is_new: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Where runs begin: at 0, and at each later element marked as new."""
    return np.flatnonzero(np.concatenate([[True], is_new]))


@lru_cache(maxsize=1024)
def _cut(pattern: Pattern, slice_bytes: int) -> tuple[Pattern, ...]:
    moves, parts = pattern.moves, []
    offset, length, _, _ = moves
    ends = length.cumsum()
    ranges = np.concatenate([[0], (offset[1:] != offset[:-1] + length[:-1]).cumsum()])  # which one each row is part of
    first = filled = 0
    while first < len(ends):
        fitting = int(ends.searchsorted(filled + slice_bytes, side="right"))
        allowed = int(ranges.searchsorted(ranges[first] + MAX_RANGES))
        last = min(max(fitting, first + 1), allowed)
        parts.append(Pattern.of(moves[:, first:last]))
        first, filled = last, int(ends[last - 1])
    return tuple(parts)


def _split(moves: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same bytes in rows of SLICE_BYTES at most."""
    if moves[1].max(initial=0) <= SLICE_BYTES:
        return moves
    times = -(-moves[1] // SLICE_BYTES)
    start = SLICE_BYTES * (np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times))
    moves = np.repeat(moves, times, axis=1)
    moves[[0, 3]] += start
    moves[1] = np.minimum(moves[1] - start, SLICE_BYTES)
    return moves
