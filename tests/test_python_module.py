"""C++ functions called as Python functions: conversion of arguments and results, and errors for wrong ones."""

import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from dirty_pages import dirty_kb

from mooncake.native import MODULE_HEADER, BuildFailed, load_module, load_native

SOURCE = """
#include "python_module.h"

namespace {

double mean(python::Array<const double> values, int64_t first) {
    double sum = 0.0;
    for (int64_t at = first; at < values.size; ++at) sum += values.data[at];
    return values.size > first ? sum / (values.size - first) : -1.0;
}

void fill(python::Array<double> values, double with) {
    for (int64_t at = 0; at < values.size; ++at) values.data[at] = with;
}

}  // namespace

PYTHON_MODULE("sums", python::method<mean>("mean"), python::method<fill>("fill"))
"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    source = tmp_path_factory.mktemp("native") / "sums.cpp"
    source.write_text(SOURCE)
    try:
        return load_module("sums", source, flags=(f"-I{Path(MODULE_HEADER).parent}", "-O0"))
    except BuildFailed as error:
        pytest.skip(str(error))


def test_numbers_and_arrays_go_in_and_out(sums: ModuleType) -> None:
    values = np.arange(5.0)
    assert sums.mean(values, 1) == 2.5
    assert sums.mean(None, 0) == -1.0, "None has no elements"
    assert sums.fill(values, 7) is None
    assert values.tolist() == [7.0] * 5


def test_what_does_not_fit_is_refused(sums: ModuleType) -> None:
    values = np.zeros(4)
    with pytest.raises(TypeError, match="arguments"):
        sums.mean(values)
    with pytest.raises(TypeError):
        sums.mean(values, "first")
    with pytest.raises(TypeError):
        sums.mean(3, 0)
    values.flags.writeable = False
    with pytest.raises((BufferError, ValueError), match=r"writ|read-only"):
        sums.fill(values, 1.0)


def test_without_a_home_folder_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container may run us as a user that its system does not know."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "any.cpp").touch()
    with pytest.raises(BuildFailed, match=r"no home folder.*set XDG_CACHE_HOME"):
        load_native("any", tmp_path / "any.cpp")


def test_what_a_killed_build_left_goes_with_the_next_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And nothing of another build, which may be under way."""
    source, begun = tmp_path / "sums.cpp", tmp_path / "begun"
    source.write_text("int two() { return 2; }\n")
    slow = tmp_path / "slow"  # a compiler that does not end
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\ntouch {begun}\nexec sleep 60\n')
    slow.chmod(0o700)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": str(slow)}
    build = [sys.executable, "-c", f"from mooncake.native import *; load_native('sums', Path({str(source)!r}))"]
    with subprocess.Popen(build, env=environment, start_new_session=True) as killed:
        while not begun.exists():
            assert killed.poll() is None
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
    folder = tmp_path / "mooncake" / "kernels"
    assert [path.name[:6] for path in folder.iterdir() if path.is_dir()] == ["build-"]
    other = folder / "build-others-of-another-library"
    other.mkdir()
    slow.write_text('#!/bin/sh\nexec g++ "$@"\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(slow))
    load_native("sums", source)
    assert [path for path in folder.iterdir() if path.suffix != ".so"] == [other]


@pytest.mark.parametrize("left", [b"", bytes(1 << 14)])
def test_a_library_that_a_power_cut_left_empty_is_built_again(
    left: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "two.cpp").write_text('extern "C" int two() { return 2; }\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = f"from mooncake.native import *; load_native('two', Path({str(tmp_path / 'two.cpp')!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    (built,) = (tmp_path / "mooncake" / "kernels").glob("two-*.so")
    assert dirty_kb(built) == 0, "it is on the disk before it has its name"
    built.unlink()
    built.write_bytes(left)
    assert load_native("two", tmp_path / "two.cpp").two() == 2
