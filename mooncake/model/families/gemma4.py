"""Gemma 4's language models over a paged cache (Gemma team 2026).

Local and global layers differ in their heads. In global layers of the larger models values are the keys, as they are
before norm and rotation. In the small models the last layers attend to KV of earlier ones, and each layer is given its
own embedding of every token. In 26B-A4B a mixture of experts stands beside each MLP. Each layer's output is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Experts, Linear
from mooncake.model.decoder import Step
from mooncake.model.families.late_gemma import LateGemma, LayerInput
from mooncake.model.layers import vector


@dataclass(frozen=True, slots=True)
class _Mixture:
    router_norm: torch.Tensor
    router: Linear
    factors: torch.Tensor  # of each expert
    norm: torch.Tensor
    experts: Experts
    behind_norm: torch.Tensor
    behind_mlp_norm: torch.Tensor  # of the MLP alone


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor
    key_norm: torch.Tensor | None
    output: Linear
    behind_attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mixture: _Mixture | None
    behind_mlp_norm: torch.Tensor
    input: LayerInput | None
    scale: torch.Tensor


class Gemma4(LateGemma):
    def _build(self) -> None:
        super()._build()
        self._layers = [self._take(index, f"model.layers.{index}.") for index in range(self.config.num_layers)]

    def _take(self, index: int, prefix: str) -> _Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            self.vector(prefix + "input_layernorm.weight"),
            self._take_qkv(index, attention),
            self.vector(attention + "q_norm.weight"),
            self.vector(attention + "k_norm.weight") if self.config.owns_kv(index) else None,
            self.linear(attention + "o_proj"),
            self.vector(prefix + "post_attention_layernorm.weight"),
            self.vector(prefix + "pre_feedforward_layernorm.weight"),
            self.linear(mlp + "gate_proj", mlp + "up_proj"),
            self.linear(mlp + "down_proj"),
            self._take_mixture(prefix) if self._parts.expert_size else None,
            self.vector(prefix + "post_feedforward_layernorm.weight"),
            self._take_input(prefix) if self._parts.input_size else None,
            self.vector(prefix + "layer_scalar"),
        )

    def _take_mixture(self, prefix: str) -> _Mixture:
        scale = self.weight(prefix + "router.scale").float() * self.config.hidden_size**-0.5
        gate_up, down = (self.expert_matrices(f"{prefix}experts.{name}_proj") for name in ("gate_up", "down"))
        return _Mixture(
            vector(scale, self.kernels),
            self.uncoded(prefix + "router.proj"),
            vector(self.weight(prefix + "router.per_expert_scale").float(), self.kernels),
            self.vector(prefix + "pre_feedforward_layernorm_2.weight"),
            self.kernels.experts(
                gate_up, down, gate="silu" if self.config.activation == "silu" else "gelu_tanh", coding=self.coding
            ),
            self.vector(prefix + "post_feedforward_layernorm_2.weight"),
            self.vector(prefix + "post_feedforward_layernorm_1.weight"),
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, norm = self._layers[index], self._norm
        qkv = self._with_values(index, layer.qkv(norm(hidden, layer.attention_norm)))
        attended = layer.output(step.attend(index, qkv, layer.query_norm, layer.key_norm))
        hidden = hidden + norm(attended, layer.behind_attention_norm)
        gate, up = layer.gate_up(norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        update = layer.down(self._activation(gate) * up)
        if layer.mixture is not None:
            update = norm(update, layer.mixture.behind_mlp_norm) + self._mixed(layer.mixture, hidden)
        hidden = hidden + norm(update, layer.behind_mlp_norm)
        if layer.input is not None:
            assert step.layer_inputs is not None
            hidden = hidden + self._from_input(layer.input, hidden, step.layer_inputs[:, index])
        return hidden * layer.scale

    def _mixed(self, mixture: _Mixture, hidden: torch.Tensor) -> torch.Tensor:
        shares = mixture.router(self._norm(hidden, mixture.router_norm)).float().softmax(-1)
        chosen, experts = shares.topk(self.config.experts_per_token, dim=-1)  # [T, k] each
        chosen = chosen / chosen.sum(-1, keepdim=True) * mixture.factors[experts]
        return self._norm(mixture.experts(self._norm(hidden, mixture.norm), experts, chosen), mixture.behind_norm)
