"""The GPT line over a paged cache: GPT-2, StarCoder, GPT-J, OPT, GPT-NeoX, BLOOM, MPT, Falcon, StarCoder2, Phi,
StableLM, Jais 2 and Nemotron.

Layer norms, often biases, an MLP mostly without a gate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from mooncake.families.gpt import OPT_POSITION_OFFSET, falcon_norms
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


class _Gpt(Decoder):
    """A layer of this line: attention, then the MLP, each after its norm; in parallel if the model says so."""

    _names: ClassVar[tuple[str, str, str]]  # embeddings, final norm and head
    _has_head_bias: ClassVar[bool] = False

    def _build(self) -> None:
        config, (embedding, final_norm, head) = self.config, self._names
        self._activation = activation(config.activation)
        self._embedding = self._head = self.linear(embedding)
        if not config.tie_embeddings:
            self._head = self.linear(head, biased=self._has_head_bias)
        self._final_norm = self.layer_norm(final_norm)
        layers_at = OTHER_FAMILIES[config.architecture].layers_at
        self._layers = [self._take(f"{layers_at}.{index}.") for index in range(config.num_layers)]

    @abstractmethod
    def _take(self, prefix: str) -> _Layer:
        """The layer whose weights' names begin with ``prefix``."""

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self._embedding.rows(batch.tokens)

    def _qkv(self, attention: str) -> Linear:
        """The projections below ``attention``, of heads of which the first elements rotate."""
        order = rotary_order(self.config.head_dim, self.config.rotary_dim)
        return reordered_qkv(self, attention, order, self.config.qkv_bias)

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

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._final_norm(hidden))


class Gpt2(_Gpt):
    """GPT-2 (Radford et al. 2019): learned positions; matrices stored ``[in, out]``."""

    _names = "transformer.wte", "transformer.ln_f", "lm_head"

    def _build(self) -> None:
        super()._build()
        self._positions = self.vector("transformer.wpe.weight")

    def _take(self, prefix: str) -> _Layer:
        def transposed(name: str) -> Linear:
            matrix, bias = (self.weight(f"{prefix}{name}.{part}") for part in ("weight", "bias"))
            return self.product(matrix.T.contiguous(), bias=bias)

        return _Layer(
            self.layer_norm(prefix + "ln_1"),
            transposed("attn.c_attn"),
            transposed("attn.c_proj"),
            self.layer_norm(prefix + "ln_2"),
            transposed("mlp.c_fc"),
            transposed("mlp.c_proj"),
        )

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super()._embed(batch) + self._positions[batch.positions]


class GptBigCode(Gpt2):
    """StarCoder and SantaCoder (BigCode 2023): keys and values of one head."""

    def _take(self, prefix: str) -> _Layer:
        return _Layer(
            self.layer_norm(prefix + "ln_1"),
            self.linear(prefix + "attn.c_attn", biased=True),
            self.linear(prefix + "attn.c_proj", biased=True),
            self.layer_norm(prefix + "ln_2"),
            self.linear(prefix + "mlp.c_fc", biased=True),
            self.linear(prefix + "mlp.c_proj", biased=True),
        )


class GptJ(_Gpt):
    """GPT-J (Wang and Komatsuzaki 2021): attention and MLP share one norm, and only part of each head rotates."""

    _names = "transformer.wte", "transformer.ln_f", "lm_head"
    _has_head_bias = True

    def _take(self, prefix: str) -> _Layer:
        norm = self.layer_norm(prefix + "ln_1")
        return _Layer(
            norm,
            interleaved_qkv(self, prefix + "attn."),
            self.linear(prefix + "attn.out_proj"),
            norm,
            self.linear(prefix + "mlp.fc_in", biased=True),
            self.linear(prefix + "mlp.fc_out", biased=True),
        )


class Opt(_Gpt):
    """OPT (Zhang et al. 2022): learned positions, offset by two unused rows."""

    _names = "model.decoder.embed_tokens", "model.decoder.final_layer_norm", "lm_head"

    def _build(self) -> None:
        super()._build()
        self._positions = self.vector("model.decoder.embed_positions.weight")

    def _take(self, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        return _Layer(
            self.layer_norm(prefix + "self_attn_layer_norm"),
            self.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v")), biased=True),
            self.linear(attention + "out_proj", biased=True),
            self.layer_norm(prefix + "final_layer_norm"),
            self.linear(prefix + "fc1", biased=True),
            self.linear(prefix + "fc2", biased=True),
        )

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super()._embed(batch) + self._positions[batch.positions + OPT_POSITION_OFFSET]


class GptNeoX(_Gpt):
    """GPT-NeoX and Pythia (Black et al. 2022): parallel residual, and only part of each head rotates."""

    _names = "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"
    _attention: ClassVar[str] = "attention"

    def _take(self, prefix: str) -> _Layer:
        qkv = f"{prefix}{self._attention}.query_key_value"
        return _Layer(
            self.layer_norm(prefix + "input_layernorm"),
            self.product(self._by_kind(self.weight(qkv + ".weight")), bias=self._by_kind(self.weight(qkv + ".bias"))),
            self.linear(f"{prefix}{self._attention}.dense", biased=True),
            self.layer_norm(prefix + "post_attention_layernorm"),
            self.linear(prefix + "mlp.dense_h_to_4h", biased=True),
            self.linear(prefix + "mlp.dense_4h_to_h", biased=True),
        )

    def _by_kind(self, stored: torch.Tensor) -> torch.Tensor:
        """Reorders rows from ``[head][q, k, v][D]`` to ``[q, k, v][head][D]``, with queries and keys in
        ``rotary_order``."""
        config = self.config
        rows = stored.view(config.num_heads, 3, config.head_dim, *stored.shape[1:]).transpose(0, 1)
        order = rotary_order(config.head_dim, config.rotary_dim)
        return torch.cat([rows[:2][:, :, order], rows[2:]]).flatten(0, 2).contiguous()


class Bloom(GptNeoX):
    """BLOOM (BigScience 2022): layers as GPT-NeoX's, a norm of embeddings, and ALiBi."""

    _names = "transformer.word_embeddings", "transformer.ln_f", "lm_head"
    _attention = "self_attention"

    def _build(self) -> None:
        super()._build()
        self._embedding_norm = self.layer_norm("transformer.word_embeddings_layernorm")

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self._embedding_norm(super()._embed(batch))


class Mpt(_Gpt):
    """MPT (MosaicML 2023): ALiBi; mostly no biases, also of norms; queries, keys and values may be clamped."""

    _names = "transformer.wte", "transformer.norm_f", "lm_head"

    def layer_norm(self, name: str) -> Norm:
        if self.config.qkv_bias:
            return super().layer_norm(name)
        scale, eps = self.vector(f"{name}.weight"), self.config.rms_eps
        return lambda hidden: torch.nn.functional.layer_norm(hidden, scale.shape, scale, eps=eps)

    def _take(self, prefix: str) -> _Layer:
        biased = self.config.qkv_bias
        return _Layer(
            self.layer_norm(prefix + "norm_1"),
            self.linear(prefix + "attn.Wqkv", biased=biased),
            self.linear(prefix + "attn.out_proj", biased=biased),
            self.layer_norm(prefix + "norm_2"),
            self.linear(prefix + "ffn.up_proj", biased=biased),
            self.linear(prefix + "ffn.down_proj", biased=biased),
        )

    def _projected(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        qkv, limit = super()._projected(layer, hidden), self.config.qkv_limit
        return qkv.clamp(-limit, limit) if limit else qkv


class Falcon(_Gpt):
    """Falcon (Almazrouei et al. 2023): parallel residual, no biases; keys and values of one head, or of a few. Not so
    Falcon-RW, which is built like BLOOM."""

    _names = "transformer.word_embeddings", "transformer.ln_f", "lm_head"

    def _take(self, prefix: str) -> _Layer:
        qkv, biased = prefix + "self_attention.query_key_value", self.config.qkv_bias
        norms = [self.layer_norm(prefix + name) for name in falcon_norms(self.config)]
        return _Layer(
            norms[0],
            self.product(
                self._by_kind(self.weight(qkv + ".weight")),
                bias=self._by_kind(self.weight(qkv + ".bias")) if biased else None,
            ),
            self.linear(prefix + "self_attention.dense", biased=biased),
            norms[-1],
            self.linear(prefix + "mlp.dense_h_to_4h", biased=biased),
            self.linear(prefix + "mlp.dense_4h_to_h", biased=biased),
        )

    def _by_kind(self, stored: torch.Tensor) -> torch.Tensor:
        """Reorders rows from ``[KV head][G queries, key, value][D]`` to all queries, all keys, all values."""
        config = self.config
        group = config.num_heads // config.num_kv_heads
        rows = stored.view(config.num_kv_heads, group + 2, config.head_dim, *stored.shape[1:])
        return torch.cat([part.flatten(0, 2) for part in torch.split(rows, [group, 1, 1], dim=1)])


class StarCoder2(_Gpt):
    """StarCoder2 (Lozhkov et al. 2024): grouped-query attention, and a window."""

    _names = "model.embed_tokens", "model.norm", "lm_head"

    def _take(self, prefix: str) -> _Layer:
        attention = prefix + "self_attn."
        return _Layer(
            self.layer_norm(prefix + "input_layernorm"),
            self.linear(*(f"{attention}{name}_proj" for name in ("q", "k", "v")), biased=True),
            self.linear(attention + "o_proj", biased=True),
            self.layer_norm(prefix + "post_attention_layernorm"),
            self.linear(prefix + "mlp.c_fc", biased=True),
            self.linear(prefix + "mlp.c_proj", biased=True),
        )


class Phi(_Gpt):
    """Phi-1, Phi-1.5 (Li et al. 2023) and Phi-2: as GPT-J, with biases everywhere."""

    _names = "model.embed_tokens", "model.final_layernorm", "lm_head"
    _has_head_bias = True

    def _take(self, prefix: str) -> _Layer:
        norm = self.layer_norm(prefix + "input_layernorm")
        return _Layer(
            norm,
            self._qkv(prefix + "self_attn."),
            self.linear(prefix + "self_attn.dense", biased=True),
            norm,
            self.linear(prefix + "mlp.fc1", biased=True),
            self.linear(prefix + "mlp.fc2", biased=True),
        )


class StableLm(_Gpt):
    """StableLM (Stability AI 2023, 2024): a gated MLP; in parallel with attention it shares its norm."""

    _names = "model.embed_tokens", "model.norm", "lm_head"

    def _build(self) -> None:
        super()._build()
        self._activation = self.kernels.silu_mul

    def _take(self, prefix: str) -> _Layer:
        mlp, norm = prefix + "mlp.", self.layer_norm(prefix + "input_layernorm")
        return _Layer(
            norm,
            self._qkv(prefix + "self_attn."),
            self.linear(prefix + "self_attn.o_proj"),
            norm if self.config.parallel_residual else self.layer_norm(prefix + "post_attention_layernorm"),
            self.linear(mlp + "gate_proj", mlp + "up_proj"),
            self.linear(mlp + "down_proj"),
        )


class Jais2(_Gpt):
    """Jais 2 (Inception and MBZUAI 2025): biases everywhere."""

    _names = "model.embed_tokens", "model.norm", "lm_head"

    def _take(self, prefix: str) -> _Layer:
        return _Layer(
            self.layer_norm(prefix + "input_layernorm"),
            self._qkv(prefix + "self_attn."),
            self.linear(prefix + "self_attn.o_proj", biased=True),
            self.layer_norm(prefix + "post_attention_layernorm"),
            self.linear(prefix + "mlp.up_proj", biased=True),
            self.linear(prefix + "mlp.down_proj", biased=True),
        )


class Nemotron(_Gpt):
    """Nemotron (NVIDIA 2024; Minitron): stored norm weights have 1 subtracted."""

    _names = "model.embed_tokens", "model.norm", "lm_head"

    def layer_norm(self, name: str) -> Norm:
        scale, shift = vector(1.0 + self.weight(f"{name}.weight"), self.kernels), self.vector(f"{name}.bias")
        eps = self.config.rms_eps
        return lambda hidden: torch.nn.functional.layer_norm(hidden, scale.shape, scale, shift, eps)

    def _take(self, prefix: str) -> _Layer:
        return _Layer(
            self.layer_norm(prefix + "input_layernorm"),
            self._qkv(prefix + "self_attn."),
            self.linear(prefix + "self_attn.o_proj"),
            self.layer_norm(prefix + "post_attention_layernorm"),
            self.linear(prefix + "mlp.up_proj"),
            self.linear(prefix + "mlp.down_proj"),
        )
