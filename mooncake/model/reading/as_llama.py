"""Weights of families that store Llama's differently and share its arithmetic.

Phi-3 (Abdin et al. 2024) publishes the query, key and value projections as one matrix and gate and up as another, and
Phi-4-mini rotates only the first elements of each head. ERNIE 4.5 (Baidu 2025) and Helium (Kyutai 2025) rotate
neighbouring elements.
"""

from __future__ import annotations

import torch

from mooncake.kernels.grouped import GroupedCodes
from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model.rope import heads_in_order, rotary_order
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
    order = head_order(config)
    places: dict[str, tuple[str, slice]] = {}
    for name in weights:
        kind = name.split(".")[-2]
        for part, rows in parts.get(kind, {kind: slice(None)}).items():
            places[name.replace(kind, part)] = name, rows

    def make(name: str) -> torch.Tensor:
        stored, rows = places[name]
        values = weights[stored][rows]
        return values if order is None or not turns(name) else heads_in_order(values, order)

    def codes(name: str) -> GroupedCodes | None:
        stored, rows = places[name]
        whole = weights.codes(stored) if isinstance(weights, WeightsOnDemand) else None
        if not isinstance(whole, GroupedCodes):
            return None
        part = whole.part(rows, slice(None))
        if part is None or order is None or not turns(name):
            return part
        return part.of_rows(heads_in_order(torch.arange(len(part.codes)), order))

    return WeightsOnDemand(places, make, codes)


def turns(name: str) -> bool:
    """Whether the weight's rows are those of heads that rotate."""
    return name.split(".")[-2] in ("q_proj", "k_proj")


def head_order(config: ModelConfig) -> torch.Tensor | None:
    """int64 ``[D]``: the order of the published elements of a query's or key's head; None: as they are."""
    if config.architecture in ("ernie4_5", "helium"):
        return rotary_order(config.head_dim, config.head_dim, in_turn=True)
    return rotary_order(config.head_dim, config.rotary_dim) if config.rotary_dim >= 0 else None
