"""Where memory lies, for calls of C++ and of network cards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.checksum import Checksums

_byte_in: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


def address_of(memory: bytes | bytearray | memoryview | Checksums | npt.NDArray[np.uint8]) -> int:
    """The address of the first byte of non-empty contiguous memory, which its owner must keep alive."""
    try:
        return ctypes.addressof(_byte_in(memory))
    except TypeError:  # read-only memory
        return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])
