"""The sources of the CPU kernels: ``cpu_kernels.cpp`` and what it needs of ``cpp``, built at first use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from mooncake.native import load_native

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FOLDER = Path(__file__).with_name("cpp")


def load_library(flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The kernels as a loaded library, built if needed. Extra compiler ``flags`` can disable features of this
    processor. Raises BuildFailed."""
    return load_native("cpu", [SOURCE, *sorted(FOLDER.glob("*.cpp"))], sorted(FOLDER.glob("*.h")), flags)
