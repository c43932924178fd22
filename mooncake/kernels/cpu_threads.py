"""How many of the CPU library's own threads share a call: as many as torch has, unless somebody says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_given_threads = 0


def use_threads(count: int) -> None:
    """Threads of this process from now on; 0: as many as torch has."""
    global _given_threads
    _given_threads = count


@contextmanager
def threads_for(count: int) -> Iterator[None]:
    """Use this many threads inside the ``with``."""
    before = _given_threads
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


def num_threads() -> int:
    return _given_threads or torch.get_num_threads()
