"""Trinity over a paged cache (AFMoE, Arcee 2025): each head's output has a gate, and norms are on both sides of
attention and the MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Linear
from mooncake.model.decoder import Step
from mooncake.model.families.gated import Mlp
from mooncake.model.families.routed import Mixture, RoutedDecoder


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    gate: Linear  # [Hq * D, hidden]
    output: Linear
    behind_attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    mlp: Mlp | Mixture
    behind_mlp_norm: torch.Tensor


class Afmoe(RoutedDecoder[_Layer]):
    def _take(self, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        return _Layer(
            attention_norm=self.vector(prefix + "input_layernorm.weight"),
            qkv=self.qkv(attention),
            query_norm=self.vector(attention + "q_norm.weight"),
            key_norm=self.vector(attention + "k_norm.weight"),
            gate=self.linear(attention + "gate_proj"),
            output=self.linear(attention + "o_proj"),
            behind_attention_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            mlp_norm=self.vector(prefix + "pre_mlp_layernorm.weight"),
            mlp=self._take_mlp(prefix),
            behind_mlp_norm=self.vector(prefix + "post_mlp_layernorm.weight"),
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        normed = self._norm(hidden, layer.attention_norm)
        attended = step.attend(index, layer.qkv(normed), layer.query_norm, layer.key_norm)
        attended = attended * layer.gate(normed).sigmoid()
        hidden = hidden + self._norm(self.reduce(layer.output(attended)), layer.behind_attention_norm)
        return hidden + self._norm(self._mlp(layer.mlp, self._norm(hidden, layer.mlp_norm)), layer.behind_mlp_norm)
