"""Shared by Gemma 3n and Gemma 4: normalised values, and layers that are given their own embedding of every token.

A layer without KV of its own computes queries alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.families.gemma4 import keys_are_values
from mooncake.kernels import Linear
from mooncake.model.batch import ForwardBatch
from mooncake.model.families.gemma import GemmaDecoder
from mooncake.model.layers import WeightsOnDemand
from mooncake.model_config import GemmaParts


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What layers' own inputs are computed from: each token's embeddings, and the first hidden state."""

    table: torch.Tensor  # [tokens, layers * size], as stored: it is read by rows, and as large as the rest of the model
    scale: torch.Tensor
    projection: Linear  # [layers * size, hidden]
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerInput:
    """How a layer adds its own input."""

    gate: Linear
    projection: Linear
    norm: torch.Tensor


class LateGemma(GemmaDecoder):
    def _build(self) -> None:
        super()._build()
        config = self.config
        assert config.gemma is not None
        self._parts: GemmaParts = config.gemma
        self._inputs = self._take_inputs() if self._parts.input_size else None
        sizes = {config.heads_of(layer)[1] for layer in config.kv_owners}
        self._plain = {size: torch.ones_like(self._final_norm[:1]).repeat(size) for size in sizes}

    def _take_inputs(self) -> _Inputs:
        return _Inputs(
            self._stored("model.embed_tokens_per_layer.weight").to(self.kernels.device),
            self._root(self._parts.input_size),
            self.linear("model.per_layer_model_projection"),
            self.vector("model.per_layer_projection_norm.weight"),
        )

    def _stored(self, name: str) -> torch.Tensor:
        """A weight in the type of its file, if that has values."""
        stored = self._weights.as_stored(name) if isinstance(self._weights, WeightsOnDemand) else None
        return self.weight(name) if stored is None else stored

    def _take_qkv(self, index: int, attention: str) -> Linear:
        """Without values where they are the keys, and without both in layers without KV of their own."""
        owns_kv = self.config.owns_kv(index)
        names = ["q"] if not owns_kv else ["q", "k"] if keys_are_values(self.config, index) else ["q", "k", "v"]
        return self.linear(*(f"{attention}{name}_proj" for name in names))

    def _take_input(self, prefix: str) -> LayerInput:
        return LayerInput(
            self.linear(prefix + "per_layer_input_gate"),
            self.linear(prefix + "per_layer_projection"),
            self.vector(prefix + "post_per_layer_input_norm.weight"),
        )

    def _layer_inputs(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor | None:
        """``[T, layers, size]``."""
        inputs, tokens = self._inputs, batch.tokens
        if inputs is None:
            return None
        if self._parts.input_vocab < self.config.vocab_size:
            tokens = tokens.where(tokens < self._parts.input_vocab, 0)
        shape = len(hidden), self.config.num_layers, self._parts.input_size
        own = torch.nn.functional.embedding(tokens, inputs.table).to(inputs.scale.dtype) * inputs.scale
        seen = (inputs.projection(hidden) * self.config.hidden_size**-0.5).view(shape)
        return (self._norm(seen, inputs.norm) + own.view(shape)) * 2**-0.5

    def _from_input(self, layer: LayerInput, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """What a layer adds of its own input ``given`` [T, size]."""
        return self._norm(layer.projection(self._activation(layer.gate(hidden)) * given), layer.norm)

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
