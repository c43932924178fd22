"""Mixtures of experts over a paged cache, Qwen's and Mixtral: a token uses a few of each MLP's experts.

A step computes each expert once, for the tokens that chose it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mooncake.gated_families import EXPERT_NAMES
from mooncake.kernels import Linear
from mooncake.model.decoder import Step
from mooncake.model.gated import GatedDecoder


@dataclass(frozen=True, slots=True)
class _Shared:
    """The expert that every token uses, by a share that the token says."""

    share: Linear  # [1, hidden]
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None  # Qwen3
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    router: Linear
    gate_up: dict[int, Linear]  # by the experts' numbers: a rank of several has some
    down: dict[int, Linear]
    shared: _Shared | None  # Qwen2-MoE


class MixtureOfExperts(GatedDecoder[_Layer]):
    def _take(self, prefix: str) -> _Layer:
        attention, names, has_norms = prefix + "self_attn.", EXPERT_NAMES[self.config.architecture], self.config.qk_norm
        experts = {expert: f"{prefix}{names.experts}.{expert}." for expert in self.experts}
        return _Layer(
            self.vector(prefix + "input_layernorm.weight"),
            self.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v")), biased=self.config.qkv_bias),
            self.vector(attention + "q_norm.weight") if has_norms else None,
            self.vector(attention + "k_norm.weight") if has_norms else None,
            self.linear(attention + "o_proj"),
            self.vector(prefix + "post_attention_layernorm.weight"),
            self.linear(prefix + names.router),
            {expert: self.linear(name + names.gate, name + names.up) for expert, name in experts.items()},
            {expert: self.linear(name + names.down) for expert, name in experts.items()},
            self._shared(prefix + "mlp.shared_expert") if self.config.shared_expert_size else None,
        )

    def _shared(self, name: str) -> _Shared:
        gate_up = self.linear(f"{name}.gate_proj", f"{name}.up_proj")
        return _Shared(self.linear(f"{name}_gate"), gate_up, self.linear(f"{name}.down_proj"))

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        attended = step.attend(index, qkv, self._tables, layer.query_norm, layer.key_norm)
        hidden = hidden + self.reduce(layer.output(attended))
        normed = self._norm(hidden, layer.mlp_norm)
        mixed = self._mixture(layer, normed)
        if layer.shared is not None:
            shared = layer.shared.down(self.kernels.silu_mul(layer.shared.gate_up(normed)))
            mixed = mixed + layer.shared.share(normed).sigmoid() * shared
        return hidden + self.reduce(mixed)

    def _mixture(self, layer: _Layer, normed: torch.Tensor) -> torch.Tensor:
        shares = layer.router(normed).float().softmax(-1)
        chosen, experts = shares.topk(self.config.experts_per_token, dim=-1)  # [T, k] each
        if self.config.norm_expert_weights:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return sum_of_experts(
            normed,
            experts,
            chosen,
            lambda expert, rows: layer.down[expert](self.kernels.silu_mul(layer.gate_up[expert](rows))),
            self.experts,
        )


def sum_of_experts(
    normed: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
    here: range,
) -> torch.Tensor:
    """Of each of the tokens ``[T, hidden]``, what its ``experts`` ``[T, k]`` make of it, by its ``shares`` ``[T, k]``:
    those of them that are ``here``, for ranks each have some.

    In the order of the experts' numbers, so that batches do not change it. ``compute`` is one expert for some tokens.
    """
    mixed = torch.zeros_like(normed)
    for expert in sorted(set(experts.flatten().tolist()).intersection(here)):
        tokens, choice = torch.where(experts == expert)
        part = compute(expert, normed[tokens]) * shares[tokens, choice, None].to(normed.dtype)
        mixed.index_add_(0, tokens, part.to(mixed.dtype))
    return mixed
