"""Mixtures of experts over a paged cache, Qwen3's and Mixtral: a token uses a few of each MLP's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.gated_families import EXPERT_NAMES
from mooncake.kernels import Kernels, Linear
from mooncake.model.decoder import Step
from mooncake.model.gated import GatedDecoder


@dataclass(frozen=True, slots=True)
class Experts:
    """Those of one layer, by their numbers."""

    gate_up: list[Linear]
    down: list[Linear]

    def mix(self, normed: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """What the experts ``chosen`` make of each token ``[T, hidden]``, times their ``weights``; both are ``[T, k]``.

        Each expert is computed once, for the tokens that chose it, and a token's sum is in the order of their numbers,
        so that batches do not change it.
        """
        mixed = torch.zeros_like(normed)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, choice = torch.where(chosen == expert)
            inner = kernels.silu_mul(self.gate_up[expert](normed[tokens]))
            part = self.down[expert](inner) * weights[tokens, choice, None].to(normed.dtype)
            mixed.index_add_(0, tokens, part.to(mixed.dtype))
        return mixed


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


class MixtureOfExperts(GatedDecoder[_Layer]):
    def _take(self, prefix: str) -> _Layer:
        attention, names, has_norms = prefix + "self_attn.", EXPERT_NAMES[self.config.architecture], self.config.qk_norm
        experts = [f"{prefix}{names.experts}.{expert}." for expert in range(self.config.num_experts)]
        return _Layer(
            self.vector(prefix + "input_layernorm.weight"),
            self.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v"))),
            self.vector(attention + "q_norm.weight") if has_norms else None,
            self.vector(attention + "k_norm.weight") if has_norms else None,
            self.linear(attention + "o_proj"),
            self.vector(prefix + "post_attention_layernorm.weight"),
            self.linear(prefix + names.router),
            Experts(
                [self.linear(expert + names.gate, expert + names.up) for expert in experts],
                [self.linear(expert + names.down) for expert in experts],
            ),
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        attended = step.attend(index, qkv, self._tables, layer.query_norm, layer.key_norm)
        hidden = hidden + layer.output(attended)
        return hidden + self._mixture(layer, self._norm(hidden, layer.mlp_norm))

    def _mixture(self, layer: _Layer, normed: torch.Tensor) -> torch.Tensor:
        shares = layer.router(normed).float().softmax(-1)
        weights, chosen = shares.topk(self.config.experts_per_token, dim=-1)
        if self.config.norm_expert_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return layer.experts.mix(normed, chosen, weights, self.kernels)
