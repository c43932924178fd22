"""Weights whose queries and keys are scaled by channel (``mooncake.key_scales``).

Factors are powers of two and equal for the two channels that RoPE rotates into each other, so nothing is rounded: over
float32 pages the model's answers are bit-identical.
"""

from __future__ import annotations

import torch

from mooncake.errors import ModelError
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import Codes
from mooncake.key_scales import KeyScales
from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model_config import ModelConfig


def with_scaled_keys(weights: Weights, config: ModelConfig, scales: KeyScales) -> Weights:
    """Weights of a Llama family model, with keys divided and queries multiplied by the factors. If keys are normalised,
    all heads of a layer share one norm's weights, and so the factors of the first head.

    Raises ModelError if the scales are not for this model.
    """
    shape = len(config.kv_owners), config.num_kv_heads, config.head_dim // 2
    if scales.exponents.shape != shape:
        raise ModelError(f"model.key_scales has the shape {scales.exponents.shape}; this model needs {shape}")
    factors = torch.exp2(torch.from_numpy(scales.exponents).float()).repeat(1, 1, 2)  # [KV layers, Hkv, D]
    rows_by_name: dict[str, torch.Tensor] = {}
    for layer in range(config.num_layers):
        of_key, attention = factors[config.kv_layer_of(layer)], f"model.layers.{layer}.self_attn."
        if config.qk_norm:
            names = {"q_norm.weight": of_key[0], "k_norm.weight": 1 / of_key[0]}
        else:
            of_query = of_key.repeat_interleave(config.num_heads // config.num_kv_heads, 0)
            parts = ("weight", "bias") if config.qkv_bias else ("weight",)
            names = {f"q_proj.{part}": of_query.flatten() for part in parts}
            names |= {f"k_proj.{part}": 1 / of_key.flatten() for part in parts}
        rows_by_name |= {attention + name: rows for name, rows in names.items()}

    def scaled(name: str) -> torch.Tensor:
        values, rows = weights[name], rows_by_name.get(name)
        return values if rows is None else (values * rows.view(-1, *[1] * (values.ndim - 1))).to(values.dtype)

    def scaled_codes(name: str) -> Codes | GroupedCodes | None:
        codes = weights.codes(name) if isinstance(weights, WeightsOnDemand) else None
        rows = rows_by_name.get(name)
        return codes if codes is None or rows is None else codes.scaled(rows)

    return WeightsOnDemand(weights, scaled, scaled_codes)
