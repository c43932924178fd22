"""How the last hidden states of a text become its embedding: which of them, and whether its length becomes 1; and how
near two embeddings are.

Torch-free. A folder says so in the files of sentence-transformers (``modules.json``, ``1_Pooling/config.json``);
where there are none, the last token's state is normalised, as vLLM does for models that generate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mooncake.errors import InvalidRequest, ModelError, shown
from mooncake.json_file import read_json, read_json_list

T = TypeVar("T")

Vector = npt.NDArray[np.float32]

_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean": "mean",
}


class Pooling(StrEnum):
    LAST = "last"  # the last token's state: what comes before it may be reused
    MEAN = "mean"  # of all tokens: each is computed, for nobody keeps the states of cached ones


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """Of one model."""

    kind: Pooling = Pooling.LAST
    is_normalised: bool = True  # L2

    def embedding(self, pooled: Vector, dimensions: int | None = None) -> Vector:
        """``[D]`` of the pooled states ``[hidden]``: the first ``dimensions`` (Matryoshka representations, Kusupati et
        al. 2022; None: all), of length 1 if the model's are."""
        vector = pooled[:dimensions]
        length = float(np.linalg.norm(vector.astype(np.float64))) if self.is_normalised else 1.0
        return (vector / max(length, 1e-12)).astype(np.float32)


def cosine(first: Vector, second: Vector) -> float:
    """How near two embeddings are: from -1 to 1."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


def paired(firsts: Sequence[T], seconds: Sequence[T], param: str) -> list[tuple[T, T]]:
    """Texts to compare, or their embeddings: one first goes with every second one. Raises InvalidRequest, naming
    ``param``, for other numbers of them."""
    if len(firsts) not in (1, len(seconds)):
        what = f"{len(firsts)} texts cannot be paired with {len(seconds)}"
        raise InvalidRequest(f"{what}: give one, or as many", param)
    return list(zip(firsts if len(firsts) > 1 else [*firsts] * len(seconds), seconds, strict=True))


_GGUF_KINDS = {None: Pooling.LAST, 0: Pooling.LAST, 1: Pooling.MEAN, 3: Pooling.LAST}  # None, 0: it says nothing

LAST_TOKEN = PoolingSettings()
"""Of models that say nothing of it."""


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raises InvalidRequest for more than an embedding has."""
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        what = f"dimensions must be between 1 and {hidden_size}, the size of this model's embeddings"
        raise InvalidRequest(f"{what}, got {shown(dimensions)}", "dimensions")


def pooling_from_gguf(kind: object, path: Path) -> PoolingSettings:
    """Of llama.cpp's numbers. Raises ModelError for what is not supported."""
    if kind not in _GGUF_KINDS:
        raise ModelError(f"{path} asks for the pooling_type {shown(kind)}: known are 1 (mean) and 3 (last)")
    return PoolingSettings(_GGUF_KINDS[kind])


def read_pooling(folder: Path) -> PoolingSettings:
    """Raises ModelError for what is not supported, or for broken files."""
    modules = folder / "modules.json"
    if not modules.exists():
        return LAST_TOKEN
    kind, is_normalised = Pooling.LAST, False
    for module in read_json_list(modules):
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _kind(folder, module)
        elif name == "Normalize":
            is_normalised = True
        elif name != "Transformer":
            raise ModelError(f"{modules} has a module {shown(name)} behind the model, which is not computed here")
    return PoolingSettings(kind, is_normalised)


def _kind(folder: Path, module: Mapping[str, object]) -> Pooling:
    path = folder / str(module.get("path", "")) / "config.json"
    if folder.resolve() not in path.resolve().parents:
        raise ModelError(f"{folder / 'modules.json'} names a folder that is not the model's: {path}")
    config = read_json(path)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode") and value is True]
    named = config.get("pooling_mode")  # newer files name it
    modes += [f"pooling_mode_{named}"] if isinstance(named, str) else []
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(f"{path} asks for {' and '.join(modes) or 'no pooling'}: known are {', '.join(_MODES)}")
    return Pooling(_MODES[modes[0]])
