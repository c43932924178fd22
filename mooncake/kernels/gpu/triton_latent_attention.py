"""Paged attention over one row per token whose keys are also its values, in Triton: multi-head latent attention.

It computes what ``triton_attention.attend`` does, over a cache of keys only: rows of up to 576 numbers that all query
heads read (the shape of FlashMLA). A row is loaded once and multiplied twice, so its bytes are half of what keys and
values would be. Neither products nor registers have a width of 576: rows are held in two parts, of 512 and of 64. If a
token has more heads than a tile has rows, several programs share them, and read the same keys at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mooncake.kernels.gpu.attention_plan import PIECE_FIELDS
from mooncake.kernels.gpu.triton_attention import pages_of, product, put
from mooncake.kernels.gpu.triton_launch import kernel

_PIECE_FIELDS = tl.constexpr(PIECE_FIELDS)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _columns(at, dims, row_ok, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """``dims`` of the rows that begin at the pointers ``at``; zeros for masked rows."""
    if MASKED or PADDED:
        values = tl.load(at[:, None] + dims[None, :], mask=row_ok[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    else:
        values = tl.load(at[:, None] + dims[None, :])
    return values


@triton.jit
def _visit(
    query,
    query_rest,
    row_positions,
    mixed,
    mixed_rest,
    peak,
    total,
    cache,
    scales,
    table,
    start,
    end,
    block_stride,
    scale_block_stride,
    softmax_scale,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SCALE_ROW_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend to keys ``start ≤ k < start + KEYS`` (``MASKED``: only those before ``end`` and visible to the row)."""
    keys = start + tl.arange(0, KEYS)
    if BLOCK_TOKENS % KEYS == 0:
        pages = tl.load(table + start // BLOCK_TOKENS).to(tl.int64)
        in_page = start % BLOCK_TOKENS + tl.arange(0, KEYS)
    else:
        pages = pages_of(table, start, end, BLOCK_TOKENS, KEYS, MASKED)
        in_page = keys % BLOCK_TOKENS
    at = cache + pages * block_stride + in_page * ROW_STRIDE
    main_dims, rest_dims = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    kind: tl.constexpr = tl.float32 if WIDE else query.dtype  # the interpreter cannot convert codes to bfloat16
    row = _columns(at, main_dims, keys < end, HEAD_DIM, MAIN > HEAD_DIM, MASKED).to(kind)
    rest = _columns(at, rest_dims, keys < end, HEAD_DIM, MAIN + REST > HEAD_DIM, MASKED).to(kind)
    scores = product(query_rest, tl.trans(rest), tl.zeros([query.shape[0], KEYS], dtype=tl.float32), WIDE)
    scores = product(query, tl.trans(row), scores, WIDE)
    if SCALED:
        scale_at = pages * scale_block_stride + in_page * SCALE_ROW_STRIDE
        row_scale = tl.load(scales + scale_at, mask=keys < end, other=0.0)
        scores = scores * (row_scale * softmax_scale)[None, :]
    if MASKED:
        visible = (keys[None, :] <= row_positions[:, None]) & (keys < end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) if SCALED else tl.max(scores, 1) * softmax_scale)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet
    weights = tl.exp2((scores if SCALED else scores * softmax_scale) - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    if SCALED:
        weights = weights * row_scale[None, :]
    weights = weights.to(query.dtype)
    mixed = product(weights, row, mixed * fade[:, None], WIDE)
    mixed_rest = product(weights, rest, mixed_rest * fade[:, None], WIDE)
    return mixed, mixed_rest, new_peak, total


@kernel("block_tables", "table_stride")
def attend_latent(
    query,  # [T, Hq, D]
    cache,  # one layer of the paged cache, [N, 1, 1, block_tokens, D]
    scales,  # float32 [N, 1, 1, block_tokens], if SCALED; may be interleaved with the rows of the cache
    block_tables,  # int32 [B, M]
    pieces,  # int32 [>= num_pieces, PIECE_FIELDS]
    num_pieces,  # int32 [1]
    output,  # [T, Hq, D]
    partial,  # float32 [rows, Hq, D]
    partial_lse,  # float32 [rows, Hq], base 2
    query_stride,
    block_stride,
    scale_block_stride,
    table_stride,
    softmax_scale,
    NUM_HEADS: tl.constexpr,
    PARTS: tl.constexpr,  # of the heads; one program each
    GROUP: tl.constexpr,  # heads per part; the last one may have fewer
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SCALE_ROW_STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """As ``triton_attention.attend``, with parts of the heads in place of KV heads."""
    softmax_scale = softmax_scale * _LOG2_E
    rows = tl.arange(0, TILE_TOKENS * GROUP_PAD)
    row_token, row_head = rows // GROUP_PAD, rows % GROUP_PAD
    main_dims, rest_dims = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    for work in range(tl.program_id(0), tl.load(num_pieces) * PARTS, tl.num_programs(0)):
        piece = pieces + (work // PARTS) * _PIECE_FIELDS
        table = block_tables + tl.load(piece).to(tl.int64) * table_stride
        first, count = tl.load(piece + 1), tl.load(piece + 2)
        position = tl.load(piece + 3)
        begin, end = tl.load(piece + 4), tl.load(piece + 5)
        row = tl.load(piece + 6)

        heads = (work % PARTS) * GROUP + row_head
        row_ok = (row_token < count) & (row_head < GROUP) & (heads < NUM_HEADS)
        at = query + (first + row_token).to(tl.int64) * query_stride + heads * HEAD_DIM
        rows_query = _columns(at, main_dims, row_ok, HEAD_DIM, True, True)
        rest_query = _columns(at, rest_dims, row_ok, HEAD_DIM, True, True)
        row_positions = position + row_token

        mixed = tl.zeros([TILE_TOKENS * GROUP_PAD, MAIN], dtype=tl.float32)
        mixed_rest = tl.zeros([TILE_TOKENS * GROUP_PAD, REST], dtype=tl.float32)
        peak = tl.full([TILE_TOKENS * GROUP_PAD], float("-inf"), dtype=tl.float32)
        total = tl.zeros([TILE_TOKENS * GROUP_PAD], dtype=tl.float32)
        # Keys that every row sees need no mask: those up to the first query's own position, in whole iterations.
        whole = tl.maximum(tl.minimum(end, position + 1) - begin, 0) // KEYS * KEYS
        for start in range(begin, begin + whole, KEYS):
            mixed, mixed_rest, peak, total = _visit(
                rows_query, rest_query, row_positions, mixed, mixed_rest, peak, total, cache, scales, table, start, end,
                block_stride, scale_block_stride, softmax_scale,
                HEAD_DIM, MAIN, REST, ROW_STRIDE, SCALE_ROW_STRIDE, BLOCK_TOKENS, KEYS, False, SCALED, WIDE,
            )  # fmt: skip
        for start in range(begin + whole, end, KEYS):
            mixed, mixed_rest, peak, total = _visit(
                rows_query, rest_query, row_positions, mixed, mixed_rest, peak, total, cache, scales, table, start, end,
                block_stride, scale_block_stride, softmax_scale,
                HEAD_DIM, MAIN, REST, ROW_STRIDE, SCALE_ROW_STRIDE, BLOCK_TOKENS, KEYS, True, SCALED, WIDE,
            )  # fmt: skip

        divided_by = tl.where(total == 0.0, 1.0, total)[:, None]
        main_mask = row_ok[:, None] & (main_dims < HEAD_DIM)[None, :]
        put(
            mixed / divided_by, peak, total, first, row, row_token, heads, row_ok, main_mask,
            output, partial, partial_lse, NUM_HEADS, HEAD_DIM, MAIN,
        )  # fmt: skip
        rest_mask = row_ok[:, None] & (rest_dims < HEAD_DIM)[None, :]
        put(
            mixed_rest / divided_by, peak, total, first, row, row_token, heads, row_ok, rest_mask,
            output + MAIN, partial + MAIN, partial_lse, NUM_HEADS, HEAD_DIM, REST,
        )  # fmt: skip
