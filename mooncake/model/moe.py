"""Mixtures of experts over a paged cache, Qwen's and Mixtral: a token uses a few of each MLP's experts.

A step computes each expert once, for the tokens that chose it (``reference.Experts``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.gated_families import EXPERT_NAMES
from mooncake.kernels import Experts, Linear
from mooncake.model.decoder import Step
from mooncake.model.gated import GatedDecoder


@dataclass(frozen=True, slots=True)
class _Shared:
    """The expert that every token uses, weighted by a gate computed from the token."""

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
    experts: Experts
    shared: _Shared | None  # Qwen2-MoE


class MixtureOfExperts(GatedDecoder[_Layer]):
    def _take(self, prefix: str) -> _Layer:
        attention, names, has_norms = prefix + "self_attn.", EXPERT_NAMES[self.config.architecture], self.config.qk_norm
        return _Layer(
            self.vector(prefix + "input_layernorm.weight"),
            self.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v")), biased=self.config.qkv_bias),
            self.vector(attention + "q_norm.weight") if has_norms else None,
            self.vector(attention + "k_norm.weight") if has_norms else None,
            self.linear(attention + "o_proj"),
            self.vector(prefix + "post_attention_layernorm.weight"),
            self.linear(prefix + names.router),
            self.take_experts(f"{prefix}{names.experts}", names.gate, names.up, names.down),
            self._shared(prefix + "mlp.shared_expert") if self.config.shared_expert_size else None,
        )

    def _shared(self, name: str) -> _Shared:
        gate_up = self.linear(f"{name}.gate_proj", f"{name}.up_proj")
        return _Shared(self.linear(f"{name}_gate"), gate_up, self.linear(f"{name}.down_proj"))

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        attended = step.attend(index, qkv, layer.query_norm, layer.key_norm)
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
        return layer.experts(normed, experts, chosen)
