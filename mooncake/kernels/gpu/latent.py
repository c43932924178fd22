"""Host side of latent attention on a GPU: how heads share tiles, and the launches of a plan's pieces.

Plans are those of ``attention``, with parts of the heads in place of KV heads.
"""

from __future__ import annotations

import torch
import triton

from mooncake.kernels.gpu.attention import DECODE_ROWS, DevicePlan, Launch, Packing, merge_parts
from mooncake.kernels.gpu.triton_latent_attention import attend_latent
from mooncake.kernels.gpu.triton_launch import INTERPRETED

LATENT_ROWS = 32
"""Rows of a tile if there are enough queries. Sums of 576 numbers per row fill the registers of eight warps: 64 rows
would spill, and Hopper's warpgroups, which multiply at least 64, would compute all scores twice."""

MOST_LATENT_DIM = 576  # of a row: 512 and 64, as in every published model


def latent_launch(tile_rows: int, wide: bool, scaled: bool) -> Launch:
    """As ``attention_launch``; both architectures hold them without spilling (``tests/kernels/compile_for_gpu.py``).

    Loading a page's address takes an iteration, so three of seven stages hold rows. Tiles of few query rows are bound
    by memory: two programs per multiprocessor, with small iterations. Over quantised pages, twice as many threads hold
    the dequantised rows.
    """
    if wide:
        return Launch(tile_rows, keys=16, num_warps=8, num_stages=2, per_processor=1)
    if scaled:
        keys = 32 if tile_rows == DECODE_ROWS else 16
        return Launch(tile_rows, keys, num_warps=8, num_stages=5, per_processor=1)
    if tile_rows == DECODE_ROWS:
        return Launch(tile_rows, keys=16, num_warps=4, num_stages=7, per_processor=2)
    return Launch(tile_rows, keys=32, num_warps=8, num_stages=7, per_processor=1)


def pack_latent(num_heads: int, wide: bool) -> Packing:
    """All heads read the same rows: use as few parts as the largest tiles allow, with equally many heads each."""
    parts = -(-num_heads // (DECODE_ROWS if wide else LATENT_ROWS))
    return Packing(parts, -(-num_heads // parts))


def column_parts(head_dim: int) -> tuple[int, int]:
    """The powers of two that hold a row's columns: 512 and 64 for 576."""
    main = max(1 << (head_dim.bit_length() - 1), 16)
    return main, max(triton.next_power_of_2(head_dim - main), 16)


def run_latent_plan(
    plan: DevicePlan,
    num_processors: int,
    query: torch.Tensor,
    cache_layer: torch.Tensor,
    scales: torch.Tensor | None,
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend as ``plan`` says: ``[T, Hq, D]``; the other arguments as in ``GpuKernels.paged_attention``."""
    _, num_heads, head_dim = query.shape
    packing = pack_latent(num_heads, query.dtype is torch.float32)
    wide = INTERPRETED or query.dtype is torch.float32
    main, rest = column_parts(head_dim)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    coding = plan.partial_lse if scales is None else scales
    for one in plan.passes:
        launch = latent_launch(one.tile_tokens * packing.group_pad, wide, scales is not None)
        attend_latent[(num_processors * launch.per_processor,)](
            query,
            cache_layer,
            coding,
            block_tables,
            one.pieces,
            one.num_pieces,
            output,
            plan.partial,
            plan.partial_lse,
            query.stride(0),
            cache_layer.stride(0),
            0 if scales is None else scales.stride(0),
            block_tables.stride(0),
            scale,
            NUM_HEADS=num_heads,
            PARTS=packing.parts,
            GROUP=packing.group,
            GROUP_PAD=packing.group_pad,
            HEAD_DIM=head_dim,
            MAIN=main,
            REST=rest,
            ROW_STRIDE=cache_layer.stride(3),
            SCALE_ROW_STRIDE=0 if scales is None else scales.stride(3),
            BLOCK_TOKENS=cache_layer.shape[3],
            TILE_TOKENS=one.tile_tokens,
            KEYS=launch.keys,
            SCALED=scales is not None,
            WIDE=wide,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    merge_parts(plan, num_processors, output)
    return output
