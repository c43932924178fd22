"""The header of a safetensors file: which tensors it holds and where, with every size checked against the file.

Owns the container format only. Reads no weights; ``safetensors`` itself does that where torch may be imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from mooncake.errors import ModelError

MAX_HEADER_BYTES = 100 << 20  # as the format's own library allows

_DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    path: Path
    size: int
    header_bytes: int
    tensors: Mapping[str, StoredTensor]


def read_safetensors_header(path: Path) -> SafetensorsFile:
    """Raises ModelError, in one sentence, when the file cannot be read, is not safetensors, or ends too early."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            header_len = int.from_bytes(file.read(8), "little")
            if size < 8 or header_len > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(f"{path} is truncated or not a safetensors file: its header does not fit in {size} B")
            header = file.read(header_len)
    except OSError as error:
        raise ModelError(f"cannot read the model file {path}: {error.strerror}") from None
    start = 8 + header_len
    try:
        tree = json.loads(header)
        if not isinstance(tree, dict):
            raise ValueError("its header is not a JSON object")
        tree.pop("__metadata__", None)
        entries = msgspec.convert(tree, dict[str, _Entry])
        tensors = {name: _placed(name, entry, start) for name, entry in entries.items()}
    except (ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise ModelError(f"{path} is not a valid safetensors file: {error}") from None
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=start)
    if end > size:
        raise ModelError(f"{path} is truncated: its tensors end at byte {end}, the file at {size}")
    return SafetensorsFile(path, size, start, MappingProxyType(tensors))


def _placed(name: str, entry: _Entry, start: int) -> StoredTensor:
    begin, end = entry.data_offsets
    itemsize = _DTYPE_BYTES.get(entry.dtype)
    if itemsize is None:
        raise ValueError(f"{name} has the unknown dtype {entry.dtype!r}")
    if min((begin, *entry.shape), default=0) < 0 or end - begin != math.prod(entry.shape) * itemsize:
        raise ValueError(f"the bytes of {name} do not fit its shape")
    return StoredTensor(entry.shape, entry.dtype, start + begin, end - begin)
