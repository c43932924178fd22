"""Pools of threads where the system starts no more of them."""

from __future__ import annotations

import threading

import pytest
from descriptors import no_more_threads

from mooncake.errors import NodeUnavailable
from mooncake.threads import Threads


def test_the_threads_that_run_do_all_the_work_and_each_piece_once() -> None:
    done: list[int] = []
    with Threads(8) as threads, no_more_threads():
        for piece in [threads.submit(done.append, number) for number in range(100)]:
            piece.result(10)
    assert done == list(range(100)), "by the one thread, in order"


def test_more_threads_start_when_they_can_again() -> None:
    both = threading.Barrier(2)
    with Threads(2) as threads:
        with no_more_threads():
            first = threads.submit(both.wait, 20)
        second = threads.submit(both.wait, 20)
        assert {first.result(20), second.result(20)} == {0, 1}


def test_a_pool_without_any_thread_is_refused() -> None:
    with no_more_threads(), pytest.raises(NodeUnavailable, match="no thread left"):
        Threads(2)
