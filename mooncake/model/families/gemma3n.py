"""Gemma 3n's language models over a paged cache (Gemma team 2025).

There are several residual streams ``[T, S, hidden]`` (AltUp). A layer predicts all of them from each other, computes
with the first, and corrects all by what it changed; what it makes of its own embedding of the token goes to the others.
Beside attention each layer has a learned residual of low rank (LAuReL). Gates of the first layers are mostly zero. The
last layers attend to KV of earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Linear
from mooncake.model.batch import ForwardBatch
from mooncake.model.decoder import Step
from mooncake.model.families.late_gemma import LateGemma, LayerInput

_LEAST_POWER = 1e-5  # of a stream that is scaled to the first one's magnitude


@dataclass(frozen=True, slots=True)
class _AltUp:
    router_norm: torch.Tensor
    router: Linear  # [S, hidden]
    prediction: Linear  # [S * S, S]
    correction: Linear  # [S, S]
    scale: torch.Tensor | None  # of the first stream, before the layer's own input is added


@dataclass(frozen=True, slots=True)
class _Layer:
    streams: _AltUp
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor
    key_norm: torch.Tensor | None
    output: Linear
    behind_attention_norm: torch.Tensor
    narrow: Linear  # LAuReL
    widen: Linear
    behind_residual_norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    behind_mlp_norm: torch.Tensor
    cut: float | None  # gates count from so many standard deviations above their mean on; None: all of them
    input: LayerInput


class Gemma3n(LateGemma):
    def _build(self) -> None:
        super()._build()
        assert self._parts.streams is not None
        self._streams = self._parts.streams
        self._others = [self.linear(f"model.altup_projections.{i}") for i in range(self._streams.count - 1)]
        self._back = [self.linear(f"model.altup_unembed_projections.{i}") for i in range(self._streams.count - 1)]
        self._layers = [self._take(index, f"model.layers.{index}.") for index in range(self.config.num_layers)]

    def _take(self, index: int, prefix: str) -> _Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            self._take_streams(prefix + "altup."),
            self.vector(prefix + "input_layernorm.weight"),
            self._take_qkv(index, attention),
            self.vector(attention + "q_norm.weight"),
            self.vector(attention + "k_norm.weight") if self.config.owns_kv(index) else None,
            self.linear(attention + "o_proj"),
            self.vector(prefix + "post_attention_layernorm.weight"),
            self.linear(prefix + "laurel.linear_left"),
            self.linear(prefix + "laurel.linear_right"),
            self.vector(prefix + "laurel.post_laurel_norm.weight"),
            self.vector(prefix + "pre_feedforward_layernorm.weight"),
            self.linear(mlp + "gate_proj", mlp + "up_proj"),
            self.linear(mlp + "down_proj"),
            self.vector(prefix + "post_feedforward_layernorm.weight"),
            _cut_of(self._streams.sparsity[index]),
            self._take_input(prefix),
        )

    def _take_streams(self, prefix: str) -> _AltUp:
        return _AltUp(
            self.vector(prefix + "router_norm.weight"),
            self.uncoded(prefix + "modality_router"),
            self.uncoded(prefix + "prediction_coefs"),
            self.uncoded(prefix + "correction_coefs"),
            self.vector(prefix + "correct_output_scale") if self._streams.are_scaled else None,
        )

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        first = super()._embed(batch)
        power = first.square().mean(-1, keepdim=True)
        return torch.stack([first, *(_scaled_to(power, projection(first)) for projection in self._others)], dim=1)

    def _layer_inputs(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor | None:
        return super()._layer_inputs(batch, hidden[:, 0].contiguous())

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, norm = self._layers[index], self._norm
        predicted = self._predicted(layer.streams, hidden)
        active = predicted[:, 0].contiguous()
        normed = norm(active, layer.attention_norm)
        qkv = self._with_values(index, layer.qkv(normed))
        attended = layer.output(step.attend(index, qkv, layer.query_norm, layer.key_norm))
        residual = normed + norm(layer.widen(layer.narrow(normed)), layer.behind_residual_norm)
        seen = (active + norm(attended, layer.behind_attention_norm) + residual) * 2**-0.5
        gate, up = layer.gate_up(norm(seen, layer.mlp_norm)).chunk(2, dim=-1)
        changed = seen + norm(layer.down(self._activation(_sparse(gate, layer.cut)) * up), layer.behind_mlp_norm)
        corrected = self._corrected(layer.streams, predicted, changed)
        assert step.layer_inputs is not None
        first = corrected[:, 0].contiguous() if layer.streams.scale is None else corrected[:, 0] * layer.streams.scale
        corrected[:, 1:] += self._from_input(layer.input, first, step.layer_inputs[:, index])[:, None]
        return corrected

    def _modes(self, streams: _AltUp, first: torch.Tensor) -> torch.Tensor:
        """``[T, S]``: how a token mixes the streams, from one of them."""
        routed = self._norm(first, streams.router_norm) * (1 / self.config.hidden_size)
        return torch.tanh(streams.router(routed))

    def _predicted(self, streams: _AltUp, hidden: torch.Tensor) -> torch.Tensor:
        count = self._streams.count
        shares = streams.prediction(self._modes(streams, hidden[:, 0].contiguous())).view(-1, count, count, 1)
        predicted = hidden.clone()
        for stream in range(count):
            predicted += shares[:, :, stream] * hidden[:, stream, None]
        return predicted

    def _corrected(self, streams: _AltUp, predicted: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        shares = streams.correction(self._modes(streams, changed)) + 1
        return predicted + shares[:, :, None] * (changed - predicted[:, 0])[:, None]

    def _final(self, hidden: torch.Tensor) -> torch.Tensor:
        first = hidden[:, 0]
        power, others = first.square().mean(-1, keepdim=True), hidden[:, 1:].unbind(1)
        back = (_scaled_to(power, turn(other.contiguous())) for turn, other in zip(self._back, others, strict=True))
        return super()._final(torch.stack([first, *back]).mean(0))


def _scaled_to(power: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``rows`` with the mean square ``power`` ``[T, 1]``."""
    return rows * power.sqrt() / rows.square().mean(-1, keepdim=True).clamp(min=_LEAST_POWER).sqrt()


def _cut_of(share: float) -> float | None:
    """The quantile of the normal distribution."""
    return float(torch.erfinv(2 * torch.tensor(share) - 1)) * 2**0.5 if share > 0 else None


def _sparse(gate: torch.Tensor, cut: float | None) -> torch.Tensor:
    """What of each gate exceeds ``cut`` standard deviations above their mean; all of it for None."""
    if cut is None:
        return gate
    spread = torch.std(gate, dim=-1, keepdim=True, unbiased=False)
    return torch.relu(gate - (gate.mean(-1, keepdim=True) + spread * cut))
