"""Segments: bounds, limits, and nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.segment import Segment, host_id
from mooncake.errors import ConfigError, InvalidRequest

ROOT = Path(__file__).parents[2]


def test_blocks_lie_one_after_the_other_and_ranges_stay_inside_them() -> None:
    segment = Segment.create("test", 100, 3)
    segment.range(1, 10, 5)[:] = b"hello"
    assert bytes(segment.buffer[110:115]) == b"hello"
    assert bytes(segment.block(1)[10:15]) == b"hello"
    for index, offset, length in ((3, 0, 1), (-1, 0, 1), (0, 100, 1), (0, 99, 2), (0, -1, 2), (0, 0, 0), (0, 0, 101)):
        with pytest.raises(InvalidRequest):
            segment.range(index, offset, length)
    segment.close()
    segment.close()


def test_a_view_outlives_the_segment() -> None:
    segment = Segment.create("test", 1 << 20, 2)
    array = np.frombuffer(segment.buffer, np.uint8)
    array[-1] = 7
    segment.close()
    assert array[-1] == 7


def test_too_much_memory_is_one_clear_sentence() -> None:
    with pytest.raises(ConfigError, match=r"needs 1000000\.\d+ GB, but free memory allows .*store\.dram_gb"):
        Segment.create("huge", 1 << 30, 931323)
    with pytest.raises(ConfigError, match="out of range"):
        Segment.create("none", 1024, 0)


def test_a_kernel_that_makes_no_memfd_is_an_error_of_the_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ConfigError, match=r"segment test: cannot get .* of shared memory: .*Too many open files"):
        Segment.create("test", 100, 3)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_the_limits_of_the_process_count(limit: str) -> None:
    """In a process of its own: the limit would stay."""
    code = f"""
import resource
from kvstore.segment import Segment
from mooncake.errors import ConfigError
resource.setrlimit(resource.{limit}, (2 << 30, 2 << 30))
try:
    Segment.create("test", 1 << 30, 4)
except ConfigError as error:
    print(error.message)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert f"but {limit} allows".encode() in result.stdout, result.stderr


def test_the_host_has_one_name() -> None:
    assert host_id() == host_id()
    assert len(host_id()) == 16
