"""The store's half of the board: the list of its DRAM blocks in shared memory, which clients on its host read without
asking (``reader``).

It owns files and lifetimes; ``door`` hands them out. Without a C++ compiler a store has no board, and its clients
ask it over the wire.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.board.library import (
    ADDRESS,
    MAX_ARRIVED,
    MAX_NOTES,
    load_board,
)
from kvstore.checksum import Checksums
from kvstore.segment import Segment, sealed_memory
from kvstore.transfer.owner.native_owner import Arrival, Landed

log = logging.getLogger(__name__)


class _Book:
    """The store's side in memory, and the eventfd that it writes to. Both live as long as anyone references this:
    threads of the data plane may still list blocks while the board is being closed, and calls of theirs come later."""

    def __init__(self, library: ctypes.CDLL, at: int, wake_fd: int) -> None:
        self.at = at
        self._library = library
        self._wake_fd = wake_fd

    def __del__(self) -> None:
        self._library.board_close(self.at)
        os.close(self._wake_fd)


class Board:
    """The store's side, on one thread; the data plane's threads list blocks that arrive. ``wake_fd`` becomes
    readable when a block has arrived or someone waits for a slot. ``create`` returns None where a board is
    impossible."""

    def __init__(self, library: ctypes.CDLL, segment: Segment) -> None:
        """Raises OSError."""
        self._library = library
        self._segment = segment
        fd = sealed_memory("mooncake-board", library.board_size(segment.num_blocks))
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
        self._book = _Book(library, self._board, self.wake_fd)
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
        list_at, wake, know = (int(ctypes.cast(call, ADDRESS).value or 0) for call in calls)
        return self._board, list_at, wake, know

    def add_mailbox(self) -> tuple[int, list[int]]:
        """For one more client: its mailbox's number, and the files to send, which we keep."""
        fd = sealed_memory("mooncake-mailbox", self._library.board_mailbox_size())
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
        """Readers find it closed, however long they keep it mapped. Calls that come later are harmless."""
        for number in list(self._mailboxes):
            self.drop_mailbox(number)
        self._library.board_end(self._board)
        os.close(self._read_only)
