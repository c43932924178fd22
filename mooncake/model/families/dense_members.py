"""AFM, Apertus, Granite 4 without Mamba, OLMo (1), nanochat and HyperCLOVA X over a paged cache: the frame of
``gated.Dense`` with other MLPs or norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from mooncake.kernels import Linear
from mooncake.model.batch import ForwardBatch
from mooncake.model.decoder import Step, capped
from mooncake.model.families.gated import Dense, reordered_qkv
from mooncake.model.layers import vector


class Arcee(Dense):
    """AFM-4.5B (Arcee 2025): the MLP has no gate."""

    _mlp_names, _is_gated = ("mlp.up_proj", "mlp.down_proj"), False


class Apertus(Arcee):
    """Apertus (Swiss AI 2025): each layer has learned its activation, xIELU (Huang and Schlag 2024)."""

    _norm_names = "attention_layernorm", "feedforward_layernorm"

    def _take_activation(self, prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
        above, below, slope, least = (
            self.vector(f"{prefix}mlp.act_fn.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
        above = torch.nn.functional.softplus(above)
        below = slope + torch.nn.functional.softplus(below)

        def xielu(values: torch.Tensor) -> torch.Tensor:
            positive = above * values * values + slope * values
            negative = (torch.expm1(torch.minimum(values, least)) - values) * below + slope * values
            return torch.where(values > 0, positive, negative)

        return xielu


class GraniteHybrid(Dense):
    """Granite 4 without Mamba (Granite team, IBM 2025): gates and ups are published as one."""

    _mlp_names = "shared_mlp.input_linear", "shared_mlp.output_linear"


class _WithPlainNorms(Dense):
    """Norms of the residual stream have no weights."""

    @cached_property
    def _ones(self) -> torch.Tensor:
        stored = self.weight(f"model.layers.{self.places.start}.self_attn.k_proj.weight")
        return vector(torch.ones(self.config.hidden_size, dtype=stored.dtype), self.kernels)

    def _take_norm(self, name: str) -> torch.Tensor:
        return self._ones


class Olmo(_WithPlainNorms):
    """OLMo (Groeneveld et al. 2024): layer norms; queries, keys and values may be clamped."""

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(hidden, weight.shape, eps=self.config.rms_eps)

    def _attention(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, limit = self._layers[index], self.config.qkv_limit
        qkv = layer.qkv(hidden)
        return layer.output(step.attend(index, qkv.clamp(-limit, limit) if limit else qkv))


class NanoChat(_WithPlainNorms):
    """nanochat (Karpathy 2025): embeddings are normalised, heads after they are rotated, and that the other way round:
    here their halves are swapped."""

    _mlp_names, _is_gated = ("mlp.fc1", "mlp.fc2"), False

    def _take_qkv(self, attention: str) -> Linear:
        dim = self.config.head_dim
        return reordered_qkv(self, attention, torch.arange(dim).roll(dim // 2), biased=False)

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self._norm(super()._embed(batch), self._ones)

    def _attention(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, plain = self._layers[index], self._ones[: self.config.head_dim]
        return layer.output(step.attend(index, layer.qkv(hidden), plain, plain))

    def _logits(self, final: torch.Tensor) -> torch.Tensor:
        return capped(super()._logits(final), self.config.logit_cap)


class HyperClova(Dense):
    """HyperCLOVA X (NAVER 2025): what attention and the MLP add is normalised, too."""

    def _build(self) -> None:
        super()._build()
        self._behind = {
            index: [self.vector(f"model.layers.{index}.post_norm{number}.weight") for number in (1, 2)]
            for index in self.places
        }

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer, (behind_attention, behind_mlp) = self._layers[index], self._behind[index]
        attended = self._attention(index, self._norm(hidden, layer.attention_norm), step)
        hidden = self._add(hidden, self._norm(attended, behind_attention))
        mixed = self._mlp(layer, self._norm(hidden, layer.mlp_norm))
        return self._add(hidden, self._norm(mixed, behind_mlp))
