"""gpt-oss over a paged cache (OpenAI 2025): a mixture of experts whose heads each have a sink, and windows in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.families.mixtures import SWIGLU_ALPHA, SWIGLU_LIMIT
from mooncake.kernels import Experts, Linear
from mooncake.kernels.reference import Bounds
from mooncake.model.decoder import Step
from mooncake.model.families.gated import GatedDecoder
from mooncake.model.layers import of_rows


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    sinks: torch.Tensor  # [Hq]
    output: Linear
    mlp_norm: torch.Tensor
    router: Linear
    experts: Experts


class GptOss(GatedDecoder[_Layer]):
    def _take(self, prefix: str) -> _Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            self.vector(prefix + "input_layernorm.weight"),
            self.qkv(attention, biased=True),
            self.vector(attention + "sinks"),
            self.linear(attention + "o_proj", biased=True),
            self.vector(prefix + "post_attention_layernorm.weight"),
            self.uncoded(mlp + "router", biased=True),
            self._experts(mlp + "experts."),
        )

    def _experts(self, prefix: str) -> Experts:
        """Gates and ups are published interleaved."""
        bias = self.weight(prefix + "gate_up_proj_bias")
        order = torch.arange(bias.shape[1]).view(-1, 2).T.flatten()
        return self.kernels.experts(
            [of_rows(each, order) for each in self.expert_matrices(prefix + "gate_up_proj", are_transposed=True)],
            self.expert_matrices(prefix + "down_proj", are_transposed=True),
            bias[:, order],
            self.weight(prefix + "down_proj_bias"),
            Bounds(SWIGLU_ALPHA, SWIGLU_LIMIT),
            self.experts_here.start,
            coding=self.coding,
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        hidden = hidden + self.reduce(layer.output(step.attend(index, qkv, sinks=layer.sinks)))
        normed = self._norm(hidden, layer.mlp_norm)
        chosen, experts = layer.router(normed).float().topk(self.config.experts_per_token, dim=-1)  # [T, k] each
        return hidden + self.reduce(layer.experts(normed, experts, chosen.softmax(-1)))
