"""Low-rank adapters of the Llama family: from PEFT's tensors to products that are added to the model's.

    y = W x + s · B (A x),  A [r, inputs], B [outputs, r], s the adapter's scale (Hu et al. 2021)

What the model fuses is fused here too: A of query, key and value are stacked, and B is block-diagonal. A step may
contain tokens of several adapters and of none. It knows nothing of requests, only indices of adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from mooncake.adapters import Adapter, read_weights
from mooncake.errors import ModelError
from mooncake.kernels import Kernels, Linear
from mooncake.kernels.cpu import CpuKernels
from mooncake.model.reading.as_llama import head_order
from mooncake.model.rope import heads_in_order
from mooncake.model_config import ModelConfig

Pair = tuple[torch.Tensor, torch.Tensor]  # A [r, inputs] and scaled B [outputs, r], float32

PRODUCTS = ("qkv", "output", "gate_up", "down")
"""The products of a layer, as ``layers.DecoderLayer`` names them."""

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(?:self_attn|mlp)"
    r"\.(q|k|v|o|gate|up|down)_proj\.lora_([AB])(?:\.default)?\.weight"
)


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """What one adapter adds to the products of one layer. None: nothing."""

    qkv: Pair | None
    output: Pair | None
    gate_up: Pair | None
    down: Pair | None


def load_adapter(adapter: Adapter, config: ModelConfig) -> list[LayerAdapter]:
    """By layer. Raises ModelError for tensors that do not fit the model, adapt something else in it or are not finite,
    and for an impossible invocation."""
    if max(adapter.invocation, default=0) >= config.vocab_size:
        raise ModelError(f"the adapter {adapter.name} is invoked by tokens that the model does not have")
    try:
        tensors = load(read_weights(adapter))
    except SafetensorError as error:
        raise ModelError(f"the adapter {adapter.name}: cannot read its weights: {error}") from None
    halves: list[dict[str, dict[str, torch.Tensor]]] = [{} for _ in range(config.num_layers)]
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or int(match[1]) >= config.num_layers:
            raise ModelError(f"the adapter {adapter.name} has {name!r}, which is not adapted here")
        halves[int(match[1])].setdefault(match[2], {})[match[3]] = tensor.float()
    return [_layer(adapter, config, by_projection, config.owns_kv(layer)) for layer, by_projection in enumerate(halves)]


def _layer(
    adapter: Adapter, config: ModelConfig, halves: Mapping[str, Mapping[str, torch.Tensor]], owns_kv: bool
) -> LayerAdapter:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    order = head_order(config)
    if not owns_kv and (set(halves) & {"k", "v"}):
        raise ModelError(f"the adapter {adapter.name} adapts keys or values of a layer that has none of its own")

    def product(inputs: int, **outputs: int) -> Pair | None:
        """The product of the projections ``outputs``, with this many outputs each."""
        downs, ups = [], []
        for projection, count in outputs.items():
            if projection not in halves:
                ups.append(torch.empty(count, 0))
                continue
            down, up = _scaled_pair(adapter, projection, halves[projection], inputs, count)
            downs.append(down)
            ups.append(up if order is None or projection not in "qk" else heads_in_order(up, order))
        return (torch.cat(downs), _block_diagonal(ups)) if downs else None

    return LayerAdapter(
        qkv=product(hidden, q=query, k=kv, v=kv) if owns_kv else product(hidden, q=query),
        output=product(query, o=hidden),
        gate_up=product(hidden, gate=inner, up=inner),
        down=product(inner, down=hidden),
    )


def _scaled_pair(
    adapter: Adapter, projection: str, pair: Mapping[str, torch.Tensor], inputs: int, outputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[rank, inputs]``, and, times the adapter's scale, ``[outputs, rank]``. Raises ModelError."""
    if set(pair) != {"A", "B"}:
        raise ModelError(f"the adapter {adapter.name} has only one half of {projection}_proj")
    down, up = pair["A"], pair["B"]
    rank = down.shape[0] if down.dim() else 0
    if not rank or down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise ModelError(f"the adapter {adapter.name} was made for another shape of {projection}_proj")
    scaled = up * adapter.scale(rank)
    if not (down.isfinite().all() and scaled.isfinite().all()):  # each of its answers would fail
        raise ModelError(f"the adapter {adapter.name} has NaN or infinite numbers in {projection}_proj")
    return down, scaled


def _block_diagonal(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    whole: torch.Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole


Rows = list[tuple[int, torch.Tensor]]
"""Which rows of a batch belong to which adapter: (place, row indices)."""


class AdapterPlaces(Protocol):
    """Where a model keeps its adapters, by the places that batches name."""

    def prepare(self, layers: Sequence[LayerAdapter]) -> object:
        """An adapter of the whole model as its kernels read it. Any thread may call this."""
        ...

    def put(self, place: int, prepared: object | None) -> None:
        """Between two steps. None: no batch names the place any more, and what is there is given up."""
        ...


Halves = Mapping[str, tuple[Linear, Linear] | None]
"""A layer's products with A and B, by product."""


class AdapterLayers:
    """The adapters of a model as kernels compute them, for a forward pass product by product. ``AdapterPlaces``."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        """``dtype`` is that of activations, for kernels that do not run on CPUs."""
        self._kernels = kernels
        self._dtype = torch.float32 if isinstance(kernels, CpuKernels) else dtype
        self._pairs: dict[int, Sequence[Halves]] = {}

    def prepare(self, layers: Sequence[LayerAdapter]) -> Sequence[Halves]:
        """See ``AdapterPlaces``."""
        with _memory_of_its_own(self._kernels):
            return [{name: self._linears(getattr(layer, name)) for name in PRODUCTS} for layer in layers]

    def put(self, place: int, prepared: object | None) -> None:
        """See ``AdapterPlaces``."""
        if prepared is None:
            del self._pairs[place]
        else:
            self._pairs[place] = cast(Sequence[Halves], prepared)

    def add(self, layer: int, product: str, hidden: torch.Tensor, output: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Add to ``output`` [T, outputs], in place, the product of each row's adapter and ``hidden`` [T, inputs]."""
        for place, indices in rows:
            pair = self._pairs[place][layer][product]
            if pair is not None:
                down, up = pair
                output.index_add_(0, indices, up(down(hidden[indices])).to(output.dtype))
        return output

    def _linears(self, pair: Pair | None) -> tuple[Linear, Linear] | None:
        if pair is None:
            return None
        return self._kernels.linear(pair[0].to(self._dtype)), self._kernels.linear(pair[1].to(self._dtype))


def _memory_of_its_own(kernels: Kernels) -> AbstractContextManager[None]:
    """Another adapter may stay when the one that is packed in here goes."""
    return kernels.weight_memory.apart() if isinstance(kernels, CpuKernels) else nullcontext()


def rows_by_adapter(adapters: torch.Tensor | None) -> Rows:
    """``adapters`` [T]: index of each row's adapter, -1 for none; None: no row has one."""
    if adapters is None:
        return []
    return [(place, (adapters == place).nonzero().flatten()) for place in _places(adapters)]


def _places(adapters: torch.Tensor) -> Iterable[int]:
    return (place for place in torch.unique(adapters).tolist() if place >= 0)
