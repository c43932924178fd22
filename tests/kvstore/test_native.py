"""Python and C++ agree on the layout of shared memory, or the library is not loaded; and its copies are copies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.transfer import native

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow
LOAD_BOTH = (
    "from kvstore.transfer.owner.native_owner import load_owner; from kvstore.board.library import load_board; "
    "assert load_owner() and load_board()"
)


@pytest.mark.parametrize(
    ("source", "line", "changed"),
    [
        ("board/board.h", "kGifts = 8;", "kGifts = 16;"),
        pytest.param("board/board.h", "uint16_t ranges, name_bytes;", "uint32_t ranges, name_bytes;", marks=SLOW),
        ("transfer/wire.cpp", "kMaxAhead = 64;", "kMaxAhead = 65;"),
    ],
)
def test_memory_that_the_two_see_differently_is_never_used(
    source: str, line: str, changed: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "kvstore", tmp_path / "kvstore", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path / "kvstore" / source
    text = place.read_text()
    assert text.count(line) == 1
    place.write_text(text.replace(line, changed))
    env = {"CXXFLAGS": "-O0", **os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "XDG_CACHE_HOME": str(tmp_path)}
    loading = subprocess.run(
        [sys.executable, "-c", LOAD_BOTH], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert loading.returncode == 1 and "AssertionError" in loading.stderr and " than " in loading.stderr


@pytest.mark.parametrize("nbytes", [100, native.MANY_BYTES - 1, native.MANY_BYTES, native.MANY_BYTES + 12_345])
@pytest.mark.parametrize("first", [0, 1, 63])
def test_a_copy_is_of_these_bytes_and_of_no_others(first: int, nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, dtype=np.uint8)[7 : 7 + nbytes]
    around = np.full(nbytes + 256, 0xA5, np.uint8)
    native.copy(around[first : first + nbytes], source)
    assert np.array_equal(around[first : first + nbytes], source)
    assert (np.delete(around, np.s_[first : first + nbytes]) == 0xA5).all()


def test_a_copy_into_fewer_bytes_or_into_what_is_only_read_is_refused() -> None:
    source = np.zeros(native.MANY_BYTES, np.uint8)
    for target in (np.zeros(source.nbytes - 1, np.uint8), np.frombuffer(bytes(source.nbytes), np.uint8)):
        with pytest.raises(ValueError):
            native.copy(target, source)
