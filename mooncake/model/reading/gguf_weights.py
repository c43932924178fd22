"""Weights out of a GGUF file, as Hugging Face publishes them: values, or codes where products take those directly.

``mooncake.gguf.sources`` says which tensors hold a weight and what the converter did to it; that is undone here.
"""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
import numpy.typing as npt
import torch

from mooncake.errors import ModelError
from mooncake.families.family import Shapes
from mooncake.gguf.file import GGUF, TensorInfo
from mooncake.gguf.forms import Source
from mooncake.gguf.sources import listed_number, sources
from mooncake.kernels.grouped import GroupedCodes
from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model.reading.gguf_codes import grouped_codes
from mooncake.model_config import ModelConfig, Recurrence

Floats = npt.NDArray[np.float32]

KEPT_WIDE = (".e_score_correction_bias", ".expert_bias", ".A_log", ".dt_bias", ".D")
"""Weights that decide between nearly equal scores, or how fast a state forgets, stay float32 in models of any type."""

_FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


def gguf_weights(file: GGUF, config: ModelConfig, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Weights:
    """Each weight of ``shapes``, made when it is asked for. Unsupported kinds raise ModelError then."""
    reader = _Reader(file, config, shapes, dtype)
    return WeightsOnDemand(shapes, reader.values, reader.codes, reader.experts)


def _stacked(parts: Sequence[GroupedCodes | None]) -> GroupedCodes | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not all(known[0].joins(part) for part in known):
        return None
    return known[0] if len(known) == 1 else GroupedCodes.stacked(known)


# Orders of states' heads


def _is_of_columns(name: str, source: Source) -> bool:
    """Whether what is tiled is what enters the matrix."""
    return source.is_tiled and name.endswith(".out_proj.weight")


def _of_tiles(states: Recurrence, size: int) -> npt.NDArray[np.int64]:
    """Value heads, or what there is one of for each of them, are last among ``size`` rows or columns."""
    heads, keys = states.num_value_heads, states.num_key_heads
    dim = states.value_dim if size >= heads * states.value_dim else 1
    before = size - heads * dim
    tiles = np.arange(before, size).reshape(heads // keys, keys, dim).swapaxes(0, 1)
    return np.concatenate([np.arange(before), tiles.flatten()])


def _of_key_heads(states: Recurrence) -> npt.NDArray[np.int64]:
    """Of each key head, its query, key, values and gates."""
    keys, values = states.num_key_heads * states.key_dim, states.num_value_heads * states.value_dim
    kinds = np.split(np.arange(2 * keys + 2 * values), np.cumsum([keys, keys, values]))
    return np.concatenate([kind.reshape(states.num_key_heads, -1) for kind in kinds], axis=1).flatten()


class _Reader:
    def __init__(self, file: GGUF, config: ModelConfig, shapes: Shapes, dtype: torch.dtype) -> None:
        self._file, self._config, self._shapes, self._dtype = file, config, shapes, dtype
        self._sources = sources(config, file, shapes)

    def values(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        dtype = torch.float32 if name.endswith(KEPT_WIDE) else self._dtype
        return torch.from_numpy(self._published(name, source)).to(dtype)

    def codes(self, name: str) -> GroupedCodes | None:
        """Of a matrix whose rows are stored whole."""
        source, shape = self._sources[name], self._shapes[name]
        if len(shape) != 2 or not source.keeps_codes(shape):
            return None
        expert = source.expert if source.form == "expert" else None
        stored = (source.stored_shape(shape, self._config, which)[-2:] for which in range(len(source.tensors)))
        infos = (self._file.tensors[tensor] for tensor in source.tensors)
        groups = _stacked([self._grouped(info, expert, part) for info, part in zip(infos, stored, strict=True)])
        if groups is not None and source.form == "rows":
            return groups.part(slice(source.first_row, source.first_row + shape[0]), slice(None))
        order = self._order(name, source)
        if groups is None or order is None:
            return groups
        which = torch.from_numpy(order)
        return groups.of_columns(which) if _is_of_columns(name, source) else groups.of_rows(which)

    def experts(self, name: str) -> list[GroupedCodes] | None:
        """The matrices ``[outputs, inputs]`` of all experts of a tensor whose weight has them transposed (gpt-oss), or
        as they are; or of two tensors, whose rows are in turn or one above the other."""
        source, shape = self._sources[name], self._shapes[name]
        if len(shape) != 3 or not source.keeps_codes(shape):
            return None
        infos = [self._file.tensors[tensor] for tensor in source.tensors]
        found: list[GroupedCodes] = []
        for expert in range(shape[0]):
            parts = [self._grouped(info, expert, (info.shape[1], info.shape[2])) for info in infos]
            whole = _stacked(parts)
            if whole is None:
                return None
            rows = torch.arange(len(whole.codes))
            found.append(whole.of_rows(rows.view(2, -1).T.flatten()) if source.form == "in turn" else whole)
        return found

    def _grouped(self, info: TensorInfo, expert: int | None, shape: tuple[int, ...]) -> GroupedCodes | None:
        return grouped_codes(info.kind.name, self._raw(info, expert), (shape[0], shape[1]), self._dtype)

    def _published(self, name: str, source: Source) -> Floats:
        if source.form == "listed":
            return np.full(self._shapes[name], listed_number(self._file, source), np.float32)
        shape, infos = self._shapes[name], [self._file.tensors[tensor] for tensor in source.tensors]
        if source.form == "expert":
            return self._stored(infos[0], source.expert).reshape(shape)
        first, *others = (self._stored(info) for info in infos)
        match source.form:
            case "plus one":
                return first - np.float32(1)
            case "transposed":
                return np.ascontiguousarray(first.swapaxes(-1, -2))
            case "in turn":
                both = np.stack([first, *others], axis=2).reshape(len(first), -1, *first.shape[2:])
                return np.ascontiguousarray(both.swapaxes(1, 2)) if both.ndim == 3 else both
            case "absorbed":
                return np.concatenate([first.swapaxes(1, 2), *others], axis=1).reshape(shape)
            case "stacked":
                return np.concatenate([first, *others], axis=-2)
            case "rows":
                return np.ascontiguousarray(first[source.first_row : source.first_row + shape[0]])
            case "by kinds":
                first = np.concatenate([first, *others])
            case "rates":
                first = np.log(-first)
        order = self._order(name, source)
        if order is not None:
            first = np.ascontiguousarray(first[:, order]) if _is_of_columns(name, source) else first[order]
        return first.reshape(shape)

    def _order(self, name: str, source: Source) -> npt.NDArray[np.int64] | None:
        """The stored row or column of each published one; None: the same."""
        config, states = self._config, self._config.recurrence
        if source.is_tiled:
            assert states is not None
            return _of_tiles(states, self._shapes[name][1 if _is_of_columns(name, source) else 0])
        if source.form == "by kinds":
            assert states is not None
            return _of_key_heads(states)
        dim = config.head_dim
        if source.form == "turned":
            heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
            return np.arange(heads * dim).reshape(heads, dim // 2, 2).swapaxes(1, 2).flatten()
        if source.form == "ungrouped":
            rows = np.arange((config.num_heads + 2 * config.num_kv_heads) * dim).reshape(-1, dim)
            query, key, value = np.split(rows, [config.num_heads, config.num_heads + config.num_kv_heads])
            groups = query.reshape(config.num_kv_heads, -1, dim)
            return np.concatenate([groups, key[:, None], value[:, None]], axis=1).flatten()
        return None

    def _raw(self, info: TensorInfo, expert: int | None) -> npt.NDArray[np.uint8]:
        octets = np.frombuffer(self._file.tensor_bytes(info), dtype=np.uint8)
        return octets if expert is None else octets.reshape(info.shape[0], -1)[expert]

    def _stored(self, info: TensorInfo, expert: int | None = None) -> Floats:
        """The tensor's values, or those of one of its first axis."""
        raw, shape = self._raw(info, expert), info.shape if expert is None else info.shape[1:]
        kind = _FLOATS.get(info.kind.name)
        try:
            octets = gguf.quant_shape_to_byte_shape(shape, info.kind)
            values = raw.view(kind) if kind else gguf.quants.dequantize(raw.reshape(octets), info.kind)
        except NotImplementedError:
            what = f"{info.name} is quantised as {info.kind.name}, which is not supported"
            raise ModelError(f"{self._file.path}: {what}") from None
        # Always a copy: the tensors must not depend on the file's mapping.
        return np.array(values.reshape(shape), dtype=np.float32)
