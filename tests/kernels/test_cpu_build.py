"""Building the kernels: once per machine, by several processes at once, and without a compiler."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fork_server import ForkServer


@pytest.fixture(scope="module")
def users() -> Iterator[ForkServer]:
    """Of the kernels: torch is imported once for all of them."""
    server = ForkServer("use_kernels", OMP_NUM_THREADS="1")
    yield server
    server.close()


def use_kernels(users: ForkServer, cache: Path, **environment: str) -> str:
    wanted = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", **environment}
    done = users.run("use_kernels:main", environment=wanted, timeout_s=200)
    assert done.returncode == 0
    return done.stdout


@pytest.mark.slow
def test_processes_that_start_together_build_one_library_and_later_ones_find_it(
    users: ForkServer, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as threads:
        for output in threads.map(use_kernels, [users] * 2, [tmp_path] * 2):
            assert output.endswith("CpuKernels 32\n")
    folder = tmp_path / "mooncake" / "kernels"
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert use_kernels(users, tmp_path) == "CpuKernels 32\n"


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"PATH": "/nowhere"}, "install g++"),
        ({"CXX": "/bin/false"}, "false failed"),
        ({"CXXFLAGS": "-fno-such"}, "-fno-such"),
        pytest.param({"CXXFLAGS": "-Dstruct=class"}, " error: ", marks=pytest.mark.slow),
        ({"XDG_CACHE_HOME": "/proc/nowhere"}, "set XDG_CACHE_HOME"),
    ],
    ids=["no compiler", "broken compiler", "a flag that it does not know", "a header with an error", "no place"],
)
def test_without_a_build_the_reference_serves_and_one_line_says_why(
    users: ForkServer, tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    warning, answer = use_kernels(users, tmp_path, **environment).splitlines()
    assert warning.startswith("WARNING using the slow torch kernels") and reason in warning
    assert answer == "module 32"


SHORT_OF_MEMORY = """
import contextlib, resource
import torch
from mooncake.kernels import choose_kernels
from mooncake.kernels.cpu_library import DRAW
from mooncake.kernels.cpu_threads import use_threads
torch.set_num_threads(1)
kernels = choose_kernels()

@contextlib.contextmanager
def no_more_than(further_bytes):
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        taken = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + further_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
"""
NO_THREADS = """
gate_up = torch.ones(4096, 256)
expected = kernels.silu_mul(gate_up).sum()  # on this thread
use_threads(8)
with no_more_than(4 << 20):  # for the result's 2 MiB, not for a thread's stack
    done = kernels.silu_mul(gate_up).sum()
print(bool(done == expected), type(kernels).__name__)
"""
NO_SCRATCH = """
weight, hidden = torch.rand(64, 4096), torch.ones(4096, 4096)
logits = torch.stack([torch.randperm(1 << 20) for _ in range(8)]).float()
rows, draws = range(8), DRAW.pack(1.0, 1.0, 0.0, 1, 7) * 8
linear = kernels.linear(weight)
calls = [
    lambda: bool(torch.allclose(linear(hidden)[-1], weight.sum(1))),
    lambda: kernels.sample(logits, rows, {}, draws, rows) == logits.argmax(1).tolist(),
]
use_threads(2)
kernels.silu_mul(torch.ones(4096, 256))  # starts one
for call in calls:
    for further_bytes in (6 << 20, 1 << 30):  # for some of what a thread keeps between calls
        try:
            with no_more_than(further_bytes):
                print(call())
        except MemoryError as error:
            print(error)
"""


def run_short_of_memory(script: str) -> str:
    command = [sys.executable, "-c", SHORT_OF_MEMORY + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def test_where_no_more_threads_start_those_that_run_do_the_work() -> None:
    assert run_short_of_memory(NO_THREADS) == "True CpuKernels\n"


def test_a_call_without_memory_for_what_threads_keep_is_an_error_and_the_next_one_is_right() -> None:
    assert run_short_of_memory(NO_SCRATCH).splitlines() == ["the kernels found none", "True"] * 2
