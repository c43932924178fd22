"""The GPT line over a paged cache: GPT-2, StarCoder, GPT-J, OPT, GPT-NeoX, BLOOM, MPT, Falcon, StarCoder2, Phi,
StableLM, Jais 2 and Nemotron.

Layer norms, often biases, an MLP mostly without a gate; ``families.gpt_names`` knows what they are called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mooncake.families.gpt import OPT_POSITION_OFFSET
from mooncake.families.gpt_names import gpt_names
from mooncake.families.registry import OTHER_FAMILIES
from mooncake.kernels import Linear
from mooncake.model.batch import ForwardBatch
from mooncake.model.decoder import Decoder, Step, activation
from mooncake.model.families.gated import reordered_qkv
from mooncake.model.families.interleaved import interleaved_qkv
from mooncake.model.layers import vector
from mooncake.model.rope import rotary_order

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class Gpt(Decoder):
    """A layer of this line: attention, then the MLP, each after its norm; in parallel if the model says so. StarCoder2
    (Lozhkov et al. 2024) has nothing else."""

    def _build(self) -> None:
        self._names = names = gpt_names(self.config)
        self._activation = activation(self.config.activation)
        embedding, final_norm, head = names.top
        self._embedding = self._head = self.linear(embedding)
        if not self.config.tie_embeddings:
            self._head = self.linear(head, biased=head in names.biased)
        self._final_norm = self.layer_norm(final_norm)
        layers_at = OTHER_FAMILIES[self.config.architecture].layers_at
        self._layers = [self._take(f"{layers_at}.{index}.") for index in range(self.config.num_layers)]

    def _take(self, prefix: str) -> _Layer:
        """The layer whose weights' names begin with ``prefix``."""
        names = self._names
        norms = {name: self.layer_norm(prefix + name) for name in names.norms}
        attention_norm, mlp_norm = (norms[name] for name in names.norms)
        *widening, down = names.mlp
        return _Layer(
            attention_norm,
            self._qkv(prefix),
            self._product(prefix, names.output),
            mlp_norm,
            self._product(prefix, *widening),
            self._product(prefix, down),
        )

    def _qkv(self, prefix: str) -> Linear:
        return self._product(prefix, *self._names.qkv)

    def _product(self, prefix: str, *names: str) -> Linear:
        """As published, stacked."""
        biased = self._names.is_biased(names[0], self.config)
        return self.linear(*(prefix + name for name in names), biased=biased)

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self._embedding.rows(batch.tokens)

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self._layers[index]
        attended = layer.output(step.attend(index, self._projected(layer, hidden)))
        if self.config.parallel_residual:
            return hidden + attended + self._mlp(layer, hidden)
        hidden = hidden + attended
        return hidden + self._mlp(layer, hidden)

    def _projected(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values."""
        return layer.qkv(layer.attention_norm(hidden))

    def _mlp(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        return layer.down(self._activation(layer.up(layer.mlp_norm(hidden))))

    def _final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._final_norm(hidden)

    def _logits(self, final: torch.Tensor) -> torch.Tensor:
        return self._head(final)


class GptBigCode(Gpt):
    """StarCoder and SantaCoder (BigCode 2023): learned positions; keys and values of one head."""

    def _build(self) -> None:
        super()._build()
        self._positions = self.vector("transformer.wpe.weight")

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super()._embed(batch) + self._positions[batch.positions]


class Gpt2(GptBigCode):
    """GPT-2 (Radford et al. 2019): matrices stored ``[in, out]``, and keys and values of each head."""

    def _product(self, prefix: str, *names: str) -> Linear:
        matrix, bias = (self.weight(f"{prefix}{names[0]}.{part}") for part in ("weight", "bias"))
        return self.product(matrix.T.contiguous(), bias=bias)


class GptJ(Gpt):
    """GPT-J (Wang and Komatsuzaki 2021): attention and MLP share one norm, and only part of each head rotates."""

    def _qkv(self, prefix: str) -> Linear:
        return interleaved_qkv(self, prefix + "attn.")


class Opt(Gpt):
    """OPT (Zhang et al. 2022): learned positions, offset by two unused rows."""

    def _build(self) -> None:
        super()._build()
        self._positions = self.vector("model.decoder.embed_positions.weight")

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super()._embed(batch) + self._positions[batch.positions + OPT_POSITION_OFFSET]


class _InOneMatrix(Gpt):
    """Queries, keys and values are published as one matrix, by heads."""

    def _qkv(self, prefix: str) -> Linear:
        [name] = self._names.qkv
        bias = self.weight(f"{prefix}{name}.bias") if self.config.qkv_bias else None
        matrix = self._by_kind(self.weight(f"{prefix}{name}.weight"))
        return self.product(matrix, bias=None if bias is None else self._by_kind(bias))

    @abstractmethod
    def _by_kind(self, stored: torch.Tensor) -> torch.Tensor:
        """Reorders rows to all queries, all keys, all values."""


class GptNeoX(_InOneMatrix):
    """GPT-NeoX and Pythia (Black et al. 2022): parallel residual, and only part of each head rotates."""

    def _by_kind(self, stored: torch.Tensor) -> torch.Tensor:
        """From ``[head][q, k, v][D]``; queries and keys in ``rotary_order``."""
        config = self.config
        rows = stored.view(config.num_heads, 3, config.head_dim, *stored.shape[1:]).transpose(0, 1)
        order = rotary_order(config.head_dim, config.rotary_dim)
        return torch.cat([rows[:2][:, :, order], rows[2:]]).flatten(0, 2).contiguous()


class Bloom(GptNeoX):
    """BLOOM (BigScience 2022): layers as GPT-NeoX's, a norm of embeddings, and ALiBi."""

    def _build(self) -> None:
        super()._build()
        self._embedding_norm = self.layer_norm("transformer.word_embeddings_layernorm")

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self._embedding_norm(super()._embed(batch))


class Mpt(Gpt):
    """MPT (MosaicML 2023): ALiBi; mostly no biases, also of norms; queries, keys and values may be clamped."""

    def layer_norm(self, name: str) -> Norm:
        if self.config.qkv_bias:
            return super().layer_norm(name)
        scale, eps = self.vector(f"{name}.weight"), self.config.rms_eps
        return lambda hidden: torch.nn.functional.layer_norm(hidden, scale.shape, scale, eps=eps)

    def _projected(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        qkv, limit = super()._projected(layer, hidden), self.config.qkv_limit
        return qkv.clamp(-limit, limit) if limit else qkv


class Falcon(_InOneMatrix):
    """Falcon (Almazrouei et al. 2023): parallel residual, no biases; keys and values of one head, or of a few. Not so
    Falcon-RW, which is built like BLOOM."""

    def _by_kind(self, stored: torch.Tensor) -> torch.Tensor:
        """From ``[KV head][G queries, key, value][D]``."""
        config = self.config
        group = config.num_heads // config.num_kv_heads
        rows = stored.view(config.num_kv_heads, group + 2, config.head_dim, *stored.shape[1:])
        return torch.cat([part.flatten(0, 2) for part in torch.split(rows, [group, 1, 1], dim=1)])


class Rotating(Gpt):
    """Only the first elements of each head rotate. Phi-1, Phi-1.5 (Li et al. 2023), Phi-2 and Jais 2 (Inception and
    MBZUAI 2025) have nothing else."""

    def _qkv(self, prefix: str) -> Linear:
        order = rotary_order(self.config.head_dim, self.config.rotary_dim)
        return reordered_qkv(self, prefix + "self_attn.", order, self.config.qkv_bias)


class StableLm(Rotating):
    """StableLM (Stability AI 2023, 2024): a gated MLP; in parallel with attention it shares its norm."""

    def _build(self) -> None:
        super()._build()
        self._activation = self.kernels.silu_mul


class Nemotron(Rotating):
    """Nemotron (NVIDIA 2024; Minitron): stored norm weights have 1 subtracted."""

    def layer_norm(self, name: str) -> Norm:
        scale, shift = vector(1.0 + self.weight(f"{name}.weight"), self.kernels), self.vector(f"{name}.bias")
        eps = self.config.rms_eps
        return lambda hidden: torch.nn.functional.layer_norm(hidden, scale.shape, scale, shift, eps)
