"""Granite and OLMo-2 over a paged cache: Llama's parts in other combinations. Mixture models share this frame."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch

from mooncake.kernels import Linear
from mooncake.model.batch import ForwardBatch
from mooncake.model.decoder import Decoder, Step
from mooncake.model.layers import embedding_and_head
from mooncake.model.rope import heads_in_order

Layer = TypeVar("Layer")


class GatedDecoder(Decoder, Generic[Layer]):
    """Embedding, layers of one kind, norm and head, with Llama's names."""

    def _build(self) -> None:
        config = self.config
        self._embedding, self._head = embedding_and_head(
            self._weights, config, self.places, lambda matrix: self.vocabulary(self.kernels.linear(matrix))
        )
        self._final_norm = self.vector("model.norm.weight")
        self.stream = self._final_norm.dtype
        self._layers = {index: self._take(f"model.layers.{index}.") for index in self.places}

    @abstractmethod
    def _take(self, prefix: str) -> Layer:
        """The layer whose weights' names begin with ``prefix``."""

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        assert self._embedding is not None, "a stage with layers before it is given what they left"
        return self._embedding.rows(batch.tokens)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(hidden, weight, self.config.rms_eps)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "a stage with layers behind it gives no logits"
        return self._head(self._norm(hidden, self._final_norm))


def reordered_qkv(model: Decoder, attention: str, order: torch.Tensor, biased: bool) -> Linear:
    """The query, key and value projections below ``attention`` as one, with each query and key head in ``order``
    ``[D]``."""

    def stacked(part: str) -> torch.Tensor:
        query, key, value = (model.weight(f"{attention}{name}_proj.{part}") for name in "qkv")
        return torch.cat([heads_in_order(query, order), heads_in_order(key, order), value])

    return model.kernels.linear(stacked("weight"), stacked("bias") if biased else None)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None  # over all heads together; OLMo-2
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class _Dense(GatedDecoder[_Layer]):
    _norm_names: ClassVar[tuple[str, str]]  # before attention and before the MLP
    _has_query_norm: ClassVar[bool]

    def _take(self, prefix: str) -> _Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        attention_norm, mlp_norm = self._norm_names
        return _Layer(
            self.vector(f"{prefix}{attention_norm}.weight"),
            self.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v"))),
            self.vector(attention + "q_norm.weight") if self._has_query_norm else None,
            self.vector(attention + "k_norm.weight") if self._has_query_norm else None,
            self.linear(attention + "o_proj"),
            self.vector(f"{prefix}{mlp_norm}.weight"),
            self.linear(mlp + "gate_proj", mlp + "up_proj"),
            self.linear(mlp + "down_proj"),
        )

    def _mlp(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        return layer.down(self.kernels.silu_mul(layer.gate_up(hidden)))


class Granite(_Dense):
    """Granite 3 (Granite team, IBM 2024): factors for embeddings, for each layer's contributions, and for logits."""

    _norm_names = "input_layernorm", "post_attention_layernorm"
    _has_query_norm = False

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super()._embed(batch) * self.config.embedding_factor

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, factor = self._layers[index], self.config.residual_factor
        attended = step.attend(index, layer.qkv(self._norm(hidden, layer.attention_norm)))
        hidden = hidden + layer.output(attended) * factor
        return hidden + self._mlp(layer, self._norm(hidden, layer.mlp_norm)) * factor

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super()._logits(hidden) / self.config.logit_divisor


class Olmo2(_Dense):
    """OLMo-2 (OLMo team 2025): norms after attention and the MLP, and over all queries and all keys of a token."""

    _norm_names = "post_attention_layernorm", "post_feedforward_layernorm"
    _has_query_norm = True

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        assert layer.query_norm is not None and layer.key_norm is not None
        width, kv_width = len(layer.query_norm), len(layer.key_norm)
        query, key, value = torch.tensor_split(layer.qkv(hidden), (width, width + kv_width), dim=-1)
        query = self._norm(query.contiguous(), layer.query_norm)
        key = self._norm(key.contiguous(), layer.key_norm)
        attended = step.attend(index, torch.cat([query, key, value], dim=-1))
        hidden = hidden + self._norm(layer.output(attended), layer.attention_norm)
        return hidden + self._norm(self._mlp(layer, hidden), layer.mlp_norm)
