"""A caller's memory as bytes without a copy: buffers, numpy arrays and torch tensors on the CPU.

Torch is not imported for that.
"""

from __future__ import annotations

import ctypes
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from mooncake.errors import InvalidRequest


class TensorLike(Protocol):
    """The interface of a torch tensor, without importing torch. Only contiguous CPU tensors are accepted."""

    def data_ptr(self) -> int: ...

    def is_contiguous(self) -> bool: ...

    def element_size(self) -> int: ...

    def numel(self) -> int: ...


Memory = Buffer | TensorLike | npt.NDArray[np.generic]


def readable(data: Memory) -> memoryview:
    """The bytes of a caller's memory, without a copy."""
    if hasattr(data, "data_ptr"):
        return _of_tensor(cast(TensorLike, data))
    try:
        return memoryview(cast(Buffer, data)).cast("B")
    except (TypeError, ValueError):
        raise InvalidRequest("data must be contiguous: bytes, an array or a CPU tensor", "data") from None


def writable(into: Memory) -> memoryview:
    view = readable(into)
    if view.readonly:
        raise InvalidRequest("cannot read into memory that is read-only", "into")
    return view


def _of_tensor(tensor: TensorLike) -> memoryview:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu" or not tensor.is_contiguous():
        raise InvalidRequest("a tensor must be contiguous and on the CPU", "data")
    nbytes = tensor.element_size() * tensor.numel()
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory._owner = tensor  # type: ignore[attr-defined]  # lives as long as the view does
    return memoryview(memory).cast("B")
