"""How much of a file is in memory alone: what a power cut would take from it."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest


def dirty_kb(path: Path) -> int:
    """As the kernel tells it of a mapping of the file. Skips the test on file systems in memory, where all is."""
    with (path.parent / "synced").open("wb") as synced:
        synced.write(bytes(1 << 16))
        synced.flush()
        os.fsync(synced.fileno())
    if _dirty_kb(Path(synced.name)):
        pytest.skip(f"{path.parent} is in memory")
    Path(synced.name).unlink()
    return _dirty_kb(path)


def _dirty_kb(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        for at in range(0, len(pages), mmap.PAGESIZE):
            pages[at]
        entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
        own = [entry for entry in entries if f"{path}\n" in entry]
        assert own
        return sum(int(size) for entry in own for size in re.findall(r"_Dirty: +(\d+) kB", entry))
