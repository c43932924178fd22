"""Command A+ over a paged cache (Cohere 2026): attention and a mixture of experts, or an MLP, share one layer norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Linear
from mooncake.model.decoder import Step
from mooncake.model.families.gated import Mlp
from mooncake.model.families.interleaved import interleaved_qkv
from mooncake.model.families.routed import Mixture, RoutedDecoder


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp: Mlp | Mixture


class CohereMoe(RoutedDecoder[_Layer]):
    def _take(self, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        return _Layer(
            self._take_norm(prefix + "input_layernorm"),
            interleaved_qkv(self, attention),
            self.linear(attention + "o_proj"),
            self._take_mlp(prefix),
        )

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(hidden, weight.shape, weight, None, self.config.rms_eps)

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        normed = self._norm(hidden, layer.norm)
        attended = self.reduce(layer.output(step.attend(index, layer.qkv(normed))))
        return hidden + attended + self._mlp(layer.mlp, normed)
