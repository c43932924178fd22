"""The data plane's bytes in C++ (wire.cpp): sending, receiving and answering without the GIL, with the checksums taken
while the bytes are in cache. Built at first use; without a compiler sockets.py and server.py do the same in Python.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import logging
import mmap
import os
import socket
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.segment import Segment
from kvstore.transfer import protocol
from kvstore.transfer.piece_table import PieceTable
from kvstore.transfer.protocol import ProtocolViolation
from kvstore.transfer.sockets import PeerClosed, Wire
from kvstore.transfer.transport import Slice
from mooncake.errors import DeadlineExceeded
from mooncake.native import BuildFailed, load_native

log = logging.getLogger(__name__)

WORTH_BYTES = 16 << 10  # pieces smaller than this go out sooner from Python
MIN_SUM_BYTES = 241  # shorter ranges have another xxh3, which wire.cpp does not know
HEAD_BYTES = protocol.FRAME_BYTES + protocol.RANGE_BYTES
_CLOSED, _VIOLATION = -1, -2


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it cannot be built."""
    try:
        library = load_native("wire", Path(__file__).with_name("wire.cpp"))
    except BuildFailed as error:
        log.warning("moving bytes over TCP in Python, at twice the cost: %s", error)
        return None
    for move in (library.send_parts, library.receive_parts):
        move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_double)
    library.serve.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


# The caller's side

_Move = Callable[[int, int, int, int, float], int]  # flow, parts, number of parts, checksum_bytes, deadline: an errno


class _Flow(ctypes.Structure):
    """``Flow`` of wire.cpp."""

    _fields_ = (
        ("fd", ctypes.c_int64),
        ("tick_us", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("part", "offset", "hashed_part", "hashed_offset")),
        ("lanes", ctypes.c_uint64 * 8),
    )


class NativeWire(Wire):
    """A ``Wire`` that also moves whole slices, in one call each."""

    def __init__(self, sock: socket.socket, library: ctypes.CDLL) -> None:
        super().__init__(sock)
        self._flow = _Flow(fd=sock.fileno())
        self._flow_at = ctypes.addressof(self._flow)
        self._send_parts, self._receive_parts = library.send_parts, library.receive_parts

    def send_slice(self, head: bytes, part: Slice) -> None:
        """``head``, then what the slice is to write. Raises like ``send``."""
        self._move(self._send_parts, socket.SO_SNDTIMEO, head, part)

    def receive_slice(self, head: bytearray, part: Slice) -> None:
        """Fill ``head``, then what the slice is to read. Raises like ``receive``."""
        self._move(self._receive_parts, socket.SO_RCVTIMEO, head, part)

    def _move(self, move: _Move, option: int, head: bytes | bytearray, part: Slice) -> None:
        table = _parts(head, part)
        flow = self._flow
        flow.part = flow.offset = flow.hashed_part = flow.hashed_offset = 0
        flow.tick_us = round(self._ticks[option] * 1e6)
        code = errno.EINTR
        while code == errno.EINTR:  # Python has handled the signal: go on where we were
            code = move(self._flow_at, table.buffer_info()[0], len(table) // 3, part.checksum_bytes, part.deadline)
        self._ticks[option] = flow.tick_us / 1e6
        _check(code)


def suits(part: Slice) -> bool:
    """Whether a call of ``NativeWire`` is worth it, and can take the checksums that are wanted."""
    if part.nbytes < WORTH_BYTES * len(part.pieces) and not isinstance(part.pieces, PieceTable):
        return False
    size = part.checksum_bytes
    return size == 0 or all(
        size >= MIN_SUM_BYTES and not 0 < piece.local.nbytes % size < MIN_SUM_BYTES for piece in part.pieces
    )


def _parts(head: bytes | bytearray, part: Slice) -> array[int]:
    """``Part`` of wire.cpp for the head and for each piece: address, bytes, where its checksums go."""
    rows = array("Q", (_address_of(head), len(head), 0))
    if isinstance(part.pieces, PieceTable):
        rows.frombytes(part.pieces.parts().tobytes())
        return rows
    sums_at = [each.ctypes.data for each in part.sums] or itertools.repeat(0)
    for piece, sum_at in zip(part.pieces, sums_at):  # noqa: B905
        rows.extend((_address_of(piece.local), piece.local.nbytes, sum_at))
    return rows


def _address_of(memory: bytes | bytearray | memoryview) -> int:
    """Also of read-only memory, which ctypes refuses."""
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])


def _check(code: int) -> None:
    if code == 0:
        return
    if code == _CLOSED:
        raise PeerClosed("the peer closed the connection")
    if code == _VIOLATION:
        raise ProtocolViolation("the ranges do not add up to the payload")
    if code == errno.ETIMEDOUT:
        raise DeadlineExceeded("the deadline of the transfer is past")
    raise OSError(code, os.strerror(code))


# The owner's side


class _Owner(ctypes.Structure):
    """``Owner`` of wire.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("segment", "grants", "block_bytes", "num_blocks", "credit_bytes")
    )


class _Connection(ctypes.Structure):
    """``Connection`` of wire.cpp."""

    _fields_ = (
        ("head", ctypes.c_uint8 * HEAD_BYTES),
        ("padding", ctypes.c_uint32),
        ("fd", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("bytes_in", "bytes_out", "refused", "num_landing")),
        ("landing", ctypes.c_uint32 * protocol.MAX_RANGES),
    )


class NativeOwner:
    """Answers reads and writes of one segment. Keeps the segment's and the grants' mappings alive."""

    def __init__(self, library: ctypes.CDLL, segment: Segment, grants: mmap.mmap) -> None:
        """``grants`` is the table of epochs, a uint64 a block."""
        self._library = library
        self._kept = segment.array, np.frombuffer(grants, dtype=np.uint64)
        self._owner = _Owner(
            *(memory.ctypes.data for memory in self._kept),
            block_bytes=segment.block_bytes,
            num_blocks=segment.num_blocks,
        )

    def serve(self, connection: NativeConnection) -> None:
        """Until a frame begins that is neither a read nor a write: ``connection.head`` holds its beginning then.
        Raises PeerClosed, ProtocolViolation, DeadlineExceeded or another OSError."""
        _check(self._library.serve(ctypes.addressof(self._owner), connection.state_at))

    def set_credit(self, nbytes: int) -> None:
        """What each connection may have on its way."""
        self._owner.credit_bytes = nbytes

    def fence(self) -> None:
        """Whoever has changed the grants calls it before looking at what is landing."""
        self._library.fence()


class NativeConnection:
    """What ``serve`` knows of one connection, for any thread to read."""

    def __init__(self, sock: socket.socket) -> None:
        self._state = _Connection(fd=sock.fileno())
        self.state_at = ctypes.addressof(self._state)
        self.head = memoryview(self._state.head).cast("B")

    @property
    def landing(self) -> frozenset[int]:
        """Blocks that the frame which is being received writes into."""
        return frozenset(self._state.landing[: self._state.num_landing])

    @property
    def counts(self) -> tuple[int, int, int]:
        """Bytes in, bytes out, frames refused."""
        return self._state.bytes_in, self._state.bytes_out, self._state.refused
