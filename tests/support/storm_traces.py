"""What processes hold of the system's resources, seen from outside: what there is more of after a storm has leaked."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path

from live import children_of

MORE = 15  # of a kind: connections, and threads for them, to those whom a process had not met before


def held(pid: int) -> Counter[str]:
    """Threads, child processes, and open files by kind; not an SSD's segments, which are its content."""
    found = Counter({"threads": len(list(Path(f"/proc/{pid}/task").iterdir())), "processes": len(children_of(pid))})
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            kind = re.sub(r"[\d\[\]]+", "", str(link.readlink()).removesuffix(" (deleted)"))
            found[kind] += not kind.endswith(".kvlog")
    return found


def grown(now: Counter[str], before: Counter[str] | None) -> list[str]:
    """What is more by so much that it can only have leaked, in words; nothing without a ``before``."""
    if before is None:
        return []
    return [f"{now[kind]} {kind} where it held {before[kind]}" for kind in now if now[kind] > before[kind] + MORE]


def processes_with(mark: str) -> list[int]:
    """All but this one that have it in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
