"""A client's half of the board of a store on its host: it looks blocks up, copies them and fills slots, without asking.

Readers need no lease: a copy counts only if the block was listed under the same epoch before and after it, and the copy
has the listed checksums.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvstore.board.library import (
    ADDRESS,
    FILES,
    GREETING,
    WRITER_ID_BYTES,
    load_board,
    load_get,
)
from kvstore.checksum import Checksums
from kvstore.segment import is_sealed_size
from kvstore.transfer.native import MAX_SUMS, MIN_SUM_BYTES
from mooncake.errors import NodeUnavailable
from mooncake.prefault import prefault_in_background

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 2.0


class Outcome(IntEnum):
    """The result of reading a block. After anything but READ the destination's content is undefined."""

    GONE = -1  # the store is
    READ = 0
    MISSING = 1
    CHANGED = 2  # while it was being read, or it has another length
    CORRUPT = 3


_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


class _Mapped:
    """A reader's mapping, which lives as long as anyone references this."""

    def __init__(self, library: ctypes.CDLL, reader: int, sock: socket.socket) -> None:
        self.reader = reader
        self._library = library
        self._sock = sock  # open as long as the store exists

    def __del__(self) -> None:
        self._library.board_leave(self.reader)
        self._sock.close()

    def segment(self) -> npt.NDArray[np.uint8]:
        """The store's slots, shape [bytes]."""
        size = self._library.board_segment_bytes(self.reader)
        memory = (ctypes.c_uint8 * size).from_address(self._library.board_segment(self.reader))
        memory._owner = self
        return np.frombuffer(memory, dtype=np.uint8)


class BoardReader:
    """A client's side, usable from any thread. After ``close`` it reports every block as absent."""

    def __init__(self, library: ctypes.CDLL, mapped: _Mapped, writer_id: str) -> None:
        self.writer_id = writer_id  # under which the store grants us slots
        self._library = library
        self._get = load_get()
        self._block_bytes = int(library.board_block_bytes(mapped.reader))
        # Every read holds a reference: it is unmapped once this is closed and the last read has ended.
        self._mapped: _Mapped | None = mapped
        self._segment: npt.NDArray[np.uint8] | None = mapped.segment()
        prefault_in_background(self._segment)  # the first touch of a page in a copy would double the copy's cost

    @classmethod
    def open(cls, path: str) -> BoardReader | None:
        """None if no store of this host is at ``path``, or we cannot read its board."""
        library = load_board()
        if library is None:
            return None
        files: list[int] = []
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # out of file descriptors
            log.debug("no board at %s: %s", path, error)
            return None
        try:
            sock.settimeout(OPEN_TIMEOUT_S)
            sock.connect("\0" + path[1:])
            greeting, files, _, _ = socket.recv_fds(sock, len(GREETING) + WRITER_ID_BYTES, FILES)
            writer_id = greeting[len(GREETING) :].decode("ascii", "replace")
            if greeting.startswith(GREETING) and len(files) == FILES and all(map(is_sealed_size, files)):
                sock.setblocking(False)
                reader = library.board_open(*files, sock.fileno())
                if reader:
                    return cls(library, _Mapped(library, reader, sock), writer_id)
        except OSError as error:
            log.debug("no board at %s: %s", path, error)
        finally:
            for fd in files:
                os.close(fd)
        sock.close()
        return None

    @property
    def lists_all(self) -> bool:
        """Whether it lists everything in the store's DRAM: not so for blocks with very many or very short ranges."""
        mapped = self._mapped
        return mapped is not None and bool(self._library.board_lists_all(mapped.reader))

    def exists(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Whether each is listed; None when the store is gone."""
        mapped = self._mapped
        if mapped is None:
            return None
        ends = np.cumsum(np.fromiter(map(len, keys), dtype=np.uint32, count=len(keys)), dtype=np.uint32)
        here = ctypes.create_string_buffer(len(keys))
        places = ends.ctypes.data_as(ADDRESS)
        found = self._library.board_exists(mapped.reader, b"".join(keys), places, len(keys), here)
        return None if found < 0 else [byte == 1 for byte in here.raw]

    def length(self, key: bytes) -> int | None:
        """The length of a listed block."""
        mapped = self._mapped
        if mapped is None:
            return None
        length = int(self._library.board_length(mapped.reader, key, len(key)))
        return length if length >= 0 else None

    def read(self, key: bytes, into: memoryview) -> Outcome:
        """Copy a block of exactly this length, and verify the copy, in one pass."""
        mapped = self._mapped
        if mapped is None:
            return Outcome.GONE
        address = ctypes.addressof(ctypes.c_char.from_buffer(into))
        return _OUTCOMES[self._library.board_read(mapped.reader, key, len(key), address, into.nbytes)]

    def get(self, key: bytes, into: object) -> int | None:
        """Copy a block of at most 4 MiB, and verify the copy, in one call. Returns its length; None if that is not
        possible, for example because ``into`` is too short or not a writable contiguous buffer."""
        mapped = self._mapped
        return self._get(mapped.reader, key, into) if mapped is not None else None

    def receive(self) -> tuple[int, int] | None:
        """A slot that the store lets us fill, with its epoch. Only on the client's event loop."""
        mapped = self._mapped
        gift = (ctypes.c_uint64 * 2)()
        if mapped is None or not self._library.board_receive(mapped.reader, gift):
            return None
        return gift[0], gift[1]

    def takes(self, nbytes: int, ranges: int) -> bool:
        """Whether a block like this can be written and then listed."""
        is_right = 1 <= ranges <= MAX_SUMS and nbytes <= self._block_bytes and not nbytes % ranges
        return is_right and nbytes >= MIN_SUM_BYTES * ranges

    def write(self, slot: int, data: memoryview, ranges: int) -> Checksums:
        """Copy into a slot of ours, and compute the checksums of what is copied, in one pass. Raises NodeUnavailable
        after ``close``."""
        mapped = self._mapped
        if mapped is None:
            raise NodeUnavailable("this client of the store has been closed")
        sums: Checksums = np.zeros(ranges, dtype=np.uint64)
        source = np.frombuffer(data, dtype=np.uint8)
        at, sums_at = source.ctypes.data_as(ADDRESS), sums.ctypes.data_as(ADDRESS)
        self._library.board_write(mapped.reader, slot, at, len(source), ranges, sums_at)
        return sums

    def close(self) -> None:
        """Stop listing anything. Reads in progress finish."""
        self._mapped = self._segment = None
