"""Granite, Hunyuan, EXAONE 4 and OLMo over a paged cache: Llama's parts in other combinations. Mixture models share
this frame."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Generic, TypeVar

import torch

from mooncake.kernels import Experts, Linear
from mooncake.model.batch import ForwardBatch
from mooncake.model.decoder import Decoder, Step, activation
from mooncake.model.layers import embedding_and_head, of_rows
from mooncake.model.rope import heads_in_order

Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class Mlp:
    """With a gate."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every token uses."""

    share: Linear | None  # [1, hidden]: its weight is computed from the token (Qwen)
    mlp: Mlp


class Normed(Enum):
    """What the norms of queries and keys are of, in layers that have them."""

    EACH_HEAD = auto()
    ALL_HEADS = auto()  # of a token, together
    ROTATED_HEADS = auto()  # each, after the rotation


class GatedDecoder(Decoder, Generic[Layer]):
    """Embedding, layers of one kind, norm and head, with Llama's names."""

    _norm_names: ClassVar[tuple[str, str]] = "input_layernorm", "post_attention_layernorm"
    _head_norm_names: ClassVar[tuple[str, str]] = "q_norm", "k_norm"
    _normed: ClassVar[Normed] = Normed.EACH_HEAD

    def _build(self) -> None:
        config = self.config
        self._embedding, self._head = embedding_and_head(
            self._weights, config, self.places, lambda matrix: self.vocabulary(self.product(matrix))
        )
        self._final_norm = self._take_norm("model.norm")
        self.stream = self._final_norm.dtype
        self._layers = self._take_layers()

    def _take_layers(self) -> dict[int, Layer]:
        return {index: self._take(f"model.layers.{index}.") for index in self.places}

    def _take_norm(self, name: str) -> torch.Tensor:
        """The weight of a norm of the residual stream."""
        return self.vector(f"{name}.weight")

    def _take_head_norms(self, attention: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weights of the norms of queries and of keys below ``attention``, if there are any."""
        if not self.config.qk_norm:
            return None, None
        query, key = (self.vector(f"{attention}{name}.weight") for name in self._head_norm_names)
        return query, key

    def _take_gated(self, prefix: str) -> Mlp:
        return Mlp(self.linear(prefix + "gate_proj", prefix + "up_proj"), self.linear(prefix + "down_proj"))

    def _dense(self, mlp: Mlp, normed: torch.Tensor) -> torch.Tensor:
        return mlp.down(self.kernels.silu_mul(mlp.gate_up(normed)))

    def _mixture_of_best(self, router: Linear, experts: Experts, normed: torch.Tensor) -> torch.Tensor:
        """Of each token's experts with the largest shares, which are a softmax over all."""
        shares = router(normed).float().softmax(-1)
        weights, chosen = shares.topk(self.config.experts_per_token, dim=-1)  # [T, k] each
        if self.config.norm_expert_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts(normed, chosen, weights)

    def _take_shared(self, prefix: str) -> SharedExpert:
        name = prefix + "mlp.shared_expert"
        return SharedExpert(self.uncoded(f"{name}_gate"), self._take_gated(f"{name}."))

    def _of_shared(self, expert: SharedExpert, normed: torch.Tensor) -> torch.Tensor:
        found = self._dense(expert.mlp, normed)
        return found if expert.share is None else expert.share(normed).sigmoid() * found

    @abstractmethod
    def _take(self, prefix: str) -> Layer:
        """The layer whose weights' names begin with ``prefix``."""

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        assert self._embedding is not None, "a stage with layers before it is given what they left"
        rows, factor = self._embedding.rows(batch.tokens), self.config.embedding_factor
        return rows if factor == 1.0 else rows * factor

    def _add(self, hidden: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """The residual stream with what attention or an MLP adds to it."""
        return torch.add(hidden, update, alpha=self.config.residual_factor)

    def _attend_normed(
        self, step: Step, index: int, qkv: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """``step.attend`` with the family's norms of queries and keys."""
        if self._normed is Normed.EACH_HEAD:
            return step.attend(index, qkv, query_norm, key_norm)
        assert query_norm is not None and key_norm is not None
        if self._normed is Normed.ALL_HEADS:
            return step.attend(index, self._norm_over_heads(qkv, query_norm, key_norm))
        # A rotation only changes what the weights act on. Both act on queries here, so the kernel can normalise first.
        plain = torch.ones_like(query_norm)
        return step.attend(index, qkv, plain, plain, query_scale=query_norm * key_norm)

    def _norm_over_heads(self, qkv: torch.Tensor, query_norm: torch.Tensor, key_norm: torch.Tensor) -> torch.Tensor:
        """``qkv`` with all queries of a token normalised together, and so its keys."""
        width, kv_width = len(query_norm), len(key_norm)
        query, key, value = torch.tensor_split(qkv, (width, width + kv_width), dim=-1)
        if not self.is_part:
            query, key = self._norm(query.contiguous(), query_norm), self._norm(key.contiguous(), key_norm)
            return torch.cat([query, key, value], dim=-1)
        # Every rank has equally many heads, so the mean over all heads is the mean of the ranks' means.
        means = [part.float().square().mean(-1, keepdim=True) for part in (query, key)]
        sums = self.reduce(torch.cat([*means, torch.ones_like(means[0])], dim=-1))
        query_mean, key_mean, size = sums[:, :1], sums[:, 1:2], sums[:, 2:]
        scaled = (
            part * torch.rsqrt(mean / size + self.config.rms_eps) * norm
            for part, mean, norm in ((query, query_mean, query_norm), (key, key_mean, key_norm))
        )
        return torch.cat([*scaled, value], dim=-1).to(qkv.dtype)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(hidden, weight, self.config.rms_eps)

    def _final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, self._final_norm)

    def _logits(self, final: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "a stage with layers behind it gives no logits"
        logits, divisor = self._head(final), self.config.logit_divisor
        return logits if divisor == 1.0 else logits / divisor


def reordered_qkv(model: Decoder, attention: str, order: torch.Tensor, biased: bool) -> Linear:
    """The query, key and value projections below ``attention`` as one, with each query and key head in ``order``
    ``[D]``."""

    query, key, value = (model.matrix(f"{attention}{name}_proj.weight") for name in "qkv")
    of_query, of_key = (heads_in_order(torch.arange(rows.shape[0]), order) for rows in (query, key))
    bias = None
    if biased:
        biases = [model.weight(f"{attention}{name}_proj.bias") for name in "qkv"]
        bias = torch.cat([biases[0][of_query], biases[1][of_key], biases[2]])
    return model.product(of_rows(query, of_query), of_rows(key, of_key), value, bias=bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Linear


class Dense(GatedDecoder[_Layer]):
    """Norms before attention and the MLP, as in Llama. Granite 3 (Granite team, IBM 2024) has nothing else."""

    _mlp_names: ClassVar[tuple[str, ...]] = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    _is_gated: ClassVar[bool] = True

    def _take(self, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        attention_norm, mlp_norm = self._norm_names
        *widening, down = (prefix + name for name in self._mlp_names)
        return _Layer(
            self._take_norm(prefix + attention_norm),
            self._take_qkv(attention),
            *self._take_head_norms(attention),
            self.linear(attention + "o_proj"),
            self._take_norm(prefix + mlp_norm),
            self.linear(*widening),
            self._take_activation(prefix),
            self.linear(down),
        )

    def _take_qkv(self, attention: str) -> Linear:
        return self.qkv(attention)

    def _take_activation(self, prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.kernels.silu_mul if self._is_gated else activation(self.config.activation)

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        hidden = self._add(hidden, self._attention(index, self._norm(hidden, layer.attention_norm), step))
        return self._add(hidden, self._mlp(layer, self._norm(hidden, layer.mlp_norm)))

    def _attention(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        return layer.output(self._attend_normed(step, index, layer.qkv(hidden), layer.query_norm, layer.key_norm))

    def _mlp(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        return layer.down(layer.activation(layer.gate_up(hidden)))


class Hunyuan(Dense):
    """Hunyuan's dense models (Tencent 2025): queries and keys are normalised after they are rotated."""

    _head_norm_names = "query_layernorm", "key_layernorm"
    _normed = Normed.ROTATED_HEADS


class Exaone4(Dense):
    """EXAONE 4 (LG AI Research 2025): norms after attention and the MLP."""

    _norm_names = "post_attention_layernorm", "post_feedforward_layernorm"

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        hidden = hidden + self._norm(self._attention(index, hidden, step), layer.attention_norm)
        return hidden + self._norm(self._mlp(layer, hidden), layer.mlp_norm)


class Olmo2(Exaone4):
    """OLMo-2 and OLMo-3 (OLMo team 2025): also norms over all queries and over all keys of a token."""

    _normed = Normed.ALL_HEADS
