"""How a model is split over tensor parallel ranks: arithmetic over its shape and the names of its weights, no
processes.

attention  rank r of S has query heads r·Hq/S … and KV heads r·Hkv/S … (one of them, repeated, if S > Hkv)
latent     all heads share one row per token, so each rank computes and keeps all of it; only the heads' projections
           to and from the latent space are split
MLP        rank r has elements r·I/S … of the inner dimension, also in an expert that all tokens use
mixture    each expert is on one rank: r has experts r·E/S …; routers are on all ranks
vocabulary rank r has rows r·V/S … of the embedding table and of the head; S need not divide V
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mooncake.errors import ModelError
from mooncake.families.llama import FAMILIES
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import Codes, quantise_rows
from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model_config import ModelConfig
from mooncake.precision import Coding

_ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_COLUMNS = ("o_proj", "down_proj")
_ENTRIES = ("sinks",)  # one per head
_ALL_EXPERTS = ("experts", "input_linear", "output_linear")  # in one tensor (gpt-oss, Granite)
_WHOLE = slice(None)


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one rank's part. Raises ModelError if the model cannot be split into ``size`` equal parts."""
    if config.gemma:
        raise ModelError("tensor parallelism is not for Gemma 3n and 4")
    if config.architecture not in FAMILIES and not config.num_experts and config.latent is None:
        raise ModelError(
            f"tensor parallelism is for the Llama family and for mixtures of experts, not for {config.architecture}"
        )
    widths = _cut_widths(config)
    if any(count % size for count in (config.num_heads, *widths)):
        mlps = "".join(f" and an MLP of {width}" for width in widths)
        raise ModelError(f"{config.num_heads} heads{mlps} cannot be cut into {size} equal parts (tensor_parallel)")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ModelError(
            f"{config.num_kv_heads} KV heads can neither be cut into {size} parts nor be repeated for them"
        )
    if 0 < config.num_experts < size:
        raise ModelError(f"{config.num_experts} experts are not enough for {size} ranks")
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        intermediate_size=config.intermediate_size // (size if _has_dense_layers(config) else 1),
        shared_expert_size=config.shared_expert_size // size,
    )


def experts_of(config: ModelConfig, rank: int, size: int) -> range:
    """The experts on this rank, by their numbers in the model."""
    share = _share(config.num_experts, rank, size)
    return range(share.start, share.stop)


def kv_heads_of(config: ModelConfig, rank: int, size: int) -> slice:
    """The KV heads of which this rank computes and reads keys and values, by their numbers in the model."""
    first = rank * config.num_kv_heads // size
    return slice(first, first + max(config.num_kv_heads // size, 1))


def copies_heads_of(config: ModelConfig, rank: int, size: int) -> bool:
    """Whether the rank before has the same KV heads."""
    return rank > 0 and kv_heads_of(config, rank, size) == kv_heads_of(config, rank - 1, size)


def vocabulary_shares(config: ModelConfig, size: int) -> list[range]:
    """The tokens whose rows of the embedding table and of the head are on each rank."""
    shares = [_share(config.vocab_size, rank, size) for rank in range(size)]
    return [range(share.start, share.stop) for share in shares]


def shard_weights(weights: Weights, config: ModelConfig, rank: int, size: int, coding: Coding = "") -> Weights:
    """The part of each weight that ``rank`` computes with, without other ranks' experts; norms and routers are whole.

    Codes stored in the checkpoint are cut like the weights they stand for. With ``coding`` "int8" so are those of
    matrices that are cut by columns: their scales are those of whole rows, as in one process.
    """
    shard, here = _Shard(weights, config, rank, size, coding), experts_of(config, rank, size)
    names = (name for name in weights if _expert_of(name) in (None, *here))
    return WeightsOnDemand(names, shard.values, shard.codes, shard.experts)


class _Shard:
    """What one rank has of each weight."""

    def __init__(self, weights: Weights, config: ModelConfig, rank: int, size: int, coding: Coding) -> None:
        self._weights = weights
        self._stored = weights if isinstance(weights, WeightsOnDemand) else None
        self._rank, self._size, self._coding = rank, size, coding
        self._head_dim = config.head_dim
        heads = kv_heads_of(config, rank, size)
        self._kv_rows = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        self._experts = _share(config.num_experts, rank, size)

    def values(self, name: str) -> torch.Tensor:
        tensor = self._weights[name]
        if _is_cut_by_columns(name) and tensor.ndim == 1:
            # A bias goes whole to the first rank, because the sum over ranks must include it once.
            return tensor if self._rank == 0 else torch.zeros_like(tensor)
        rows, columns = self._place(name, tensor.shape)
        return (tensor[rows] if tensor.ndim == 1 else tensor[rows, columns]).contiguous()

    def codes(self, name: str) -> Codes | GroupedCodes | None:
        whole = None if self._stored is None else self._stored.codes(name)
        if whole is None and self._coding and _is_cut_by_columns(name):
            tensor = self._weights[name]
            whole = Codes(*quantise_rows(tensor), self._coding, tensor.dtype)
        return None if whole is None else whole.part(*self._place(name, whole.shape))

    def experts(self, name: str) -> list[GroupedCodes] | None:
        everyones = None if self._stored is None else self._stored.experts(name)
        return None if everyones is None else everyones[self._experts]

    def _place(self, name: str, shape: Sequence[int]) -> tuple[slice, slice]:
        """Rows and columns."""
        if _is_cut_by_columns(name) and len(shape) == 2:
            return _WHOLE, _share(shape[1], self._rank, self._size)
        return self._rows(name, shape), _WHOLE

    def _rows(self, name: str, shape: Sequence[int]) -> slice:
        kind = name.split(".")[-2]
        if _expert_of(name) is not None:
            return _WHOLE
        if kind in _ALL_EXPERTS:
            return self._experts
        if kind in ("q_norm", "k_norm") and shape[0] <= self._head_dim:
            return _WHOLE  # of each head, and not of all heads together (OLMoE, MiniMax-M2)
        if kind in ("k_norm", "k_proj", "v_proj"):
            return self._kv_rows
        if kind in (*_ROWS, "q_norm") or name.endswith(_ENTRIES):
            return _share(shape[0], self._rank, self._size)
        return _WHOLE


def _is_cut_by_columns(name: str) -> bool:
    return name.split(".")[-2] in _COLUMNS and _expert_of(name) is None


def _cut_widths(config: ModelConfig) -> list[int]:
    dense = [config.intermediate_size] if _has_dense_layers(config) else []
    return dense + ([config.shared_expert_size] if config.shared_expert_size else [])


def _has_dense_layers(config: ModelConfig) -> bool:
    return not config.num_experts or (config.routing is not None and len(config.routing.dense_layers) > 0)


def _expert_of(name: str) -> int | None:
    """The number of the only expert that uses this weight."""
    _, is_there, behind = name.partition(".experts.")
    number = behind.split(".")[0]
    return int(number) if is_there and number.isdigit() else None


def _share(count: int, rank: int, size: int) -> slice:
    return slice(count * rank // size, count * (rank + 1) // size)
