"""The functions of ``reference`` on a GPU: Triton kernels for what moves memory, experts and int8 weights, cuBLAS
(through torch) for other products.

``GpuKernels`` has the signatures of every other implementation. A caller that runs many layers of one step plans its
attention once (``plan``) and passes the plan in. Without a GPU the same code runs in Triton's interpreter if
``TRITON_INTERPRET=1`` was set before this module was imported: slow, and used for tests.
"""

from __future__ import annotations

import numpy as np
import torch
import triton

from mooncake.kernels import reference
from mooncake.kernels.gpu import recurrent
from mooncake.kernels.gpu import triton_elementwise as elementwise
from mooncake.kernels.gpu.attention import (
    DECODE_ROWS,
    PREFILL_ROWS,
    SHARED_ROWS,
    DevicePlan,
    Packing,
    attention_launch,
    most_rows,
    pack_heads,
    run_plan,
)
from mooncake.kernels.gpu.attention_plan import Int32s, plan_attention
from mooncake.kernels.gpu.experts import GroupedExperts
from mooncake.kernels.gpu.latent import LATENT_ROWS, latent_launch, pack_latent, run_latent_plan
from mooncake.kernels.gpu.products import Int8Linear, W8A8Linear
from mooncake.kernels.gpu.triton_launch import INTERPRETED, row_warps
from mooncake.kernels.grouped import GroupedCodes
from mooncake.precision import Coding

COPY_PROGRAMS = 8  # multiprocessors that page copies may take from computation
COPY_WORDS = 4096  # 8-byte words in flight per program: a thread loads eight times 16 bytes before it stores
TURNED_PAIRS = 2048  # elements of query heads that a program rotates: 32 registers per thread
_INTERPRETED_PROCESSORS = 4


class GpuKernels:
    """``mooncake.kernels.Kernels`` on one device. Any thread may call it; work goes to the current stream."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device or ("cpu" if INTERPRETED else "cuda"))
        self.num_processors = (
            _INTERPRETED_PROCESSORS
            if self.device.type == "cpu"
            else torch.cuda.get_device_properties(self.device).multi_processor_count
        )
        self.choose_launch = attention_launch

    # Products and norms

    def linear(
        self, weight: reference.Matrix, bias: torch.Tensor | None = None, coding: Coding = ""
    ) -> reference.Linear | Int8Linear:
        if isinstance(weight, GroupedCodes):
            weight = weight.weights()
        weight, bias = weight.to(self.device), None if bias is None else bias.to(self.device)
        coding = weight.coding if isinstance(weight, reference.Codes) else coding
        if not coding:
            return reference.linear(weight, bias)
        return (W8A8Linear if coding == "w8a8" else Int8Linear)(weight, bias, self.num_processors)

    def experts(
        self,
        gate_up: reference.Matrices,
        down: reference.Matrices,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        bounds: reference.Bounds | None = None,
        first: int = 0,
        gate: reference.Gate = "silu",
        coding: Coding = "",
    ) -> GroupedExperts:
        assert not coding, "GPUs have experts as values"
        return GroupedExperts(
            self._stacked(gate_up),
            self._stacked(down),
            None if gate_up_bias is None else gate_up_bias.to(self.device).contiguous(),
            None if down_bias is None else down_bias.to(self.device).contiguous(),
            bounds,
            first,
            gate,
        )

    def _stacked(self, matrices: reference.Matrices) -> torch.Tensor:
        if not isinstance(matrices, torch.Tensor):
            weights = (each.weights() if isinstance(each, GroupedCodes) else each for each in matrices)
            matrices = torch.stack([each for each in weights if isinstance(each, torch.Tensor)])
        return matrices.to(self.device).contiguous()

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(hidden.flatten(0, -2), None, weight, eps).view(hidden.shape)

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._norm(residual, update, weight, eps)

    def _norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        tokens, width = residual.shape
        output = torch.empty((tokens, width), dtype=residual.dtype, device=residual.device)
        other = residual if update is None else update
        if tokens:
            elementwise.add_rms_norm[(tokens,)](
                residual,
                other,
                weight,
                output,
                residual.stride(0),
                other.stride(0),
                width,
                eps,
                HAS_UPDATE=update is not None,
                WIDTH_PAD=triton.next_power_of_2(width),
                num_warps=row_warps(width),
            )
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        if tokens:
            block = min(triton.next_power_of_2(width), 1024)
            elementwise.silu_mul[(tokens, triton.cdiv(width, block))](
                gate_up, output, width, gate_up.stride(0), BLOCK=block, num_warps=4
            )
        return output

    # The cache

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
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``reference.rope_write_kv``. With ``scales`` ``[N, K|V, Hkv, block_tokens]`` the cache has int8 or float8.

        A negative slot is skipped: a token that only pads a captured graph.
        """
        if cache_layer.dtype is torch.int8 and scales is None:
            cache_layer, scales = codes_and_scales(cache_layer)
        _, num_kinds, num_kv_heads, block_tokens, head_dim = cache_layer.shape
        tokens, width = qkv.shape
        num_heads = width // head_dim - num_kinds * num_kv_heads
        half_pad = triton.next_power_of_2(head_dim // 2)
        heads = min(triton.next_power_of_2(num_heads), max(TURNED_PAIRS // half_pad, 1))
        normed = query_norm is not None
        if normed and key_norm is None:
            key_norm = query_norm  # of no keys
        if tokens:
            elementwise.rope_write_kv[(tokens, triton.cdiv(num_heads, heads))](
                qkv,
                cos,
                sin,
                positions,
                cache_layer,
                cos if scales is None else scales,
                slots,
                query_norm if normed else cos,
                key_norm if normed else cos,
                eps,
                qkv.stride(0),
                *cache_layer.stride()[:4],
                *((0, 0, 0, 0) if scales is None else scales.stride()),
                NUM_HEADS=num_heads,
                HEADS=heads,
                NUM_KV_HEADS=num_kv_heads,
                KV_HEADS_PAD=triton.next_power_of_2(max(num_kv_heads, 1)),
                HALF=head_dim // 2,
                HALF_PAD=half_pad,
                BLOCK_TOKENS=block_tokens,
                NORMED=normed,
                SCALED=scales is not None,
                HAS_VALUES=num_kinds == 2,
                MAX_CODE=_max_code(cache_layer.dtype),
                num_warps=4,
            )
        return qkv.as_strided((tokens, num_heads, head_dim), (qkv.stride(0), head_dim, 1))

    # Attention

    def plan(
        self,
        query_starts: Int32s,
        context_lens: Int32s,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        window: int = 0,
        block_tables: Int32s | None = None,
        piece_tokens: int = 0,
        wide: bool = False,
        scaled: bool = False,
        latent: bool = False,
        buffers: DevicePlan | None = None,
    ) -> DevicePlan:
        """The step's plan on the device, in ``buffers`` where it fits. Arguments as of ``plan_attention``, on the host.

        ``wide``: the queries are float32; ``scaled``: the pages are codes and scales; ``latent``: keys are the values.
        """
        heads = pack(num_heads, num_kv_heads, wide, latent)
        longest = int(np.diff(query_starts).max(initial=1))
        # float32 tiles with more than the fewest rows do not fit into registers
        most = DECODE_ROWS if wide else LATENT_ROWS if latent else most_rows(head_dim, scaled)
        few = DECODE_ROWS if latent else SHARED_ROWS
        rows = most if longest * heads.group_pad > few else DECODE_ROWS
        shared_rows = [min(rows, most) for rows in (SHARED_ROWS, PREFILL_ROWS)]
        launches = [
            latent_launch(rows, wide, scaled)
            if latent
            else attention_launch(rows, head_dim, block_tokens, wide, scaled)
            for rows in shared_rows
        ]
        if heads.tile_tokens(shared_rows[-1]) == 1:
            block_tables = None  # one token's heads fill a tile: nobody can share its reads
        plan = plan_attention(
            query_starts,
            context_lens,
            block_tokens=block_tokens,
            num_kv_heads=heads.parts,
            tile_tokens=heads.tile_tokens(rows),
            num_processors=self.num_processors,
            window=window,
            block_tables=block_tables,
            shared_tile_tokens=[heads.tile_tokens(rows) for rows in shared_rows],
            shared_programs=[launch.per_processor for launch in launches],
            piece_tokens=piece_tokens,
        )
        if buffers is None or not buffers.fits(plan):
            buffers = DevicePlan.empty(
                [(one.tile_tokens, len(one.pieces)) for one in plan.passes],
                plan.num_rows,
                len(plan.merge_tokens),
                len(plan.merge_rows),
                num_heads,
                head_dim,
                self.device,
            )
        buffers.load(plan)
        return buffers

    def plan_call(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        window: int,
        scaled: bool,
    ) -> DevicePlan:
        """For lengths on the device: it waits for them."""
        return self.plan(
            query_starts.cpu().numpy(),
            context_lens.cpu().numpy(),
            num_heads=query.shape[1],
            num_kv_heads=cache_layer.shape[2],
            head_dim=query.shape[2],
            block_tokens=cache_layer.shape[3],
            window=window,
            wide=query.dtype is torch.float32,
            scaled=scaled,
            latent=cache_layer.shape[1] == 1,
        )

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
        plan: DevicePlan | None = None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``reference.paged_attention``. Without a ``plan`` it makes one, and waits for the lengths. With
        ``alibi_slopes``, float32, a plan has no pass over what is shared."""
        if cache_layer.dtype is torch.int8 and scales is None:
            cache_layer, scales = codes_and_scales(cache_layer)
        if not len(query):
            return torch.empty_like(query)
        if plan is None:
            plan = self.plan_call(query, cache_layer, query_starts, context_lens, window, scaled=scales is not None)
        if cache_layer.shape[1] == 1:
            assert not window and not softcap and sinks is None and alibi_slopes is None, (
                "no model has these over latent rows"
            )
            return run_latent_plan(plan, self.num_processors, query, cache_layer, scales, block_tables, scale)
        rest = (block_tables, scale, window, softcap, sinks, alibi_slopes, self.choose_launch)
        return run_plan(plan, self.num_processors, query, cache_layer, scales, *rest)

    # Layers that keep states, as in ``recurrent``

    gated_delta = staticmethod(recurrent.gated_delta)
    state_space = staticmethod(recurrent.state_space)
    short_convolution = staticmethod(recurrent.short_convolution)


def pack(num_heads: int, num_kv_heads: int, wide: bool, latent: bool) -> Packing:
    """Arguments as of ``GpuKernels.plan``."""
    return pack_latent(num_heads, wide) if latent else pack_heads(num_heads, num_kv_heads)


def copy_pages(
    source: torch.Tensor,
    target: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    programs: int = COPY_PROGRAMS,
    words: int = COPY_WORDS,
) -> None:
    """``target[target_pages[i]] = source[source_pages[i]]`` with a few programs, in the current stream.

    ``source`` and ``target`` are ``[pages, ...]`` whose pages are runs of whole 8-byte words; each lies on the GPU or
    in pinned host memory (also memory registered with ``cudaHostRegister``). The page lists are int64 on the GPU.
    Raises ValueError for pages of different or odd sizes.
    """
    from_words, to_words = _as_words(source), _as_words(target)
    if from_words.shape[1] != to_words.shape[1] or len(source_pages) != len(target_pages):
        raise ValueError("source and target must have pages of the same size, and as many of them")
    if not len(source_pages):
        return
    elementwise.copy_pages[(programs,)](
        from_words,
        to_words,
        source_pages,
        target_pages,
        len(source_pages),
        from_words.stride(0),
        to_words.stride(0),
        from_words.shape[1],
        BLOCK=words,
        num_warps=8,
    )


def _as_words(pages: torch.Tensor) -> torch.Tensor:
    """``[pages, words]`` of int64 over the same memory."""
    page_bytes = pages[0].numel() * pages.element_size()
    stride_bytes = pages.stride(0) * pages.element_size()
    if page_bytes % 8 or stride_bytes % 8 or not pages[0].is_contiguous():
        raise ValueError("pages must be contiguous runs of whole 8-byte words")
    raw = pages.as_strided((pages.shape[0], pages[0].numel()), (pages.stride(0), 1))
    return raw.view(torch.int64) if pages.element_size() == 8 else raw.view(torch.uint8).view(torch.int64)


def codes_and_scales(cache_layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[N, K|V, Hkv, block_tokens, D]`` and float32 scales of an int8 cache whose rows contain their scale."""
    head_dim = cache_layer.shape[-1] - reference.SCALE_BYTES
    return cache_layer[..., :head_dim], cache_layer[..., head_dim:].view(torch.float32)[..., 0]


def _max_code(dtype: torch.dtype) -> float:
    return 448.0 if dtype is torch.float8_e4m3fn else 127.0
