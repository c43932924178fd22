"""Page-aligned memory, like that of registered segments.

Copying unaligned memory takes up to half as long again.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]


def pages(num_bytes: int) -> Memory:
    """Uninitialised memory of shape [num_bytes]."""
    room = np.empty(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -room.ctypes.data % mmap.PAGESIZE
    return room[start : start + num_bytes]


def random_pages(num_bytes: int, seed: int) -> Memory:
    memory = pages(num_bytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return memory
