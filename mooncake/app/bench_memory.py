"""Memory as those have it who register it: it begins with a page.

What begins elsewhere is copied as much as half as long again.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]


def pages(num_bytes: int) -> Memory:
    """Shape [num_bytes], of no particular content."""
    room = np.empty(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -room.ctypes.data % mmap.PAGESIZE
    return room[start : start + num_bytes]


def random_pages(num_bytes: int, seed: int) -> Memory:
    memory = pages(num_bytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return memory
