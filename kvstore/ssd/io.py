"""Moves runs of whole pages between memory and the SSD's files, and verifies what it reads.

Written twice: in Python, which is the reference, and in C++ (``io.cpp``), where a run is one call without the GIL;
a Python thread returning from every system call waits for the GIL as long as the disk takes for a block. All calls
block. It knows neither what a record is, nor which file is whose.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.checksum import Checksums, first_mismatch
from kvstore.pointers import address_of
from mooncake.native import BuildFailed, load_native

log = logging.getLogger(__name__)

IO_BYTES = 1 << 20  # of one read or write: larger ones are slower on most disks
_IO_VECTORS = 512
_MIN_PART_BYTES = 241  # xxh3 treats shorter input differently, which our xxh3.h does not implement
_READ = np.dtype(
    [
        ("fd", "<i4"),
        ("result", "<i4"),
        ("offset", "<i8"),
        ("into", "<u8"),
        ("io_bytes", "<i8"),
        ("length", "<i8"),
        ("checksums", "<u8"),
        ("num_checksums", "<i8"),
    ]
)
_PART = np.dtype([("base", "<u8"), ("length", "<u8")])


class VerifiedRead(NamedTuple):
    """``into`` is whole aligned pages, to be filled from ``offset``; the block is its first ``length`` bytes."""

    fd: int
    offset: int
    into: memoryview
    length: int
    checksums: Checksums


class SsdIO(Protocol):
    """``write_and_sync`` writes aligned parts of whole pages one after another, about IO_BYTES per system call, and
    makes them durable; it raises OSError. ``read`` returns for each job whether its bytes match their checksums, or
    what went wrong."""

    def write_and_sync(self, fd: int, offset: int, parts: Sequence[memoryview]) -> None: ...

    def read(self, jobs: Sequence[VerifiedRead]) -> list[bool | OSError]: ...


class PlainIO:
    def write_and_sync(self, fd: int, offset: int, parts: Sequence[memoryview]) -> None:
        for batch in _batches(parts):
            total = sum(part.nbytes for part in batch)
            written = os.pwritev(fd, batch, offset)
            if written != total:
                raise OSError(errno.EIO, f"{written} of {total} bytes were written")
            offset += total
        os.fdatasync(fd)

    def read(self, jobs: Sequence[VerifiedRead]) -> list[bool | OSError]:
        return [self._read_one(job) for job in jobs]

    def _read_one(self, job: VerifiedRead) -> bool | OSError:
        try:
            read_pages(job.fd, job.offset, job.into)
        except OSError as error:
            return error
        return first_mismatch(job.into[: job.length], job.checksums) is None


class NativeIO:
    def __init__(self) -> None:
        """Raises BuildFailed."""
        source = Path(__file__).with_name("io.cpp")
        library = load_native("ssd_io", source, [source.parent.with_name("xxh3.h")])
        library.read_verified.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        library.read_verified.restype = None
        library.write_and_sync.argtypes = [
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
        ]
        self._read, self._write = library.read_verified, library.write_and_sync

    def write_and_sync(self, fd: int, offset: int, parts: Sequence[memoryview]) -> None:
        table = np.array([(address_of(part), part.nbytes) for part in parts], _PART)
        if (number := self._write(fd, offset, table.ctypes.data, len(table), IO_BYTES)) != 0:
            raise OSError(number, os.strerror(number))

    def read(self, jobs: Sequence[VerifiedRead]) -> list[bool | OSError]:
        if any(job.length < _MIN_PART_BYTES * len(job.checksums) for job in jobs):
            return PlainIO().read(jobs)
        expected = [np.ascontiguousarray(job.checksums, "<u8") for job in jobs]
        rows = [
            (
                job.fd,
                0,
                job.offset,
                address_of(job.into),
                job.into.nbytes,
                job.length,
                sums.ctypes.data,
                len(sums),
            )
            for job, sums in zip(jobs, expected, strict=True)
        ]
        table = np.array(rows, _READ)
        self._read(table.ctypes.data, len(table), IO_BYTES)
        return [code == 0 if code >= 0 else OSError(-code, os.strerror(-code)) for code in table["result"].tolist()]


@lru_cache(1)
def best_io() -> SsdIO:
    """C++ where there is a compiler; otherwise Python, with a one-line log message."""
    try:
        return NativeIO()
    except BuildFailed as error:
        log.warning("the SSD is read and written from Python: %s", error)
        return PlainIO()


def read_pages(fd: int, offset: int, into: memoryview) -> None:
    """Fill whole aligned pages. Raises OSError."""
    for start in range(0, into.nbytes, IO_BYTES):
        part = into[start : start + IO_BYTES]
        if os.preadv(fd, [part], offset + start) != part.nbytes:
            raise OSError(errno.EIO, "the file ends within what was to be read")


def _batches(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Groups for one system call each: about IO_BYTES, or one larger part split."""
    batch: list[memoryview] = []
    total = 0
    for part in parts:
        for start in range(0, part.nbytes, IO_BYTES):
            if total >= IO_BYTES or len(batch) == _IO_VECTORS:
                yield batch
                batch, total = [], 0
            batch.append(part[start : start + IO_BYTES])
            total += batch[-1].nbytes
    if batch:
        yield batch
