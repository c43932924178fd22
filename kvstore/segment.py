"""Registered memory: one run of blocks in a memfd, which other processes on this host may map.

A memfd has no name in any file system, so nothing is left behind however its owner dies. This module knows bytes and
memory limits; it knows neither what the blocks hold, who may write them, nor how they travel.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import resource
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mooncake.errors import ConfigError, InvalidRequest
from mooncake.host_memory import available_bytes

# <linux/fcntl.h>: Python's fcntl has some of these only from 3.13 on.
_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1034, 0x2, 0x4

MAX_BLOCK_BYTES = (1 << 32) - 1  # lengths and offsets travel as uint32
MAX_BLOCKS = 1 << 24


class Segment:
    """``num_blocks`` blocks of ``block_bytes`` bytes, shared and writable. Only its owner creates and closes it.

    ``incarnation`` is a random number of this one segment: a peer that names another one means a dead owner.
    """

    def __init__(self, name: str, fd: int, block_bytes: int, num_blocks: int) -> None:
        self.name = name
        self.fd = fd
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.incarnation = secrets.randbits(63) | 1
        self._map = map_shared(fd, block_bytes * num_blocks)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, name: str, block_bytes: int, num_blocks: int) -> Segment:
        """Raises ConfigError, saying what to change, when this much memory is not available."""
        if not (1 <= block_bytes <= MAX_BLOCK_BYTES and 1 <= num_blocks <= MAX_BLOCKS):
            raise ConfigError(f"segment {name}: {num_blocks} blocks of {block_bytes} bytes is out of range")
        size = block_bytes * num_blocks
        _check_memory(name, size)
        try:
            fd = sealed_memory(f"mooncake-{name}"[:200], size)
            try:
                return cls(name, fd, block_bytes, num_blocks)
            except BaseException:
                os.close(fd)
                raise
        except (OSError, ValueError) as error:
            raise ConfigError(f"segment {name}: cannot get {_gb(size)} of shared memory: {error}") from None

    def block(self, index: int) -> memoryview:
        return self.range(index, 0, self.block_bytes)

    def range(self, index: int, offset: int, length: int) -> memoryview:
        """Raises InvalidRequest for a range that is not inside one block."""
        check_range(index, offset, length, self.block_bytes, self.num_blocks)
        start = index * self.block_bytes + offset
        return self.buffer[start : start + length]

    def close(self) -> None:
        """Free the memory. Views that are still alive keep it until they are gone."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.buffer.release()
        self.array = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def check_range(index: int, offset: int, length: int, block_bytes: int, num_blocks: int) -> None:
    """Raises InvalidRequest unless ``[offset, offset + length)`` is a non-empty range inside block ``index``."""
    if not 0 <= index < num_blocks:
        raise InvalidRequest(f"block {index} is outside the segment of {num_blocks} blocks")
    if not (offset >= 0 and length > 0 and offset + length <= block_bytes):
        raise InvalidRequest(f"range [{offset}, {offset + length}) is outside a block of {block_bytes} bytes")


def map_shared(fd: int, size: int, writable: bool = True) -> mmap.mmap:
    """Map a memfd. Raises ValueError when it is smaller than ``size``, OSError when there is no address space."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with contextlib.suppress(OSError):  # a kernel built without it
            mapping.madvise(advice)
    return mapping


def sealed_memory(name: str, size: int) -> int:
    """A memfd of ``size`` bytes: whoever maps it can neither truncate it while others use it nor grow it. Raises
    OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed_size(fd: int) -> bool:
    """Whether the memfd can no longer shrink, so that touching a mapping can never fault."""
    try:
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK)
    except OSError:
        return False


def host_id() -> str:
    """Names the reach of an abstract unix socket: this boot of this kernel, and this network namespace.

    Two containers on one host that do not share a network namespace get different names, and so use TCP.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return hashlib.sha256(f"{boot}|{namespace}".encode()).hexdigest()[:16]


def _check_memory(name: str, size: int) -> None:
    for limit, free in (("free memory", available_bytes()), ("RLIMIT_AS", _address_space()), _file_size_limit()):
        if free is not None and size > free:
            raise ConfigError(
                f"segment {name} needs {_gb(size)}, but {limit} allows {_gb(free)}; configure less "
                "(store.dram_gb, prefill.kv_gb, decode.kv_gb) or free memory"
            )


def _address_space() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - used_pages * mmap.PAGESIZE)


def _file_size_limit() -> tuple[str, int | None]:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # growing a memfd beyond it would kill us with SIGXFSZ
    return "RLIMIT_FSIZE", None if limit == resource.RLIM_INFINITY else limit


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
