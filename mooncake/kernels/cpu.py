"""The functions of ``reference`` in C++ (``cpu_kernels.cpp``), called through ctypes on the tensors' own memory.

Activations are float32 on both sides, whatever the types of weights and pages. Narrow values are widened in registers;
only if the processor multiplies bfloat16 are activations rounded to it, for products with bfloat16 weights and, on its
matrix unit, queries for attention over narrow pages. What the library does not support (other activations, a head size
that is not a multiple of 16, an unusual layout) goes to the reference. Weights are packed by ``cpu_panels``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mooncake.kernels import reference
from mooncake.kernels.cpu_library import (
    LONG,
    PAGE_KINDS,
    POINTER,
    ROW_UNIT,
    WEIGHT_KINDS,
    RecurrentCall,
    Rope,
    activation_unit,
    check,
    declare,
    pages_of,
)
from mooncake.kernels.cpu_panels import PanelExperts, PanelLinear, WeightMemory
from mooncake.kernels.cpu_threads import num_threads
from mooncake.kernels.recurrent import Runs
from mooncake.kernels.reference import Bounds, Gate, Matrices, Matrix
from mooncake.precision import Coding


class CpuKernels:
    """``mooncake.kernels.Kernels`` over a built library. Any thread may call it."""

    device = reference.device

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library)
        self.library = library
        self.weight_memory = WeightMemory()
        self.has_matrix_unit = activation_unit(library) == ROW_UNIT
        self._paged_attention = library.mc_paged_attention
        self._rope_write_kv = library.mc_rope_write_kv
        self._copy_turned = library.mc_copy_turned
        self._add_rms_norm = library.mc_add_rms_norm
        self._silu_mul = library.mc_silu_mul
        self._recur_call = library.mc_recur
        self._sample, self._score = library.mc_sample, library.mc_score

    def linear(
        self, weight: Matrix, bias: torch.Tensor | None = None, coding: Coding = ""
    ) -> reference.Linear | PanelLinear:
        if weight.dtype not in WEIGHT_KINDS:
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
        gate: Gate = "silu",
        coding: Coding = "",
    ) -> reference.Experts | PanelExperts:
        if gate_up[0].dtype not in WEIGHT_KINDS:
            return reference.experts(gate_up, down, gate_up_bias, down_bias, bounds, first, gate, coding)
        gated, downs = (
            [
                self.panel_linear(*given, coding)
                for given in zip(weights, reference.biases_of(biases, weights), strict=True)
            ]
            for weights, biases in ((gate_up, gate_up_bias), (down, down_bias))
        )
        return PanelExperts(self.library, gated, downs, bounds, first, gate)

    def panel_linear(
        self, weight: Matrix, bias: torch.Tensor | None = None, coding: Coding = "", is_gated: bool = False
    ) -> PanelLinear:
        """Of float32 or bfloat16 weights, or of codes in a model of those. ``is_gated`` needs a multiple of
        ``mc_panel_width()`` outputs."""
        return PanelLinear(self.library, self.weight_memory, weight, bias, coding, is_gated)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        instead: Mapping[int, npt.NDArray[np.float32]],
        draws: bytes | None = None,
        positions: Sequence[int] = (),
    ) -> list[int]:
        """The next token after each of these ``rows`` of ``logits`` ``[R, V]`` float32, or after the one given instead
        of the i-th, as ``mooncake.engine.decoding.sampler`` defines it; -1 for logits that are not finite. ``draws``
        has a DRAW per row, for a token at that index of the positions; None: the most likely tokens."""
        count, size = len(rows), logits.shape[1]
        first, row_bytes = logits.data_ptr(), 4 * logits.stride(0)
        places = (POINTER * count)(*[first + row * row_bytes for row in rows])
        for place, row in instead.items():
            places[place] = row.ctypes.data
        tokens = (LONG * count)()
        where = None if draws is None else (LONG * count)(*positions)
        check(self._sample(places, count, size, draws, where, tokens, num_threads()))
        return tokens[:]

    def score(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[float], list[int], list[list[int]], list[list[float]]]:
        """For each of these ``rows`` of ``logits`` ``[R, V]`` float32, the log-probability and the rank of its token,
        NaN and 0 if the row is not finite; and the most likely tokens with theirs, as many as its count says, as
        ``mooncake.engine.decoding.sampler`` defines them."""
        num_rows, most = len(rows), max(counts, default=0)
        given = [np.array(numbers, np.int64) for numbers in (rows, tokens, counts)]
        logprobs, ranks = np.empty(num_rows), np.empty(num_rows, np.int64)
        ids, tops = np.empty((num_rows, most), np.int64), np.empty((num_rows, most))
        status = self._score(
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            logits.shape[1],
            *(numbers.ctypes.data for numbers in given),
            most,
            *(numbers.ctypes.data for numbers in (logprobs, ranks, ids, tops)),
            num_threads(),
        )
        check(status)
        return logprobs.tolist(), ranks.tolist(), ids.tolist(), tops.tolist()

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
        status = self._add_rms_norm(
            residual.data_ptr(),
            _pointer(update),
            weight.data_ptr(),
            output.data_ptr(),
            residual.numel() // width,
            width,
            eps,
            num_threads(),
        )
        check(status)
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype is not torch.float32 or not gate_up.is_contiguous():
            return reference.silu_mul(gate_up)
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty((tokens, width))
        check(self._silu_mul(gate_up.data_ptr(), output.data_ptr(), tokens, width, num_threads()))
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
        pages = pages_of(cache_layer)
        head_dim = pages.head_dim
        tokens, width = qkv.shape
        num_heads = width // head_dim - cache_layer.shape[1] * pages.num_kv_heads
        norms = map(_pointer, (query_norm, key_norm))
        rope = Rope(cos.data_ptr(), sin.data_ptr(), cos.shape[0], *norms, eps)
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
        check(status)
        return qkv.as_strided((tokens, num_heads, head_dim), (qkv.stride(0), head_dim, 1))

    def copy_turned(
        self,
        cache_layer: torch.Tensor,
        sources: torch.Tensor,
        slots: torch.Tensor,
        shifts: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        if not _takes_pages(cache_layer, cos):
            reference.copy_turned(cache_layer, sources, slots, shifts, cos, sin)
            return
        rope = Rope(cos.data_ptr(), sin.data_ptr(), cos.shape[0], None, None, 0.0)
        status = self._copy_turned(
            ctypes.byref(rope),
            ctypes.byref(pages_of(cache_layer)),
            sources.data_ptr(),
            slots.data_ptr(),
            shifts.data_ptr(),
            len(slots),
            num_threads(),
        )
        check(status)

    def gated_delta(
        self,
        inputs: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        taps: torch.Tensor,
        states: torch.Tensor,
        runs: Runs,
        num_key_heads: int,
        key_dim: int,
    ) -> torch.Tensor:
        (tokens, channels), heads = inputs.shape, decay.shape[1]
        value_dim = (channels - 2 * num_key_heads * key_dim) // heads
        rows = (inputs, decay, beta, taps)
        if key_dim % 16 or value_dim % 16 or not all(each.is_contiguous() for each in rows) or states.stride(1) != 1:
            return reference.gated_delta(inputs, decay, beta, taps, states, runs, num_key_heads, key_dim)
        output = inputs.new_empty((tokens, heads * value_dim))
        sizes = {"num_key_heads": num_key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        of_heads = {"decay": decay.data_ptr(), "beta": beta.data_ptr(), "output": output.data_ptr()}
        self._recur(inputs, taps, states, runs, torch.empty_like(inputs), sizes | of_heads)
        return output

    def state_space(
        self,
        inputs: torch.Tensor,
        decay: torch.Tensor,
        step: torch.Tensor,
        taps: torch.Tensor,
        bias: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        runs: Runs,
        num_groups: int,
        state_dim: int,
    ) -> torch.Tensor:
        (tokens, channels), heads = inputs.shape, decay.shape[1]
        head_dim = (channels - 2 * num_groups * state_dim) // heads
        rows = (inputs, decay, step, taps)
        if channels % 16 or head_dim % 16 or not all(each.is_contiguous() for each in rows) or states.stride(1) != 1:
            return reference.state_space(inputs, decay, step, taps, bias, skip, states, runs, num_groups, state_dim)
        output = inputs.new_empty((tokens, heads * head_dim))
        sizes = {"num_key_heads": num_groups, "heads": heads, "key_dim": state_dim, "value_dim": head_dim}
        of_heads = {"decay": decay.data_ptr(), "beta": step.data_ptr(), "output": output.data_ptr()}
        of_layer = {"bias": bias.data_ptr(), "skip": skip.data_ptr()}
        self._recur(inputs, taps, states, runs, torch.empty_like(inputs), sizes | of_heads | of_layer)
        return output

    def short_convolution(
        self, inputs: torch.Tensor, taps: torch.Tensor, states: torch.Tensor, runs: Runs
    ) -> torch.Tensor:
        if inputs.shape[1] % 16 or not (inputs.is_contiguous() and taps.is_contiguous()) or states.stride(1) != 1:
            return reference.short_convolution(inputs, taps, states, runs)
        output = torch.empty_like(inputs)
        self._recur(inputs, taps, states, runs, output, {})
        return output

    def _recur(
        self,
        inputs: torch.Tensor,
        taps: torch.Tensor,
        states: torch.Tensor,
        runs: Runs,
        mixed: torch.Tensor,
        of_heads: dict[str, int],
    ) -> None:
        """``mixed``: for what comes out of the convolution; ``of_heads``: what is behind it, nothing if empty."""
        call = RecurrentCall(
            inputs=inputs.data_ptr(),
            taps=taps.data_ptr(),
            states=states.data_ptr(),
            num_pages=len(states),
            page_stride=states.stride(0),
            starts=runs.starts.data_ptr(),
            sources=runs.sources.data_ptr(),
            targets=runs.targets.data_ptr(),
            num_runs=len(runs.targets),
            mixed=mixed.data_ptr(),
            channels=inputs.shape[1],
            num_taps=len(taps),
            **of_heads,
        )
        check(self._recur_call(ctypes.byref(call), num_threads()))

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
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = (query, cache_layer, block_tables, query_starts, context_lens, scale, window, softcap)
        return self.ready_attention(*given, sinks, alibi_slopes)()

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
        alibi_slopes: torch.Tensor | None = None,
    ) -> Callable[[], torch.Tensor]:
        """``paged_attention`` except for the call of the library, which may be made any number of times while the
        tensors live."""
        of_heads = [numbers for numbers in (sinks, alibi_slopes) if numbers is not None]
        are_wide = all(numbers.dtype is torch.float32 and numbers.is_contiguous() for numbers in of_heads)
        given = (query, cache_layer, block_tables, query_starts, context_lens)
        if not (are_wide and _takes_queries(query, cache_layer)):
            return lambda: reference.paged_attention(*given, scale, window, softcap, sinks, alibi_slopes)
        output, attend = query.new_empty(query.shape), self._paged_attention
        settings = (scale, window, softcap, *map(_pointer, (sinks, alibi_slopes)), None, None)
        arguments = (*_attention_arguments(output, *given), *settings, num_threads())

        def call() -> torch.Tensor:
            check(attend(*arguments))
            return output

        return call

    def partial_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = (query, cache_layer, block_tables, query_starts, context_lens)
        if not _takes_queries(query, cache_layer):
            return reference.partial_attention(*given, positions, scale, softcap)
        output, log_sums = query.new_zeros(query.shape), query.new_full(query.shape[:2], float("-inf"))
        settings = (scale, 0, softcap, None, None, positions.data_ptr(), log_sums.data_ptr())
        check(self._paged_attention(*_attention_arguments(output, *given), *settings, num_threads()))
        return output, log_sums


def _attention_arguments(
    output: torch.Tensor,
    query: torch.Tensor,
    cache_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
) -> tuple[object, ...]:
    """What the library's attention is told first: where everything is."""
    return (
        query.data_ptr(),
        query.stride(0),
        output.data_ptr(),
        ctypes.byref(pages_of(cache_layer)),
        query.shape[1],
        block_tables.data_ptr(),
        block_tables.stride(0),
        query_starts.data_ptr(),
        context_lens.data_ptr(),
        context_lens.shape[0],
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _takes_queries(query: torch.Tensor, cache_layer: torch.Tensor) -> bool:
    return _takes_pages(cache_layer, query) and query.stride()[1:] == (query.shape[2], 1)


def _takes_pages(cache_layer: torch.Tensor, activations: torch.Tensor) -> bool:
    head_dim = reference.head_dim_of(cache_layer)
    return (
        activations.dtype is torch.float32
        and cache_layer.dtype in PAGE_KINDS
        and head_dim % 16 == 0
        and cache_layer.stride()[3:] == (cache_layer.shape[4], 1)
    )
