"""Qwen3-Next and Qwen3.5 over a paged cache (Qwen team 2025, 2026): three of four layers keep a state of fixed size,
the others attend.

Attention's output is gated by a sigmoid, and a quarter of each head rotates. Stored weights of norms have 1 subtracted,
but for the norm of what a state returns. MLPs are Qwen's mixtures, or dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.errors import ModelError
from mooncake.families.gated import expert_names
from mooncake.kernels import Experts, Linear
from mooncake.kernels.recurrent import RecurrentKernels
from mooncake.kernels.reference import Matrix
from mooncake.model.batch import Attention, ForwardBatch, LayerHook
from mooncake.model.decoder import Step
from mooncake.model.families.gated import GatedDecoder, Layer, Mlp, SharedExpert
from mooncake.model.layers import of_rows, vector
from mooncake.model.rope import heads_in_order, rotary_order
from mooncake.model.states import States


@dataclass(frozen=True, slots=True)
class _Attention:
    qkv: Linear
    gate: Linear
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    output: Linear


@dataclass(frozen=True, slots=True)
class _Recurrent:
    inputs: Linear  # queries, keys and values before the convolution; gate; beta; decay
    taps: torch.Tensor  # float32 [taps, C]
    rates: torch.Tensor  # float32 [Hv]: -exp(A)
    rate_bias: torch.Tensor  # float32 [Hv]
    norm: torch.Tensor  # [Dv]
    output: Linear


@dataclass(frozen=True, slots=True)
class _Mixture:
    router: Linear
    experts: Experts
    shared: SharedExpert


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: torch.Tensor
    mixer: _Attention | _Recurrent
    mlp_norm: torch.Tensor
    mlp: Mlp | _Mixture


class HybridDecoder(GatedDecoder[Layer]):
    """Some of its layers keep states (``States.of``)."""

    def _build(self) -> None:
        if not isinstance(self.kernels, RecurrentKernels) or self.is_part:
            raise ModelError("models with recurrent layers run in one process")
        self._recurrent = self.kernels
        super()._build()

    def floats(self, values: torch.Tensor) -> torch.Tensor:
        """In float32, where the kernels compute."""
        return values.to(self.kernels.device, torch.float32)

    def taps(self, name: str) -> torch.Tensor:
        """Of a convolution, float32 [taps, C]."""
        return self.floats(self.weight(name)).squeeze(1).T.contiguous()

    def forward(
        self,
        batch: ForwardBatch,
        cache: torch.Tensor,
        hook: LayerHook,
        entering: torch.Tensor | None = None,
        leaving: torch.Tensor | None = None,
        attention: Attention | None = None,
    ) -> torch.Tensor:
        """As in ``Decoder``. If the hook abandons the step, states are what they were before it."""
        with torch.inference_mode():
            self._states = States(self.config, batch, cache, hook.wants_layers)
            try:
                return super().forward(batch, cache, hook, entering, leaving, attention)
            except BaseException:
                self._states.undo()
                raise
            finally:
                del self._states


class Qwen3Next(HybridDecoder[_Layer]):
    """The layers of Qwen3-Next have one projection for queries, keys, values and gates, ordered by key heads, those of
    Qwen3.5 one for each."""

    def _take_norm(self, name: str) -> torch.Tensor:
        return self._norm_of(self.weight(f"{name}.weight"))

    def _norm_of(self, weight: torch.Tensor) -> torch.Tensor:
        return vector(1.0 + weight.float(), self.kernels)

    def _take(self, prefix: str) -> _Layer:
        is_recurrent = f"{prefix}linear_attn.A_log" in self._weights
        return _Layer(
            self._take_norm(prefix + "input_layernorm"),
            self._take_recurrent(prefix + "linear_attn.") if is_recurrent else self._take_attention(prefix),
            self._take_norm(prefix + "post_attention_layernorm"),
            self._take_mixture(prefix) if self.config.num_experts else self._take_gated(prefix + "mlp."),
        )

    def _take_attention(self, prefix: str) -> _Attention:
        config, attention = self.config, prefix + "self_attn."
        order = rotary_order(config.head_dim, config.rotary_dim)
        query, key, value = (self.matrix(f"{attention}{name}_proj.weight") for name in "qkv")
        of_heads = torch.arange(query.shape[0]).view(config.num_heads, 2, config.head_dim)
        of_keys = heads_in_order(torch.arange(key.shape[0]), order)
        query_norm, key_norm = (self._norm_of(self.weight(f"{attention}{name}_norm.weight")[order]) for name in "qk")
        return _Attention(
            self.product(of_rows(query, of_heads[:, 0, order].flatten()), of_rows(key, of_keys), value),
            self.product(of_rows(query, of_heads[:, 1].flatten())),
            query_norm,
            key_norm,
            self.linear(attention + "o_proj"),
        )

    def _take_recurrent(self, prefix: str) -> _Recurrent:
        return _Recurrent(
            self.product(*self._input_projections(prefix)),
            self.taps(prefix + "conv1d.weight"),
            -self.floats(self.weight(prefix + "A_log")).exp(),
            self.floats(self.weight(prefix + "dt_bias")),
            self.vector(prefix + "norm.weight"),
            self.linear(prefix + "out_proj"),
        )

    def _input_projections(self, prefix: str) -> list[Matrix]:
        """Of queries, keys, values, gate, beta and decay, as rows in this order."""
        shape = self.config.recurrence
        assert shape is not None
        if f"{prefix}in_proj_qkv.weight" in self._weights:
            return [self.matrix(f"{prefix}in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")]
        of_key = shape.num_value_heads // shape.num_key_heads
        sizes = [shape.key_dim, shape.key_dim, of_key * shape.value_dim, of_key * shape.value_dim]
        found = []
        for name, parts in (("qkvz", sizes), ("ba", [of_key, of_key])):
            given = self.matrix(f"{prefix}in_proj_{name}.weight")
            of_heads = torch.split(torch.arange(given.shape[0]).view(shape.num_key_heads, -1), parts, 1)
            found.append(of_rows(given, torch.cat([rows.flatten() for rows in of_heads])))
        return found

    def _take_mixture(self, prefix: str) -> _Mixture:
        return _Mixture(
            self.uncoded(prefix + expert_names(self.config).router),
            self.take_experts(prefix),
            self._take_shared(prefix),
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        normed = self._norm(hidden, layer.norm)
        if isinstance(layer.mixer, _Attention):
            hidden = hidden + self._attend(index, layer.mixer, normed, step)
        else:
            hidden = hidden + self._recur(index, layer.mixer, normed, step)
        normed, mlp = self._norm(hidden, layer.mlp_norm), layer.mlp
        return hidden + (self._mix(mlp, normed) if isinstance(mlp, _Mixture) else self._dense(mlp, normed))

    def _attend(self, index: int, layer: _Attention, normed: torch.Tensor, step: Step) -> torch.Tensor:
        mixed = step.attend(index, layer.qkv(normed), layer.query_norm, layer.key_norm)
        return layer.output(mixed * layer.gate(normed).sigmoid())

    def _recur(self, index: int, layer: _Recurrent, normed: torch.Tensor, step: Step) -> torch.Tensor:
        shape = self.config.recurrence
        assert shape is not None
        heads, values = shape.num_value_heads, shape.num_value_heads * shape.value_dim
        sizes = [shape.channels, values, heads, heads]
        inputs, gate, beta, decay = torch.split(layer.inputs(normed).float(), sizes, dim=1)
        decay = layer.rates * torch.nn.functional.softplus(decay + layer.rate_bias)
        step.hook.before_layer(index)
        states, runs = self._states.of(index)
        mixed = self._recurrent.gated_delta(
            inputs.contiguous(), decay, beta.sigmoid(), layer.taps, states, runs, shape.num_key_heads, shape.key_dim
        )
        step.hook.after_layer(index)
        per_head = mixed.view(-1, shape.value_dim)
        scaled = per_head * torch.rsqrt(per_head.square().mean(-1, keepdim=True) + self.config.rms_eps) * layer.norm
        gated = scaled.view_as(mixed) * torch.nn.functional.silu(gate)
        return layer.output(gated.to(normed.dtype))

    def _mix(self, mlp: _Mixture, normed: torch.Tensor) -> torch.Tensor:
        return self._mixture_of_best(mlp.router, mlp.experts, normed) + self._of_shared(mlp.shared, normed)
