"""Gemma, Gemma 2, VaultGemma and Gemma 3's text model over a paged cache (Gemma team 2024, 2025).

From Gemma 2 on layers are local and global, and norms come before and after attention and the MLP, but in VaultGemma,
as in Gemma, only before them. Stored norm weights have 1 subtracted. Gemma 2 soft-caps attention scores and logits;
Gemma 3 normalises queries and keys instead, and its local layers, those with a window, have their own RoPE base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.kernels import Linear
from mooncake.model.batch import ForwardBatch
from mooncake.model.decoder import Decoder, Step, activation, capped
from mooncake.model.layers import vector


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None  # Gemma 3
    key_norm: torch.Tensor | None
    output: Linear
    behind_attention_norm: torch.Tensor | None  # Gemma 2 and 3
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    behind_mlp_norm: torch.Tensor | None


class GemmaDecoder(Decoder):
    """What all Gemmas have around their layers: embeddings that are scaled, and logits that may be capped."""

    def _build(self) -> None:
        self._activation = activation(self.config.activation)
        self._embedding = self._head = self.linear("model.embed_tokens")
        if not self.config.tie_embeddings:
            self._head = self.linear("lm_head")
        self._embedding_scale = self._root(self.config.hidden_size)
        self._final_norm = self._take_norm("model.norm")

    def _root(self, size: int) -> torch.Tensor:
        """The square root, rounded to the weights' type, as published."""
        return torch.tensor(size**0.5, dtype=self.weight("model.norm.weight").dtype)

    def _take_norm(self, name: str) -> torch.Tensor:
        return self.vector(f"{name}.weight")

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(hidden, weight, self.config.rms_eps)

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        rows = self._embedding.rows(batch.tokens)
        return rows * self._embedding_scale.to(rows.dtype)

    def _final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, self._final_norm)

    def _logits(self, final: torch.Tensor) -> torch.Tensor:
        return capped(self._head(final), self.config.logit_cap)


class Gemma(GemmaDecoder):
    def _build(self) -> None:
        super()._build()
        self._has_late_norms = self.config.architecture not in ("gemma", "vaultgemma")
        self._layers = [self._take(f"model.layers.{index}.") for index in range(self.config.num_layers)]

    def _take_norm(self, name: str) -> torch.Tensor:
        return vector(1.0 + self.weight(f"{name}.weight").float(), self.kernels)

    def _take(self, prefix: str) -> _Layer:
        config, attention, mlp = self.config, prefix + "self_attn.", prefix + "mlp."
        mlp_norm = "post_attention_layernorm" if config.architecture == "gemma" else "pre_feedforward_layernorm"
        return _Layer(
            self._take_norm(prefix + "input_layernorm"),
            self.qkv(attention),
            self._take_norm(attention + "q_norm") if config.qk_norm else None,
            self._take_norm(attention + "k_norm") if config.qk_norm else None,
            self.linear(attention + "o_proj"),
            self._take_norm(prefix + "post_attention_layernorm") if self._has_late_norms else None,
            self._take_norm(prefix + mlp_norm),
            self.linear(mlp + "gate_proj", mlp + "up_proj"),
            self.linear(mlp + "down_proj"),
            self._take_norm(prefix + "post_feedforward_layernorm") if self._has_late_norms else None,
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, norm = self._layers[index], self._norm
        qkv = layer.qkv(norm(hidden, layer.attention_norm))
        attended = layer.output(step.attend(index, qkv, layer.query_norm, layer.key_norm))
        hidden = hidden + self._behind(attended, layer.behind_attention_norm)
        gate, up = layer.gate_up(norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return hidden + self._behind(layer.down(self._activation(gate) * up), layer.behind_mlp_norm)

    def _behind(self, update: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return update if norm is None else self._norm(update, norm)
