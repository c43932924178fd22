"""DeepSeek-V2 and -V3 over a paged cache of latent vectors: attention with one key per token, shared by all heads.

A head's key is W_k c for the token's latent vector c, joined with a shared key that carries the position; its value is
W_v c. So q · W_k c = (W_kᵀ q) · c, and the weighted sum of values is W_v times the weighted sum of c: queries are
projected to the latent space, and results are projected back ("absorbed", DeepSeek-V2 2024, section 2.1.2). Kernels see
one KV head whose keys are its values. Long prompts need more arithmetic this way than with keys and values computed per
head, but cached rows are read once for all heads and never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Linear
from mooncake.model.decoder import Step
from mooncake.model.families.gated import Mlp
from mooncake.model.families.routed import Mixture, RoutedDecoder
from mooncake.model.rope import rotary_order
from mooncake.model_config import LatentAttention

LATENT_EPS = 1e-6
"""Epsilon of the norms inside attention, whatever config.json says about the others."""


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    down: Linear  # of queries, unless they have no latent vector, and of keys and values
    query_norm: torch.Tensor | None
    query: Linear  # the rotating parts of all heads, then the other parts
    latent_norm: torch.Tensor
    key_up: list[Linear]  # per head: W_kᵀ
    value_up: list[Linear]
    output: Linear
    mlp_norm: torch.Tensor
    mlp: Mlp | Mixture


class DeepSeek(RoutedDecoder[_Layer]):
    @property
    def latent(self) -> LatentAttention:
        assert self.config.latent is not None
        return self.config.latent

    @property
    def _turning(self) -> torch.Tensor:
        """Order of the rotating elements; published pairs are mostly adjacent."""
        return rotary_order(self.latent.rope_dim, self.latent.rope_dim, in_turn=not self.latent.turns_halves)

    def _take(self, prefix: str) -> _Layer:
        latent, attention = self.latent, prefix + "self_attn."
        kv_down = self.weight(attention + "kv_a_proj_with_mqa.weight")
        kv_down = torch.cat([kv_down[: latent.rank], kv_down[latent.rank :][self._turning]])
        query_name = attention + ("q_b_proj" if latent.query_rank else "q_proj")
        query = self._by_part(self.weight(query_name + ".weight"))
        if latent.query_rank:
            kv_down = torch.cat([self.weight(attention + "q_a_proj.weight"), kv_down])
        kv_up = self.weight(attention + "kv_b_proj.weight").view(self.config.num_heads, -1, latent.rank)
        key_up, value_up = kv_up.tensor_split([latent.nope_dim], dim=1)
        return _Layer(
            attention_norm=self.vector(prefix + "input_layernorm.weight"),
            down=self.product(kv_down),
            query_norm=self.vector(attention + "q_a_layernorm.weight") if latent.query_rank else None,
            query=self.product(query),
            latent_norm=self.vector(attention + "kv_a_layernorm.weight"),
            key_up=[self.kernels.linear(head.T.contiguous()) for head in key_up],
            value_up=[self.kernels.linear(head.contiguous()) for head in value_up],
            output=self.linear(attention + "o_proj"),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight"),
            mlp=self._take_mlp(prefix),
        )

    def _by_part(self, query: torch.Tensor) -> torch.Tensor:
        """Reorders rows of published queries, in which each head has two parts, to the order of ``_Layer.query``."""
        heads = query.view(self.config.num_heads, -1, query.shape[1])
        nope, rope = heads.tensor_split([self.latent.nope_dim], dim=1)
        return torch.cat([rope[:, self._turning].flatten(0, 1), nope.flatten(0, 1)])

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        hidden = self._add(hidden, self._attend(index, layer, self._norm(hidden, layer.attention_norm), step))
        return self._add(hidden, self._mlp(layer.mlp, self._norm(hidden, layer.mlp_norm)))

    def _attend(self, index: int, layer: _Layer, normed: torch.Tensor, step: Step) -> torch.Tensor:
        latent, heads = self.latent, self.config.num_heads
        places = [latent.query_rank, latent.query_rank + latent.rank]
        compressed, vector, turning = layer.down(normed).tensor_split(places, dim=1)
        if layer.query_norm is not None:
            normed = self.kernels.rms_norm(compressed.contiguous(), layer.query_norm, LATENT_EPS)
        vector = self.kernels.rms_norm(vector.contiguous(), layer.latent_norm, LATENT_EPS)
        rotated, still = layer.query(normed).tensor_split([heads * latent.rope_dim], dim=1)
        queries = [up(part) for up, part in zip(layer.key_up, still.chunk(heads, 1), strict=True)]
        rows = _rows(
            torch.cat([rotated, turning], 1).view(len(normed), heads + 1, -1), torch.stack([*queries, vector], 1)
        )
        mixed = step.attend(index, rows.flatten(1)).view(len(normed), heads, -1)
        mixed = _latent_of(mixed, latent.rope_dim)
        values = [up(part) for up, part in zip(layer.value_up, mixed.unbind(1), strict=True)]
        return self.reduce(layer.output(torch.cat(values, 1)))


def _rows(rotating: torch.Tensor, still: torch.Tensor) -> torch.Tensor:
    """Join these parts into queries or keys ``[..., D]``, in the order in which kernels rotate them
    (``rotary_order``)."""
    first, second = rotating.chunk(2, -1)
    before, behind = still.chunk(2, -1)
    return torch.cat([first, before, second, behind], -1)


def _latent_of(rows: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """The non-rotating part of such rows."""
    first, second = rows.chunk(2, -1)
    return torch.cat([first[..., rope_dim // 2 :], second[..., rope_dim // 2 :]], -1)
