"""A helper process of a benchmark, which sends a message once it is ready and ends when its pipe closes."""

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
def spawned(kind: type[T], target: Callable[..., None], *args: object, is_killed: bool = False) -> Iterator[T]:
    """Run ``target(pipe, *args)`` in a new process; yields the first message. It must return when the pipe closes, or
    is killed if ``is_killed``. Raises NodeUnavailable when it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()  # so that the pipe closes when the process ends
    try:
        if not ours.poll(START_S):
            raise NodeUnavailable("the other process does not start")
        try:
            said = ours.recv()
        except EOFError:
            raise NodeUnavailable("the other process ended before it was ready; its output is above") from None
        assert isinstance(said, kind)
        yield said
    finally:
        ours.close()
        process.join(0 if is_killed else END_S)
        if process.is_alive():
            process.kill()
            process.join()
