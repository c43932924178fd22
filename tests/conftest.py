"""Common fixtures: one small live cluster, started when the first test needs it.

Slow tests run last. With ``SLOW_TESTS_END`` in the environment (set by CI; seconds since 1970), slow tests whose time
limit ends later than that are skipped and listed, so that a slow machine still gives a result for all others.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from sweeps import mark_what_is_beyond_the_cover

if TYPE_CHECKING:
    from mooncake.app.cluster.local import LocalCluster
    from mooncake.rpc.server import RpcServer

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks for models but at loopback

SLOW_TESTS_END = float(os.environ.get("SLOW_TESTS_END", "inf"))

with contextlib.suppress(ModuleNotFoundError):  # where only GPU kernels are tested it may be missing
    from hypothesis import settings

    settings.register_profile("at any speed", deadline=None)  # a busy machine is no failure
    settings.load_profile("at any speed")

# GPU kernels run compiled where there is a GPU, else in Triton's interpreter. Triton chooses when it is imported, which
# transformers does, too.
with contextlib.suppress(ModuleNotFoundError):
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread per process if several test processes share the cores: more would spin while others wait for a
    core. Processes started by tests are not affected."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nearly all that is made here (modules, tests) lives to the end: the garbage collector need not visit it, neither
    meanwhile nor during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def time_limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_what_is_beyond_the_cover(items)
    items.sort(key=is_slow)  # stable: files and their tests stay in order


@pytest.hookimpl(tryfirst=True)  # before fixtures are made for it
def pytest_runtest_setup(item: pytest.Item) -> None:
    is_again = getattr(item, "execution_count", 1) > 1  # a skipped second run would hide that the first one failed
    if is_slow(item) and not is_again and time.time() + time_limit_s(item) > SLOW_TESTS_END:
        pytest.skip(f"{item.nodeid}: no time left")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A fault on a GPU ends all that its process can do there: of several test processes this one ends then, and
    another one takes the tests that are left. Each of them would fail at once, so it would take most of all others'."""
    done = yield
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{item.nodeid}: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)
    return done


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List tests that only passed when run again (CI sets ``--reruns``)."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"{report.nodeid} was run again, because", sep="-")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For tests with several ranks, or that compare bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
async def rpc_server() -> AsyncIterator[Callable[[], RpcServer]]:
    """Makes gRPC servers that stop with the test, also with one that fails: one that is still running when it is
    collected fails the test that runs then, or hangs it."""
    from mooncake.rpc.server import RpcServer

    servers: list[RpcServer] = []

    def make() -> RpcServer:
        servers.append(RpcServer())
        return servers[-1]

    yield make
    for server in servers:
        await server.stop(0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """For tests that only talk to a cluster and leave it as it is. One prefill, one decode, one store. It runs beside
    most of the suite, so its heartbeats are as rare as a user's."""
    from live import running_cluster, small_config  # most tests need none of it

    with running_cluster(small_config("conductor.heartbeat_interval_s=0.5")) as running:
        yield running
