"""The owner's side of the data plane in C++ (wire.cpp): answers reads and writes of a segment, and calls for blocks by
key, without the GIL. Without a compiler server_frames.py answers those of ranges in Python."""

from __future__ import annotations

import ctypes
import functools
import mmap
import socket
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.checksum import Checksums
from kvstore.segment import Segment
from kvstore.transfer import protocol
from kvstore.transfer.native import MAX_SUMS, check_code, check_sizes, load

HEAD_BYTES = protocol.FRAME_BYTES + protocol.RANGE_BYTES
MAX_AHEAD = 64


class _Owner(ctypes.Structure):
    """Mirrors ``Owner`` of wire.cpp."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("segment", "grants", "block_bytes", "num_blocks", "credit_bytes")),
        *((name, ctypes.c_uint64) for name in ("board", "mailbox", "book", "list", "wake", "know")),
        *((name, ctypes.c_uint64) for name in ("is_locked", "num_ahead")),
        ("ahead", ctypes.c_uint64 * (2 * MAX_AHEAD)),
    )


class Arrival(ctypes.Structure):
    """Mirrors ``Arrival`` of board.h: a block that arrived completely."""

    _fields_ = (
        ("slot", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("length", ctypes.c_uint32),
        ("ranges", ctypes.c_uint16),
        ("name_bytes", ctypes.c_uint16),
        ("sums", ctypes.c_uint64 * MAX_SUMS),
        ("name", ctypes.c_uint8 * protocol.MAX_NAME_BYTES),
    )

    def landed(self) -> Landed:
        """Raises ProtocolViolation."""
        at = ctypes.addressof(self)
        key, parent, tenant = protocol.unpack_name(ctypes.string_at(at + Arrival.name.offset, self.name_bytes))
        sums = np.frombuffer(ctypes.string_at(at + Arrival.sums.offset, 8 * self.ranges), dtype=np.uint64)
        return Landed(key, parent, tenant, self.slot, self.epoch, self.length, sums)


class _Connection(ctypes.Structure):
    """Mirrors ``Connection`` of wire.cpp."""

    _fields_ = (
        ("head", ctypes.c_uint8 * HEAD_BYTES),
        ("padding", ctypes.c_uint32),
        ("fd", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("bytes_in", "bytes_out", "refused", "num_landing")),
        ("landing", ctypes.c_uint32 * protocol.MAX_RANGES),
        ("arrival", Arrival),
    )


@functools.cache
def load_owner() -> ctypes.CDLL | None:
    """The library, ready for ``NativeOwner``, or None if it cannot be built."""
    library = load()
    if library is not None:
        library.serve.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        library.give_ahead.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
        library.take_ahead.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        check_sizes(library, _Owner, _Connection)
    return library


class Event(IntEnum):
    """Why ``NativeOwner.serve`` returned."""

    FRAME = 0  # one that it does not handle
    LANDED = -3  # a block has arrived, and the board does not know whether to list it


_EVENTS = {event.value: event for event in Event}


class Landed(NamedTuple):
    """A block that arrived completely: its name, its slot, and the checksums of its equal ranges."""

    key: bytes
    parent: bytes
    tenant: str
    slot: int
    epoch: int
    length: int
    checksums: Checksums


class MappedBoard(Protocol):
    """Where the owner finds blocks by key, and lists arriving ones: a board (``kvstore.board``)."""

    def map_for_owner(self) -> tuple[mmap.mmap, mmap.mmap]:
        """The board, and a mailbox for noting what has been read."""
        ...

    def book_for_owner(self) -> tuple[int, int, int, int]:
        """Addresses: of the book, and of the functions that list a block, wake the store, and look up its blocks."""
        ...


class NativeOwner:
    """Answers reads and writes of one segment. Keeps the mappings it works in alive."""

    def __init__(
        self, library: ctypes.CDLL, segment: Segment, grants: mmap.mmap, listing: MappedBoard | None, takes_puts: bool
    ) -> None:
        """``grants`` is the table of epochs, one uint64 per block. Without a ``listing`` nothing can be found by key
        or put."""
        self._library = library
        self._listing = listing  # whose book is used for as long as a thread serves
        maps = [grants, *(listing.map_for_owner() if listing is not None else ())]
        self._kept = [segment.array, *(np.frombuffer(memory, dtype=np.uint8) for memory in maps)]
        segment_at, grants_at, *listing_at = (memory.ctypes.data for memory in self._kept)
        board_at, mailbox_at = listing_at or (0, 0)
        book, list_at, wake, know = listing.book_for_owner() if listing is not None and takes_puts else (0, 0, 0, 0)
        self._owner = _Owner(
            segment_at,
            grants_at,
            segment.block_bytes,
            segment.num_blocks,
            board=board_at,
            mailbox=mailbox_at,
            book=book,
            list=list_at,
            wake=wake,
            know=know,
        )
        self._owner_at = ctypes.addressof(self._owner)

    def serve(self, connection: NativeConnection) -> Event:
        """Returns when something arrives that it cannot handle; ``connection.head`` then has the start of the frame.
        Raises PeerClosed, ProtocolViolation, DeadlineExceeded or another OSError."""
        code = self._library.serve(self._owner_at, connection.state_at)
        if code not in _EVENTS:
            check_code(code)
        return _EVENTS[code]

    def give_ahead(self, slot: int, epoch: int) -> bool:
        """A slot for a block that will be put. False when there are enough."""
        return bool(self._library.give_ahead(self._owner_at, slot, epoch))

    def take_ahead(self) -> tuple[int, int] | None:
        """Take one of them back, with its epoch."""
        slot = (ctypes.c_uint64 * 2)()
        return (slot[0], slot[1]) if self._library.take_ahead(self._owner_at, slot) else None

    def set_credit(self, nbytes: int) -> None:
        """The most bytes that each connection may have in flight."""
        self._owner.credit_bytes = nbytes

    def fence(self) -> None:
        """Call after changing the grants, before looking at what is landing."""
        self._library.fence()


class NativeConnection:
    """What ``serve`` knows of one connection, readable from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._state = _Connection(fd=sock.fileno())
        self.state_at = ctypes.addressof(self._state)
        self.head = memoryview(self._state.head).cast("B")

    @property
    def landing(self) -> frozenset[int]:
        """Blocks that the frame being received writes into."""
        return frozenset(self._state.landing[: self._state.num_landing])

    def landed(self) -> Landed:
        """Valid after LANDED. Raises ProtocolViolation."""
        landed: Landed = self._state.arrival.landed()
        return landed

    @property
    def landed_in(self) -> tuple[int, int]:
        """Valid after LANDED: the slot and its epoch."""
        return self._state.arrival.slot, self._state.arrival.epoch

    @property
    def counts(self) -> tuple[int, int, int]:
        """Bytes in, bytes out, frames refused."""
        return self._state.bytes_in, self._state.bytes_out, self._state.refused
