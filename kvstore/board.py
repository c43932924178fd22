"""The Python side of the board: the list of a store's DRAM blocks in shared memory, and how clients on the host read
it.

``board.cpp`` owns the layout and the order of loads and stores; this module owns files, sockets and lifetimes. Without
a C++ compiler a store has no board, and its clients ask it over the wire. Readers need no lease: a copy counts only if
the block was listed under the same epoch before and after it, and the copy has the listed checksums.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.checksum import Checksums
from kvstore.segment import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, Segment, is_sealed_size
from kvstore.transfer.native import MAX_SUMS, MIN_SUM_BYTES
from kvstore.transfer.native_owner import Arrival, Landed
from mooncake.errors import NodeUnavailable
from mooncake.native import MODULE_HEADER, BuildFailed, load_module, load_native
from mooncake.prefault import prefault_in_background

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("board.cpp")
HEADERS = [SOURCE.with_name("board.h"), SOURCE.with_name("xxh3.h")]
FLAGS = (f"-I{MODULE_HEADER.parent}",)
FILES = 3  # sent to a client: the board, its mailbox, the segment
GREETING = b"board 1\n"
WRITER_ID_BYTES = 36
OPEN_TIMEOUT_S = 2.0
MAX_ARRIVED = 64  # blocks listed by others, taken at a time
MAX_NOTES = 1024  # of blocks a client has read
MAX_GIFTS = 8  # slots for a client to fill

_ADDRESS, _U32, _U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "board_size": (_U64, [_U32]),
    "board_mailbox_size": (_U64, []),
    "board_max_ranges": (_U64, []),
    "board_min_range_bytes": (_U64, []),
    "board_arrival_size": (_U64, []),
    "board_max_arrived": (_U64, []),
    "board_max_notes": (_U64, []),
    "board_max_gifts": (_U64, []),
    "board_create": (_ADDRESS, [ctypes.c_int, _U32, _U64, _U64, ctypes.c_int]),
    "board_close": (None, [_ADDRESS]),
    "board_show": (ctypes.c_int, [_ADDRESS, _U32, _U64, ctypes.c_char_p, _U32, _U32, _ADDRESS, _U32]),
    "board_hide": (None, [_ADDRESS, _U32]),
    "board_mark": (None, [_ADDRESS, ctypes.c_char_p, _U32, ctypes.c_int]),
    "board_hold": (None, [_ADDRESS, ctypes.c_int]),
    "board_expect": (None, [_ADDRESS, _U32, _U64]),
    "board_count_unlisted": (None, [_ADDRESS, _U32]),
    "board_lists_all": (ctypes.c_int, [_ADDRESS]),
    "board_be_patient": (None, [_ADDRESS, _U32]),
    "board_take_arrived": (_U32, [_ADDRESS, _ADDRESS]),
    "board_open_mailbox": (_ADDRESS, [ctypes.c_int]),
    "board_close_mailbox": (None, [_ADDRESS]),
    "board_take_notes": (_U32, [_ADDRESS, _ADDRESS, _ADDRESS, _U32]),
    "board_give": (ctypes.c_int, [_ADDRESS, _U64, _U64]),
    "board_receive": (ctypes.c_int, [_ADDRESS, _ADDRESS]),
    "board_open": (_ADDRESS, [ctypes.c_int] * 4),
    "board_segment": (_ADDRESS, [_ADDRESS]),
    "board_segment_bytes": (_U64, [_ADDRESS]),
    "board_leave": (None, [_ADDRESS]),
    "board_exists": (ctypes.c_int32, [_ADDRESS, ctypes.c_char_p, _ADDRESS, _U32, ctypes.c_char_p]),
    "board_length": (ctypes.c_int64, [_ADDRESS, ctypes.c_char_p, _U32]),
    "board_block_bytes": (_U64, [_ADDRESS]),
    "board_write": (None, [_ADDRESS, _U32, _ADDRESS, _U64, _U32, _ADDRESS]),
    "board_read": (ctypes.c_int32, [_ADDRESS, ctypes.c_char_p, _U32, _ADDRESS, _U64]),
}
_SAME: dict[str, int] = {  # as in board.cpp
    "board_arrival_size": ctypes.sizeof(Arrival),
    "board_max_ranges": MAX_SUMS,
    "board_min_range_bytes": MIN_SUM_BYTES,
    "board_max_arrived": MAX_ARRIVED,
    "board_max_notes": MAX_NOTES,
    "board_max_gifts": MAX_GIFTS,
}


class Outcome(IntEnum):
    """The result of reading a block. After anything but READ the destination's content is undefined."""

    GONE = -1  # the store is
    READ = 0
    MISSING = 1
    CHANGED = 2  # while it was being read, or it has another length
    CORRUPT = 3


_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


@functools.cache
def load_board() -> ctypes.CDLL | None:
    """The library, or None if it cannot be built."""
    try:
        library = load_native("board", SOURCE, [MODULE_HEADER, *HEADERS], FLAGS)
        _load_get()
    except BuildFailed as error:
        log.warning("blocks on this host are looked up over the wire, not in shared memory: %s", error)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name, ours in _SAME.items():
        assert getattr(library, name)() == ours, f"board.cpp has another {name} than board.py"
    return library


@functools.cache
def _load_get() -> Callable[[int, bytes, object], int | None]:
    """The same library's look-up as a function of Python's. Raises BuildFailed."""
    get: Callable[[int, bytes, object], int | None] = load_module("board", SOURCE, HEADERS, FLAGS).get
    return get


class Board:
    """The store's side, on one thread; the data plane's threads list blocks that arrive. ``wake_fd`` becomes
    readable when a block has arrived or someone waits for a slot. ``create`` returns None where a board is
    impossible."""

    def __init__(self, library: ctypes.CDLL, segment: Segment) -> None:
        """Raises OSError."""
        self._library = library
        self._segment = segment
        fd = _sealed_memory("mooncake-board", library.board_size(segment.num_blocks))
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._board = library.board_create(
                fd, segment.num_blocks, segment.block_bytes, segment.incarnation, self.wake_fd
            )
        finally:
            os.close(fd)
        if not self._board:
            os.close(self._read_only)
            os.close(self.wake_fd)
            raise OSError("no address space for the board")
        self._arrived = (Arrival * MAX_ARRIVED)()
        self._unlisted: dict[int, bytes] = {}  # keys of blocks that are stored but not listed
        self._mailboxes: dict[int, int] = {}  # mailbox addresses by file number
        self._notes: npt.NDArray[np.uint32] = np.empty(MAX_NOTES, dtype=np.uint32)
        self._notes_at = self._notes.ctypes.data

    @classmethod
    def create(cls, segment: Segment) -> Board | None:
        library = load_board()
        if library is None:
            return None
        try:
            return cls(library, segment)
        except OSError as error:
            log.warning("no board for %s: %s", segment.name, error)
            return None

    def show(self, slot: int, epoch: int, key: bytes, length: int, checksums: Checksums) -> None:
        """List a sealed block, unless it already is. Blocks with too long a key, or that a reader could not verify
        in one pass, are left to be asked for."""
        sums = np.ascontiguousarray(checksums, dtype=np.uint64)
        at = sums.ctypes.data
        if not self._library.board_show(self._board, slot, epoch, key, len(key), length, at, len(checksums)):
            self._unlisted[slot] = key
            self.mark(key, True)
            self._library.board_count_unlisted(self._board, len(self._unlisted))

    def hide(self, slot: int) -> None:
        """Call before the slot's bytes may change. Harmless for slots that are not listed."""
        if (unlisted := self._unlisted.pop(slot, None)) is not None:
            self.mark(unlisted, False)
            self._library.board_count_unlisted(self._board, len(self._unlisted))
        self._library.board_hide(self._board, slot)

    def mark(self, key: bytes, is_marked: bool) -> None:
        """Mark a key: others must not list this block without asking, because it is being written or is stored off
        the board."""
        self._library.board_mark(self._board, key, len(key), is_marked)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside it only we list blocks."""
        self._library.board_hold(self._board, True)
        try:
            yield
        finally:
            self._library.board_hold(self._board, False)

    def expect(self, slot: int, epoch: int) -> None:
        """Let others list a block in this slot, while it is granted to this epoch."""
        self._library.board_expect(self._board, slot, epoch)

    def be_patient(self, num_blocks: int) -> None:
        """Do not wake us before this many blocks have arrived: we will look soon anyway."""
        self._library.board_be_patient(self._board, num_blocks)

    def take_arrived(self) -> list[Landed]:
        """Blocks listed by others since the last call."""
        count = self._library.board_take_arrived(self._board, self._arrived)
        return [self._arrived[at].landed() for at in range(count)]

    def book_for_owner(self) -> tuple[int, int, int, int]:
        """For the data plane's server: to list arrivals, wake us, and look up what is stored."""
        calls = (self._library.board_list, self._library.board_wake, self._library.board_know)
        list_at, wake, know = (int(ctypes.cast(call, _ADDRESS).value or 0) for call in calls)
        return self._board, list_at, wake, know

    def add_mailbox(self) -> tuple[int, list[int]]:
        """For one more client: its mailbox's number, and the files to send, which we keep."""
        fd = _sealed_memory("mooncake-mailbox", self._library.board_mailbox_size())
        mailbox = self._library.board_open_mailbox(fd)
        if not mailbox:
            os.close(fd)
            raise OSError("no address space for a mailbox")
        self._mailboxes[fd] = mailbox
        return fd, [self._read_only, fd, self._segment.fd]

    def map_for_owner(self) -> tuple[mmap.mmap, mmap.mmap]:
        """A mapping of the board and a mailbox, for the data plane's server in this process. They live as long as it
        does."""
        fd, files = self.add_mailbox()
        size, mailbox_size = (os.fstat(file).st_size for file in (self._read_only, fd))
        return mmap.mmap(files[0], size, prot=mmap.PROT_READ), mmap.mmap(fd, mailbox_size)

    def drop_mailbox(self, number: int) -> None:
        self._library.board_close_mailbox(self._mailboxes.pop(number))
        os.close(number)

    def give(self, mailbox: int, slot: int, epoch: int) -> bool:
        """Let this mailbox's client fill a slot. False if it has enough slots it has not taken."""
        return bool(self._library.board_give(self._mailboxes[mailbox], slot, epoch))

    def take_notes(self) -> list[int]:
        """Slots that clients have read since the last call, in order per client, up to what they could note."""
        slots: list[int] = []
        for mailbox in self._mailboxes.values():
            count = self._library.board_take_notes(self._board, mailbox, self._notes_at, MAX_NOTES)
            if count:
                slots += self._notes[:count].tolist()
        return slots

    def close(self) -> None:
        """Readers find it closed, however long they keep it mapped."""
        for number in list(self._mailboxes):
            self.drop_mailbox(number)
        self._library.board_close(self._board)
        os.close(self._read_only)
        os.close(self.wake_fd)


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
        self._get = _load_get()
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
        places = ends.ctypes.data_as(_ADDRESS)
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
        at, sums_at = source.ctypes.data_as(_ADDRESS), sums.ctypes.data_as(_ADDRESS)
        self._library.board_write(mapped.reader, slot, at, len(source), ranges, sums_at)
        return sums

    def close(self) -> None:
        """Stop listing anything. Reads in progress finish."""
        self._mapped = self._segment = None


def is_same_user(sock: socket.socket) -> bool:
    """Whether the peer of a unix socket runs as our user or as root."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid) in (os.geteuid(), 0)


def _sealed_memory(name: str, size: int) -> int:
    """A memfd whose size can no longer change."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    return fd
