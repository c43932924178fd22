"""Shared by the forward passes of all families: a step over the paged cache, and the loop over layers.

A family defines how tokens are embedded, what a layer does and how logits are computed (``Decoder``); ``Step`` is its
only access to the cache. The Llama family has a frame of its own in ``llama``, for a faster pass; its layers attend
through ``Step``, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from mooncake.errors import ModelError
from mooncake.families.gated import expert_names
from mooncake.kernels import Experts, Kernels, Linear, choose_kernels
from mooncake.kernels.reference import Matrix
from mooncake.model.batch import Attention, ForwardBatch, LayerHook
from mooncake.model.layers import MatricesOnDemand, SideBySide, Weights, WeightsOnDemand, joined, matrix, vector, weight
from mooncake.model.pages import first_rows, layer_pages
from mooncake.model.rope import Tables, query_scales, tables_by_layer
from mooncake.model_config import ModelConfig
from mooncake.page_groups import one_group
from mooncake.precision import Coding


class CacheLayers:
    """The layers of a model in its cache: a row of a page each, or where they differ in their heads, in views of their
    own over as many rows as they take."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        owners = config.kv_owners if config.layer_heads else ()
        self._heads = [config.heads_of(layer) for layer in owners]
        self._rows = [row for _, row in one_group(config.kv_rows).places] or list(range(len(owners)))

    def of(self, cache: torch.Tensor, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        """By layer, where they differ in their heads; otherwise by row."""
        if not self._heads:
            layers = cache.unbind(1)
            has_states = self._config.recurrence is not None and batch.pages is None
            return [layers[row] for row in first_rows(self._config, cache)] if has_states else layers
        rows = self._rows if batch.pages is None else batch.pages.places[:, 1].tolist()
        return [layer_pages(cache, row, *heads) for row, heads in zip(rows, self._heads, strict=True)]


class LayerPages(NamedTuple):
    """Where a step's KV of one layer is."""

    cache: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One batch in progress through the layers."""

    config: ModelConfig
    kernels: Kernels
    batch: ForwardBatch
    cache_layers: Sequence[torch.Tensor]  # ``CacheLayers.of``
    kv_layers: Sequence[int]  # the cache's layer that each layer attends to
    hook: LayerHook
    tables: Sequence[Tables]  # of each layer
    attention: Attention | None = None
    query_scales: torch.Tensor | None = None  # as ``rope.query_scales``
    layer_inputs: torch.Tensor | None = None  # as ``Decoder._layer_inputs``
    alibi_slopes: torch.Tensor | None = None  # as ``reference.paged_attention``

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        query_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values of ``layer`` and attend over the whole context: ``[T, Hq * D]``.

        ``qkv`` is ``[T, (Hq + 2 Hkv) * D]``, of a layer without KV of its own ``[T, Hq * D]``, and may be overwritten.
        ``sinks`` as in ``reference.paged_attention``. ``query_scale`` ``[D]`` is applied to queries after their
        rotation.
        """
        pages = self.pages_of(layer)
        query = self.write(layer, qkv, pages, query_norm, key_norm)
        if query_scale is not None:
            query = query * query_scale
        return self.read(layer, query, pages, sinks)

    def pages_of(self, layer: int) -> LayerPages:
        kv_layer = self.kv_layers[layer]
        row, block_tables, slots = self.batch.pages_of(kv_layer)
        return LayerPages(self.cache_layers[kv_layer if self.config.layer_heads else row], block_tables, slots)

    def write(
        self,
        layer: int,
        qkv: torch.Tensor,
        pages: LayerPages,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """The first half of ``attend``: write keys and values, if the layer has its own; returns the queries, ``[T, Hq,
        D]``."""
        kv_layer, owns_kv, positions = self.kv_layers[layer], self.config.owns_kv(layer), self.batch.positions
        if owns_kv:
            self.hook.before_layer(kv_layer)
        query = self.kernels.rope_write_kv(
            qkv,
            *self.tables[layer],
            positions,
            pages.cache if owns_kv else pages.cache[:, :, :0],
            pages.slots,
            query_norm,
            key_norm,
            self.config.rms_eps,
        )
        if owns_kv:
            self.hook.after_layer(kv_layer)
        if self.query_scales is not None and self.config.query_grows(layer):
            query = query * self.query_scales[positions].to(query.dtype)[:, None, None]
        return query

    def read(
        self, layer: int, query: torch.Tensor, pages: LayerPages, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The second half of ``attend``."""
        if self.attention is not None:
            return self.attention(layer, query, sinks).flatten(1)
        mixed = self.kernels.paged_attention(
            query,
            pages.cache,
            pages.block_tables,
            self.batch.query_starts,
            self.batch.context_lens,
            self.config.softmax_scale,
            self.config.window_of(layer),
            self.config.score_cap,
            sinks,
            self.alibi_slopes,
        )
        return mixed.flatten(1)

    def narrowed(self, rows: torch.Tensor) -> Step:
        """Only these tokens, after the last layer with KV of its own."""
        inputs = None if self.layer_inputs is None else self.layer_inputs[rows]
        return replace(self, batch=self.batch.narrowed(rows), layer_inputs=inputs)


class Decoder(ABC):
    """A decoder-only model: ``engine.CausalModel``. Raises ModelError when a weight is missing."""

    stream = torch.float32  # type of the residuals

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_model_len: int = 0,
        kernels: Kernels | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        vocabulary: Callable[[Linear], Linear] | None = None,
        experts: range | None = None,
        layers: range | None = None,
        coding: Coding = "",
    ) -> None:
        """``coding`` is for matrices: routers and what is small stay as they are.

        If this is one rank's part of a model, ``reduce`` completes the output of attention and MLP in each layer,
        ``vocabulary`` its part of the embedding table and of the head, and it has these ``experts`` (None: all).
        ``layers`` are those of this stage of a model (None: all), for ``families.gated.GatedDecoder``."""
        self.config = config
        self.max_model_len = max_model_len or config.max_model_len
        self.kernels = kernels or choose_kernels()
        self.is_part = reduce is not None
        self.reduce = reduce or (lambda values: values)
        self.vocabulary = vocabulary or (lambda linear: linear)
        self.experts_here = range(config.num_experts) if experts is None else experts
        self.places = layers or range(config.num_layers)
        device = self.kernels.device
        self._tables = tables_by_layer(config, self.max_model_len, device)
        self._query_scales = query_scales(config, self.max_model_len, device)
        self._alibi_slopes = torch.tensor(config.alibi_slopes, device=device) if config.alibi_slopes else None
        self._cache_layers = CacheLayers(config)
        self._kv_layers = [config.kv_layer_of(layer) for layer in range(config.num_layers)]
        self._first_without_kv = config.kv_owners[-1] + 1  # all of those from here on
        self.coding = coding
        self._weights: Weights = weights
        self._build()
        del self._weights

    @abstractmethod
    def _build(self) -> None:
        """Prepare the weights (``self.linear``, ``self.vector``) for ``forward``."""

    @abstractmethod
    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        """``[T, hidden]``."""

    def _layer_inputs(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor | None:
        """``[T, layers, …]``: what layers are given of each token, beside the residual stream that begins with
        ``hidden``."""
        return None

    @abstractmethod
    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """The residual stream after layer ``index``; must call ``step.attend`` once."""

    @abstractmethod
    def _final(self, hidden: torch.Tensor) -> torch.Tensor:
        """The wanted rows ``[R, hidden]`` of the residual stream behind the final norm."""

    @abstractmethod
    def _logits(self, final: torch.Tensor) -> torch.Tensor:
        """``[R, V]`` of what ``_final`` gives."""

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

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
        """As ``llama.CausalLM.forward``."""
        hidden = self._embed(batch) if entering is None else entering.to(self.stream)
        step = Step(
            self.config,
            self.kernels,
            batch,
            self._cache_layers.of(cache, batch),
            self._kv_layers,
            hook,
            self._tables,
            attention,
            self._query_scales,
            self._layer_inputs(batch, hidden),
            self._alibi_slopes,
        )
        for index in self.places:
            if index == self._first_without_kv and attention is None and leaving is None:
                if not len(batch.logit_rows):
                    return torch.empty((0, self.config.vocab_size), device=hidden.device)
                if len(batch.logit_rows) < len(hidden):  # the others are not needed any more
                    step, hidden = step.narrowed(batch.logit_rows), hidden[batch.logit_rows]
            hidden = self._layer(index, hidden, step)
        if leaving is not None:
            leaving.copy_(hidden)
            return torch.empty((0, self.config.vocab_size))
        final = self._final(hidden[step.batch.logit_rows])
        if batch.hidden is not None:
            batch.hidden.copy_(final[len(final) - batch.num_hidden :])
            final = final if self.is_part else final[: len(final) - batch.num_hidden]
        if not len(final):
            return torch.empty((0, self.config.vocab_size), device=final.device)
        return self._logits(final).float()

    # For _build

    def weight(self, name: str) -> torch.Tensor:
        return weight(self._weights, name)

    def matrix(self, name: str) -> Matrix:
        """As codes, if it is stored so and codes are wanted."""
        return matrix(self._weights, name)

    def vector(self, name: str) -> torch.Tensor:
        return vector(self.weight(name), self.kernels)

    def linear(self, *names: str, biased: bool = False) -> Linear:
        """One product from several published ones, stacked."""
        bias = torch.cat([self.weight(f"{name}.bias") for name in names]) if biased else None
        return self.product(*(self.matrix(f"{name}.weight") for name in names), bias=bias)

    def qkv(self, attention: str, biased: bool = False) -> Linear:
        """The projections to queries, keys and values below ``attention``, as published."""
        return self.linear(*(f"{attention}{name}_proj" for name in "qkv"), biased=biased)

    def uncoded(self, name: str, biased: bool = False) -> Linear:
        """A product that stays as it is, whatever ``coding`` says: with a router, or what is small."""
        return self.kernels.linear(self.weight(f"{name}.weight"), self.weight(f"{name}.bias") if biased else None)

    def product(self, *matrices: Matrix, bias: torch.Tensor | None = None) -> Linear:
        """One product with several matrices, stacked."""
        parts = joined(matrices)
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else torch.split(bias, sizes)
        products = [self.kernels.linear(*given, self.coding) for given in zip(parts, biases, strict=True)]
        return products[0] if len(products) == 1 else SideBySide(products)

    def take_experts(self, prefix: str) -> Experts:
        """Those of a layer that are here, which are published one by one, or as two tensors."""
        names = expert_names(self.config)
        together = f"{prefix}{names.experts}."
        if f"{together}gate_up_proj" in self._weights:
            return self.experts_of_tensors(together + "gate_up_proj", together + "down_proj")
        here = [f"{prefix}{names.experts}.{expert}." for expert in self.experts_here]
        gate_up = MatricesOnDemand(
            self._weights, [(f"{expert}{names.gate}.weight", f"{expert}{names.up}.weight") for expert in here]
        )
        downs = MatricesOnDemand(self._weights, [(f"{expert}{names.down}.weight",) for expert in here])
        return self.kernels.experts(gate_up, downs, first=self.experts_here.start, coding=self.coding)

    def expert_matrices(self, name: str, *, are_transposed: bool = False) -> Sequence[Matrix]:
        """Of all experts of a layer, which are published as one tensor; ``are_transposed``: each ``[inputs,
        outputs]``."""
        codes = self._weights.experts(name) if isinstance(self._weights, WeightsOnDemand) else None
        if codes is not None:
            return codes
        stored = self.weight(name)
        return (stored.mT if are_transposed else stored).unbind()

    def experts_of_tensors(self, gate_up: str, down: str, *, are_transposed: bool = False) -> Experts:
        """Those of a layer that are here, which are published as these two tensors."""
        gate_ups, downs = (self.expert_matrices(name, are_transposed=are_transposed) for name in (gate_up, down))
        return self.kernels.experts(gate_ups, downs, first=self.experts_here.start, coding=self.coding)

    def layer_norm(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Layer normalisation with its own weight and bias (Ba et al. 2016)."""
        scale, shift, eps = self.vector(f"{name}.weight"), self.vector(f"{name}.bias"), self.config.rms_eps
        return lambda hidden: torch.nn.functional.layer_norm(hidden, scale.shape, scale, shift, eps)


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Soft-capped (Gemma 2, 2024); 0: as they are."""
    return cap * torch.tanh(logits / cap) if cap else logits


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Raises ModelError for a name that ``ModelConfig.activation`` does not have."""
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": torch.nn.functional.silu,
        "relu": torch.nn.functional.relu,
        "relu2": lambda values: torch.nn.functional.relu(values).square(),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda values: torch.nn.functional.gelu(values, approximate="tanh"),
    }
    try:
        return functions[name]
    except KeyError:
        raise ModelError(f"there is no activation {name!r}; there are {', '.join(functions)}") from None
