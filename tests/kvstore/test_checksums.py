"""Checksums of ranges."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvstore.checksum import (
    checksum,
    checksums_from_wire,
    checksums_to_wire,
    first_mismatch,
    range_checksums,
)
from mooncake.errors import InvalidRequest


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
