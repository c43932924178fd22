"""The caller's side of the data plane in C++ (wire.cpp): sends and receives without the GIL, computing checksums while
the bytes are in cache, and copies what is larger than caches. Built at first use; without a compiler sockets.py and
numpy do the same. The owner's side is in ``native_owner``."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import logging
import os
import socket
import struct
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.pointers import address_of
from kvstore.transfer import protocol
from kvstore.transfer.piece_table import PieceTable
from kvstore.transfer.protocol import Operation, ProtocolViolation
from kvstore.transfer.sockets import PeerClosed, Wire
from kvstore.transfer.transport import Slice
from mooncake.errors import DeadlineExceeded
from mooncake.native import BuildFailed, load_native

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("wire.cpp")
HEADERS = [
    *(SOURCE.with_name(name) for name in ("flow.h", "frames.h")),
    *(SOURCE.parents[1] / name for name in ("board/board.h", "copy.h", "xxh3.h")),
]
WORTH_BYTES = 16 << 10  # smaller pieces are sent sooner from Python
MANY_BYTES = 64 << 10  # copies from here on go past the caches: nothing is read to be overwritten
MIN_SUM_BYTES = 241  # xxh3 treats shorter input differently, which our C++ does not implement
MAX_SUMS = 94  # per block fetched or put: what a board lists
_CLOSED, _VIOLATION, _OTHER = -1, -2, -4
_READ = Operation.READ  # enum members are slow to look up
_ASKED = struct.Struct(protocol.FRAME_1 + "4xQQQQd")  # from ``head`` to ``deadline_s`` in ``Sliced`` of wire.cpp


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None if it cannot be built."""
    try:
        library = load_native("wire", SOURCE, HEADERS)
    except BuildFailed as error:
        log.warning("moving bytes over TCP in Python, at twice the cost: %s", error)
        return None
    for move in (library.send_parts, library.receive_parts):
        move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_double)
    size, time_s, memory = ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p
    library.exchange.argtypes = (memory,)
    library.copy.argtypes = (memory, memory, size)
    library.copy.restype = None
    library.keyed_ask.argtypes = (memory, ctypes.c_char_p, size, size, time_s)
    library.keyed_get.argtypes = (memory, ctypes.c_char_p, size, memory, size, memory, time_s)
    library.keyed_receive.argtypes = (memory, memory, size, size, time_s)
    library.keyed_put.argtypes = (memory, ctypes.c_char_p, size, memory, size, size, time_s)
    check_sizes(library, _Sliced, _Keyed)
    return library


def copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """All of ``source`` into as many contiguous bytes. Releases the GIL, which assigning to a memoryview does not.
    Raises ValueError for another number of bytes, and for memory that is not to be written."""
    library = load() if MANY_BYTES <= source.nbytes == target.nbytes and target.flags.writeable else None
    if library is None:
        np.copyto(target, source)
    else:
        library.copy(target.ctypes.data, source.ctypes.data, source.nbytes)


def check_sizes(library: ctypes.CDLL, *described: type[ctypes.Structure]) -> None:
    """Asserts that wire.cpp has these structures, too."""
    for structure in described:
        name = f"{structure.__name__[1:].lower()}_size"
        assert getattr(library, name)() == ctypes.sizeof(structure), f"wire.cpp has another {name} than Python"


_Move = Callable[[int, int, int, int, float], int]  # flow, parts, their number, checksum_bytes, deadline: an errno


class _Flow(ctypes.Structure):
    """Mirrors ``Flow`` of wire.cpp."""

    _fields_ = (
        ("fd", ctypes.c_int64),
        ("tick_us", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("part", "offset", "hashed_part", "hashed_offset")),
        ("lanes", ctypes.c_uint64 * 8),
    )


class _Reply(ctypes.LittleEndianStructure):
    """Mirrors ``protocol.pack_reply``."""

    _pack_ = 1
    _fields_ = (("beginning", ctypes.c_uint8 * (protocol.REPLY_BYTES - 4)), ("credit_bytes", ctypes.c_uint32))


class _Sliced(ctypes.Structure):
    """Mirrors ``Sliced`` of wire.cpp."""

    _fields_ = (
        ("incoming", _Flow),
        ("out", _Flow),
        ("step", ctypes.c_uint64),
        ("asked", ctypes.c_uint8 * _ASKED.size),
        ("reply", _Reply),
    )


class NativeWire(Wire):
    """A ``Wire`` that also moves whole slices, in one call each, or in one call with their replies."""

    def __init__(self, sock: socket.socket, library: ctypes.CDLL) -> None:
        fd = sock.fileno()
        self._state = _Sliced(incoming=_Flow(fd=fd), out=_Flow(fd=fd))
        self._flows = {socket.SO_RCVTIMEO: self._state.incoming, socket.SO_SNDTIMEO: self._state.out}
        self._at = ctypes.addressof(self._state)
        self._asked = memoryview(self._state.asked).cast("B")
        self._reply = self._state.reply
        self._send_parts, self._receive_parts = library.send_parts, library.receive_parts
        self._exchange = library.exchange
        super().__init__(sock)

    def send_slice(self, head: bytes, part: Slice) -> None:
        """Send ``head``, then the data of a write. Raises like ``send``."""
        self._move(self._send_parts, self._state.out, head, part)

    def receive_slice(self, head: bytearray, part: Slice) -> None:
        """Fill ``head``, then the memory of a read. Raises like ``receive``."""
        self._move(self._receive_parts, self._state.incoming, head, part)

    def exchange(self, frame_id: int, part: Slice, hashed: bool) -> int:
        """Send a one-piece slice and receive its reply, when nothing else is in flight. Returns the new credit, or 0
        on failure: see ``reply``. ``hashed``: with checksums. It avoids Python code, which is slow while the caches
        hold streamed bytes."""
        [(wire, local)] = part.pieces
        sums_at = address_of(part.sums[0]) if hashed and part.sums else 0
        ranges = (part.operation, 1, part.nbytes, frame_id, *wire)
        _ASKED.pack_into(
            self._asked, 0, *ranges, address_of(local), part.nbytes, sums_at, part.checksum_bytes, part.deadline
        )
        code = _finished(self._exchange, self._at)
        if code == _OTHER:
            return 0
        check_code(code)
        return int(self._reply.credit_bytes)

    @property
    def reply(self) -> bytes:
        """The reply to the last ``exchange``."""
        return bytes(self._reply)

    def _move(self, move: _Move, flow: _Flow, head: bytes | bytearray, part: Slice) -> None:
        rows = _parts(head, part)
        rows_at, length = rows.buffer_info()
        flow.part = flow.offset = flow.hashed_part = flow.hashed_offset = 0
        flow_at = ctypes.addressof(flow)
        check_code(_finished(move, flow_at, rows_at, length // 3, part.checksum_bytes, part.deadline))

    def _tick(self, option: int) -> int:
        return int(self._flows[option].tick_us)

    def _set_tick(self, option: int, micros: int) -> None:
        super()._set_tick(option, micros)
        self._flows[option].tick_us = micros


class _Keyed(ctypes.Structure):
    """Mirrors ``Keyed`` of wire.cpp."""

    _fields_ = (
        ("incoming", _Flow),
        ("out", _Flow),
        ("step", ctypes.c_uint64),
        ("is_right", ctypes.c_uint64),
        *((name, ctypes.c_uint64 * MAX_SUMS) for name in ("made", "listed")),
        ("answer", ctypes.c_uint8 * (protocol.REPLY_BYTES + protocol.MAX_RANGES * protocol.FOUND_BYTES)),
    )


class NativeKeyed:
    """The client's end of a connection for blocks by key. One call at a time; after DeadlineExceeded the same call
    may be repeated, and continues where it was. All raise like ``Wire.receive``."""

    def __init__(self, wire: Wire, library: ctypes.CDLL) -> None:
        self.wire = wire
        self._library = library
        fd = wire.sock.fileno()
        self._state = _Keyed(incoming=_Flow(fd=fd), out=_Flow(fd=fd))
        self._at = ctypes.addressof(self._state)
        self.answer = memoryview(self._state.answer).cast("B")  # to the last ``ask`` or ``put``

    def ask(self, request: bytes, answer_bytes: int, deadline: float) -> None:
        check_code(_finished(self._library.keyed_ask, self._at, request, len(request), answer_bytes, deadline))

    def get(self, request: bytes, into: memoryview, deadline: float) -> tuple[int, bool]:
        """The requested block: its length, 0 if it is not there, and whether it matches its checksums. If it is
        longer than ``into``, nothing has been received, and the connection is unusable."""
        length = ctypes.c_uint64()
        where = address_of(into), into.nbytes, ctypes.addressof(length)
        check_code(_finished(self._library.keyed_get, self._at, request, len(request), *where, deadline))
        return length.value, bool(self._state.is_right)

    def receive(self, into: memoryview, ranges: int, deadline: float) -> bool:
        """The next block of the answer. Returns whether it matches its checksums."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(into))
        check_code(_finished(self._library.keyed_receive, self._at, address, into.nbytes, ranges, deadline))
        return bool(self._state.is_right)

    def put(self, head: bytes, data: memoryview, ranges: int, deadline: float) -> None:
        block = address_of(data), data.nbytes, ranges
        check_code(_finished(self._library.keyed_put, self._at, head, len(head), *block, deadline))


def hashes(part: Slice) -> bool:
    """Whether ``NativeWire`` can compute the requested checksums."""
    size = part.checksum_bytes
    if size == 0:
        return True
    if len(part.pieces) == 1:
        return size >= MIN_SUM_BYTES and not 0 < part.nbytes % size < MIN_SUM_BYTES
    return size >= MIN_SUM_BYTES and not any(0 < piece.local.nbytes % size < MIN_SUM_BYTES for piece in part.pieces)


def suits(part: Slice) -> bool:
    """Whether ``send_slice`` and ``receive_slice`` are worthwhile, and can compute the checksums."""
    is_worth_it = part.nbytes >= WORTH_BYTES * len(part.pieces) or type(part.pieces) is PieceTable
    return is_worth_it and hashes(part)


def _parts(head: bytes | bytearray, part: Slice) -> array[int]:
    """``Part`` of wire.cpp for the head and for each piece: address, bytes, address of its checksums."""
    rows = array("Q", (address_of(head), len(head), 0))
    if type(part.pieces) is PieceTable:
        rows.frombytes(part.pieces.parts())
        return rows
    sums_at = [address_of(each) for each in part.sums] if part.sums else itertools.repeat(0)
    for piece, sum_at in zip(part.pieces, sums_at, strict=False):
        local = piece.local
        rows.extend((address_of(local), len(local), sum_at))
    return rows


def _finished(call: Callable[..., int], *arguments: object) -> int:
    """The code that a function of wire.cpp ends with. After EINTR Python has handled a signal, and it goes on where it
    was."""
    while (code := call(*arguments)) == errno.EINTR:
        pass
    return code


def check_code(code: int) -> None:
    """Raises what a code returned by wire.cpp stands for: PeerClosed, ProtocolViolation, DeadlineExceeded or another
    OSError."""
    if code == 0:
        return
    if code == _CLOSED:
        raise PeerClosed("the peer closed the connection")
    if code == _VIOLATION:
        raise ProtocolViolation("the ranges do not add up to the payload")
    if code == errno.ETIMEDOUT:
        raise DeadlineExceeded("the deadline of the transfer is past")
    raise OSError(code, os.strerror(code))
