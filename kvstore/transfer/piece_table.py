"""Thousands of short pieces of blocks as columns of arrays: bounded, cut and packed without an object for each.

What is cut over heads or tokens lies in runs of some KiB, which take a socket less time than Python needs to look at
one. A table is a sequence of pieces like any other, made one by one for whoever asks; TCP packs it as it is. It must
not know layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

import numpy as np
import numpy.typing as npt

from kvstore.transfer.protocol import MAX_RANGES, SLICE_BYTES, WireRange
from kvstore.transfer.transport import Piece
from mooncake.errors import InvalidRequest

WIRE_ROW = np.dtype([("block", "<u4"), ("offset", "<u4"), ("length", "<u4"), ("epoch", "<u8")])  # a range as it travels


@final
@dataclass(frozen=True, slots=True, eq=False)
class PieceTable(Sequence[Piece]):
    """Pieces of one segment's blocks, to be read: row i goes to ``places[i]`` of ``memories[owners[i]]``."""

    wire: npt.NDArray[Any]  # of WIRE_ROW
    memories: Sequence[memoryview]
    parts: npt.NDArray[np.uint64]  # [n, 3], ``Part`` of wire.cpp: address in this process, bytes, 0
    owners: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    @classmethod
    def reading(cls, rows: npt.NDArray[np.int64], memories: Sequence[memoryview]) -> PieceTable:
        """``rows [5, n]``: block, offset in it, bytes, index of the memory, place in it. Long ones become several.

        Raises InvalidRequest for rows outside their memory, and memory that is not writable.
        """
        if any(memory.readonly for memory in memories):
            raise InvalidRequest("cannot read into read-only memory")
        block, offset, length, owner, place = rows = _split(rows)
        sizes = np.array([memory.nbytes for memory in memories], np.int64)
        if rows.size and (
            min(rows.min(), length.min() - 1) < 0
            or max(block.max(), offset.max()) >> 32
            or (place + length > sizes[owner]).any()
        ):
            raise InvalidRequest("a row outside its memory")
        wire = np.zeros(len(block), WIRE_ROW)
        wire["block"], wire["offset"], wire["length"] = block, offset, length
        starts = np.array([_address_of(memory) for memory in memories], np.int64)
        parts = np.zeros((len(block), 3), np.uint64)
        parts[:, 0], parts[:, 1] = starts[owner] + place, length
        return cls(wire, memories, parts, owner, place)

    def __len__(self) -> int:
        return len(self.wire)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> PieceTable: ...
    def __getitem__(self, index: int | slice) -> Piece | PieceTable:
        if isinstance(index, slice):
            columns = self.wire[index], self.memories, self.parts[index], self.owners[index], self.places[index]
            return PieceTable(*columns)
        wire, place = WireRange(*self.wire[index].item()), int(self.places[index])
        return Piece(wire, self.memories[self.owners[index]][place : place + wire.length])

    def __iter__(self) -> Iterator[Piece]:
        return (self[index] for index in range(len(self)))

    @property
    def nbytes(self) -> int:
        return int(self.wire["length"].sum(dtype=np.int64))

    def check(self, block_bytes: int, num_blocks: int) -> None:
        """Raises InvalidRequest unless every row lies in one block of such a segment."""
        ends = self.wire["offset"].astype(np.int64) + self.wire["length"]
        if (ends > block_bytes).any() or (self.wire["block"] >= num_blocks).any():
            raise InvalidRequest(f"a row outside a segment of {num_blocks} blocks of {block_bytes} bytes")

    def cut(self, slice_bytes: int) -> Iterator[tuple[PieceTable, int]]:
        """In order, as many rows at a time as fill ``slice_bytes``, but one at least, with their bytes."""
        ends = np.cumsum(self.wire["length"], dtype=np.int64)
        first = filled = 0
        while first < len(self):
            fitting = int(ends.searchsorted(filled + slice_bytes, side="right"))
            last = min(max(fitting, first + 1), first + MAX_RANGES)
            end = int(ends[last - 1])
            yield self[first:last], end - filled
            first, filled = last, end

    def packed(self) -> bytes:
        """All ranges as they travel."""
        return self.wire.tobytes()


def _split(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same bytes in rows of SLICE_BYTES at most."""
    if rows[2].max(initial=0) <= SLICE_BYTES:
        return rows
    times = -(-rows[2] // SLICE_BYTES)
    start = SLICE_BYTES * (np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times))
    rows = np.repeat(rows, times, axis=1)
    rows[[1, 4]] += start
    rows[2] = np.minimum(rows[2] - start, SLICE_BYTES)
    return rows


def _address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
