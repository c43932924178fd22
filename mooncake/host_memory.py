"""How much memory this process can still get, from the machine and from its container; giving back what it freed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> int | None:
    """What is available without swapping: the kernel's estimate, or the limit of a control group above this process if
    that is less. None when neither is known.

    A group's usage includes the page cache of the files it has read, which the kernel drops when the room is needed. It
    counts as free here, as it does in the kernel's estimate.
    """
    known: list[int] = []
    with contextlib.suppress(OSError):
        rows = (proc / "meminfo").read_text().splitlines()
        known += [int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:")]
    known += _group_limits(proc, cgroups)
    return min(known, default=None)


def num_oom_kills(proc: Path = Path("/proc")) -> int:
    """How many processes the system has killed for lack of memory, in any group, since it started; 0 if unknown."""
    with contextlib.suppress(OSError):
        for row in (proc / "vmstat").read_text().splitlines():
            if row.startswith("oom_kill "):
                return int(row.split()[1])
    return 0


class RecentOomKills:
    """Whether the system has lately killed somebody for lack of memory. Whoever wants to know looks often: a kill
    counts from the look that first sees it."""

    def __init__(self, recent_s: float, count: Callable[[], int] = num_oom_kills) -> None:
        self._recent_s = recent_s
        self._count = count
        self._known = count()
        self._seen_at = -math.inf

    def look(self, now: float) -> bool:
        """Whether there was one in the last ``recent_s``."""
        if (number := self._count()) > self._known:
            self._known, self._seen_at = number, now
        return now - self._seen_at <= self._recent_s


def check_free(num_bytes: int) -> None:
    """Raises OSError when this much memory would get the process killed once it is touched: the system promises more
    than it has."""
    free = available_bytes()
    if free is not None and num_bytes > free:
        raise OSError(errno.ENOMEM, f"{free / 1e9:.2f} GB are free")


def gives_back_memory(load: Callable[P, R]) -> Callable[P, R]:
    """Return to the system what ``load`` freed: glibc keeps freed blocks of up to 32 MB, as weights being packed are,
    for the process. Does nothing with other C libraries."""

    @functools.wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> R:
        result = load(*args, **kwargs)
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(ctypes.c_size_t(0))
        return result

    return loaded


def _group_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """For every group from this process's own to the root, in version 2 and in version 1."""
    for folder in _groups(proc, cgroups):
        for limit, usage, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which means no limit
                limit_bytes = int((folder / limit).read_text())
                used_bytes = int((folder / usage).read_text())
                yield max(0, limit_bytes - used_bytes + _file_bytes(folder / "memory.stat", prefix))


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Inside a container a group's path may be the one outside, which does not exist here; the root always does."""
    with contextlib.suppress(OSError):
        for row in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = row.split(":", 2)
            if controllers in ("", "memory"):
                own = PurePosixPath(path.lstrip("/"))
                yield from (cgroups / controllers / part for part in (own, *own.parents))


def _file_bytes(stat: Path, prefix: str) -> int:
    """Page cache in bytes; shared memory, including memfds, is not included."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    rows = (row.partition(" ") for row in stat.read_text().splitlines())
    return sum(int(value) for name, _, value in rows if name in names)
