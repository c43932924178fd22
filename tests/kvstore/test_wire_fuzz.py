"""Anyone can connect to a segment's TCP port and send anything: it must not crash, nor write where it may not."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings

from kvstore.board.board import Board
from kvstore.checksum import range_checksums
from kvstore.segment import Segment
from kvstore.transfer import native, protocol
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.owner.server_connection import Put
from kvstore.transfer.protocol import ProtocolViolation, Status
from kvstore.transfer.requests import ReadRange
from mooncake.addresses import split_address

BLOCK, NUM, GRANTED, AHEAD, EPOCH = 4096, 5, 2, 4, 9
PATTERN = bytes(range(256)) * (BLOCK // 256)


class Target:
    """A segment in which one block is granted to EPOCH, one can be fetched by key and one is given ahead to be put."""

    def __init__(self, is_native: bool) -> None:
        self.segment = Segment.create("fuzz", BLOCK, NUM)
        for i in range(NUM):
            self.segment.block(i)[:] = PATTERN
        self.board = Board.create(self.segment)
        self.server = SegmentServer(
            self.segment, "fuzz", ("tcp",), is_native=is_native, listing=self.board, on_put=self.take
        )
        self.server.start()
        self.server.grant([GRANTED, AHEAD], EPOCH)
        self.server.give_ahead(AHEAD, EPOCH)
        if self.board is not None:
            self.board.expect(AHEAD, EPOCH)
            self.board.show(0, EPOCH, b"key", BLOCK, range_checksums(PATTERN, 2))
        self.hello = protocol.pack_hello(self.segment.incarnation, "fuzz", 1)

    def take(self, put: Put) -> None:
        """Take a put that the board would not list: it is in a granted slot, or claims any other."""
        if (put.landed.slot, put.landed.epoch) == (AHEAD, EPOCH):
            self.server.give_ahead(AHEAD, EPOCH)
        put.answer(Status.NO_SLOT)

    def throw(self, data: bytes) -> None:
        """Send all bytes, close, and wait until the server has processed them."""
        with socket.create_connection(split_address(self.server.address.tcp_address), timeout=5.0) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except TimeoutError:
                raise
            except OSError:
                pass  # it has hung up first

    def check(self) -> None:
        for i in range(NUM):
            if i not in (GRANTED, AHEAD):
                assert self.segment.block(i) == PATTERN
        engine = TransferEngine("checker", ("tcp",), streams=1)
        into = bytearray(BLOCK)
        engine.read(self.server.address, [ReadRange(0, 0, into)], time.monotonic() + 5)
        engine.close()
        assert into == PATTERN
        for came in self.board.take_arrived() if self.board is not None else ():
            assert came.slot == AHEAD  # the other one that is granted was not given for a block without a name
            self.board.hide(AHEAD)
            self.server.grant([AHEAD], EPOCH)
            self.server.give_ahead(AHEAD, EPOCH)


@pytest.fixture(scope="module", params=["C++", "Python"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    if request.param == "C++" and native.load() is None:
        pytest.skip("there is no compiler")
    crashes: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, crashes.append
    target = Target(request.param == "C++")
    yield target
    target.server.stop()
    if target.board is not None:
        target.board.close()
    target.segment.close()
    threading.excepthook = before
    assert crashes == []


SETTINGS = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(data=st.binary(max_size=200))
@example(data=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
def test_any_bytes_from_a_stranger_leave_a_server_that_serves_others(target: Target, data: bytes) -> None:
    target.throw(data)
    target.check()


@SETTINGS
@given(data=st.binary(max_size=400))
def test_any_bytes_after_a_good_hello_leave_it_serving_too(target: Target, data: bytes) -> None:
    target.throw(target.hello + data)
    target.check()


u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
near = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2**31, 2**32 - 1])
ranges = st.lists(st.tuples(st.integers(0, NUM) | u32, near, near, st.sampled_from([0, EPOCH]) | u64), max_size=5)


@SETTINGS
@given(
    operation=st.sampled_from([1, 2, 3, 4, 5, 6]) | u16,
    count=st.none() | u16,
    size=st.none() | u32,
    rows=ranges,
    payload=st.binary(max_size=64),
)
@example(operation=1, count=None, size=None, rows=[(GRANTED, BLOCK - 1, 2, EPOCH)], payload=b"xx")
@example(operation=1, count=None, size=None, rows=[(GRANTED, 0, 1, EPOCH), (GRANTED - 1, 0, 1, EPOCH)], payload=b"xx")
@example(operation=1, count=None, size=None, rows=[(GRANTED, 2**32 - 1, 1, EPOCH)], payload=b"x")
@example(operation=4, count=2, size=10, rows=[(0, 0, 10, 0)], payload=b"\3\0key\3\0kex")
@example(operation=4, count=2, size=10, rows=[(0, 0, 10, 0)], payload=b"\3\0key\6\0kex")
@example(operation=5, count=1, size=6 + 500 + 16, rows=[(2, 6, 500, 0)], payload=bytes(6 + 500 + 16))
@example(operation=5, count=1, size=6 + BLOCK + 2 + 8, rows=[(1, 6, BLOCK + 2, 0)], payload=b"")
@example(operation=6, count=1, size=7 + 8, rows=[(0, 7, 500, 0)], payload=b"\1\0\0\0\0\0k" + bytes(8))
@example(operation=6, count=1, size=7 + 8, rows=[(AHEAD, 7, 500, EPOCH)], payload=b"\1\0\0\0\0\0k" + bytes(8))
@example(operation=6, count=1, size=7 + 8, rows=[(GRANTED, 7, 500, EPOCH)], payload=b"\1\0\0\0\0\0k" + bytes(8))
@example(operation=6, count=1, size=7, rows=[(0, 9, 500, 0)], payload=bytes(7))
def test_frames_with_any_numbers_leave_a_server_that_serves_others(
    target: Target,
    operation: int,
    count: int | None,
    size: int | None,
    rows: list[tuple[int, int, int, int]],
    payload: bytes,
) -> None:
    """Headers that are nearly right: counts that lie, ranges across every edge, epochs that are not granted."""
    total = min(sum(length for _, _, length, _ in rows), 2**32 - 1)
    frame = struct.pack(
        "<HHIQ", operation, len(rows) if count is None else count, total if size is None else size, 1
    ) + b"".join(struct.pack("<IIIQ", *row) for row in rows)
    target.throw(target.hello + frame + payload + b"z" * min(total, 2 * BLOCK))
    target.check()


@given(data=st.binary(min_size=protocol.REPLY_BYTES, max_size=protocol.REPLY_BYTES))
def test_a_reply_is_understood_or_refused(data: bytes) -> None:
    with contextlib.suppress(ProtocolViolation):
        assert protocol.pack_reply(*_fields(protocol.unpack_reply(data))) == data


@given(data=st.lists(st.binary(min_size=8, max_size=8)).map(b"".join))
@example(data=struct.pack("<IHH", 240, 1, 0))  # too short to be hashed
@example(data=struct.pack("<IHH", 1000, 0, 0))
def test_what_was_found_can_be_taken_in(data: bytes) -> None:
    with contextlib.suppress(ProtocolViolation):
        for length, ranges in protocol.unpack_found(data, native.MAX_SUMS, native.MIN_SUM_BYTES):
            assert not length or native.MIN_SUM_BYTES <= length / ranges == length // ranges


@given(data=st.binary(min_size=protocol.WELCOME_BYTES, max_size=protocol.WELCOME_BYTES))
def test_a_welcome_is_understood_or_refused(data: bytes) -> None:
    with contextlib.suppress(ProtocolViolation):
        welcome = protocol.unpack_welcome(data)
        assert protocol.pack_welcome(welcome.status, welcome.block_bytes, welcome.num_blocks, welcome.challenge) == data


def _fields(reply: protocol.Reply) -> tuple[protocol.Status, int, int, int, int]:
    return reply.status, reply.refused, reply.payload_bytes, reply.frame_id, reply.credit_bytes
