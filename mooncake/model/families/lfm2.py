"""LFM2 (Liquid AI 2025) over a paged cache: most layers are short convolutions between two gates, the others attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Linear
from mooncake.model.decoder import Step
from mooncake.model.families.gated import Mlp
from mooncake.model.families.hybrid import HybridDecoder
from mooncake.model.families.routed import Mixture, RoutedDecoder


@dataclass(frozen=True, slots=True)
class _Attention:
    qkv: Linear
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    output: Linear


@dataclass(frozen=True, slots=True)
class _Convolution:
    inputs: Linear  # gate before it, gate behind it, values
    taps: torch.Tensor  # float32 [taps, hidden]
    output: Linear


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: torch.Tensor
    mixer: _Attention | _Convolution
    mlp_norm: torch.Tensor
    mlp: Mlp | Mixture


class Lfm2(HybridDecoder[_Layer], RoutedDecoder[_Layer]):
    def _take_norm(self, name: str) -> torch.Tensor:
        return super()._take_norm("model.embedding_norm" if name == "model.norm" else name)

    def _take(self, prefix: str) -> _Layer:
        return _Layer(
            self._take_norm(prefix + "operator_norm"),
            self._take_mixer(prefix),
            self._take_norm(prefix + "ffn_norm"),
            self._take_mlp(prefix),
        )

    def _take_gated(self, prefix: str) -> Mlp:
        return Mlp(self.linear(prefix + "w1", prefix + "w3"), self.linear(prefix + "w2"))

    def _take_mixer(self, prefix: str) -> _Attention | _Convolution:
        if f"{prefix}conv.conv.weight" in self._weights:
            return _Convolution(
                self.linear(prefix + "conv.in_proj"),
                self.taps(prefix + "conv.conv.weight"),
                self.linear(prefix + "conv.out_proj"),
            )
        attention = prefix + "self_attn."
        return _Attention(
            self.qkv(attention),
            self.vector(attention + "q_layernorm.weight"),
            self.vector(attention + "k_layernorm.weight"),
            self.linear(attention + "out_proj"),
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        normed, mixer = self._norm(hidden, layer.norm), layer.mixer
        if isinstance(mixer, _Attention):
            mixed = mixer.output(step.attend(index, mixer.qkv(normed), mixer.query_norm, mixer.key_norm))
        else:
            mixed = self._convolve(index, mixer, normed, step)
        hidden = hidden + mixed
        return hidden + self._mlp(layer.mlp, self._norm(hidden, layer.mlp_norm))

    def _convolve(self, index: int, layer: _Convolution, normed: torch.Tensor, step: Step) -> torch.Tensor:
        before, behind, values = layer.inputs(normed).float().chunk(3, dim=-1)
        step.hook.before_layer(index)
        states, runs = self._states.of(index)
        mixed = self._recurrent.short_convolution((before * values).contiguous(), layer.taps, states, runs)
        step.hook.after_layer(index)
        return layer.output((behind * mixed).to(normed.dtype))
