"""The functions of ``reference`` in C++ (``cpu_kernels.cpp``), called through ctypes on the tensors' own memory.

Activations are float32 on both sides, whatever the types of weights and pages. Narrow values are widened in registers;
only if the processor multiplies bfloat16 are activations rounded to it, for products with bfloat16 weights and, on its
matrix unit, queries for attention over narrow pages. What the library does not support (other activations, a head size
that is not a multiple of 16, an unusual layout) goes to the reference. The C side checks block ids, slots and
positions: a wrong one is our bug and raises IndexError before a byte is written. Threads are the library's own, as many
as torch has unless ``use_threads`` says otherwise.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from mooncake.kernels import reference
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import Bounds, Codes, Coding, Matrices, Matrix

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "mc_paged_attention": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _INT),  # query, query_stride, output, pages, num_heads
        *(_POINTER, _LONG, _POINTER, _POINTER, _INT),  # block_tables, table_stride, query_starts, context_lens, B
        *(_FLOAT, _INT, _FLOAT, _POINTER),  # scale, window, softcap, sinks
        *(_POINTER, _POINTER, _INT),  # first_positions, log_sums, threads
    ],
    "mc_rope_write_kv": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _POINTER),  # qkv, qkv_stride, rope, positions, pages
        *(_INT, _POINTER, _LONG, _INT),  # num_heads, slots, T, threads
    ],
    "mc_add_rms_norm": [_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _INT, _FLOAT, _INT],
    "mc_silu_mul": [_POINTER, _POINTER, _LONG, _INT, _INT],
    "mc_size_of": [ctypes.c_char_p],
    "mc_panel_width": [],
    "mc_activation_unit": [_INT],
    "mc_pack": [_POINTER, _POINTER, _POINTER, _INT],
    "mc_pack_groups": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT],
    "mc_unpack_rows": [_POINTER, _POINTER, _LONG, _POINTER],
    "mc_linear": [_POINTER, _POINTER, _LONG, _POINTER, _LONG, _INT],  # layer, from, from_stride, to, T, threads
    "mc_experts": [
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG),  # experts, hidden, chosen, shares, T, k
        *(_POINTER, _INT),  # output, threads
    ],
    "mc_sample": [_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT],
    "mc_score": [
        *(_POINTER, _LONG, _LONG, _LONG),  # logits, stride, count, vocab
        *(_POINTER, _POINTER, _POINTER, _LONG),  # rows, tokens, counts, most
        *(_POINTER, _POINTER, _POINTER, _INT),  # logprobs, top_ids, top_logprobs, threads
    ],
    "mc_forward": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT],
}
_PAGE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_CODED_KINDS: dict[Coding, int] = {"int8": 2, "w8a8": 3}
_WIDE_CODES = 4
PROBLEMS = {
    1: "a block id or slot lies outside the cache",
    2: "a position lies outside the model's length",
    3: "a token id or row lies outside its range",
}
STOPPED_BY_HOOK = 4
DRAW = struct.Struct("=dddqQ")
"""How one token is chosen: temperature, top_p, min_p, top_k, seed; mirrors ``Draw`` of sampling.h."""
_ROW_UNIT = 64  # bytes, as in packed.h
_CHUNK_BYTES = 32 << 20  # weights are packed into memory taken in pieces of this size


_given_threads = 0


def use_threads(count: int) -> None:
    """Threads of this process from now on; 0: as many as torch has."""
    global _given_threads
    _given_threads = count


@contextmanager
def threads_for(count: int) -> Iterator[None]:
    """Use this many threads inside the ``with``."""
    before = _given_threads
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


def num_threads() -> int:
    return _given_threads or torch.get_num_threads()


class _PackedLinear(ctypes.Structure):
    """Mirrors ``PackedLinear`` of packed.h."""

    _fields_: ClassVar = [
        ("panels", _POINTER),
        ("bias", _POINTER),
        ("scales", _POINTER),
        ("sums", _POINTER),
        ("levels", _POINTER),
        ("inputs", _LONG),
        ("outputs", _LONG),
        *((name, ctypes.c_int32) for name in ("kind", "is_gated", "hadamard", "code_bits", "group", "has_offsets")),
    ]


class _Pages(ctypes.Structure):
    """Mirrors ``CacheLayer`` of pages.h; strides in bytes."""

    _fields_: ClassVar = [
        *((name, _POINTER if name == "base" else _LONG) for name in ("base", "num_blocks", "block_stride")),
        *((name, _LONG) for name in ("kv_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("block_tokens", "num_kv_heads", "head_dim", "kind")),
    ]


class _Rope(ctypes.Structure):
    """Mirrors ``Rope`` of steps.h."""

    _fields_: ClassVar = [
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("num_positions", _LONG),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("eps", _FLOAT),
    ]


class _Experts(ctypes.Structure):
    """Mirrors ``Experts`` of experts.h."""

    _fields_: ClassVar = [
        ("gate_up", _POINTER),
        ("down", _POINTER),
        ("first", _LONG),
        ("count", _LONG),
        ("alpha", _FLOAT),
        ("limit", _FLOAT),
    ]


def check_mirrors(library: ctypes.CDLL, mirrors: Mapping[str, type[ctypes.Structure]]) -> None:
    """Check that these have the same size as their namesakes in C++; otherwise the library would read past their
    end."""
    for name, mirror in mirrors.items():
        assert library.mc_size_of(name.encode()) == ctypes.sizeof(mirror), f"{name} has changed on one side alone"


def activation_unit(library: ctypes.CDLL) -> int:
    """Bytes of activations that products with bfloat16 weights take at once; 0 if those are float32. If not 0, int8
    weights of a bfloat16 model meet 16-bit activations."""
    return int(library.mc_activation_unit(_WEIGHT_KINDS[torch.bfloat16]))


class PanelLinear:
    """Weights interleaved in panels of some outputs each (see packed.h), in huge pages.

    Each output is one sum in a fixed order: a token's result is bit-identical whichever and however many tokens are
    computed with it.

    ``is_gated``: ``weight`` is gates above ups; both are interleaved, for SwiGLU inside the product, and then only
    ``address`` is useful.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: WeightMemory,
        weight: Matrix,
        bias: torch.Tensor | None,
        coding: Coding = "",
        is_gated: bool = False,
    ) -> None:
        self._linear, self._unpack_rows = library.mc_linear, library.mc_unpack_rows
        self._outputs, self._inputs = weight.shape
        self._library, self._memory = library, memory
        self._width = int(library.mc_panel_width())
        self._order = torch.arange(self._outputs)
        if is_gated:  # like source_row of packed.h
            self._order = self._order.view(2, -1, self._width // 2).transpose(0, 1).flatten()
        self._layer = _PackedLinear(inputs=self._inputs, outputs=self._outputs, is_gated=is_gated, hadamard=1)
        self.address = ctypes.addressof(self._layer)
        self._kept: dict[str, torch.Tensor] = {}  # what the layer points to
        if bias is not None:
            self._keep("bias", bias.float())
        if isinstance(weight, GroupedCodes):
            self._pack_groups(weight)
        else:
            self._pack(weight, coding)

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads, except activations."""
        return sum(part.nbytes for part in self._kept.values())

    def _keep(self, name: str, values: torch.Tensor) -> None:
        """One number per output, in the order of the panels."""
        padded = torch.nn.functional.pad(values[self._order], (0, -self._outputs % self._width)).contiguous()
        self._kept[name] = padded
        setattr(self._layer, name, padded.data_ptr())

    def _take(self, panel_bytes: int) -> int:
        """Memory for the panels, at its address."""
        panels = self._memory.take(-(-self._outputs // self._width) * panel_bytes)
        self._layer.panels = panels.data_ptr()
        self._kept["panels"] = panels
        return panels.data_ptr()

    def _pack(self, weight: torch.Tensor | Codes, coding: Coding) -> None:
        layer, coding = self._layer, weight.coding if isinstance(weight, Codes) else coding
        if coding:
            source, scales, layer.hadamard = reference.coded(weight, coding)
            self._keep("scales", scales)
            self._keep("sums", source.sum(1, dtype=torch.int32))
            is_wide = coding == "int8" and weight.dtype is torch.bfloat16 and activation_unit(self._library)
            layer.kind = _WIDE_CODES if is_wide else _CODED_KINDS[coding]
        else:
            assert isinstance(weight, torch.Tensor)
            source, layer.kind = weight, _WEIGHT_KINDS[weight.dtype]
        source = source.contiguous()  # packing reads it by address
        row_bytes = self._inputs * source.element_size()
        panels = self._take(self._width * (row_bytes + -row_bytes % _ROW_UNIT))
        self._library.mc_pack(self.address, source.data_ptr(), panels, num_threads())

    def _pack_groups(self, weight: GroupedCodes) -> None:
        layer, scales, offsets = self._layer, weight.scales.contiguous(), weight.offsets
        codes, offsets = weight.codes.contiguous(), None if offsets is None else offsets.contiguous()
        layer.kind, layer.group = _WEIGHT_KINDS[weight.dtype], weight.group
        layer.code_bits, layer.has_offsets = 8 if weight.levels is None else 4, offsets is not None
        if weight.levels is not None:
            self._kept["levels"] = weight.levels
            layer.levels = weight.levels.data_ptr()
        group_bytes = 4 * (1 + layer.has_offsets) + layer.group * layer.code_bits // 8
        panels = self._take(self._width * self._inputs // layer.group * group_bytes)
        given = [None if each is None else each.data_ptr() for each in (codes, scales, offsets)]
        self._library.mc_pack_groups(self.address, *given, panels, num_threads())

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, inputs = hidden.shape
        stride, adjacent = hidden.stride()
        assert hidden.dtype is torch.float32 and inputs == self._inputs and adjacent == 1
        output = hidden.new_empty((tokens, self._outputs))
        self._linear(self.address, hidden.data_ptr(), stride, output.data_ptr(), tokens, num_threads())
        return output

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Float32 for all types of weights."""
        output = torch.empty((len(indices), self._inputs))
        _check(self._unpack_rows(self.address, indices.data_ptr(), len(indices), output.data_ptr()))
        return output


class PanelExperts:
    """``reference.Experts`` over such layers, in one call."""

    def __init__(
        self,
        library: ctypes.CDLL,
        gate_up: Sequence[PanelLinear],
        down: Sequence[PanelLinear],
        bounds: Bounds | None,
        first: int,
    ) -> None:
        self._layers = (gate_up, down)
        self._addresses = [(_POINTER * len(layers))(*(layer.address for layer in layers)) for layers in self._layers]
        both = (ctypes.addressof(addresses) for addresses in self._addresses)
        alpha, limit = (bounds.alpha, bounds.limit) if bounds else (1.0, 0.0)
        self._experts = _Experts(*both, first, len(gate_up), alpha, limit)
        self._run = library.mc_experts

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        hidden, chosen, shares = hidden.contiguous(), chosen.contiguous(), shares.contiguous()
        assert hidden.dtype is shares.dtype is torch.float32 and chosen.dtype is torch.int64
        output = torch.empty_like(hidden)
        status = self._run(
            ctypes.byref(self._experts),
            hidden.data_ptr(),
            chosen.data_ptr(),
            shares.data_ptr(),
            *chosen.shape,
            output.data_ptr(),
            num_threads(),
        )
        _check(status)
        return output


class WeightMemory:
    """Memory for packed weights, in huge pages if the system gives them: a step reads all of it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Bytes that live as long as the tensor, or any other tensor from the same piece."""
        rounded = num_bytes + -num_bytes % 4096
        if rounded > len(self._chunk):
            # private: most systems have no huge pages for shared memory
            area = mmap.mmap(-1, max(rounded, _CHUNK_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                area.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(area, dtype=torch.uint8)
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[rounded:]
        return taken


class CpuKernels:
    """``mooncake.kernels.Kernels`` over a built library. Any thread may call it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
        check_mirrors(
            library, {"PackedLinear": _PackedLinear, "CacheLayer": _Pages, "Rope": _Rope, "Experts": _Experts}
        )
        assert library.mc_size_of(b"Draw") == DRAW.size
        self.library = library
        self.weight_memory = WeightMemory()
        unit = activation_unit(library)
        self.rounds_activations = unit > 0  # to bfloat16, for products with bfloat16 weights or keys
        self.has_matrix_unit = unit == _ROW_UNIT
        self._paged_attention = library.mc_paged_attention
        self._rope_write_kv = library.mc_rope_write_kv
        self._add_rms_norm = library.mc_add_rms_norm
        self._silu_mul = library.mc_silu_mul
        self._sample, self._score = library.mc_sample, library.mc_score

    def linear(
        self, weight: Matrix, bias: torch.Tensor | None = None, coding: Coding = ""
    ) -> reference.Linear | PanelLinear:
        if weight.dtype not in _WEIGHT_KINDS:
            return reference.linear(weight, bias, coding)
        return self.panel_linear(weight, bias, coding)

    def experts(
        self,
        gate_up: Matrices,
        down: Matrices,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        bounds: Bounds | None = None,
        first: int = 0,
    ) -> reference.Experts | PanelExperts:
        if gate_up[0].dtype not in _WEIGHT_KINDS:
            return reference.experts(gate_up, down, gate_up_bias, down_bias, bounds, first)
        gated, downs = (
            [self.panel_linear(*given) for given in zip(weights, reference.biases_of(biases, weights), strict=True)]
            for weights, biases in ((gate_up, gate_up_bias), (down, down_bias))
        )
        return PanelExperts(self.library, gated, downs, bounds, first)

    def panel_linear(
        self, weight: Matrix, bias: torch.Tensor | None = None, coding: Coding = "", is_gated: bool = False
    ) -> PanelLinear:
        """Of float32 or bfloat16 weights, or of codes in a model of those. ``is_gated`` needs a multiple of
        ``mc_panel_width()`` outputs."""
        return PanelLinear(self.library, self.weight_memory, weight, bias, coding, is_gated)

    def sample(
        self,
        logits: torch.Tensor,
        instead: Mapping[int, npt.NDArray[np.float32]],
        draws: bytes | None = None,
        positions: Sequence[int] = (),
    ) -> list[int]:
        """The next token after each row of ``logits`` ``[R, V]`` float32, or after the row given instead, as
        ``mooncake.engine.decoding.sampler`` defines it; -1 for logits that are not finite. ``draws`` has a DRAW per
        row, for a token at that index of the positions; None: the most likely tokens."""
        count, size = logits.shape
        tokens, others = (_LONG * count)(), None
        if instead:
            others = (_POINTER * count)(*(instead[row].ctypes.data if row in instead else None for row in range(count)))
        where = None if draws is None else (_LONG * count)(*positions)
        first, stride, threads = logits.data_ptr(), logits.stride(0), num_threads()
        self._sample(first, stride, others, count, size, draws, where, tokens, threads)
        return tokens[:]

    def score(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """For each of these ``rows`` of ``logits`` ``[R, V]`` float32, the log-probability of its token, NaN if the row
        is not finite; and the most likely tokens with theirs, as many as its count says, as
        ``mooncake.engine.decoding.sampler`` defines them."""
        num_rows, most = len(rows), max(counts, default=0)
        given = [np.array(numbers, np.int64) for numbers in (rows, tokens, counts)]
        logprobs, ids, tops = np.empty(num_rows), np.empty((num_rows, most), np.int64), np.empty((num_rows, most))
        self._score(
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            logits.shape[1],
            *(numbers.ctypes.data for numbers in given),
            most,
            *(numbers.ctypes.data for numbers in (logprobs, ids, tops)),
            num_threads(),
        )
        return logprobs.tolist(), ids.tolist(), tops.tolist()

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(hidden, None, weight, eps)

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._norm(residual, update, weight, eps)

    def _norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        given = [residual, weight] if update is None else [residual, weight, update]
        if not all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in given):
            if update is None:
                return reference.rms_norm(residual, weight, eps)
            return reference.add_rms_norm(residual, update, weight, eps)
        output = torch.empty_like(residual)
        width = weight.shape[0]
        self._add_rms_norm(
            residual.data_ptr(),
            None if update is None else update.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            residual.numel() // width,
            width,
            eps,
            num_threads(),
        )
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype is not torch.float32 or not gate_up.is_contiguous():
            return reference.silu_mul(gate_up)
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty((tokens, width))
        self._silu_mul(gate_up.data_ptr(), output.data_ptr(), tokens, width, num_threads())
        return output

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        cache_layer: torch.Tensor,
        slots: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        if not (_takes_pages(cache_layer, qkv) and qkv.stride(1) == 1):
            return reference.rope_write_kv(qkv, cos, sin, positions, cache_layer, slots, query_norm, key_norm, eps)
        pages = _pages(cache_layer)
        head_dim = pages.head_dim
        tokens, width = qkv.shape
        num_heads = width // head_dim - cache_layer.shape[1] * pages.num_kv_heads
        norms = [None if norm is None else norm.data_ptr() for norm in (query_norm, key_norm)]
        rope = _Rope(cos.data_ptr(), sin.data_ptr(), cos.shape[0], *norms, eps)
        status = self._rope_write_kv(
            qkv.data_ptr(),
            qkv.stride(0),
            ctypes.byref(rope),
            positions.data_ptr(),
            ctypes.byref(pages),
            num_heads,
            slots.data_ptr(),
            tokens,
            num_threads(),
        )
        _check(status)
        return qkv.as_strided((tokens, num_heads, head_dim), (qkv.stride(0), head_dim, 1))

    def paged_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = (query, cache_layer, block_tables, query_starts, context_lens, scale, window, softcap, sinks)
        return self.ready_attention(*given)()

    def ready_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """``paged_attention`` except for the call of the library, which may be made any number of times while the
        tensors live."""
        query_stride, *inner = query.stride()
        are_wide = sinks is None or (sinks.dtype is torch.float32 and sinks.is_contiguous())
        if not (_takes_pages(cache_layer, query) and inner == [query.shape[2], 1] and are_wide):
            given = (query, cache_layer, block_tables, query_starts, context_lens, scale, window, softcap, sinks)
            return lambda: reference.paged_attention(*given)
        output, attend, pages = query.new_empty(query.shape), self._paged_attention, _pages(cache_layer)
        arguments = (
            query.data_ptr(),
            query_stride,
            output.data_ptr(),
            ctypes.byref(pages),
            query.shape[1],
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            context_lens.shape[0],
            scale,
            window,
            softcap,
            None if sinks is None else sinks.data_ptr(),
            None,
            None,
            num_threads(),
        )

        def call() -> torch.Tensor:
            _check(attend(*arguments))
            return output

        return call

    def partial_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        first_positions: torch.Tensor,
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query_stride, *inner = query.stride()
        if not (_takes_pages(cache_layer, query) and inner == [query.shape[2], 1]):
            given = (query, cache_layer, block_tables, query_starts, context_lens, first_positions, scale, softcap)
            return reference.partial_attention(*given)
        output, log_sums = query.new_zeros(query.shape), query.new_full(query.shape[:2], float("-inf"))
        pages = _pages(cache_layer)
        status = self._paged_attention(
            query.data_ptr(),
            query_stride,
            output.data_ptr(),
            ctypes.byref(pages),
            query.shape[1],
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            context_lens.shape[0],
            scale,
            0,
            softcap,
            None,
            first_positions.data_ptr(),
            log_sums.data_ptr(),
            num_threads(),
        )
        _check(status)
        return output, log_sums


def _takes_pages(cache_layer: torch.Tensor, activations: torch.Tensor) -> bool:
    head_dim = reference.head_dim_of(cache_layer)
    return (
        activations.dtype is torch.float32
        and cache_layer.dtype in _PAGE_KINDS
        and head_dim % 16 == 0
        and cache_layer.stride()[3:] == (cache_layer.shape[4], 1)
    )


def _pages(cache_layer: torch.Tensor) -> _Pages:
    num_blocks, num_kinds, num_kv_heads, block_tokens, _ = cache_layer.shape
    strides = [stride * cache_layer.element_size() for stride in cache_layer.stride()[:3]]
    if num_kinds == 1:  # values are the keys
        strides[1] = 0
    kind = _PAGE_KINDS[cache_layer.dtype]
    head_dim = reference.head_dim_of(cache_layer)
    return _Pages(cache_layer.data_ptr(), num_blocks, *strides, block_tokens, num_kv_heads, head_dim, kind)


def page_kind(dtype: torch.dtype) -> int:
    """As ``PageKind`` of pages.h."""
    return _PAGE_KINDS[dtype]


def _check(status: int) -> None:
    if status:
        raise IndexError(PROBLEMS[status])
