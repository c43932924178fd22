"""GLM-4 and Command R over a paged cache: RoPE rotates neighbouring elements, 2i and 2i + 1, with each other.

They are reordered at load, so kernels need not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Linear
from mooncake.model.decoder import Decoder, Step
from mooncake.model.families.gated import GatedDecoder, Mlp, reordered_qkv
from mooncake.model.layers import vector
from mooncake.model.rope import rotary_order
from mooncake.model_config import ModelConfig


def interleaved_qkv(model: Decoder, attention: str, biased: bool = False) -> Linear:
    """The weights below ``attention``, with queries and keys in ``rotary_order``."""
    return reordered_qkv(model, attention, _order(model.config), biased)


def _order(config: ModelConfig) -> torch.Tensor:
    return rotary_order(config.head_dim, config.rotary_dim, in_turn=True)


@dataclass(frozen=True, slots=True)
class _GlmLayer:
    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    behind_attention_norm: torch.Tensor | None  # glm4
    mlp_norm: torch.Tensor
    mlp: Mlp
    behind_mlp_norm: torch.Tensor | None


class Glm(GatedDecoder[_GlmLayer]):
    """GLM-4 (GLM team 2024): half of each head rotates. Since 0414 ("glm4") the layers' contributions are also
    normalised."""

    def _take(self, prefix: str) -> _GlmLayer:
        attention, is_late = prefix + "self_attn.", self.config.architecture == "glm4"
        return _GlmLayer(
            self.vector(prefix + "input_layernorm.weight"),
            interleaved_qkv(self, attention, self.config.qkv_bias),
            self.linear(attention + "o_proj"),
            self.vector(prefix + "post_self_attn_layernorm.weight") if is_late else None,
            self.vector(prefix + "post_attention_layernorm.weight"),
            Mlp(self.linear(prefix + "mlp.gate_up_proj"), self.linear(prefix + "mlp.down_proj")),
            self.vector(prefix + "post_mlp_layernorm.weight") if is_late else None,
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        attended = layer.output(step.attend(index, layer.qkv(self._norm(hidden, layer.attention_norm))))
        hidden = hidden + self._behind(attended, layer.behind_attention_norm)
        mixed = self._dense(layer.mlp, self._norm(hidden, layer.mlp_norm))
        return hidden + self._behind(mixed, layer.behind_mlp_norm)

    def _behind(self, update: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return update if norm is None else self._norm(update, norm)


@dataclass(frozen=True, slots=True)
class _CohereLayer:
    norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None  # [Hq + Hkv, D], Command R+
    output: Linear
    mlp: Mlp


class Cohere(GatedDecoder[_CohereLayer]):
    """Command R (Cohere 2024): attention and MLP share one norm. In "cohere2" only layers with a window rotate."""

    def _take(self, prefix: str) -> _CohereLayer:
        attention = prefix + "self_attn."
        return _CohereLayer(
            self.vector(prefix + "input_layernorm.weight"),
            interleaved_qkv(self, attention),
            self._head_norms(attention) if self.config.qk_norm else None,
            self.linear(attention + "o_proj"),
            self._take_gated(prefix + "mlp."),
        )

    def _head_norms(self, attention: str) -> torch.Tensor:
        stored = torch.cat([self.weight(f"{attention}{name}_norm.weight") for name in "qk"])
        return vector(stored[:, _order(self.config)], self.kernels)

    def _normed_heads(self, qkv: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalise queries and keys, each head on its own and with its own weight."""
        heads = qkv.view(len(qkv), -1, self.config.head_dim)
        turning, value = torch.split(heads, [len(weight), self.config.num_kv_heads], dim=1)
        normed = torch.nn.functional.layer_norm(turning, turning.shape[2:], eps=self.config.rms_eps) * weight
        return torch.cat([normed, value], dim=1).flatten(1)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(hidden, weight.shape, weight, None, self.config.rms_eps)

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        normed = self._norm(hidden, layer.norm)
        qkv = layer.qkv(normed)
        if layer.qk_norm is not None:
            qkv = self._normed_heads(qkv, layer.qk_norm)
        attended = step.attend(index, qkv)
        return hidden + layer.output(attended) + self._dense(layer.mlp, normed)
