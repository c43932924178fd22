"""Converts KV rows between float32, bfloat16, and int8 with one scale per row.

Widening and narrowing again is lossless, bit for bit: float32 represents every bfloat16, and every product of an int8
and a scale of 16 significant bits, which the scales computed here have. Written twice: in numpy, which is the
reference, and in C++ (``convert.cpp``), in one pass over memory. It knows neither blocks nor transfers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.layout.layout import numbers, rows, scales
from kvstore.pointers import address_of
from mooncake.native import BuildFailed, load_native
from mooncake.types import KVLayout

log = logging.getLogger(__name__)

Place = tuple[int, int, int]  # layer, head, token
Bytes = npt.NDArray[np.uint8]

SOURCE = Path(__file__).with_name("convert.cpp")
HEADERS = [SOURCE.parent.with_name("copy.h")]
_INT8_MAX = 127.0
_NATIVE_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}


class Converter:
    """Converts one box of the source format's blocks into its place in the target format's."""

    def __init__(
        self,
        source: KVLayout,
        source_first: Place,
        target: KVLayout,
        target_first: Place,
        count: Place,
        is_native: bool = True,
    ) -> None:
        """Without ``is_native``, or a compiler, numpy does it."""
        self._source, self._there = source, _part(source_first, count)
        self._target, self._here = target, _part(target_first, count)
        self._library = _load() if is_native else None
        self._source_at, source_strides = _lies(source, source_first)
        self._target_at, target_strides = _lies(target, target_first)
        types = _NATIVE_TYPES[source.dtype], _NATIVE_TYPES[target.dtype]
        shape = _Numbers(count[0], source.num_kinds, count[1], count[2])
        self._how = (*types, source.head_dim, shape, source_strides, target_strides)

    def __call__(self, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
        """From each source into its target: contiguous blocks of each format, or longer buffers that begin with one."""
        convert_in_turns([self], sources, targets)

    def _convert_plainly(self, source: Bytes, target: Bytes) -> None:
        there, here = rows(self._source, source)[self._there], rows(self._target, target)[self._here]
        convert(there, here, self._source.dtype, self._target.dtype)


def convert_in_turns(converters: Sequence[Converter], sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
    """As calling them, with one source and target each, over and over again: boxes of one shape in blocks of the same
    formats. Those of one round are converted run by run, in turns, so that neighbours in a block are read as they lie
    there."""
    first, num_blocks = converters[0], len(sources)
    assert num_blocks == len(targets) and num_blocks % len(converters) == 0
    if first._library is None:
        for converter, source, target in zip(cycle(converters), sources, targets, strict=False):
            converter._convert_plainly(source, target)
        return
    assert all(source.nbytes >= first._source.block_bytes for source in sources)
    assert all(target.nbytes >= first._target.block_bytes for target in targets)
    places = (
        _addresses(sources, [converter._source_at for converter in converters]),
        _addresses(targets, [converter._target_at for converter in converters]),
    )
    first._library.convert(*places, num_blocks, len(converters), *first._how)


_Numbers = ctypes.c_int64 * 4


def _addresses(blocks: Sequence[Bytes], firsts: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    places: list[int] = []
    last, start = None, 0
    for block, first in zip(blocks, cycle(firsts), strict=False):
        if block is not last:  # asking again would cost more than the rest of this
            last, start = block, address_of(block)
        places.append(start + first)
    return (ctypes.c_void_p * len(places))(*places)


def _lies(block: KVLayout, first: Place) -> tuple[int, ctypes.Array[ctypes.c_int64]]:
    """Where in a block a box begins, and the strides of its layers, K and V, and heads, in bytes."""
    head = block.block_tokens * block.row_bytes
    kind, layer = block.num_kv_heads * head, block.layer_bytes
    return first[0] * layer + first[1] * head + first[2] * block.row_bytes, _Numbers(layer, kind, head, 0)


def _part(first: Place, count: Place) -> tuple[slice, slice, slice, slice]:
    layers, heads, tokens = (slice(start, start + size) for start, size in zip(first, count, strict=True))
    return layers, slice(None), heads, tokens


@cache
def _load() -> ctypes.CDLL | None:
    """The library, or None if it cannot be built."""
    try:
        library = load_native("layout_convert", SOURCE, HEADERS)
    except BuildFailed as error:
        log.warning("converting KV in Python, at several times the cost: %s", error)
        return None
    number, memory = ctypes.c_int64, ctypes.c_void_p
    library.convert.argtypes = (memory, memory, number, number, number, number, number, memory, memory, memory)
    library.convert.restype = None
    return library


def convert(source: Bytes, target: Bytes, source_dtype: str, target_dtype: str) -> None:
    """Convert rows ``[layer, K|V, head, token, row_bytes]`` from one type to another: the reference."""
    if source_dtype == target_dtype:
        np.copyto(target, source)
    elif target_dtype == "float32":
        _widen(source, source_dtype, numbers(target, target_dtype))
    else:
        for index in np.ndindex(source.shape[:2]):  # K or V of a layer: stays in cache
            _narrow(_wide(source[index], source_dtype), target[index], target_dtype)


def _wide(rows: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "float32":
        return numbers(rows, dtype)
    wide = np.empty(numbers(rows, dtype).shape, np.float32)
    _widen(rows, dtype, wide)
    return wide


def _widen(rows: npt.NDArray[np.uint8], dtype: str, wide: npt.NDArray[np.float32]) -> None:
    """To float32, in one pass."""
    values = numbers(rows, dtype)
    if dtype == "bfloat16":
        np.left_shift(values, 16, out=wide.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        np.multiply(values, scales(rows)[..., None], out=wide, dtype=np.float32, casting="unsafe")


def _narrow(wide: npt.NDArray[np.float32], rows: npt.NDArray[np.uint8], dtype: str) -> None:
    if dtype == "bfloat16":
        np.copyto(numbers(rows, dtype), _to_bfloat16(wide), casting="unsafe")
    else:
        least = _scales_of(wide)
        np.copyto(scales(rows), least)
        steps = np.divide(wide, np.where(least > 0, least, np.float32(1))[..., None])
        np.copyto(numbers(rows, dtype), np.rint(steps, out=steps), casting="unsafe")


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """The bits, rounded to nearest, ties to even; NaN stays NaN. In place, because allocating costs more than
    computing."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    if (nothing := np.isnan(values)).any():
        rounded[nothing] = (bits[nothing] >> np.uint32(16)) | np.uint32(0x40)
    return rounded


def _scales_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The smallest scales of 16 significant bits that bring each row ``[…, dim]`` into the range of int8."""
    exact = (np.abs(values).max(axis=-1) / np.float32(_INT8_MAX)).astype(np.float32)
    bits = np.ascontiguousarray(exact).view(np.uint32)
    return ((bits + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)).view(np.float32)
