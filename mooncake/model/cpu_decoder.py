"""A forward pass in one call of the CPU library: what ``llama.py`` does step by step, with the same functions.

Python's share of a step is then a few microseconds, plus two calls per layer if a hook wants to know about layers. It
knows nothing of requests or scheduling.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.cpu_library import STOPPED_BY_HOOK, check, check_mirrors, page_kind
from mooncake.kernels.cpu_panels import PanelLinear
from mooncake.kernels.cpu_threads import num_threads
from mooncake.kernels.reference import Matrix
from mooncake.model.batch import Attention, ForwardBatch, LayerHook
from mooncake.model.blend import Blending
from mooncake.model.layers import LayerWeights, Weights, embedding_and_head, vector, weight
from mooncake.model.lora import PRODUCTS, LayerAdapter
from mooncake.model.rope import Tables, query_scales
from mooncake.model_config import ModelConfig
from mooncake.precision import Coding

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_LayerCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
_AttendCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _POINTER, _LONG, _POINTER)
_ThinCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _POINTER)


class _Layer(ctypes.Structure):
    """Mirrors ``DecoderLayer`` of decoder.h; those that follow mirror their namesakes."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm", "cos", "sin")),
        *((name, _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _INT) for name in ("kv_layer", "owns_kv", "window")),
    ]


class _Decoder(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("layers", "embedding", "head", "adapters", "final_norm")),
        *((name, _POINTER) for name in ("query_scales", "kept")),
        *((name, _LONG) for name in ("num_adapters", "num_layers", "num_positions", "hidden", "intermediate", "vocab")),
        ("num_kept", _LONG),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim", "last_owner")),
        *((name, _FLOAT) for name in ("eps", "scale")),
    ]


class _LayerAdapter(ctypes.Structure):
    """Two pointers per product; mirrors ``LayerAdapter`` of adapters.h."""

    _fields_: ClassVar = [(f"{product}_{half}", _POINTER) for product in PRODUCTS for half in ("down", "up")]


class _Step(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("tokens", "positions", "slots", "logit_rows")),
        *((name, _POINTER) for name in ("query_starts", "context_lens", "block_tables", "adapters")),
        *((name, _POINTER) for name in ("places", "entering", "leaving", "hidden")),
        *((name, _LONG) for name in ("table_stride", "num_tokens", "num_sequences", "num_logits", "num_groups")),
        *((name, _LONG) for name in ("first_layer", "last_layer", "num_hidden")),
    ]


class _Thinned(ctypes.Structure):
    _fields_: ClassVar = [(name, _POINTER) for name in ("step", "rows", "positions")]


class _Cache(ctypes.Structure):
    _fields_: ClassVar = [
        ("base", _POINTER),
        *((name, _LONG) for name in ("num_blocks", "block_stride", "layer_stride", "kv_stride", "head_stride")),
        *((name, _INT) for name in ("block_tokens", "kind")),
    ]


_MIRRORS: dict[str, type[ctypes.Structure]] = {
    "DecoderLayer": _Layer,
    "Decoder": _Decoder,
    "LayerAdapter": _LayerAdapter,
    "Step": _Step,
    "Thinned": _Thinned,
    "Cache": _Cache,
}


class CpuDecoder:
    """The Llama family over packed weights, if ``takes`` says so."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        places: range,
        layers: Iterable[LayerWeights],
        tables: Sequence[Tables],
        kernels: CpuKernels,
        coding: Coding,
        kept: Sequence[int],
    ) -> None:
        """``places`` are the indices of ``layers`` in the model: all, or a stage's. ``tables`` are those of every layer
        of the model. Raises ModelError when a weight is missing."""
        check_mirrors(kernels.library, _MIRRORS)
        self._forward = kernels.library.mc_forward
        self._vocab = config.vocab_size
        self._last_layer = len(places) - 1
        self._query_shape = config.num_heads, config.head_dim
        self._results = _Results()
        self._kernels = kernels
        self._weights = _Packed(kernels, coding)
        self._places = places
        self._tables = tables
        self._query_scales = query_scales(config, len(tables[0][0]), kernels.device)
        # What follows refers by address to what is before it, which is kept as long as this decoder.
        self._layers = (_Layer * len(places))(
            *(
                _layer(self._weights, config, index, layer, tables[index])
                for index, layer in zip(places, layers, strict=True)
            )
        )
        self._adapters: dict[int, _PackedAdapter] = {}
        self._adapter_table = (_POINTER * 0)()
        self._kept_layers = (_LONG * len(kept))(*kept)
        self._final_norm = vector(weight(weights, "model.norm.weight"), kernels)
        self._decoder = self._described(config, weights, places)

    def _described(self, config: ModelConfig, weights: Weights, places: range) -> _Decoder:
        embedding, head = embedding_and_head(weights, config, places, self._weights.product)
        return _Decoder(
            layers=ctypes.addressof(self._layers),
            embedding=embedding,
            head=head,
            adapters=ctypes.addressof(self._adapter_table),
            final_norm=self._weights.vector(weight(weights, "model.norm.weight")),
            query_scales=None if self._query_scales is None else self._query_scales.data_ptr(),
            kept=ctypes.addressof(self._kept_layers),
            num_adapters=0,
            num_layers=len(places),
            num_positions=len(self._tables[0][0]),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            num_kept=len(self._kept_layers),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            last_owner=config.kv_owners[-1] - places.start,
            eps=config.rms_eps,
            scale=config.softmax_scale,
        )

    def prepare(self, layers: Sequence[LayerAdapter]) -> _PackedAdapter:
        """See ``lora.AdapterPlaces``."""
        packed = _Packed(self._kernels)
        with self._kernels.weight_memory.apart():  # another adapter may stay when this one goes
            here = [_layer_adapter(packed, layers[place]) for place in self._places]
        return _PackedAdapter(packed, (_LayerAdapter * len(here))(*here))

    def put(self, place: int, prepared: object | None) -> None:
        """See ``lora.AdapterPlaces``."""
        if prepared is None:
            del self._adapters[place]
        else:
            self._adapters[place] = cast(_PackedAdapter, prepared)
        table: list[int | None] = [None] * (max(self._adapters, default=-1) + 1)
        for taken, adapter in self._adapters.items():
            table[taken] = ctypes.addressof(adapter.layers)
        self._adapter_table = (_POINTER * len(table))(*table)
        self._decoder.adapters = ctypes.addressof(self._adapter_table)
        self._decoder.num_adapters = len(table)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed matrices, which a decode step reads once."""
        return self._weights.matrix_bytes

    @staticmethod
    def takes(config: ModelConfig, dtype: torch.dtype) -> bool:
        return config.head_dim % 16 == 0 and config.intermediate_size % 16 == 0 and dtype is not torch.float16

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
        """As ``LayerByLayer.forward``."""
        step = self._step(batch, entering, leaving, layers)
        area = _area(cache)
        logits = self._results.take(step.num_logits - step.num_hidden, self._vocab)
        told = _LibraryHook(hook)
        status = self._forward(
            ctypes.addressof(self._decoder),
            ctypes.addressof(step),
            ctypes.addressof(area),
            told.before,
            told.after,
            None if attention is None else told.instead(attention, batch.tokens.shape[0], *self._query_shape),
            None if blending is None else told.thinned(blending, self._step),
            logits.data_ptr(),
            num_threads(),
        )
        if told.error is not None:
            raise told.error
        check(status)
        if batch.hidden is not None:
            batch.hidden.copy_(self._kernels.rms_norm(batch.hidden, self._final_norm, self._decoder.eps))
        return logits

    def _step(
        self,
        batch: ForwardBatch,
        entering: torch.Tensor | None = None,
        leaving: torch.Tensor | None = None,
        layers: range | None = None,
    ) -> _Step:
        """Refers to the batch's memory. By position, because names take a microsecond more."""
        pages = batch.pages
        tables, slots = (batch.block_tables, batch.slots) if pages is None else (pages.block_tables, pages.slots)
        return _Step(
            batch.tokens.data_ptr(),
            batch.positions.data_ptr(),
            slots.data_ptr(),
            batch.logit_rows.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            None if batch.adapters is None else batch.adapters.data_ptr(),
            None if pages is None else pages.places.data_ptr(),
            None if entering is None else entering.data_ptr(),
            None if leaving is None else leaving.data_ptr(),
            None if batch.hidden is None else batch.hidden.data_ptr(),
            tables.stride(-2),
            batch.tokens.shape[0],
            batch.num_sequences,
            batch.logit_rows.shape[0] if leaving is None else 0,
            1 if pages is None else slots.shape[0],
            0 if layers is None else layers[0],
            self._last_layer if layers is None else layers[-1],
            batch.num_hidden,
        )


class _Packed:
    """Weights in the library's form. It owns them: their addresses are valid as long as it lives."""

    def __init__(self, kernels: CpuKernels, coding: Coding = "") -> None:
        self._kernels = kernels
        self._coding: Coding = coding
        self._vectors: list[torch.Tensor] = []
        self._matrices: list[PanelLinear] = []

    @property
    def matrix_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self._matrices)

    def vector(self, values: torch.Tensor | None) -> int | None:
        """Its address; None for none."""
        if values is None:
            return None
        self._vectors.append(vector(values, self._kernels))
        return self._vectors[-1].data_ptr()

    def product(self, source: Matrix, bias: torch.Tensor | None = None, is_gated: bool = False) -> int:
        """The address of a matrix to multiply by."""
        self._matrices.append(self._kernels.panel_linear(source, bias, self._coding, is_gated))
        return self._matrices[-1].address


@dataclass(frozen=True, slots=True)
class _PackedAdapter:
    weights: _Packed  # to which ``layers`` refer by address
    layers: ctypes.Array[_LayerAdapter]


def _layer(packed: _Packed, config: ModelConfig, index: int, layer: LayerWeights, tables: Tables) -> _Layer:
    return _Layer(
        attention_norm=packed.vector(layer.attention_norm),
        mlp_norm=packed.vector(layer.mlp_norm),
        query_norm=packed.vector(layer.query_norm),
        key_norm=packed.vector(layer.key_norm),
        cos=tables[0].data_ptr(),
        sin=tables[1].data_ptr(),
        qkv=packed.product(layer.qkv, layer.qkv_bias),
        output=packed.product(layer.output),
        gate_up=packed.product(layer.gate_up, is_gated=True),
        down=packed.product(layer.down),
        kv_layer=config.kv_layer_of(index),
        owns_kv=config.owns_kv(index),
        window=config.window_of(index),
    )


def _layer_adapter(packed: _Packed, layer: LayerAdapter) -> _LayerAdapter:
    """Null where it changes nothing."""
    halves: dict[str, int] = {}
    for product in PRODUCTS:
        pair: tuple[torch.Tensor, torch.Tensor] | None = getattr(layer, product)
        if pair is not None:
            halves[f"{product}_down"] = packed.product(pair[0])
            halves[f"{product}_up"] = packed.product(pair[1], is_gated=product == "gate_up")
    return _LayerAdapter(**halves)


def _area(cache: torch.Tensor) -> _Cache:
    size = cache.element_size()
    block, layer, kv, head, _, _ = (stride * size for stride in cache.stride())
    return _Cache(cache.data_ptr(), cache.shape[0], block, layer, kv, head, cache.shape[4], page_kind(cache.dtype))


class _Results:
    """Memory for logits, reused once nobody references the previous ones: the system zeroes new pages, which for 32
    sequences took four times as long as writing the logits."""

    def __init__(self) -> None:
        self._area = mmap.mmap(-1, mmap.PAGESIZE)
        self._lock = threading.Lock()

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """Float32, uninitialised. Its storage, and so every view of it, references the area."""
        if not rows:
            return torch.empty((0, columns))
        with self._lock:
            is_held = sys.getrefcount(self._area) > 2  # our own reference, and the argument's
            if is_held or len(self._area) < 4 * rows * columns:
                self._area = mmap.mmap(-1, 4 * rows * columns)
            return torch.frombuffer(self._area, dtype=torch.float32, count=rows * columns).view(rows, columns)


class _LibraryHook:
    """A hook as the library calls it. An exception stops the pass and is kept. For a hook that wants no layers the
    pass never returns to Python."""

    def __init__(self, hook: LayerHook) -> None:
        self.error: BaseException | None = None
        self.before: object = None
        self.after: object = None
        self._staying: object = None
        if hook.wants_layers:
            self.before, self.after = self._call(hook.before_layer), self._call(hook.after_layer)

    def instead(self, attention: Attention, num_tokens: int, num_heads: int, head_dim: int) -> object:
        """Attention of these shapes, as the library calls it."""

        def attend(layer: int, query_at: int, query_stride: int, mixed_at: int) -> None:
            query = _floats_at(query_at, num_tokens * query_stride).as_strided(
                (num_tokens, num_heads, head_dim), (query_stride, head_dim, 1)
            )
            mixed = _floats_at(mixed_at, num_tokens * num_heads * head_dim)
            mixed.copy_(attention(layer, query).reshape(-1))

        return _AttendCall(self._keeping(attend))

    def thinned(self, blending: Blending, step_of: Callable[[ForwardBatch], _Step]) -> object:
        """Asks which tokens stay, layer by layer."""

        def thin(layer: int, left_at: int) -> None:
            rows = blending.narrow(layer)
            if rows is not None:
                batch = blending.batch
                step, positions = step_of(batch), batch.positions.int()
                self._staying = step, batch, rows, positions  # valid until others take their place
                left = _Thinned.from_address(left_at)
                left.step, left.rows, left.positions = ctypes.addressof(step), rows.data_ptr(), positions.data_ptr()

        return _ThinCall(self._keeping(thin))

    def _call(self, method: Callable[[int], None]) -> object:
        return _LayerCall(self._keeping(method))

    def _keeping(self, method: Callable[..., None]) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            try:
                method(*arguments)
            except BaseException as error:  # C++ cannot propagate it; ``forward`` does
                self.error = error
                return STOPPED_BY_HOOK
            return 0

        return call


def _floats_at(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((_FLOAT * count).from_address(address), dtype=torch.float32)
