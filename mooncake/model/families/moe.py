"""Mixtures of experts over a paged cache (Qwen's, Mixtral, OLMoE, Granite's): a token uses few of an MLP's experts.

A step computes each expert once, for the tokens that chose it (``reference.Experts``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.families.gated import expert_names
from mooncake.kernels import Experts, Linear
from mooncake.model.decoder import Step
from mooncake.model.families.gated import GatedDecoder, Normed, SharedExpert


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
    shared: SharedExpert | None  # Qwen2-MoE, Hunyuan


class MixtureOfExperts(GatedDecoder[_Layer]):
    def _take(self, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        attention_norm, mlp_norm = self._norm_names
        return _Layer(
            self._take_norm(prefix + attention_norm),
            self.qkv(attention, biased=self.config.qkv_bias),
            *self._take_head_norms(attention),
            self.linear(attention + "o_proj"),
            self._take_norm(prefix + mlp_norm),
            self.uncoded(prefix + expert_names(self.config).router),
            self.take_experts(prefix),
            self._take_shared(prefix) if self.config.shared_expert_size else None,
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        hidden = self._add(hidden, self._attention(index, self._norm(hidden, layer.attention_norm), step))
        normed = self._norm(hidden, layer.mlp_norm)
        mixed = self._mixture_of_best(layer.router, layer.experts, normed)
        if layer.shared is not None:
            mixed = mixed + self._of_shared(layer.shared, normed)
        return self._add(hidden, self.reduce(mixed))

    def _attention(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        attended = self._attend_normed(step, index, layer.qkv(hidden), layer.query_norm, layer.key_norm)
        return self.reduce(layer.output(attended))


class Olmoe(MixtureOfExperts):
    """OLMoE (Muennighoff et al. 2024): norms over all queries and over all keys of a token."""

    _normed = Normed.ALL_HEADS


class FlexOlmo(Olmoe):
    """FlexOlmo (Shi et al. 2025): norms after attention and the mixture."""

    _norm_names = "post_attention_layernorm", "post_feedforward_layernorm"

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        hidden = hidden + self._norm(self._attention(index, hidden, step), layer.attention_norm)
        mixed = self.reduce(self._mixture_of_best(layer.router, layer.experts, hidden))
        return hidden + self._norm(mixed, layer.mlp_norm)


class GraniteMoe(MixtureOfExperts):
    """Granite's mixtures (Granite team, IBM 2024): factors as in Granite, and all experts in one tensor."""

    def take_experts(self, prefix: str) -> Experts:
        mixture = prefix + "block_sparse_moe."
        return self.experts_of_tensors(mixture + "input_linear.weight", mixture + "output_linear.weight")


class HunyuanMoe(MixtureOfExperts):
    """Hunyuan's mixtures (Tencent 2025): queries and keys are normalised after they are rotated (``gated.Hunyuan``)."""

    _head_norm_names = "query_layernorm", "key_layernorm"
    _normed = Normed.ROTATED_HEADS

    def _take_shared(self, prefix: str) -> SharedExpert:
        return SharedExpert(None, self._take_gated(f"{prefix}{expert_names(self.config).shared}."))


class Qwen3VlMoe(MixtureOfExperts):
    """Qwen3-VL's language model (Qwen team 2025): all experts in one tensor, with their inputs as rows."""

    def take_experts(self, prefix: str) -> Experts:
        experts = prefix + "mlp.experts."
        return self.experts_of_tensors(experts + "gate_up_proj", experts + "down_proj", are_transposed=True)
