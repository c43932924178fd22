"""Shared by DeepSeek's mixtures of experts; and GLM-4.5, dots.llm1, ERNIE 4.5 and MiniMax-M2 over a paged cache, which
combine them with ordinary attention.

The first layers have a dense MLP. In the others a router chooses each token's experts from some groups of them, and all
tokens use one more (DeepSeek-V3 2024, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mooncake.families.gated import expert_names
from mooncake.kernels import Experts, Linear
from mooncake.model.decoder import Step
from mooncake.model.families.gated import GatedDecoder, Layer, Mlp, Normed, reordered_qkv
from mooncake.model.layers import vector
from mooncake.model.rope import heads_in_order, rotary_order
from mooncake.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Mixture:
    router: Linear
    choice_bias: torch.Tensor | None  # [experts]
    experts: Experts
    shared: Mlp | None


class RoutedDecoder(GatedDecoder[Layer]):
    """Layers of one kind, except for their MLPs."""

    def _take_mlp(self, prefix: str) -> Mlp | Mixture:
        """Of the layer whose weights' names begin with ``prefix``."""
        routing, names = self.config.routing, expert_names(self.config)
        router, bias = f"{prefix}{names.router}.weight", prefix + names.choice_bias
        if routing is None or router not in self._weights:
            return self._take_gated(f"{prefix}{names.dense}.")
        return Mixture(
            # in float32, as published: rounded, nearly equal scores would choose other experts
            router=self.kernels.linear(self.weight(router).float()),
            choice_bias=self.vector(bias).float().flatten() if routing.has_choice_bias else None,
            experts=self.take_experts(prefix),
            shared=self._take_gated(f"{prefix}{names.shared}.") if self.config.shared_expert_size else None,
        )

    def _mlp(self, mlp: Mlp | Mixture, normed: torch.Tensor) -> torch.Tensor:
        return self.reduce(self._dense(mlp, normed) if isinstance(mlp, Mlp) else self._mixture(mlp, normed))

    def _mixture(self, mlp: Mixture, normed: torch.Tensor) -> torch.Tensor:
        weights, chosen = choose_experts(self.config, mlp.router, mlp.choice_bias, normed)
        mixed = mlp.experts(normed, chosen, weights)
        if mlp.shared is None:
            return mixed
        assert self.config.routing is not None
        return torch.add(mixed, self._dense(mlp.shared, normed), alpha=self.config.routing.shared_factor)


def choose_experts(
    config: ModelConfig, router: Linear, choice_bias: torch.Tensor | None, normed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers ``[T, k]`` of each token's experts. The bias affects the choice, not the weights."""
    routing, count = config.routing, config.experts_per_token
    assert routing is not None
    logits = router(normed.float())
    scores = logits.sigmoid() if routing.scoring.endswith("sigmoid") else logits.softmax(-1)
    ranks = scores if choice_bias is None else scores + choice_bias
    if routing.num_groups > 1:
        grouped = ranks.view(len(ranks), routing.num_groups, -1)
        # a group counts as its best expert does, or with a bias as its best two
        best = grouped.topk(1 if choice_bias is None else min(2, grouped.shape[2]), dim=-1).values.sum(-1)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.top_groups).indices, True)
        ranks = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    chosen = ranks.topk(count, dim=-1).indices
    weights = scores.gather(1, chosen)
    if config.norm_expert_weights:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.factor, chosen


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None  # GLM-4.5 and 4.6, not Air
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    mlp: Mlp | Mixture


class GlmMoe(RoutedDecoder[_Layer]):
    """GLM-4.5 (GLM team 2025): half of each head rotates. dots.llm1 (rednote 2025) differs in settings alone."""

    _rotates_in_turn: ClassVar[bool] = False  # neighbouring elements with each other

    def _take(self, prefix: str) -> _Layer:
        config, attention = self.config, prefix + "self_attn."
        order = rotary_order(config.head_dim, config.rotary_dim, self._rotates_in_turn)
        query_norm, key_norm = self._head_norms(attention, order) if config.qk_norm else (None, None)
        return _Layer(
            attention_norm=self.vector(prefix + "input_layernorm.weight"),
            qkv=reordered_qkv(self, attention, order, config.qkv_bias),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self.linear(attention + "o_proj"),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            mlp=self._take_mlp(prefix),
        )

    def _head_norms(self, attention: str, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of the norms of each query and of each key, with heads in ``order``."""
        query, key = (
            vector(heads_in_order(self.weight(f"{attention}{name}_norm.weight"), order), self.kernels) for name in "qk"
        )
        return query, key

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        attended = self._attend_normed(step, index, qkv, layer.query_norm, layer.key_norm)
        hidden = hidden + self.reduce(layer.output(attended))
        return hidden + self._mlp(layer.mlp, self._norm(hidden, layer.mlp_norm))


class Ernie(GlmMoe):
    """ERNIE 4.5 (Baidu 2025)."""

    _rotates_in_turn = True


class MiniMax(GlmMoe):
    """MiniMax-M2 (MiniMax 2025): norms over all queries and over all keys of a token."""

    _normed = Normed.ALL_HEADS
