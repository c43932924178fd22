"""Checksums of ranges."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.checksum import (
    checksum,
    checksums_from_wire,
    checksums_to_wire,
    digest,
    first_mismatch,
    range_checksums,
)
from mooncake.errors import InvalidRequest
from mooncake.native import load_native

ROOT = Path(__file__).parents[2]
STREAMED = 64 << 10  # bytes from which a copy goes past the caches


def test_each_range_has_its_own() -> None:
    data = bytes(range(240))
    sums = range_checksums(data, 3)
    assert [int(value) for value in sums] == [xxhash.xxh3_64_intdigest(data[i : i + 80]) for i in (0, 80, 160)]
    assert int(range_checksums(data, 1)[0]) == checksum(data)
    assert np.array_equal(checksums_from_wire(checksums_to_wire(sums)), sums)


def test_a_flipped_bit_is_found() -> None:
    data = bytearray(range(240))
    sums = range_checksums(data, 3)
    assert first_mismatch(data, sums) is None
    data[100] ^= 0x10
    assert first_mismatch(data, sums) == 1


@pytest.mark.parametrize(("size", "ranges"), [(10, 3), (10, 0), (0, 1), (2, 4)])
def test_bytes_that_do_not_divide_are_refused(size: int, ranges: int) -> None:
    with pytest.raises(InvalidRequest):
        range_checksums(bytes(size), ranges)
    with pytest.raises(InvalidRequest):
        checksums_from_wire(b"1234567")


@pytest.mark.parametrize(
    "length",
    [241, 1024, 1025, 5000, *(STREAMED + more for more in (-1, 0, 1, 63, 64, 65, 1023, 1024, 1025)), (1 << 20) + 7],
)
def test_a_copy_and_its_checksum_are_right_wherever_memory_begins(length: int) -> None:
    """Streamed stores fill whole lines: neither a byte before the copy nor one behind it may change."""
    library = load_native("hash_copy", Path(__file__).with_name("hash_copy.cpp"), [ROOT / "kvstore" / "xxh3.h"])
    library.hash_copy.restype = library.hash_of.restype = ctypes.c_uint64
    data = np.random.default_rng(length).integers(0, 256, length + 64, dtype=np.uint8)
    room = np.zeros(length + 3 * 64, dtype=np.uint8)
    line = -room.ctypes.data % 64
    for into, start in itertools.product((0, 1, 16, 17, 48, 63), (0, 1, 63)):
        source, begin = data[start : start + length], line + into
        right = xxhash.xxh3_64_intdigest(source)
        room[:] = 0xA5
        place, size = ctypes.c_void_p(source.ctypes.data), ctypes.c_uint64(length)
        assert library.hash_copy(ctypes.c_void_p(room.ctypes.data + begin), place, size) == right
        assert library.hash_of(place, size) == right
        assert np.array_equal(room[begin : begin + length], source)
        assert (room[:begin] == 0xA5).all() and (room[begin + length :] == 0xA5).all()


def test_a_digest_sees_every_checksum_and_their_order() -> None:
    sums = [np.arange(4, dtype=np.uint64), np.arange(4, 8, dtype=np.uint64)]
    whole = np.concatenate(sums)
    assert digest(sums) == digest([whole]) == checksum(whole.tobytes())
    others = [whole[:-1], whole[::-1], np.append(whole, np.uint64(0)), whole ^ np.uint64(1 << 63)]
    assert digest(sums) not in [digest([other]) for other in others]
    assert digest([]) == checksum(b"")
