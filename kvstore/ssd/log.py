"""The files of an SSD tier: one directory of fixed-size segments, each written once from front to back, then deleted.

It moves pages between memory and disk past the page cache (O_DIRECT), and recovers what earlier runs wrote. Every call
blocks and may come from any thread. It does not know which blocks are worth keeping, and while scanning trusts no byte
that it has not verified.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.checksum import Checksums, first_mismatch
from kvstore.pointers import address_of
from kvstore.ssd.io import IO_BYTES, SsdIO, VerifiedRead, best_io, read_pages
from kvstore.ssd.record import MAX_HEADER_BYTES, PAGE, NotARecord, Record, is_header, padded, parse
from mooncake.errors import ConfigError

log = logging.getLogger(__name__)

_SCAN_THREADS = 4
FULL = (errno.ENOSPC, errno.EDQUOT)  # why a disk takes no more
_SUFFIX, _ASIDE = ".kvlog", ".unread"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record begins, the sizes of its header and of the whole record, and its sequence number."""

    segment: int
    offset: int
    header_bytes: int
    size: int
    sequence: int


class BlockRead(NamedTuple):
    """A block of ``length`` bytes to be read from ``offset`` of a segment, and its checksums. ``into`` may have room
    up to the next whole page."""

    segment: int
    offset: int
    into: memoryview
    length: int
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Scan:
    """What a directory held: records with their offsets in the order they were written. Segments set ``aside``, now
    or by an earlier run, take room but are not used."""

    records: tuple[tuple[int, Record], ...]
    segments: tuple[int, ...]
    aside: tuple[int, ...]
    last_sequence: int
    torn: int  # incomplete records that were cut off
    rotten: int  # headers that are wrong although records behind them were durable


@dataclass(frozen=True, slots=True)
class _Found:
    """What one segment held, up to its end. Records from number ``gaps[0]`` on lie behind a wrong header."""

    segment: int
    rows: list[tuple[int, Record]]
    gaps: list[int]  # numbers of records right behind one


@dataclass(slots=True)
class _File:
    fd: int
    readers: int = 0
    is_deleted: bool = False


class _Scratch(threading.local):
    """Aligned memory of one thread, for callers whose own is not."""

    def __init__(self) -> None:
        self.pages = mmap.mmap(-1, IO_BYTES)

    def take(self, nbytes: int) -> memoryview:
        if len(self.pages) < nbytes:
            self.pages = mmap.mmap(-1, padded(nbytes))
        return memoryview(self.pages)[:nbytes]


class SsdLog:
    """Raises ConfigError when the directory cannot be used, or another process uses it.

    With ``direct`` it bypasses the page cache where the file system allows it; ``is_direct`` says whether it does.
    """

    def __init__(self, directory: Path, segment_bytes: int, direct: bool = True, io: SsdIO | None = None) -> None:
        self._io = io or best_io()
        self.segment_bytes = padded(segment_bytes)
        self.directory = directory
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()  # for the table of files
        self._scratch = _Scratch()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._guard = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"store.ssd_path {directory}: {error.strerror}") from None
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._guard)
            is_in_use = isinstance(error, BlockingIOError)
            reason = "is in use by another store" if is_in_use else f"cannot be locked: {error.strerror}"
            raise ConfigError(f"store.ssd_path {directory} {reason}") from None
        self.is_direct = direct and self._can_be_direct()
        if direct and not self.is_direct:
            log.warning("%s: this file system refuses O_DIRECT; reads and writes go through the page cache", directory)

    # Writing: a place is written by one thread

    def create(self, segment: int) -> None:
        """A new empty segment with its room allocated on the disk. Raises OSError, leaving nothing of it behind."""
        path = self._path(segment)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | self._flags, 0o600)
        try:
            _allocate(fd, self.segment_bytes)
            self._sync_directory()
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        with self._lock:
            self._files[segment] = _File(fd)

    def write(self, segment: int, offset: int, parts: Sequence[memoryview]) -> None:
        """Write parts one after another from ``offset``, each padded to whole pages; they are durable on return.
        Raises OSError: then it is unknown which are."""
        with self._open(segment) as fd:
            self._io.write_and_sync(fd, offset, [self._aligned(part) for part in parts])
            if not self.is_direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def delete(self, segment: int) -> None:
        """Durable on return; its room is free once the last reader has finished. Raises OSError: then it still has
        to be deleted."""
        self._path(segment).unlink(missing_ok=True)
        self._sync_directory()
        with self._lock:
            file = self._files.pop(segment)
            file.is_deleted = True
            idle = file.readers == 0
        if idle:
            os.close(file.fd)

    # Reading: from any thread

    def read(self, segment: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` from whole pages at ``offset``. Raises OSError, KeyError when the segment has been deleted."""
        with self._open(segment) as fd:
            if self._is_straight(into):
                read_pages(fd, offset, into)
            else:
                pages = self._scratch.take(padded(into.nbytes))
                read_pages(fd, offset, pages)
                into[:] = pages[: into.nbytes]

    def read_blocks(self, reads: Sequence[BlockRead]) -> list[bool | OSError | KeyError]:
        """For each, whether its bytes match their checksums, or why they could not be read (KeyError: its segment
        has been deleted)."""
        results: list[bool | OSError | KeyError] = [False] * len(reads)
        straight: list[tuple[int, VerifiedRead]] = []
        with contextlib.ExitStack() as files:
            for index, read in enumerate(reads):
                try:
                    if self._is_straight(read.into):
                        fd = files.enter_context(self._open(read.segment))
                        straight.append((index, VerifiedRead(fd, *read[1:])))
                    else:
                        self.read(read.segment, read.offset, read.into)
                        results[index] = first_mismatch(read.into[: read.length], read.checksums) is None
                except (OSError, KeyError) as error:
                    results[index] = error
            if straight:
                for (index, _), result in zip(straight, self._io.read([job for _, job in straight]), strict=True):
                    results[index] = result
        return results

    # Starting and ending

    def scan(self) -> Scan:
        """Find the records of earlier runs. Reads headers, and the bytes of records that may be torn: those written
        after the last one known to have been durable. Raises OSError when files cannot be opened or renamed."""
        numbers = self._numbers(_SUFFIX)
        for number in numbers:
            self._files[number] = _File(os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC | self._flags))
        with ThreadPoolExecutor(_SCAN_THREADS) as threads:
            found = [each for each in threads.map(self._scan_segment, numbers) if each is not None]
            records = [record for each in found for _, record in each.rows]
            durable = max((record.durable for record in records), default=0)
            last = max((record.sequence for record in records), default=0)
            whole = list(threads.map(lambda each: self._cut_torn(each, durable), found))
        kept = [(each, rows) for each, rows in zip(found, whole, strict=True) if rows is not None]
        torn = sum(len(each.rows) - len(rows) for each, rows in kept)
        rotten = sum(gap < len(rows) for each, rows in kept for gap in each.gaps)
        ordered = sorted((row for _, rows in kept for row in rows), key=lambda row: row[1].sequence)
        return Scan(tuple(ordered), tuple(sorted(self._files)), self._numbers(_ASIDE), last, torn, rotten)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                os.close(file.fd)
            self._files.clear()
            if self._guard >= 0:
                os.close(self._guard)
                self._guard = -1

    def _scan_segment(self, segment: int) -> _Found | None:
        """Every record up to the end. None when the segment cannot be read; it is then set aside."""
        found = _Found(segment, [], [])
        try:
            offset: int | None = 0
            while offset is not None and offset + PAGE <= self._size(segment):
                try:
                    record = self._header_at(segment, offset)
                except NotARecord:
                    offset = self._next_header(segment, offset, found.rows[-1][1].sequence if found.rows else -1)
                    if offset is not None:
                        found.gaps.append(len(found.rows))
                    continue
                found.rows.append((offset, record))
                offset += record.size
        except OSError as error:
            self._leave_aside(segment, error)
            return None
        return found

    def _next_header(self, segment: int, offset: int, sequence: int) -> int | None:
        """Where the next record with a later sequence number begins, behind something that is none. None at the end
        of the log, where there is an empty page, or only what a crash left."""
        page = bytearray(PAGE)
        self.read(segment, offset, memoryview(page))
        if not any(page):
            return None
        end = self._size(segment) // PAGE * PAGE
        for start in range(offset + PAGE, end, IO_BYTES):
            data = bytearray(min(IO_BYTES, end - start))
            self.read(segment, start, memoryview(data))
            for at in range(0, len(data), PAGE):
                if is_header(data[at : at + PAGE]):
                    with contextlib.suppress(NotARecord):
                        if self._header_at(segment, start + at).sequence > sequence:
                            return start + at
        return None

    def _leave_aside(self, segment: int, error: OSError) -> None:
        """The disk may be able to read it another time, so it is not deleted. But it must not return by itself:
        later runs do not know its blocks, and so cannot log which of them to drop. Raises OSError."""
        path = self._path(segment)
        log.error("%s cannot be read (%s): left aside as %s", path, error, path.with_suffix(_ASIDE).name)
        path.rename(path.with_suffix(_ASIDE))
        self._sync_directory()
        with self._lock:
            file = self._files.pop(segment)
        os.close(file.fd)

    def _header_at(self, segment: int, offset: int) -> Record:
        page = bytearray(PAGE)
        self.read(segment, offset, memoryview(page))
        try:
            return parse(bytes(page), segment)
        except NotARecord:
            if not is_header(page):
                raise
        longer = bytearray(min(MAX_HEADER_BYTES, (self._size(segment) - offset) // PAGE * PAGE))
        self.read(segment, offset, memoryview(longer))
        return parse(bytes(longer), segment)

    def _cut_torn(self, found: _Found, durable: int) -> list[tuple[int, Record]] | None:
        """The records before the first torn one. The file ends there from now on: the next run's durable sequence
        will be beyond it, and would make it count as whole. None when the disk refuses that; the segment is then set
        aside. Behind a wrong header only blocks that were durable count: that header may have been torn."""
        gap = min(found.gaps, default=len(found.rows))
        for index, (offset, record) in enumerate(found.rows):
            is_behind = record.block is not None and index >= gap
            try:
                if record.sequence > durable and (is_behind or not self._is_whole(offset, record)):
                    self._truncate(record.segment, offset)
                    return found.rows[:index]
            except OSError as error:
                self._leave_aside(record.segment, error)
                return None
        return found.rows

    def _truncate(self, segment: int, size: int) -> None:
        """Durable on return. Raises OSError."""
        fd = self._files[segment].fd
        os.ftruncate(fd, size)
        os.fsync(fd)

    def _is_whole(self, offset: int, record: Record) -> bool:
        if record.block is None:
            return True  # the checksum was in its header
        if offset + record.size > self._size(record.segment):
            return False
        data = bytearray(record.block.length)
        self.read(record.segment, offset + record.header_bytes, memoryview(data))
        return first_mismatch(data, record.block.checksums) is None

    def _numbers(self, suffix: str) -> tuple[int, ...]:
        """The numbers of segment files with this suffix. Other files are ignored."""
        return tuple(sorted(int(path.stem, 16) for path in self.directory.glob(f"{16 * '[0-9a-f]'}{suffix}")))

    @property
    def _flags(self) -> int:
        return os.O_DIRECT if self.is_direct else 0

    def _size(self, segment: int) -> int:
        return os.fstat(self._files[segment].fd).st_size

    def _path(self, segment: int) -> Path:
        return self.directory / f"{segment:016x}{_SUFFIX}"

    def _can_be_direct(self) -> bool:
        path, page = self.directory / "probe", mmap.mmap(-1, PAGE)
        try:
            with _opened(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd:
                return os.pwritev(fd, [page], 0) == PAGE
        except OSError as error:
            if error.errno not in FULL:
                return False
        finally:
            path.unlink(missing_ok=True)
        try:  # a full disk says nothing of O_DIRECT
            with _opened(self.directory / "lock", os.O_RDONLY | os.O_DIRECT) as fd:
                return os.preadv(fd, [page], 0) >= 0
        except OSError:
            return False

    def _sync_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _open(self, segment: int) -> Iterator[int]:
        with self._lock:
            file = self._files[segment]
            file.readers += 1
        try:
            yield file.fd
        finally:
            with self._lock:
                file.readers -= 1
                last = file.is_deleted and file.readers == 0
            if last:
                os.close(file.fd)

    @staticmethod
    def _is_straight(into: memoryview) -> bool:
        """Whether the disk can read pages directly into it."""
        return into.nbytes % PAGE == 0 and _is_aligned(into)

    def _aligned(self, part: memoryview) -> memoryview:
        """The same bytes, as whole pages in memory the disk can read from."""
        size = padded(part.nbytes)
        if size == part.nbytes and (not self.is_direct or _is_aligned(part)):
            return part
        copy = memoryview(mmap.mmap(-1, size))
        np.copyto(np.frombuffer(copy[: part.nbytes], np.uint8), np.frombuffer(part, np.uint8))
        return copy


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _allocate(fd: int, nbytes: int) -> None:
    """Give a new file its size and its room on the disk. Raises OSError, also when there is less room than that.

    Where a file system cannot reserve room (NFS before 4.2, ext3), what is free now has to do. There the C library's
    ``posix_fallocate`` writes a byte into every page, which O_DIRECT forbids, or which takes a minute.
    """
    while _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            disk = os.fstatvfs(fd)
            if disk.f_bavail * disk.f_frsize < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(fd, nbytes)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _is_aligned(view: memoryview) -> bool:
    return address_of(view) % PAGE == 0
