"""Linear layers, and the weights of one decoder layer in the form the forward pass wants them: fused.

Query, key and value projections are one matrix, and so are gate and up: fewer and larger products. This module knows
names of weights as Hugging Face publishes them; it must not know about files or caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mooncake.errors import ModelError
from mooncake.kernels import Kernels, Linear

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> (Hq + 2 * Hkv) * D
    query_norm: torch.Tensor | None  # [D], Qwen3
    key_norm: torch.Tensor | None
    output: Linear  # Hq * D -> hidden
    mlp_norm: torch.Tensor
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden


def decoder_layer(weights: Weights, layer: int, qkv_bias: bool, qk_norm: bool, kernels: Kernels) -> DecoderLayer:
    """Gather and fuse the weights of one layer. Raises ModelError when one is missing."""
    prefix = f"model.layers.{layer}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    projections = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
    return DecoderLayer(
        attention_norm=norm_weight(weights, prefix + "input_layernorm.weight"),
        qkv=_fused(weights, projections, qkv_bias, kernels),
        query_norm=norm_weight(weights, attention + "q_norm.weight") if qk_norm else None,
        key_norm=norm_weight(weights, attention + "k_norm.weight") if qk_norm else None,
        output=kernels.linear(weight(weights, attention + "o_proj.weight")),
        mlp_norm=norm_weight(weights, prefix + "post_attention_layernorm.weight"),
        gate_up=_fused(weights, [mlp + "gate_proj", mlp + "up_proj"], bias=False, kernels=kernels),
        down=kernels.linear(weight(weights, mlp + "down_proj.weight")),
    )


def _fused(weights: Weights, names: list[str], bias: bool, kernels: Kernels) -> Linear:
    matrix = torch.cat([weight(weights, name + ".weight") for name in names])
    return kernels.linear(matrix, torch.cat([weight(weights, name + ".bias") for name in names]) if bias else None)


def weight(weights: Weights, name: str) -> torch.Tensor:
    """One weight by its published name. Raises ModelError when the model lacks it."""
    try:
        return weights[name]
    except KeyError:
        raise ModelError(f"the model's files have no weight {name!r}") from None


def norm_weight(weights: Weights, name: str) -> torch.Tensor:
    """A copy: a small view of a mapped file would keep the whole of it in memory."""
    return weight(weights, name).clone()
