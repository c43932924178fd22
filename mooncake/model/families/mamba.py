"""Models with layers of Mamba-2 (Dao and Gu 2024) over a paged cache: Granite 4 (Granite team, IBM 2025)
and Bamba (Ahuja et al. 2024).

A layer of Mamba-2 mixes tokens through a state space (``kernels.recurrent.state_space``), whose output is gated and
normalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from mooncake.families.gated import expert_names
from mooncake.kernels import Experts, Linear
from mooncake.model.decoder import Step
from mooncake.model.families.gated import Mlp, reordered_qkv
from mooncake.model.families.hybrid import HybridDecoder
from mooncake.model.rope import rotary_order

Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: Linear
    output: Linear


@dataclass(frozen=True, slots=True)
class StateSpace:
    inputs: Linear  # gate; x, B and C before the convolution; step
    taps: torch.Tensor  # float32 [taps, C]
    bias: torch.Tensor  # float32 [C], of the convolution
    step_bias: torch.Tensor  # float32 [H]
    rates: torch.Tensor  # float32 [H]: -exp(A)
    skip: torch.Tensor  # float32 [H]: D
    norm: torch.Tensor | None  # [H * P]
    output: Linear


class MambaDecoder(HybridDecoder[Layer]):
    """Layers that attend, and layers of Mamba-2."""

    def _take_attention(self, prefix: str) -> Attention:
        order = rotary_order(self.config.head_dim, self.config.rotary_dim)
        return Attention(reordered_qkv(self, prefix, order, biased=False), self.linear(prefix + "o_proj"))

    def _take_state_space(self, prefix: str) -> StateSpace:
        shape, mamba = self.config.recurrence, self.config.mamba
        assert shape is not None and mamba is not None
        return StateSpace(
            self.linear(prefix + "in_proj", biased=mamba.has_biases),
            self.taps(prefix + "conv1d.weight"),
            self.floats(self.weight(prefix + "conv1d.bias") if mamba.has_conv_bias else torch.zeros(shape.channels)),
            self.floats(self.weight(prefix + "dt_bias")),
            -self.floats(self.weight(prefix + "A_log")).exp(),
            self.floats(self.weight(prefix + "D")),
            self.vector(prefix + "norm.weight") if mamba.norm_groups else None,
            self.linear(prefix + "out_proj", biased=mamba.has_biases),
        )

    def _mix(self, index: int, mixer: Attention | StateSpace, normed: torch.Tensor, step: Step) -> torch.Tensor:
        if isinstance(mixer, Attention):
            return mixer.output(step.attend(index, mixer.qkv(normed)))
        return self._recur(index, mixer, mixer.inputs(normed).float(), step)

    def _recur(self, index: int, mixer: StateSpace, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """``projected``: what ``mixer.inputs`` gives."""
        shape = self.config.recurrence
        assert shape is not None
        heads = shape.num_value_heads
        gate, inputs, steps = torch.split(projected, [heads * shape.value_dim, shape.channels, heads], dim=1)
        steps = torch.nn.functional.softplus(steps + mixer.step_bias)
        step.hook.before_layer(index)
        states, runs = self._states.of(index)
        mixed = self._recurrent.state_space(
            inputs.contiguous(),
            steps * mixer.rates,
            steps,
            mixer.taps,
            mixer.bias,
            mixer.skip,
            states,
            runs,
            shape.num_key_heads,
            shape.key_dim,
        )
        step.hook.after_layer(index)
        return mixer.output(self._gated(mixer, mixed, torch.nn.functional.silu(gate)).to(self.stream))

    def _gated(self, mixer: StateSpace, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        mamba = self.config.mamba
        assert mamba is not None
        if mixer.norm is None:
            return mixed * gate
        if mamba.norms_first:
            return self._norm_in_groups(mixed, mamba.norm_groups, mixer.norm) * gate
        return self._norm_in_groups(mixed * gate, mamba.norm_groups, mixer.norm)

    def _norm_in_groups(self, values: torch.Tensor, num_groups: int, weight: torch.Tensor) -> torch.Tensor:
        groups = values.view(len(values), num_groups, -1)
        scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.config.rms_eps)
        return scaled.view_as(values) * weight


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: torch.Tensor
    mixer: Attention | StateSpace
    mlp_norm: torch.Tensor
    mlp: Mlp
    router: Linear | None  # of a mixture of experts beside the MLP
    experts: Experts | None


class GraniteMamba(MambaDecoder[_Layer]):
    """Granite 4 with Mamba-2: small and tiny are mixtures beside an MLP, micro has the MLP alone."""

    _mlp_norm_name: ClassVar[str] = "post_attention_layernorm"

    def _take(self, prefix: str) -> _Layer:
        is_recurrent = f"{prefix}mamba.A_log" in self._weights
        router, experts = self._take_mixture(prefix) if self.config.num_experts else (None, None)
        return _Layer(
            self._take_norm(prefix + "input_layernorm"),
            self._take_state_space(prefix + "mamba.") if is_recurrent else self._take_attention(prefix + "self_attn."),
            self._take_norm(prefix + self._mlp_norm_name),
            self._take_mlp(prefix),
            router,
            experts,
        )

    def _take_mlp(self, prefix: str) -> Mlp:
        return Mlp(self.linear(prefix + "shared_mlp.input_linear"), self.linear(prefix + "shared_mlp.output_linear"))

    def _take_mixture(self, prefix: str) -> tuple[Linear, Experts]:
        mixture = prefix + "block_sparse_moe."
        experts = self.experts_of_tensors(mixture + "input_linear.weight", mixture + "output_linear.weight")
        return self.uncoded(prefix + expert_names(self.config).router), experts

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        hidden = self._add(hidden, self._mix(index, layer.mixer, self._norm(hidden, layer.norm), step))
        normed = self._norm(hidden, layer.mlp_norm)
        update = self._dense(layer.mlp, normed)
        if layer.router is not None and layer.experts is not None:
            scores, chosen = layer.router(normed).float().topk(self.config.experts_per_token, dim=-1)
            update = update + layer.experts(normed, chosen, scores.softmax(-1))
        return self._add(hidden, update)


class Bamba(GraniteMamba):
    _mlp_norm_name = "pre_ff_layernorm"

    def _take_norm(self, name: str) -> torch.Tensor:
        return super()._take_norm("model.final_layernorm" if name == "model.norm" else name)

    def _take_mlp(self, prefix: str) -> Mlp:
        return self._take_gated(prefix + "feed_forward.")
