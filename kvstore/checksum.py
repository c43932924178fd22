"""The checksum of stored bytes: xxh3-64, one for each range (a layer) of a block.

It catches flipped bits and torn writes, not attackers. Checksums travel as little-endian uint64 arrays.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Buffer

from mooncake.errors import InvalidRequest

Checksums = npt.NDArray[np.uint64]


def checksum(data: Buffer) -> int:
    """xxh3-64 of one contiguous buffer."""
    return int(xxhash.xxh3_64_intdigest(data))


def checksums_of(parts: Iterable[Buffer]) -> Checksums:
    """One checksum per buffer."""
    return np.fromiter((checksum(part) for part in parts), dtype=np.uint64)


def part_checksums(data: Buffer, part_bytes: int) -> Checksums:
    """One checksum per ``part_bytes`` of ``data``, and one for the remainder."""
    view = memoryview(data).cast("B")
    return checksums_of(view[start : start + part_bytes] for start in range(0, view.nbytes, part_bytes))


def range_checksums(data: Buffer, ranges: int) -> Checksums:
    """One checksum for each of ``ranges`` equal parts of ``data``. Raises InvalidRequest when it does not divide
    evenly."""
    view = memoryview(data).cast("B")
    if not 1 <= ranges <= view.nbytes or view.nbytes % ranges:
        raise InvalidRequest(f"{view.nbytes} bytes do not divide into {ranges} equal ranges")
    size = view.nbytes // ranges
    return part_checksums(view, size)


def first_mismatch(data: Buffer, expected: Checksums) -> int | None:
    """Index of the first of ``len(expected)`` equal ranges whose checksum differs, or None when all agree."""
    differs = range_checksums(data, len(expected)) != expected
    return int(differs.argmax()) if differs.any() else None


def digest(checksums: Iterable[Checksums]) -> int:
    """One checksum over the checksums of many blocks, in order: xxh3-64 of them as they travel."""
    whole = xxhash.xxh3_64()
    for part in checksums:
        whole.update(checksums_to_wire(part))
    return int(whole.intdigest())


def checksums_to_wire(checksums: Checksums) -> bytes:
    return np.ascontiguousarray(checksums, dtype="<u8").tobytes()


def checksums_from_wire(data: bytes) -> Checksums:
    """Raises InvalidRequest when the buffer is not a whole number of uint64."""
    if len(data) % 8:
        raise InvalidRequest("checksum buffer length is not a multiple of 8", "checksums")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
