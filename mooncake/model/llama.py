"""The Llama family over a paged KV cache: Llama, SmolLM2, Mistral, Qwen2, Qwen3, told apart by configuration alone.

The forward pass computes one ragged batch, writes its keys and values into the cache it is given, and returns logits.
It must not know about requests, scheduling, transfer or files; a hook is told when each layer touches the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mooncake.checkpoint import ModelConfig
from mooncake.errors import InternalError
from mooncake.kernels import Kernels, choose_kernels
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.reference import Coding
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.model.blend import Blending, turns
from mooncake.model.cpu_decoder import CpuDecoder
from mooncake.model.layers import DecoderLayer, Weights, decoder_layer, layer_weights, matrix, vector, weight
from mooncake.model.lora import AdapterLayers, LayerAdapter, adapter_of_rows, rows_by_adapter
from mooncake.model.rope import rope_tables


class CausalLM:
    """A decoder-only language model. ``max_model_len`` bounds positions: it is the length of the RoPE tables."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_model_len: int = 0,
        kernels: Kernels | None = None,
        coding: Coding = "",
        is_fused: bool = True,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        adapters: Sequence[Sequence[LayerAdapter]] = (),
    ) -> None:
        """``is_fused``: in one call of the library, where there is one that can; the results are the same.

        ``reduce`` completes what attention and the MLP of each layer give, where this is one shard of a model.
        ``adapters`` are those that batches may name by their places, layer by layer.
        Raises ModelError when a weight is missing or the configuration is not supported.
        """
        self.config = config
        self.max_model_len = max_model_len or config.max_model_len
        self._kernels = kernels = kernels or choose_kernels()
        tables = rope_tables(
            config.head_dim, self.max_model_len, config.rope_theta, config.rope_scaling, config.rotary_dim
        )
        self._cos, self._sin = (table.to(getattr(kernels, "device", table.device)) for table in tables)
        self._reduce = reduce or _as_it_is
        # One at a time: what a layer is fused from and into is given back before the next one is read.
        layers = (layer_weights(weights, index, config) for index in range(config.num_layers))
        self._kv_layers = [config.kv_layer_of(index) for index in range(config.num_layers)]
        self._last_owner = config.kv_owners[-1]
        dtype = weight(weights, "model.norm.weight").dtype
        self._fused: CpuDecoder | None = None
        self._layers: list[DecoderLayer] = []
        if is_fused and reduce is None and isinstance(kernels, CpuKernels) and CpuDecoder.takes(config, dtype):
            self._fused = CpuDecoder(config, weights, layers, tables, kernels, coding, adapters)
            return
        self._layers = [decoder_layer(layer, kernels, coding) for layer in layers]
        self._adapters = AdapterLayers(adapters, kernels, dtype)
        self._turns = turns(self._cos, self._sin)
        self._final_norm = vector(weight(weights, "model.norm.weight"), kernels)
        self._embedding = self._head = kernels.linear(matrix(weights, "model.embed_tokens.weight"), None, coding)
        if not config.tie_embeddings:
            self._head = kernels.linear(matrix(weights, "lm_head.weight"), None, coding)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """Compute one step; returns float32 logits ``[R, V]`` of ``batch.logit_rows``.

        ``cache`` is ``[N, layers, 2, Hkv, block_tokens, D]``. Keys and values of all of the batch's tokens are in it
        afterwards. What the hook raises passes through, and the cache then holds a part of the step.
        """
        if self._fused is not None:
            if batch.reuse is not None:
                raise InternalError("a model whose layers are fused cannot blend")
            return self._fused.forward(batch, cache, hook)
        eps, kernels = self.config.rms_eps, self._kernels
        residual = self._embedding.rows(batch.tokens)
        normed = kernels.rms_norm(residual, self._layers[0].attention_norm, eps)
        cache_layers = cache.unbind(1)
        last, adapt, is_narrowed = len(self._layers) - 1, self._adapters.add, False
        adapters = None if batch.adapters is None else adapter_of_rows(batch.adapters, batch.query_starts)
        rows = [] if adapters is None else rows_by_adapter(adapters)
        blending = None if batch.reuse is None else Blending(batch, kernels, *self._turns)
        for index, layer in enumerate(self._layers):
            qkv = adapt(index, "qkv", normed, layer.qkv(normed), rows)
            row, block_tables, slots = batch.pages_of(self._kv_layers[index])
            cache_layer = cache_layers[row]
            query = self._write(index, layer, qkv, batch.positions, cache_layer, slots, hook, blending)
            if blending is not None and (kept := blending.narrow(index, cache_layer)) is not None:
                batch, query, residual = blending.batch, query[kept], residual[kept]
                block_tables = batch.block_tables  # whoever blends has one group of layers
                adapters = None if adapters is None else adapters[kept]
                rows = [] if adapters is None else rows_by_adapter(adapters)
            mixed = self._attend(index, query, batch, cache_layer, block_tables)
            if index == self._last_owner and len(wanted := batch.logit_rows) < len(mixed):
                # All KV is there: from here on nobody asks for rows without logits.
                if not len(wanted):
                    return torch.empty((0, self.config.vocab_size), device=mixed.device)
                mixed, residual, is_narrowed = mixed[wanted], residual[wanted], True
                rows = [] if adapters is None else rows_by_adapter(adapters[wanted])
                batch = batch if index == last else batch.narrowed(wanted)
            update = self._reduce(adapt(index, "output", mixed, layer.output(mixed), rows))
            normed = kernels.add_rms_norm(residual, update, layer.mlp_norm, eps)
            gated = kernels.silu_mul(adapt(index, "gate_up", normed, layer.gate_up(normed), rows))
            update = self._reduce(adapt(index, "down", gated, layer.down(gated), rows))
            next_norm = self._final_norm if index == last else self._layers[index + 1].attention_norm
            normed = kernels.add_rms_norm(residual, update, next_norm, eps)
        return self._head(normed if is_narrowed else normed[batch.logit_rows]).float()

    def _write(
        self,
        index: int,
        layer: DecoderLayer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cache_layer: torch.Tensor,
        slots: torch.Tensor,
        hook: LayerHook,
        blending: Blending | None,
    ) -> torch.Tensor:
        """Put the step's keys and values into the cache, where the layer has its own; returns the queries,
        ``[T, Hq, D]``."""
        owns_kv, kv_layer = self.config.owns_kv(index), self._kv_layers[index]
        if owns_kv:
            hook.before_layer(kv_layer)
        else:
            cache_layer = cache_layer[:, :, :0]
        if blending is not None:
            blending.fill(cache_layer)
        query = self._kernels.rope_write_kv(
            qkv,
            self._cos,
            self._sin,
            positions,
            cache_layer,
            slots,
            layer.query_norm,
            layer.key_norm,
            self.config.rms_eps,
        )
        if owns_kv:
            hook.after_layer(kv_layer)
        return query

    def _attend(
        self,
        index: int,
        query: torch.Tensor,
        batch: ForwardBatch,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> torch.Tensor:
        """Attention's output before its projection, ``[T, Hq * D]``."""
        mixed = self._kernels.paged_attention(
            query,
            cache_layer,
            block_tables,
            batch.query_starts,
            batch.context_lens,
            self.config.head_dim**-0.5,
            self.config.window_of(index),
        )
        return mixed.flatten(1)


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values
