"""Linear layers, and the weights of one decoder layer in the form the forward pass needs: fused.

Query, key and value projections are one matrix, and so are gate and up: fewer and larger products. This module knows
the names of weights as Hugging Face publishes them; it knows nothing of files or caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import torch

from mooncake.errors import ModelError
from mooncake.kernels import Kernels, Linear
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import Codes, Matrix
from mooncake.model_config import ModelConfig
from mooncake.precision import Coding

T = TypeVar("T")

Weights = Mapping[str, torch.Tensor]


class WeightsOnDemand(Weights):
    """Creates each weight anew on every access, so that packing them one after another never holds all of them twice.

    ``codes`` gives a matrix, and ``experts`` a tensor of all experts, as codes that products take directly, if it is
    stored so and codes are wanted; otherwise None. ``as_stored`` gives a weight in the type of its file, for those who
    read a few of its rows at a time; None if it is not stored as values.
    """

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[[str], torch.Tensor],
        codes: Callable[[str], Codes | GroupedCodes | None] = lambda _: None,
        experts: Callable[[str], list[GroupedCodes] | None] = lambda _: None,
        as_stored: Callable[[str], torch.Tensor | None] = lambda _: None,
    ) -> None:
        self._names = dict.fromkeys(names)
        self._make = make
        self.codes = codes
        self.experts = experts
        self.as_stored = as_stored

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        """Without creating it."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """As published, except for the fusion."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Matrix  # [(Hq + 2 * Hkv) * D, hidden]; in a layer without its own KV [Hq * D, hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [D], Qwen3
    key_norm: torch.Tensor | None
    output: Matrix  # [hidden, Hq * D]
    mlp_norm: torch.Tensor
    gate_up: Matrix  # [2 * intermediate, hidden]
    down: Matrix  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The same, with matrices in the kernels' form."""

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def layer_weights(weights: Weights, layer: int, config: ModelConfig) -> LayerWeights:
    """Gather and fuse one layer's weights. Raises ModelError if one is missing."""
    owns_kv, qk_norm = config.owns_kv(layer), config.qk_norm
    prefix = f"model.layers.{layer}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    projections = [attention + name for name in (("q_proj", "k_proj", "v_proj") if owns_kv else ("q_proj",))]
    return LayerWeights(
        attention_norm=weight(weights, prefix + "input_layernorm.weight"),
        qkv=matrix(weights, *(name + ".weight" for name in projections)),
        qkv_bias=torch.cat([weight(weights, name + ".bias") for name in projections]) if config.qkv_bias else None,
        query_norm=weight(weights, attention + "q_norm.weight") if qk_norm else None,
        key_norm=weight(weights, attention + "k_norm.weight") if qk_norm and owns_kv else None,
        output=matrix(weights, attention + "o_proj.weight"),
        mlp_norm=weight(weights, prefix + "post_attention_layernorm.weight"),
        gate_up=matrix(weights, *(mlp + name for name in ("gate_proj.weight", "up_proj.weight"))),
        down=matrix(weights, mlp + "down_proj.weight"),
    )


def decoder_layer(source: LayerWeights, kernels: Kernels, coding: Coding) -> DecoderLayer:
    return DecoderLayer(
        attention_norm=vector(source.attention_norm, kernels),
        qkv=kernels.linear(source.qkv, source.qkv_bias, coding),
        query_norm=None if source.query_norm is None else vector(source.query_norm, kernels),
        key_norm=None if source.key_norm is None else vector(source.key_norm, kernels),
        output=kernels.linear(source.output, None, coding),
        mlp_norm=vector(source.mlp_norm, kernels),
        gate_up=kernels.linear(source.gate_up, None, coding),
        down=kernels.linear(source.down, None, coding),
    )


def embedding_and_head(
    weights: Weights, config: ModelConfig, places: range, linear: Callable[[Matrix], T]
) -> tuple[T | None, T | None]:
    """For a stage with the layers ``places``: the stage with the first layer embeds, the one with the last layer
    computes logits, if the model does. If it has one matrix for both, they share the product. Raises ModelError if one
    is missing."""
    embeds, has_head = places.start == 0, places.stop == config.num_layers and config.has_head
    is_tied = config.tie_embeddings
    embedding = linear(matrix(weights, "model.embed_tokens.weight")) if embeds or (has_head and is_tied) else None
    head = embedding if is_tied or not has_head else linear(matrix(weights, "lm_head.weight"))
    return embedding, head


def weight(weights: Weights, name: str) -> torch.Tensor:
    """One weight by its published name. Raises ModelError if the model lacks it."""
    try:
        return weights[name]
    except KeyError:
        raise ModelError(f"the model's files have no weight {name!r}") from None


def matrix(weights: Weights, *names: str) -> Matrix:
    """Matrices stacked into one; as codes, if all of them are. Raises ModelError if the model lacks one."""
    given = [weights.codes(name) for name in names] if isinstance(weights, WeightsOnDemand) else []
    codes = [each for each in given if isinstance(each, Codes)]
    if len(codes) == len(names) and all(codes[0].joins(each) for each in codes):
        return Codes.stacked(codes)
    groups = [each for each in given if isinstance(each, GroupedCodes)]
    if len(groups) == len(names) and all(groups[0].joins(each) for each in groups):
        return GroupedCodes.stacked(groups)
    return weight(weights, names[0]) if len(names) == 1 else torch.cat([weight(weights, name) for name in names])


def of_rows(given: Matrix, order: torch.Tensor) -> Matrix:
    """The same matrix with its outputs in another order."""
    return given[order] if isinstance(given, torch.Tensor) else given.of_rows(order)


def joined(matrices: Sequence[Matrix]) -> list[Matrix]:
    """The same rows in as few matrices as can be: neighbours that join are one."""
    found: list[list[Matrix]] = []
    for given in matrices:
        if found and _join(found[-1][0], given):
            found[-1].append(given)
        else:
            found.append([given])
    return [run[0] if len(run) == 1 else _stacked(run) for run in found]


def _join(first: Matrix, other: Matrix) -> bool:
    if isinstance(first, GroupedCodes) and isinstance(other, GroupedCodes):
        return first.joins(other)
    return isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor)


def _stacked(run: Sequence[Matrix]) -> Matrix:
    if isinstance(run[0], torch.Tensor):
        return torch.cat([each for each in run if isinstance(each, torch.Tensor)])
    return GroupedCodes.stacked([each for each in run if isinstance(each, GroupedCodes)])


class SideBySide:
    """A ``Linear`` of several: the outputs of each follow those of the one before it. For matrices that do not join, as
    in GGUF files whose values have more bits than queries and keys."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(hidden) for part in self._parts], dim=-1)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        raise AssertionError("what embeds is one matrix, and so no such product")


class MatricesOnDemand(Sequence[Matrix]):
    """Matrices by their names, several stacked as one, each made when it is asked for: kernels that pack experts one
    after another never hold all of them twice."""

    def __init__(self, weights: Weights, names: Sequence[tuple[str, ...]]) -> None:
        self._weights, self._names = weights, names

    @overload
    def __getitem__(self, index: int) -> Matrix: ...
    @overload
    def __getitem__(self, index: slice) -> MatricesOnDemand: ...
    def __getitem__(self, index: int | slice) -> Matrix | MatricesOnDemand:
        if isinstance(index, slice):
            return MatricesOnDemand(self._weights, self._names[index])
        return matrix(self._weights, *self._names[index])

    def __len__(self) -> int:
        return len(self._names)


def vector(values: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """A small weight in the type of these kernels' activations: float32 on CPUs.

    It is a copy, because a small view would keep a whole mapped file in memory.
    """
    dtype = torch.float32 if isinstance(kernels, CpuKernels) else values.dtype
    return values.to(kernels.device, dtype, copy=True)
