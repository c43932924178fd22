"""Threads for what would hold up an event loop or a request, where the system may start no more of them: a container
allows only so many, or memory is short."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from mooncake.errors import NodeUnavailable


class Expendable(threading.Thread):
    """One whose unexpected end costs nothing but what it was doing. The end of any other is the process's (see
    ``mooncake.app.cluster.last_resort``)."""


class Threads(ThreadPoolExecutor):
    """At most ``most`` threads (None: Python's number). The first one starts with the pool; while no further one can be
    started, those that run do all the work.

    Python's own pool would raise for the last piece of work, and yet do it later: beside whoever has given it up, and
    in memory that is somebody else's by then.
    """

    def __init__(self, most: int | None = None, name: str = "") -> None:
        """Raises NodeUnavailable when not even the first thread can be started."""
        super().__init__(most, thread_name_prefix=name)
        try:
            self.submit(_nothing).result()
        except RuntimeError as error:
            raise NodeUnavailable(f"this process has no thread left: {error}") from None

    def _adjust_thread_count(self) -> None:
        """Called by ``submit`` once the work is in the queue."""
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


def _nothing() -> None:
    pass
