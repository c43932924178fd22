"""Falcon-H1 (TII 2025) over a paged cache: a layer adds what attention and what Mamba-2 make of the same input, each
with a factor of its own. In the cache it is two layers, first the one with the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.model.decoder import Step
from mooncake.model.families.gated import Mlp
from mooncake.model.families.mamba import Attention, MambaDecoder, StateSpace


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: torch.Tensor
    state_space: StateSpace
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: Mlp


class FalconH1(MambaDecoder[_Layer]):
    def _build(self) -> None:
        super()._build()
        shape, mamba = self.config.recurrence, self.config.mamba
        assert shape is not None and mamba is not None and mamba.factors is not None
        heads, of_groups = shape.num_value_heads, shape.num_key_heads * shape.key_dim
        sizes = [heads * shape.value_dim] * 2 + [of_groups] * 2 + [heads]
        self._factors = mamba.factors
        self._input_factors = self.floats(torch.tensor(mamba.factors.inputs).repeat_interleave(torch.tensor(sizes)))

    def _take_norm(self, name: str) -> torch.Tensor:
        return super()._take_norm("model.final_layernorm" if name == "model.norm" else name)

    def _take_layers(self) -> dict[int, _Layer]:
        return {place: self._take(f"model.layers.{place // 2}.") for place in self.places[::2]}

    def _take(self, prefix: str) -> _Layer:
        return _Layer(
            self._take_norm(prefix + "input_layernorm"),
            self._take_state_space(prefix + "mamba."),
            self._take_attention(prefix + "self_attn."),
            self._take_norm(prefix + "pre_ff_layernorm"),
            self._take_gated(prefix + "feed_forward."),
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, factors = self._layers.get(index), self._factors
        if layer is None:
            return hidden  # its attention was in the one before
        normed = self._norm(hidden, layer.norm)
        projected = layer.state_space.inputs(normed).float() * self._input_factors
        remembered = self._recur(index, layer.state_space, projected, step)
        attended = self._mix(index + 1, layer.attention, normed, step)
        hidden = hidden + factors.state_space * remembered + factors.attention * attended
        gate_up = layer.mlp.gate_up(self._norm(hidden, layer.mlp_norm))
        gate_up[:, : self.config.intermediate_size] *= factors.gate
        return hidden + factors.mlp * layer.mlp.down(self.kernels.silu_mul(gate_up))
