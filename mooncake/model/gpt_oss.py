"""gpt-oss over a paged cache (OpenAI 2025): a mixture of experts whose heads each have a sink, and windows in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Linear
from mooncake.mixture_families import SWIGLU_ALPHA, SWIGLU_LIMIT
from mooncake.model.decoder import Step
from mooncake.model.gated import GatedDecoder
from mooncake.model.moe import sum_of_experts


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    sinks: torch.Tensor  # [Hq]
    output: Linear
    mlp_norm: torch.Tensor
    router: Linear
    gate_up: dict[int, Linear]  # by the experts' numbers: a rank of several has some
    down: dict[int, Linear]


class GptOss(GatedDecoder[_Layer]):
    def _take(self, prefix: str) -> _Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            self.vector(prefix + "input_layernorm.weight"),
            self.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v")), biased=True),
            self.vector(attention + "sinks"),
            self.linear(attention + "o_proj", biased=True),
            self.vector(prefix + "post_attention_layernorm.weight"),
            self.linear(mlp + "router", biased=True),
            self._experts(mlp + "experts.gate_up_proj"),
            self._experts(mlp + "experts.down_proj"),
        )

    def _experts(self, name: str) -> dict[int, Linear]:
        parts = zip(self.experts, self.weight(name), self.weight(f"{name}_bias"), strict=True)
        return {expert: self.kernels.linear(weight.T.contiguous(), bias) for expert, weight, bias in parts}

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        hidden = hidden + self.reduce(layer.output(step.attend(index, qkv, self._tables, sinks=layer.sinks)))
        normed = self._norm(hidden, layer.mlp_norm)
        chosen, experts = layer.router(normed).float().topk(self.config.experts_per_token, dim=-1)  # [T, k] each
        mixed = sum_of_experts(
            normed,
            experts,
            chosen.softmax(-1),
            lambda one, rows: layer.down[one](_gated(layer.gate_up[one](rows))),
            self.experts,
        )
        return hidden + self.reduce(mixed)


def _gated(inner: torch.Tensor) -> torch.Tensor:
    """``[T, I]`` of ``[T, 2 * I]``, gates and ups in turn: SwiGLU with a bound on both, and ups that begin at one."""
    gate, up = inner[:, ::2].clamp(max=SWIGLU_LIMIT), inner[:, 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
