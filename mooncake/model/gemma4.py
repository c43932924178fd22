"""Gemma 4's language models over a paged cache (Gemma team 2026).

Local and global layers differ in their heads. Values are normalised, without a weight; in global layers of the larger
models they are the keys, as they are before norm and rotation. In the small models the last layers attend to KV of
earlier ones, and each layer is given its own embedding of every token. In 26B-A4B a mixture of experts stands beside
each MLP. Each layer's output is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.families.gemma4 import keys_are_values
from mooncake.kernels import Experts, Linear
from mooncake.kernels.reference import Matrices
from mooncake.model.batch import ForwardBatch
from mooncake.model.decoder import Decoder, Step, activation
from mooncake.model.layers import WeightsOnDemand, vector
from mooncake.model_config import Gemma4Parts


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What layers' own inputs are computed from: each token's embeddings, and the first hidden state."""

    table: torch.Tensor  # [tokens, layers * size], as stored: it is read by rows, and as large as the rest of the model
    scale: torch.Tensor
    projection: Linear  # [layers * size, hidden]
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Input:
    """How a layer adds its own input."""

    gate: Linear
    projection: Linear
    norm: torch.Tensor


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
    qkv: Linear  # without values where they are the keys, and without both in layers without KV of their own
    query_norm: torch.Tensor
    key_norm: torch.Tensor | None
    output: Linear
    behind_attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mixture: _Mixture | None
    behind_mlp_norm: torch.Tensor
    input: _Input | None
    scale: torch.Tensor


class Gemma4(Decoder):
    def _build(self) -> None:
        config = self.config
        assert config.gemma4 is not None
        self._parts: Gemma4Parts = config.gemma4
        self._activation = activation(config.activation)
        self._embedding = self._head = self.linear("model.embed_tokens")
        if not config.tie_embeddings:
            self._head = self.linear("lm_head")
        self._embedding_scale = self._rounded(config.hidden_size)
        self._final_norm = self.vector("model.norm.weight")
        self._inputs = self._take_inputs() if self._parts.input_size else None
        sizes = {config.heads_of(layer)[1] for layer in config.kv_owners}
        self._plain = {size: torch.ones_like(self._final_norm[:1]).repeat(size) for size in sizes}
        self._layers = [self._take(index, f"model.layers.{index}.") for index in range(config.num_layers)]

    def _rounded(self, size: int) -> torch.Tensor:
        """The root, in the weights' type, as published."""
        return torch.tensor(size**0.5, dtype=self.weight("model.norm.weight").dtype)

    def _take_inputs(self) -> _Inputs:
        return _Inputs(
            self.weight("model.embed_tokens_per_layer.weight"),
            self._rounded(self._parts.input_size),
            self.linear("model.per_layer_model_projection"),
            self.vector("model.per_layer_projection_norm.weight"),
        )

    def _take(self, index: int, prefix: str) -> _Layer:
        config, attention, mlp = self.config, prefix + "self_attn.", prefix + "mlp."
        owns_kv = config.owns_kv(index)
        names = ["q"] if not owns_kv else ["q", "k"] if keys_are_values(config, index) else ["q", "k", "v"]
        return _Layer(
            self.vector(prefix + "input_layernorm.weight"),
            self.linear(*(f"{attention}{name}_proj" for name in names)),
            self.vector(attention + "q_norm.weight"),
            self.vector(attention + "k_norm.weight") if owns_kv else None,
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
        gate_up, down = (self._matrices(f"{prefix}experts.{name}_proj") for name in ("gate_up", "down"))
        return _Mixture(
            vector(scale, self.kernels),
            self.linear(prefix + "router.proj"),
            self.weight(prefix + "router.per_expert_scale").float(),
            self.vector(prefix + "pre_feedforward_layernorm_2.weight"),
            self.kernels.experts(gate_up, down, gate="gelu_tanh"),
            self.vector(prefix + "post_feedforward_layernorm_2.weight"),
            self.vector(prefix + "post_feedforward_layernorm_1.weight"),
        )

    def _matrices(self, name: str) -> Matrices:
        """Of all experts."""
        codes = self._weights.experts(name) if isinstance(self._weights, WeightsOnDemand) else None
        return self.weight(name).unbind() if codes is None else codes

    def _take_input(self, prefix: str) -> _Input:
        return _Input(
            self.linear(prefix + "per_layer_input_gate"),
            self.linear(prefix + "per_layer_projection"),
            self.vector(prefix + "post_per_layer_input_norm.weight"),
        )

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        rows = self._embedding.rows(batch.tokens)
        return rows * self._embedding_scale.to(rows.dtype)

    def _layer_inputs(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor | None:
        """``[T, layers, size]``."""
        inputs = self._inputs
        if inputs is None:
            return None
        shape = len(hidden), self.config.num_layers, self._parts.input_size
        own = torch.nn.functional.embedding(batch.tokens, inputs.table) * inputs.scale
        seen = (inputs.projection(hidden) * self.config.hidden_size**-0.5).view(shape)
        return (self._norm(seen, inputs.norm) + own.view(shape)) * 2**-0.5

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
            given = self._activation(layer.input.gate(hidden)) * step.layer_inputs[:, index]
            hidden = hidden + norm(layer.input.projection(given), layer.input.norm)
        return hidden * layer.scale

    def _with_values(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """The layer's queries, keys and normalised values; only queries, if it has no KV of its own."""
        if not self.config.owns_kv(index):
            return qkv
        num_kv_heads, size = self.config.heads_of(index)
        last = qkv[:, -num_kv_heads * size :]
        values = self._norm(last.reshape(-1, size), self._plain[size]).view(last.shape)
        if keys_are_values(self.config, index):
            return torch.cat([qkv, values], dim=-1)
        last.copy_(values)
        return qkv

    def _mixed(self, mixture: _Mixture, hidden: torch.Tensor) -> torch.Tensor:
        shares = mixture.router(self._norm(hidden, mixture.router_norm)).float().softmax(-1)
        chosen, experts = shares.topk(self.config.experts_per_token, dim=-1)  # [T, k] each
        chosen = chosen / chosen.sum(-1, keepdim=True) * mixture.factors[experts]
        return self._norm(mixture.experts(self._norm(hidden, mixture.norm), experts, chosen), mixture.behind_norm)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(hidden, weight, self.config.rms_eps)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_cap
        logits = self._head(self._norm(hidden, self._final_norm))
        return cap * torch.tanh(logits / cap) if cap else logits
