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


class Gemma(Decoder):
    def _build(self) -> None:
        config = self.config
        self._activation = activation(config.activation)
        self._has_late_norms = config.architecture not in ("gemma", "vaultgemma")
        self._embedding = self._head = self.linear("model.embed_tokens")
        if not config.tie_embeddings:
            self._head = self.linear("lm_head")
        # As published: the factor is rounded to the weights' type.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=self.weight("model.norm.weight").dtype)
        self._final_norm = self._norm("model.norm")
        self._layers = [self._take(f"model.layers.{index}.") for index in range(config.num_layers)]

    def _norm(self, name: str) -> torch.Tensor:
        return vector(1.0 + self.weight(f"{name}.weight").float(), self.kernels)

    def _take(self, prefix: str) -> _Layer:
        config, attention, mlp = self.config, prefix + "self_attn.", prefix + "mlp."
        has_norms = config.qk_norm
        return _Layer(
            self._norm(prefix + "input_layernorm"),
            self.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v"))),
            self._norm(attention + "q_norm") if has_norms else None,
            self._norm(attention + "k_norm") if has_norms else None,
            self.linear(attention + "o_proj"),
            self._norm(prefix + "post_attention_layernorm") if self._has_late_norms else None,
            self._norm(
                f"{prefix}{'post_attention' if config.architecture == 'gemma' else 'pre_feedforward'}_layernorm"
            ),
            self.linear(mlp + "gate_proj", mlp + "up_proj"),
            self.linear(mlp + "down_proj"),
            self._norm(prefix + "post_feedforward_layernorm") if self._has_late_norms else None,
        )

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        rows = self._embedding.rows(batch.tokens)
        return rows * self._embedding_scale.to(rows.dtype)

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, norm, eps = self._layers[index], self.kernels.rms_norm, self.config.rms_eps
        qkv = layer.qkv(norm(hidden, layer.attention_norm, eps))
        attended = layer.output(step.attend(index, qkv, layer.query_norm, layer.key_norm))
        hidden = hidden + self._behind(attended, layer.behind_attention_norm)
        gate, up = layer.gate_up(norm(hidden, layer.mlp_norm, eps)).chunk(2, dim=-1)
        return hidden + self._behind(layer.down(self._activation(gate) * up), layer.behind_mlp_norm)

    def _behind(self, update: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return update if norm is None else self.kernels.rms_norm(update, norm, self.config.rms_eps)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.kernels.rms_norm(hidden, self._final_norm, self.config.rms_eps)
        return capped(self._head(normed), self.config.logit_cap)
