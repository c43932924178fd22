"""The header of a GGUF file, read in milliseconds, with every length checked before use.

Knows the container format only: metadata by key (arrays are decoded on access) and where each tensor is; not what any
key means. The ``gguf`` package's own reader builds one array object per token, which takes seconds, and trusts the
lengths in the file; its constants and dequantisers are used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mooncake.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEYS = 65_536
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 65_535
MAX_DIMS = 4

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor is. ``shape`` is row-major, with the last axis contiguous, as in numpy and torch."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUF(Protocol):
    """What readers need of a model: one file, or several (``parts``)."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def files(self) -> tuple[GGUFFile, ...]:
        """All its files, in order."""

    def get(self, key: str) -> Value | None:
        """The value of a metadata key, or None without such a key. Raises ModelError."""

    def tensor_bytes(self, tensor: TensorInfo) -> memoryview:
        """The tensor's bytes in its file; pages are read when touched."""


@dataclass(frozen=True, slots=True)
class _Array:
    """A skipped array: where its items begin, and their type."""

    kind: int
    length: int
    offset: int


class GGUFFile:
    """One open file. ``tensors`` in file order; ``header_bytes`` is everything before the first tensor's bytes."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError, in one sentence, if the file cannot be read, is not GGUF, or ends too early."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                if file.read(4) != MAGIC:
                    raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"cannot read the model file {path}: {error.strerror}") from None
        self._values: dict[str, Value | _Array] = {}
        try:
            self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._read_header())
        except (struct.error, OverflowError):
            raise ModelError(f"{path} is truncated: its header does not end") from None
        except (UnicodeDecodeError, ValueError) as error:
            raise ModelError(f"{path} is not a valid GGUF file: {error}") from None

    @property
    def files(self) -> tuple[GGUFFile, ...]:
        return (self,)

    def get(self, key: str) -> Value | None:
        """The value of a metadata key, or None when the file has no such key."""
        value = self._values.get(key)
        if not isinstance(value, _Array):
            return value
        try:
            return self._array_items(value)
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path} is not a valid GGUF file: {key}: {error}") from None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def tensor_bytes(self, tensor: TensorInfo) -> memoryview:
        """The tensor's bytes in the file; pages are read when touched."""
        return memoryview(self.data)[tensor.offset : tensor.offset + tensor.num_bytes]

    def _read_header(self) -> dict[str, TensorInfo]:
        (version,) = _U32.unpack_from(self.data, 4)
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ModelError(f"{self.path} is GGUF version {version}; versions {known} (little-endian) are supported")
        num_tensors, num_keys = struct.unpack_from("<QQ", self.data, 8)
        if num_keys > MAX_KEYS or num_tensors > MAX_TENSORS:
            raise ValueError(f"it claims {num_keys} keys and {num_tensors} tensors")
        at = 24
        for _ in range(num_keys):
            key, at = self._name(at)
            (kind,) = _U32.unpack_from(self.data, at)
            self._values[key], at = self._value(kind, at + 4)
        entries = []
        for _ in range(num_tensors):
            entry, at = self._tensor_entry(at)
            entries.append(entry)
        alignment = self._values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
        self.header_bytes = -(-at // alignment) * alignment
        return {entry[0]: self._placed(*entry) for entry in entries}

    def _placed(self, name: str, shape: tuple[int, ...], kind_id: int, offset: int) -> TensorInfo:
        kind = GGMLQuantizationType(kind_id)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"{name} of kind {kind.name} has rows of {shape[-1]} values, not a multiple of {block}")
        tensor = TensorInfo(name, shape, kind, self.header_bytes + offset, math.prod(shape) // block * block_bytes)
        if tensor.offset + tensor.num_bytes > self.size:
            raise ModelError(
                f"{self.path} is truncated: {name} ends at byte {tensor.offset + tensor.num_bytes}, "
                f"the file at {self.size}"
            )
        return tensor

    def _tensor_entry(self, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, at = self._name(at)
        (num_dims,) = _U32.unpack_from(self.data, at)
        if not 1 <= num_dims <= MAX_DIMS:
            raise ValueError(f"{name} has {num_dims} dimensions")
        *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", self.data, at + 4)
        return (name, tuple(reversed(dims)), kind, offset), at + 4 + 8 * num_dims + 12

    def _name(self, at: int) -> tuple[str, int]:
        """The name of a key or tensor, on one line for errors and logs."""
        name, end = self._string(at, MAX_NAME_BYTES)
        if not name.isprintable():
            raise ValueError(f"{name!r} is no name")
        return name, end

    def _value(self, kind: int, at: int) -> tuple[Value | _Array, int]:
        if kind in _SCALARS:
            (value,) = _SCALARS[kind].unpack_from(self.data, at)
            return value, at + _SCALARS[kind].size
        if kind == _STRING:
            return self._string(at, self.size)
        if kind == _ARRAY:
            return self._skipped_array(at)
        raise ValueError(f"unknown kind of metadata {kind}")

    def _skipped_array(self, at: int) -> tuple[_Array, int]:
        item_kind, length = struct.unpack_from("<IQ", self.data, at)
        at += 12
        array = _Array(item_kind, length, at)
        if item_kind in _SCALARS:
            end = at + length * _SCALARS[item_kind].size
        elif item_kind == _STRING:
            if length > (self.size - at) // 8:  # each has a length of 8 bytes
                raise struct.error
            end, unpack, data = at, _U64.unpack_from, self.data
            for _ in range(length):
                end += 8 + unpack(data, end)[0]
        else:
            raise ValueError(f"arrays of kind {item_kind} are not supported")
        if end > self.size:
            raise struct.error
        return array, end

    def _array_items(self, array: _Array) -> list[int] | list[float] | list[bool] | list[str]:
        if array.kind in _SCALARS:
            code = _SCALARS[array.kind].format[1:]
            return list(struct.unpack_from(f"<{array.length}{code}", self.data, array.offset))
        items: list[str] = []
        at, unpack, data = array.offset, _U64.unpack_from, self.data
        for _ in range(array.length):
            start = at + 8
            at = start + unpack(data, at)[0]
            items.append(data[start:at].decode())
        return items

    def _string(self, at: int, max_bytes: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self.data, at)
        if length > max_bytes:
            raise ValueError(f"a string of {length} bytes where at most {max_bytes} make sense")
        end = at + 8 + length
        if end > self.size:
            raise struct.error
        return self.data[at + 8 : end].decode(), end
