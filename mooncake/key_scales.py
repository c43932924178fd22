"""Factors for key channels, measured once per model by ``mooncake key-scales`` and kept in a file.

int8 pages have one scale per token and head, which the largest channel determines. Keys have channels that are large in
every token; if they are divided by factors, and the queries multiplied by them, scores are unchanged and codes are
finer. Every node of a cluster must have the same file: its digest is part of the name of all KV. Torch-free.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.durable import write_whole
from mooncake.errors import ConfigError

MAX_FILE_BYTES = 16 << 20
Exponents = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, eq=False)
class KeyScales:
    """``exponents`` ``[layers, Hkv, D / 2]`` of two, for channels c and c + D / 2, which RoPE rotates into each
    other."""

    exponents: Exponents

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.exponents.shape).encode() + self.exponents.tobytes()).hexdigest()[:16]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    tokens: int
    exponents: list[list[list[int]]]


def save_key_scales(path: Path, scales: KeyScales, model: str, tokens: int) -> None:
    """``model`` and ``tokens`` record the origin. Written atomically. Raises ConfigError when there is no room."""
    try:
        write_whole(path, msgspec.json.encode(_File(model, tokens, scales.exponents.tolist())) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def load_key_scales(path: str) -> KeyScales:
    """Raises ConfigError for a missing or invalid file."""
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is too long")
        exponents = np.array(msgspec.json.decode(Path(path).read_bytes(), type=_File).exponents, dtype=np.int8)
        if exponents.ndim != 3 or not exponents.size or np.abs(exponents.astype(int)).max() > 32:
            raise ValueError("its exponents are none")
    except OSError as error:
        raise ConfigError(f"model.key_scales: cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise ConfigError(f"model.key_scales: {path} is not what `mooncake key-scales` writes: {error}") from None
    return KeyScales(exponents)
