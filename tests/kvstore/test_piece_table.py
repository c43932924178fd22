"""Thousands of short ranges in one request: what arrives over each transport, how they are cut, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.piece_table import Lot, Pattern, PieceTable
from kvstore.transfer.protocol import MAX_RANGES, SLICE_BYTES
from kvstore.transfer.requests import Request
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
    """Rows of 1 to 4000 bytes from anywhere in a block, to places of their own in turn; some of those touch."""
    random = np.random.default_rng(count)
    length = np.where(random.random(count) < 0.5, 4000, random.integers(1, 4000, count))
    numbers = np.arange(count)
    return np.array([random.integers(0, BLOCK - 4000, count), length, numbers % memories, numbers // memories * 4000])


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_row_arrives_in_its_place(name: str, owner: tuple[Segment, SegmentServer]):
    segment, server = owner
    one: Transport = TRANSPORTS[name]()
    engine = TransferEngine("reader", [one])
    short, long = ragged(1400, 2), np.array([[5], [SLICE_BYTES * 2 + 77], [0], [9]])  # which travels as three
    lanes = np.array([(row * 4096, 4096, row % 4, row // 4 * 4096) for row in range(600)]).T  # apart what lies together
    into = [bytearray(700 * 4000) for _ in range(4)] + [bytearray(SLICE_BYTES * 2 + 90)]
    into += [bytearray(150 * 4096) for _ in range(4)]
    wanted = [bytearray(len(memory)) for memory in into]
    asked = [(short, 0, (0, 1)), (short, 2, (2, 3)), (long, 1, (4,)), (lanes, 1, (5, 6, 7, 8))]
    patterns = {id(moves): Pattern.of(moves) for moves in (short, long, lanes)}
    lots = [Lot(patterns[id(moves)], block, [memoryview(into[at]) for at in places]) for moves, block, places in asked]
    table = PieceTable.reading(lots)
    assert len(table) == 1400 * 2 + 3 + 600
    assert len(patterns[id(lanes)].wire) == 1  # on the wire
    [transfer] = engine.submit([Request(server.address, table, time.monotonic() + 20)])
    assert transfer.result().nbytes == table.nbytes == sum(int(moves[1].sum()) for moves, _, _ in asked)
    for moves, block, places in asked:
        for offset, length, memory, place in moves.T.tolist():
            wanted[places[memory]][place : place + length] = segment.block(block)[offset : offset + length]
    assert into == wanted  # and nothing beside them
    engine.close()


def test_a_slice_has_no_more_ranges_than_a_frame_and_no_more_bytes_than_were_asked_for():
    many, few = Pattern.of(ragged(2000, 1)), Pattern.of(ragged(30, 1))
    memory = memoryview(bytearray(2000 * 4000))
    table = PieceTable.reading(
        [Lot(each, block, [memory]) for block, each in enumerate([few, few, many, few, few, few])]
    )
    for size in (1, 9000, SLICE_BYTES, 1 << 30):
        parts = list(table.cut(size))
        assert [piece for part in parts for piece in part] == list(table)
        assert all(part.nbytes == sum(piece.wire.length for piece in part) <= max(size, 4000) for part in parts)
        assert all(len(part.ranges()) == part.num_ranges <= MAX_RANGES for part in parts)
    [together] = PieceTable.reading([Lot(few, block, [memory]) for block in range(3)]).cut(SLICE_BYTES)
    assert len(together.lots) == 3


@pytest.mark.parametrize(
    ("row", "block"),
    [
        ((0, 0, 0, 0), 0),
        ((0, -1, 0, 1), 0),
        ((-1, 2, 0, 0), 0),
        ((0, 1, 0, -1), 0),
        ((0, 8, 0, 93), 0),  # past its memory
        ((0, 101, 0, 0), 0),
        ((1 << 32, 1, 0, 0), 0),  # what would wrap round on the wire
        ((0, 1, 0, 0), 1 << 32),
        ((0, 1, 0, 0), -1),
        ((BLOCK - 1, 2, 0, 0), 0),  # past the block
        ((0, 1, 0, 0), NUM),
    ],
)
def test_a_row_outside_is_refused(row: tuple[int, ...], block: int, owner: tuple[Segment, SegmentServer]):
    engine = TransferEngine("reader", ("tcp",))
    with pytest.raises(InvalidRequest, match="a row outside"):
        pattern = Pattern.of(np.array([(0, 1, 0, 0), row]).T)
        table = PieceTable.reading([Lot(pattern, block, [memoryview(bytearray(100))])])
        engine.submit([Request(owner[1].address, table, time.monotonic() + 20)])
    engine.close()


def test_read_only_memory_and_checksums_are_refused(owner: tuple[Segment, SegmentServer]):
    pattern = Pattern.of(np.array([[0], [1], [0], [0]]))
    with pytest.raises(InvalidRequest, match="read-only"):
        PieceTable.reading([Lot(pattern, 0, [memoryview(b"x")])])
    engine = TransferEngine("reader", ("tcp",))
    table = PieceTable.reading([Lot(pattern, 0, [memoryview(bytearray(1))])])
    with pytest.raises(InvalidRequest, match="no checksums"):
        engine.submit([Request(owner[1].address, table, time.monotonic() + 20, checksum_bytes=64)])
    engine.close()
