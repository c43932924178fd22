"""A process of ours beside a benchmark, which says something once it is ready and goes when its pipe closes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mooncake.errors import NodeUnavailable

START_S = 60.0
END_S = 10.0

T = TypeVar("T")


@contextmanager
def spawned(kind: type[T], target: Callable[..., None], *args: object) -> Iterator[T]:
    """Run ``target(pipe, *args)`` there: what it sends first. Then it is to wait for the pipe's end, and return. Raises
    NodeUnavailable when it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise NodeUnavailable("the other process does not start")
        said = ours.recv()
        assert isinstance(said, kind)
        yield said
    finally:
        ours.close()
        theirs.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
