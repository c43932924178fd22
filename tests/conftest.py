"""What every test may ask for: one small live cluster, started when the first test wants it.

Slow tests run last. With ``TEST_MINUTES`` in the environment (CI sets it) those that would begin later than that are
skipped by name, so a machine at half its speed gives a verdict on everything else instead of none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mooncake.app.local import LocalCluster

BEGUN = time.monotonic()
TEST_MINUTES = float(os.environ.get("TEST_MINUTES", "inf"))


def pytest_configure(config: pytest.Config) -> None:
    """Of several test processes that share the cores, none shall spin until threads of its own are given one. Processes
    that tests start have their threads as ever."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=is_slow)  # stable: files and their tests stay in order


@pytest.hookimpl(tryfirst=True)  # before fixtures are made for it
def pytest_runtest_setup(item: pytest.Item) -> None:
    is_again = getattr(item, "execution_count", 1) > 1  # a skipped second run would hide that the first one failed
    if is_slow(item) and not is_again and time.monotonic() - BEGUN > 60 * TEST_MINUTES:
        pytest.skip(f"{item.nodeid}: no time left, {TEST_MINUTES:g} minutes are over")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CI runs what fails once more (``--reruns``); what then passes must not pass in silence."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"{report.nodeid} was run again, because", sep="-")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """For tests that only talk to a cluster and leave it as it is. One prefill, one decode, one store."""
    from live import running_cluster, small_config  # most tests need none of it

    with running_cluster(small_config()) as running:
        yield running
