"""The Llama family over a paged KV cache, whose members are distinguished by configuration alone.

The forward pass computes one ragged batch, writes its keys and values into the given cache, and returns logits. It
knows nothing of requests, scheduling, transfer or files; a hook is told when each layer touches the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

import torch

from mooncake.kernels import HostKernels, Kernels, Linear, choose_kernels
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.reference import Matrix
from mooncake.model.batch import Attention, ForwardBatch, LayerHook, OnlyWaiting
from mooncake.model.blend import Blending, turns
from mooncake.model.cpu_decoder import CpuDecoder
from mooncake.model.decoder import Step
from mooncake.model.kept_inputs import KeptInputs
from mooncake.model.layers import (
    DecoderLayer,
    Weights,
    decoder_layer,
    embedding_and_head,
    layer_weights,
    vector,
    weight,
)
from mooncake.model.lora import AdapterLayers, AdapterPlaces, LayerAdapter, Rows, rows_by_adapter
from mooncake.model.rope import Tables, query_scales, tables_by_layer
from mooncake.model_config import ModelConfig
from mooncake.precision import Coding

T = TypeVar("T")


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
        vocabulary: Callable[[Linear], Linear] | None = None,
        adapters: Sequence[Sequence[LayerAdapter]] = (),
        layers: range | None = None,
        keep_hidden: Sequence[int] = (),
    ) -> None:
        """``is_fused``: in one call of the library, where possible; the results are the same.

        If this is one shard of a model, ``reduce`` completes the output of attention and MLP in each layer, and
        ``vocabulary`` its part of the embedding table and of the head.
        ``adapters`` are those that batches may refer to by index, layer by layer. ``layers`` are those of this stage of
        a model (None: all); no other weights are read. The cache keeps the inputs of the layers ``keep_hidden``, after
        the KV of all layers. Raises ModelError when a weight is missing or the configuration is not supported.
        """
        self.config = config
        self.max_model_len = max_model_len or config.max_model_len
        self._kernels = kernels = kernels or choose_kernels()
        self._tables = tables = tables_by_layer(config, self.max_model_len, kernels.device)
        places = layers or range(config.num_layers)
        self._kept = KeptInputs(keep_hidden, config.num_layers)
        # One at a time: a layer's unfused weights are freed before the next layer is read.
        read = (layer_weights(weights, index, config) for index in places)
        dtype = weight(weights, "model.norm.weight").dtype
        self.decoder: CpuDecoder | LayerByLayer
        if is_fused and reduce is None and isinstance(kernels, CpuKernels) and CpuDecoder.takes(config, dtype):
            self.decoder = CpuDecoder(config, weights, places, read, tables, kernels, coding, keep_hidden)
        else:
            complete = vocabulary or _as_it_is
            self.decoder = LayerByLayer(
                config,
                weights,
                places,
                (decoder_layer(layer, kernels, coding) for layer in read),
                tables,
                kernels,
                self._kept,
                reduce or _as_it_is,
                lambda source: complete(kernels.linear(source, None, coding)),
                is_part=reduce is not None,
            )
        for place, adapter in enumerate(adapters):
            self.adapter_places.put(place, self.adapter_places.prepare(adapter))

    @property
    def adapter_places(self) -> AdapterPlaces:
        """For adapters beside those that it was built with, which have the first places."""
        return self.decoder.adapters if isinstance(self.decoder, LayerByLayer) else self.decoder

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @cached_property
    def turns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``blend.turns`` of its tables."""
        return turns(*self._tables[0])

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        cache: torch.Tensor,
        hook: LayerHook,
        entering: torch.Tensor | None = None,
        leaving: torch.Tensor | None = None,
        attention: Attention | None = None,
    ) -> torch.Tensor:
        """Compute one step; returns float32 logits ``[R, V]`` of ``batch.logit_rows``, but for those of which it writes
        the ``hidden`` states (a rank has rows of theirs, too, which mean nothing).

        ``cache`` is ``[N, layers, 2, Hkv, block_tokens, D]``. Afterwards it contains keys and values of all of the
        batch's tokens. Exceptions of the hook propagate, and the cache then contains part of the step. ``attention``
        replaces the kernel.

        Between stages the residual stream is passed on, float32 ``[T, hidden]``: a stage with layers before it gets it
        as ``entering``, and one with layers after it writes it to ``leaving`` and returns no logits, ``[0, V]``.
        """
        self._kept.check(cache, self.config.hidden_size)
        blending = None
        if batch.reuse is not None:
            assert entering is None and leaving is None and attention is None, "a step that blends is not divided"
            blending = Blending(batch, cache, hook, cast(HostKernels, self._kernels), self.turns)
        logits = self.decoder.forward(batch, cache, blending or hook, entering, leaving, attention, blending=blending)
        self._kept.tell(hook, cache)
        return logits

    @torch.inference_mode()
    def recompute(
        self, layers: range, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook, hidden: torch.Tensor | None
    ) -> None:
        """Only the keys and values of adjacent ``layers``, from the input of the first of them: ``hidden``, float32 [T,
        hidden], which may be another model's; None: the tokens' embeddings, for layer 0.

        Attention sees what the cache has of these layers before each token. The batch has no logit rows, and the hook
        is only used to wait.
        """
        assert not len(batch.logit_rows) and (hidden is not None or layers[0] == 0)
        self._kept.check(cache, self.config.hidden_size)
        self.decoder.forward(batch, cache, OnlyWaiting(hook), hidden, layers=layers)


class LayerByLayer:
    """The family's layers, product by product: for kernels that have nothing fused, and for ranks. It is the definition
    of the fused pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        places: range,
        layers: Iterable[DecoderLayer],
        tables: Sequence[Tables],
        kernels: Kernels,
        kept: KeptInputs,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        vocabulary: Callable[[Matrix], Linear],
        *,
        is_part: bool,
    ) -> None:
        """``places`` are the indices of ``layers`` in the model: all, or a stage's. ``tables`` are those of every layer
        of the model. ``vocabulary`` makes a product of the embedding table and of the head. ``is_part``: other ranks
        have the rest of the model. Raises ModelError when a weight is missing."""
        self._config = config
        self._is_part = is_part
        self._kernels = kernels
        self._places = places
        self._tables = tables
        self._kept = kept
        self._reduce = reduce
        self._query_scales = query_scales(config, len(tables[0][0]), kernels.device)
        self._kv_layers = [config.kv_layer_of(index) for index in range(config.num_layers)]
        self._last_owner = config.kv_owners[-1]
        self._layers = list(layers)
        dtype = weight(weights, "model.norm.weight").dtype
        self._stream = torch.float32 if isinstance(kernels, CpuKernels) else dtype  # of the residual stream
        self.adapters = AdapterLayers(kernels, dtype)
        self._final_norm = vector(weight(weights, "model.norm.weight"), kernels)
        self._embedding, self._head = embedding_and_head(weights, config, places, vocabulary)

    def forward(
        self,
        batch: ForwardBatch,
        cache: torch.Tensor,
        hook: LayerHook,
        entering: torch.Tensor | None = None,
        leaving: torch.Tensor | None = None,
        attention: Attention | None = None,
        layers: range | None = None,
        blending: Blending | None = None,
    ) -> torch.Tensor:
        """As ``CausalLM.forward``, or as its ``recompute`` of those ``layers``. ``blending`` is the hook, too."""
        layers = self._places if layers is None else layers
        eps, kernels, first = self._config.rms_eps, self._kernels, self._places.start
        step = Step(
            self._config,
            kernels,
            batch,
            cache.unbind(1),
            self._kv_layers,
            hook,
            self._tables,
            attention,
            self._query_scales,
        )
        residual = self._enter(batch.tokens) if entering is None else entering.to(self._stream, copy=True)
        normed = kernels.rms_norm(residual, self._layers[layers.start - first].attention_norm, eps)
        last, is_narrowed = layers.stop - 1, False
        last_kv = min(last, self._last_owner)
        # With ``attention`` other ranks may need this one to take part.
        wants_more = leaving is not None or len(batch.logit_rows) > 0 or attention is not None
        rows = rows_by_adapter(batch.adapters)
        for index in layers:
            layer = self._layers[index - first]
            self._kept.write(index, residual, cache, step.batch.slots)
            qkv = self.adapters.add(index, "qkv", normed, layer.qkv(normed), rows)
            pages = step.pages_of(index)
            query = step.write(index, qkv, pages, layer.query_norm, layer.key_norm)
            if index == last_kv and not wants_more:
                return torch.empty((0, self._config.vocab_size), device=normed.device)
            if blending is not None and (kept := blending.narrow(index)) is not None:
                step, query, residual = replace(step, batch=blending.batch), query[kept], residual[kept]
                rows, pages = rows_by_adapter(blending.batch.adapters), step.pages_of(index)
            if blending is not None and blending.has_gaps:
                mixed = blending.attend(index, query, self._config.softmax_scale).flatten(1)
            else:
                mixed = step.read(index, query, pages)
            wanted, of_adapters = step.batch.logit_rows, step.batch.adapters
            if index == self._last_owner and leaving is None and len(wanted) < len(mixed):
                # All KV is written: from here on rows without logits are not needed.
                mixed, residual, is_narrowed = mixed[wanted], residual[wanted], True
                rows = [] if of_adapters is None else rows_by_adapter(of_adapters[wanted])
                step = step if index == last else step.narrowed(wanted)
            next_norm = self._final_norm if index == last else self._layers[index + 1 - first].attention_norm
            normed = self._behind_attention(index, mixed, residual, rows, next_norm)
        if leaving is not None:
            leaving.copy_(residual)
            return torch.empty((0, self._config.vocab_size))
        normed = normed if is_narrowed else normed[step.batch.logit_rows]
        if batch.hidden is not None:
            batch.hidden.copy_(normed[len(normed) - batch.num_hidden :])
            normed = normed if self._is_part else normed[: len(normed) - batch.num_hidden]
        if not len(normed) or not self._config.has_head:
            return torch.empty((0, self._config.vocab_size), device=normed.device)
        assert self._head is not None, "a stage with layers behind it gives no logits"
        return self._head(normed).float()

    def _behind_attention(
        self, index: int, mixed: torch.Tensor, residual: torch.Tensor, rows: Rows, next_norm: torch.Tensor
    ) -> torch.Tensor:
        """Complete the layer, from attention's output ``mixed``; changes ``residual``. Returns it normalised for what
        follows."""
        layer, kernels, eps = self._layers[index - self._places.start], self._kernels, self._config.rms_eps
        update = self._reduce(self.adapters.add(index, "output", mixed, layer.output(mixed), rows))
        normed = kernels.add_rms_norm(residual, update, layer.mlp_norm, eps)
        gated = kernels.silu_mul(self.adapters.add(index, "gate_up", normed, layer.gate_up(normed), rows))
        update = self._reduce(self.adapters.add(index, "down", gated, layer.down(gated), rows))
        return kernels.add_rms_norm(residual, update, next_norm, eps)

    def _enter(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self._embedding is not None, "a stage with layers before it is given what they left"
        return self._embedding.rows(tokens)


def _as_it_is(it: T) -> T:
    return it
