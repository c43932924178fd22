"""The functions of ``reference`` in C++ (``cpu_kernels.cpp``), called through ctypes on the tensors' own memory.

What the library does not take (another dtype, a head size that is no multiple of 16, an unusual layout) goes to the
reference. The C side checks block ids, slots and positions: a wrong one is our bug and raises IndexError before a byte
is written. Threads are torch's (``torch.get_num_threads``), out of the same OpenMP runtime.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import ClassVar

import torch

from mooncake.kernels import reference
from mooncake.kernels.cpu_build import cpu_features

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_PAGES = [_POINTER, _LONG, _LONG, _LONG, _LONG, _INT, _INT, _INT]
"""cache, num_blocks, strides of block, K|V and head, block_tokens, num_kv_heads, head_dim"""
_SIGNATURES = {
    "mc_paged_attention": [
        *(_POINTER, _LONG, _POINTER),  # query, query_stride, output
        *(*_PAGES, _INT),  # num_heads
        *(_POINTER, _LONG, _POINTER, _POINTER, _INT),  # block_tables, table_stride, query_starts, context_lens, B
        *(_FLOAT, _INT, _INT, _INT),  # scale, window, is_bf16, threads
    ],
    "mc_rope_write_kv": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER),  # qkv, qkv_stride, cos, sin, P, positions
        *(*_PAGES, _INT),  # num_heads
        *(
            _POINTER,
            _LONG,
            _POINTER,
            _POINTER,
            _FLOAT,
            _INT,
            _INT,
        ),  # slots, T, query_norm, key_norm, eps, is_bf16, threads
    ],
    "mc_write_kv": [_POINTER, _LONG, _POINTER, _LONG, *_PAGES, _POINTER, _LONG, _INT],
    "mc_add_rms_norm": [_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _INT, _FLOAT, _INT, _INT],
    "mc_linear": [_POINTER, _POINTER, _LONG, _POINTER, _LONG, _INT],  # layer, from, from_stride, to, T, threads
    "mc_panel_width": [],
    "mc_silu_mul": [_POINTER, _POINTER, _LONG, _INT, _INT, _INT],
}
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})
_TYPICAL_BATCH = 32  # tokens; what oneDNN chooses its packing for
_PROBLEMS = {1: "a block id or slot lies outside the cache", 2: "a position lies outside the model's length"}


class _PackedLinear(ctypes.Structure):
    """Mirrors ``PackedLinear`` of cpu_kernels.cpp."""

    _fields_: ClassVar = [
        ("panels", _POINTER),
        ("bias", _POINTER),
        ("inputs", _LONG),
        ("outputs", _LONG),
        ("is_bf16", ctypes.c_int32),
    ]


class PanelLinear:
    """Weights interleaved in panels of some outputs each, ``[ceil(out / width), in, width]``; products in float32.

    Each output is one sum in a fixed order: a token's result does not depend, to the bit, on which or how many tokens
    are computed with it. Libraries do not promise that, and it is what makes chunks, batches and reused prefixes agree.

    SmolLM2's layers in float32 on one Cascade Lake core, best ms for 1 / 8 / 32 / 256 tokens: these 42 / 45 / 89 / 520,
    torch eager 49 / 120 / 137 / 520, oneDNN packed 53 / 64 / 104 / 490, MKL packed 44 / 53 / 88 / 430 (but that packing
    is for one number of tokens only). Reading the weights once takes 42.
    """

    def __init__(
        self,
        function: Callable[[int, int, int, int, int, int], int],
        width: int,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        outputs, inputs = weight.shape
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % width))
        self._panels = padded.view(-1, width, inputs).transpose(1, 2).contiguous()
        self._bias = None if bias is None else bias.contiguous()
        self._layer = _PackedLinear(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            inputs,
            outputs,
            _IS_BF16[weight.dtype],
        )
        self._address = ctypes.addressof(self._layer)
        self._function, self._dtype = function, weight.dtype
        self._inputs, self._outputs = inputs, outputs

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, inputs = hidden.shape
        stride, adjacent = hidden.stride()
        assert hidden.dtype is self._dtype and inputs == self._inputs and adjacent == 1
        output = hidden.new_empty((tokens, self._outputs))
        self._function(self._address, hidden.data_ptr(), stride, output.data_ptr(), tokens, torch.get_num_threads())
        return output

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        width = self._panels.shape[2]
        return self._panels[indices // width, :, indices % width]


class OneDnnLinear:
    """oneDNN's packed product, for bfloat16 on processors that multiply it natively (several times faster there)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_BATCH)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self._bias, "none", [], "")
        return output

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(indices, self._weight)


class CpuKernels:
    """``mooncake.kernels.Kernels`` over a built library. Has no state; any thread may call it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
        self._paged_attention = library.mc_paged_attention
        self._rope_write_kv = library.mc_rope_write_kv
        self._write_kv = library.mc_write_kv
        self._add_rms_norm = library.mc_add_rms_norm
        self._silu_mul = library.mc_silu_mul
        self._linear = library.mc_linear
        self._panel_width = int(library.mc_panel_width())
        self._has_bf16 = not _BF16_FEATURES.isdisjoint(cpu_features())

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> reference.Linear | PanelLinear | OneDnnLinear:
        if weight.dtype not in _IS_BF16:
            return reference.linear(weight, bias)
        if weight.dtype is torch.bfloat16 and self._has_bf16:
            return OneDnnLinear(weight, bias)
        return PanelLinear(self._linear, self._panel_width, weight, bias)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(hidden, None, weight, eps)

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._norm(residual, update, weight, eps)

    def _norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        is_bf16 = _IS_BF16.get(residual.dtype)
        dense = residual.is_contiguous() and (update is None or update.is_contiguous())
        if is_bf16 is None or weight.dtype is not residual.dtype or not dense:
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
            is_bf16,
            torch.get_num_threads(),
        )
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        is_bf16 = _IS_BF16.get(gate_up.dtype)
        if is_bf16 is None or not gate_up.is_contiguous():
            return reference.silu_mul(gate_up)
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty((tokens, width))
        self._silu_mul(gate_up.data_ptr(), output.data_ptr(), tokens, width, is_bf16, torch.get_num_threads())
        return output

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache_layer: torch.Tensor, slots: torch.Tensor) -> None:
        head_dim = cache_layer.shape[4]
        rows_fit = key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
        if not (_takes_pages(cache_layer, key.dtype) and rows_fit and value.dtype is key.dtype):
            return reference.write_kv(key, value, cache_layer, slots)
        status = self._write_kv(
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            *_pages(cache_layer),
            slots.data_ptr(),
            slots.shape[0],
            _IS_BF16[key.dtype],
        )
        _check(status)
        return None

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
        if not (_takes_pages(cache_layer, qkv.dtype) and qkv.stride(1) == 1):
            return reference.rope_write_kv(qkv, cos, sin, positions, cache_layer, slots, query_norm, key_norm, eps)
        pages = _pages(cache_layer)
        head_dim, num_kv_heads = pages[-1], pages[-2]
        tokens, width = qkv.shape
        num_heads = width // head_dim - 2 * num_kv_heads
        status = self._rope_write_kv(
            qkv.data_ptr(),
            width,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[0],
            positions.data_ptr(),
            *pages,
            num_heads,
            slots.data_ptr(),
            tokens,
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            eps,
            _IS_BF16[qkv.dtype],
            torch.get_num_threads(),
        )
        _check(status)
        return qkv.as_strided((tokens, num_heads, head_dim), (width, head_dim, 1))

    def paged_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int = 0,
    ) -> torch.Tensor:
        query_stride, *inner = query.stride()
        if not (_takes_pages(cache_layer, query.dtype) and inner == [query.shape[2], 1]):
            return reference.paged_attention(
                query, cache_layer, block_tables, query_starts, context_lens, scale, window
            )
        output = query.new_empty(query.shape)
        status = self._paged_attention(
            query.data_ptr(),
            query_stride,
            output.data_ptr(),
            *_pages(cache_layer),
            query.shape[1],
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            context_lens.shape[0],
            scale,
            window,
            _IS_BF16[query.dtype],
            torch.get_num_threads(),
        )
        _check(status)
        return output


def _takes_pages(cache_layer: torch.Tensor, dtype: torch.dtype) -> bool:
    head_dim = cache_layer.shape[4]
    return (
        dtype in _IS_BF16
        and cache_layer.dtype is dtype
        and head_dim % 16 == 0
        and cache_layer.stride()[3:] == (head_dim, 1)
    )


def _pages(cache_layer: torch.Tensor) -> tuple[int, ...]:
    num_blocks, _, num_kv_heads, block_tokens, head_dim = cache_layer.shape
    block_stride, kv_stride, head_stride, _, _ = cache_layer.stride()
    return (
        cache_layer.data_ptr(),
        num_blocks,
        block_stride,
        kv_stride,
        head_stride,
        block_tokens,
        num_kv_heads,
        head_dim,
    )


def _check(status: int) -> None:
    if status:
        raise IndexError(_PROBLEMS[status])
