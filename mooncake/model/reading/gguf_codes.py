"""Blocks of quantised GGUF tensors as codes with scales, for CPU kernels that multiply those (``kernels.grouped``).

Layouts are ggml's (``ggml-common.h``): a row is divided into blocks of 32 weights, or of 256 in the K-quants, whose
scales are small integers times one or two float16. Kinds not listed here are dequantised by the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mooncake.errors import ModelError
from mooncake.gguf.config import GROUPED_KINDS
from mooncake.kernels.grouped import GroupedCodes

Bytes = npt.NDArray[np.uint8]  # [blocks, bytes of a block]
Floats = npt.NDArray[np.float32]

_NIBBLES = np.arange(16, dtype=np.float32)
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # values of E2M1 codes
NOT_A_POWER = 255  # the exponent that means NaN (OCP MX 1.0, E8M0)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """``codes`` are [blocks, weights per block]; scales and offsets [blocks, groups per block]."""

    codes: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    scales: Floats
    offsets: Floats | None = None
    levels: Floats | None = None


def grouped_codes(kind: str, raw: Bytes, shape: tuple[int, int], dtype: torch.dtype) -> GroupedCodes | None:
    """A matrix ``[out, in]`` from its blocks' bytes; None for a kind whose codes are not multiplied directly."""
    read = _READERS.get(kind)
    if read is None:
        return None
    parse, block_bytes = read
    blocks = parse(raw.reshape(-1, block_bytes))
    outputs, inputs = shape

    def rows(numbers: npt.NDArray[np.generic] | None) -> torch.Tensor | None:
        return None if numbers is None else torch.from_numpy(np.ascontiguousarray(numbers.reshape(outputs, -1)))

    codes, scales = rows(blocks.codes), rows(blocks.scales)
    assert codes is not None and scales is not None and codes.shape[1] == inputs
    levels = None if blocks.levels is None else torch.from_numpy(blocks.levels)
    return GroupedCodes(codes, scales, rows(blocks.offsets), levels, dtype)


def _halves(raw: Bytes, at: int) -> Floats:
    """The float16 at this byte of each block, [blocks, 1]."""
    return raw[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(octets: Bytes) -> npt.NDArray[np.uint8]:
    """The low nibbles of all bytes, then the high ones, along the last axis."""
    return np.concatenate([octets & 15, octets >> 4], axis=-1)


def _q4_0(raw: Bytes) -> _Blocks:
    return _Blocks(_nibbles(raw[:, 2:]), _halves(raw, 0), levels=_NIBBLES - 8)


def _q4_1(raw: Bytes) -> _Blocks:
    return _Blocks(_nibbles(raw[:, 4:]), _halves(raw, 0), _halves(raw, 2), _NIBBLES)


def _q5_bits(raw: Bytes, at: int) -> npt.NDArray[np.int8]:
    """5-bit codes; their fifth bits are a 32-bit word at byte ``at``, before the other bits."""
    fifth = np.unpackbits(raw[:, at : at + 4], axis=-1, bitorder="little") << 4
    return (_nibbles(raw[:, at + 4 :]) | fifth).astype(np.int8)


def _q5_0(raw: Bytes) -> _Blocks:
    return _Blocks(_q5_bits(raw, 2) - np.int8(16), _halves(raw, 0))


def _q5_1(raw: Bytes) -> _Blocks:
    return _Blocks(_q5_bits(raw, 4), _halves(raw, 0), _halves(raw, 2))


def _q8_0(raw: Bytes) -> _Blocks:
    return _Blocks(raw[:, 2:].view(np.int8), _halves(raw, 0))


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of the 8 groups in a Q4_K or Q5_K block: 6 bits each, in 12 bytes, each kind times a
    float16."""
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    mins = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return _halves(raw, 0) * scales, -(_halves(raw, 2) * mins)


def _in_runs(octets: Bytes) -> npt.NDArray[np.uint8]:
    """Nibbles of bytes in runs of 32: first the low nibbles of a run, then its high ones."""
    return _nibbles(octets.reshape(len(octets), -1, 32)).reshape(len(octets), -1)


def _q4_k(raw: Bytes) -> _Blocks:
    return _Blocks(_in_runs(raw[:, 16:]), *_k_scales(raw), levels=_NIBBLES)


def _q5_k(raw: Bytes) -> _Blocks:
    fifth = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [blocks, groups, 32]
    codes = _in_runs(raw[:, 48:]) | fifth.reshape(len(raw), -1) << 4
    return _Blocks(codes.astype(np.int8), *_k_scales(raw))


def _q6_k(raw: Bytes) -> _Blocks:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | high << 4).astype(np.int8) - np.int8(32)
    return _Blocks(codes.reshape(len(raw), -1), _halves(raw, 208) * raw[:, 192:208].view(np.int8))


def _mxfp4(raw: Bytes) -> _Blocks:
    """Powers of two times E2M1 codes (OCP MX 1.0)."""
    if (raw[:, 0] == NOT_A_POWER).any():
        raise ModelError(f"a weight has an mxfp4 scale of {NOT_A_POWER}, which means NaN")
    return _Blocks(_nibbles(raw[:, 1:]), np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 127), levels=FLOAT4)


_READERS: dict[str, tuple[Callable[[Bytes], _Blocks], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
    "MXFP4": (_mxfp4, 17),
}
assert _READERS.keys() == GROUPED_KINDS.keys()
