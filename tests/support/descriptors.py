"""A process at its limit of open files, or of threads."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def no_file_descriptors() -> Iterator[None]:
    """Opening a file or a socket fails, and so does starting a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """No thread can be started beside those that run: each would take more than there is address space."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)
