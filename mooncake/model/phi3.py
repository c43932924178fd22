"""Phi-3's weights (Abdin et al. 2024) as those of the Llama family, whose arithmetic it shares.

It publishes the query, key and value projections as one matrix and gate and up as another, and Phi-4-mini rotates only
the first elements of each head.
"""

from __future__ import annotations

import torch

from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model.rope import rotary_order
from mooncake.model_config import ModelConfig


def as_llama(weights: Weights, config: ModelConfig) -> Weights:
    """The same weights under Llama's names: fused ones split, query and key rows in ``rotary_order``."""
    dim, inner = config.head_dim, config.intermediate_size
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    parts = {
        "qkv_proj": {
            "q_proj": slice(0, query),
            "k_proj": slice(query, query + kv),
            "v_proj": slice(query + kv, query + 2 * kv),
        },
        "gate_up_proj": {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)},
    }
    order = rotary_order(dim, config.rotary_dim) if config.rotary_dim >= 0 else None
    places: dict[str, tuple[str, slice]] = {}
    for name in weights:
        kind = name.split(".")[-2]
        for part, rows in parts.get(kind, {kind: slice(None)}).items():
            places[name.replace(kind, part)] = name, rows

    def make(name: str) -> torch.Tensor:
        stored, rows = places[name]
        values = weights[stored][rows]
        if order is not None and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = values.view(-1, dim, values.shape[1])[:, order].flatten(0, 1)
        return values

    return WeightsOnDemand(places, make)
