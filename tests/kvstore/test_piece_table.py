"""Thousands of short ranges in one request: what arrives over each transport, how they are cut, and what is refused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.segment import Segment
from kvstore.transfer.engine import Request, TransferEngine
from kvstore.transfer.piece_table import PieceTable
from kvstore.transfer.protocol import MAX_RANGES, SLICE_BYTES
from kvstore.transfer.server import SegmentServer
from kvstore.transfer.shm import ShmTransport
from kvstore.transfer.tcp import TcpTransport
from kvstore.transfer.transport import Transport
from mooncake.errors import InvalidRequest

BLOCK, NUM = 3 << 20, 3
TRANSPORTS = {
    "shm": ShmTransport,
    "tcp": lambda: TcpTransport(2),
    "tcp in Python": lambda: TcpTransport(2, is_native=False),
}


@pytest.fixture(scope="module")
def owner() -> Iterator[tuple[Segment, SegmentServer]]:
    segment = Segment.create("rows", BLOCK, NUM)
    segment.array[:] = np.random.default_rng(0).integers(0, 256, BLOCK * NUM, dtype=np.uint8)
    server = SegmentServer(segment, "rows", ("shm", "tcp"))
    server.start()
    yield segment, server
    server.stop()
    segment.close()


def ragged(count: int, memories: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Rows of 1 to 4000 bytes from anywhere, to places of their own in turn."""
    random = np.random.default_rng(count)
    length = random.integers(1, 4000, count)
    block, offset = random.integers(0, NUM, count), random.integers(0, BLOCK - 4000, count)
    return np.array([block, offset, length, np.arange(count) % memories, np.arange(count) // memories * 4000])


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_row_arrives_in_its_place(name: str, owner: tuple[Segment, SegmentServer]):
    segment, server = owner
    one: Transport = TRANSPORTS[name]()
    engine = TransferEngine("reader", [one])
    rows = ragged(3000, 2)
    long_row = [2, 5, SLICE_BYTES * 2 + 77, 2, 9]  # travels as three
    into = [bytearray(1500 * 4000), bytearray(1500 * 4000), bytearray(SLICE_BYTES * 2 + 90)]
    table = PieceTable.reading(np.column_stack([rows, long_row]), [memoryview(memory) for memory in into])
    assert len(table) == 3003
    [transfer] = engine.submit([Request(server.address, table, time.monotonic() + 20)])
    assert transfer.result().nbytes == table.nbytes == int(rows[2].sum()) + long_row[2]
    wanted = [bytearray(len(memory)) for memory in into]
    for block, offset, length, memory, place in [*rows.T.tolist(), long_row]:
        wanted[memory][place : place + length] = segment.block(block)[offset : offset + length]
    assert into == wanted  # and nothing beside them
    engine.close()


def test_a_slice_has_no_more_rows_than_a_frame_and_no_more_bytes_than_were_asked_for():
    table = PieceTable.reading(ragged(2000, 1), [memoryview(bytearray(2000 * 4000))])
    for size in (1, 9000, SLICE_BYTES, 1 << 30):
        parts = list(table.cut(size))
        assert [piece.wire for part, _ in parts for piece in part] == [piece.wire for piece in table]
        assert all(nbytes == part.nbytes <= max(size, 4000) and len(part) <= MAX_RANGES for part, nbytes in parts)
        assert all(
            before[1] + after[0][0].wire.length > size or len(before[0]) == MAX_RANGES
            for before, after in itertools.pairwise(parts)
        ), "and no fewer"


@pytest.mark.parametrize(
    "row",
    [
        (0, 0, 0, 0, 0),
        (0, 0, -1, 0, 0),
        (-1, 0, 1, 0, 0),
        (0, -1, 1, 0, 0),
        (0, 0, 1, 0, -1),
        (0, 0, 8, 0, 93),  # past its memory
        (0, 0, 101, 0, 0),
        (0, 1 << 32, 1, 0, 0),  # what would wrap round on the wire
        (1 << 32, 0, 1, 0, 0),
        (0, BLOCK - 1, 2, 0, 0),  # past the block
        (NUM, 0, 1, 0, 0),
    ],
)
def test_a_row_outside_is_refused(row: tuple[int, ...], owner: tuple[Segment, SegmentServer]):
    engine = TransferEngine("reader", ("tcp",))
    with pytest.raises(InvalidRequest, match="a row outside"):
        table = PieceTable.reading(np.array([(0, 0, 1, 0, 0), row]).T, [memoryview(bytearray(100))])
        engine.submit([Request(owner[1].address, table, time.monotonic() + 20)])
    engine.close()


def test_read_only_memory_and_checksums_are_refused(owner: tuple[Segment, SegmentServer]):
    row = np.array([(0, 0, 1, 0, 0)]).T
    with pytest.raises(InvalidRequest, match="read-only"):
        PieceTable.reading(row, [memoryview(b"x")])
    engine = TransferEngine("reader", ("tcp",))
    table = PieceTable.reading(row, [memoryview(bytearray(1))])
    with pytest.raises(InvalidRequest, match="no checksums"):
        engine.submit([Request(owner[1].address, table, time.monotonic() + 20, checksum_bytes=64)])
    engine.close()
