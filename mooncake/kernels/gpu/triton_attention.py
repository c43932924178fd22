"""Paged attention on a GPU, in Triton: one kernel for prefill chunks, decode steps and shared prefixes, and its merge.

The kernel processes the pieces of an ``AttentionPlan``. A tile's rows are its query tokens times the query heads of one
KV head (GQA packing), so every key and value is read once per tile. Pages are read in place through the block table;
they may be float32, bfloat16, float16, or int8 or float8 with one scale per token and head. Sums are float32. The
launch grid does not depend on the batch: a captured CUDA graph replays it with another plan in the same buffers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mooncake.kernels.gpu.attention_plan import PIECE_FIELDS
from mooncake.kernels.gpu.triton_launch import kernel

_PIECE_FIELDS = tl.constexpr(PIECE_FIELDS)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, WIDE: tl.constexpr):
    """``a @ b`` in float32; ``WIDE`` multiplies in float32 too: exact mode, and the interpreter (no bfloat16)."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def product(left, right, sums, WIDE: tl.constexpr):
    """``sums + left @ right``, multiplied as ``_dot`` does."""
    if WIDE:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(left, right, sums)


@triton.jit
def pages_of(table, start, end, BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """int64 [KEYS]: the page of each key from ``start`` on; with ``MASKED``, possibly 0 for keys past ``end``."""
    keys = start + tl.arange(0, KEYS)
    if BLOCK_TOKENS % KEYS == 0:  # all in one page: addresses are one contiguous run
        pages = tl.load(table + start // BLOCK_TOKENS).to(tl.int64) + tl.zeros([KEYS], dtype=tl.int64)
    elif KEYS == 2 * BLOCK_TOKENS:  # two such runs: load two page numbers instead of one per key
        one = start // BLOCK_TOKENS
        low = tl.load(table + one).to(tl.int64)
        if MASKED:
            high = tl.load(table + one + 1, mask=start + BLOCK_TOKENS < end, other=0).to(tl.int64)
        else:
            high = tl.load(table + one + 1).to(tl.int64)
        pages = tl.where(tl.arange(0, KEYS) < BLOCK_TOKENS, low, high)
    elif MASKED:
        pages = tl.load(table + keys // BLOCK_TOKENS, mask=keys < end, other=0).to(tl.int64)
    else:
        pages = tl.load(table + keys // BLOCK_TOKENS).to(tl.int64)
    return pages


@triton.jit
def capped(scores, softcap):
    """tanh as 1 - 2 / (e^2x + 1): exact enough at both ends, where e^2x is 0 or infinite."""
    return softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * _LOG2_E / softcap)) + 1.0)


@triton.jit
def sloped(scores, slopes, keys, row_positions):
    """ALiBi: less the distance between key and query, times the row's slope. Float32 is exact up to 2^24 tokens."""
    distances = keys.to(tl.float32)[None, :] - row_positions.to(tl.float32)[:, None]
    return scores + slopes[:, None] * distances


@triton.jit
def divisor(peak, total, row, sinks, heads, row_ok, SINKS: tl.constexpr):
    """The sum of weights of each row of a piece. A sink counts once: in the merge, if a tile has several pieces."""
    result = tl.where(total == 0.0, 1.0, total)
    if SINKS:
        sink = tl.load(sinks + heads, mask=row_ok, other=0.0).to(tl.float32) * _LOG2_E
        result += tl.where(row < 0, tl.exp2(sink - peak), 0.0)
    return result


@triton.jit
def put(
    result, peak, total, first, row, row_token, heads, row_ok, row_mask, output, partial, partial_lse,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Store a piece's rows: in the output if it is its tile's only piece, otherwise as partial results from ``row``
    on."""
    dims = tl.arange(0, HEAD_PAD)
    if row < 0:
        at = (first + row_token).to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM)
        at = at + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output + at, result.to(output.dtype.element_ty), mask=row_mask)
    else:
        part = (row + row_token).to(tl.int64) * NUM_HEADS + heads
        lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(total))
        tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], result, mask=row_mask)
        tl.store(partial_lse + part, lse, mask=row_ok)


@triton.jit
def in_window(keys, row_positions, chunk_begin, window, WINDOWED: tl.constexpr):
    """Which keys are no earlier than ``windows.first_seen``. ``WINDOWED``: 1 if the window slides with each row, -1 if
    it is a chunk, whose begin is the same for all rows of a tile."""
    return (keys >= chunk_begin)[None, :] if WINDOWED < 0 else keys[None, :] > (row_positions - window)[:, None]


@triton.jit
def _visit(
    query,
    row_positions,
    chunk_begin,
    accumulated,
    peak,
    total,
    cache,
    scales,
    table,
    start,
    end,
    block_stride,
    kv_stride,
    head_offset,
    row_stride,
    scale_block_stride,
    scale_kv_stride,
    scale_head_offset,
    scale_row_stride,
    softmax_scale,
    window,
    softcap,
    slopes,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend to keys ``start ≤ k < start + KEYS`` (``MASKED``: only those before ``end`` and visible to the row)."""
    keys = start + tl.arange(0, KEYS)
    dims = tl.arange(0, HEAD_PAD)
    pages = pages_of(table, start, end, BLOCK_TOKENS, KEYS, MASKED)
    in_page = keys % BLOCK_TOKENS
    at = pages[:, None] * block_stride + head_offset + in_page[:, None] * row_stride + dims[None, :]
    if MASKED:  # past the last token, memory was never written and may hold anything
        loaded = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(cache + at, mask=loaded, other=0.0)
        value = tl.load(cache + at + kv_stride, mask=loaded, other=0.0)
    elif HEAD_PAD != HEAD_DIM:
        loaded = (keys >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(cache + at, mask=loaded, other=0.0)
        value = tl.load(cache + at + kv_stride, mask=loaded, other=0.0)
    else:
        key = tl.load(cache + at)
        value = tl.load(cache + at + kv_stride)
    scores = _dot(query, tl.trans(key.to(query.dtype)), WIDE)
    if SCALED:
        scale_at = pages * scale_block_stride + scale_head_offset + in_page * scale_row_stride
        key_scale = tl.load(scales + scale_at, mask=keys < end, other=0.0)
        value_scale = tl.load(scales + scale_at + scale_kv_stride, mask=keys < end, other=0.0)
        scores = scores * (key_scale * softmax_scale)[None, :]
    if (CAPPED or SLOPED) and not SCALED:
        scores = scores * softmax_scale
    if CAPPED:
        scores = capped(scores, softcap)
    if SLOPED:
        scores = sloped(scores, slopes, keys, row_positions)
    if MASKED:
        visible = (keys[None, :] <= row_positions[:, None]) & (keys < end)[None, :]
        if WINDOWED:
            visible = visible & in_window(keys, row_positions, chunk_begin, window, WINDOWED)
        scores = tl.where(visible, scores, float("-inf"))
    # Scores that nothing else changes are scaled as the peak is subtracted, in one instruction; the scale is positive.
    is_scaled: tl.constexpr = SCALED or CAPPED or SLOPED
    new_peak = tl.maximum(peak, tl.max(scores, 1) if is_scaled else tl.max(scores, 1) * softmax_scale)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet
    weights = tl.exp2((scores if is_scaled else scores * softmax_scale) - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    if SCALED:
        weights = weights * value_scale[None, :]
    mixed = _dot(weights.to(query.dtype), value.to(query.dtype), WIDE)
    return accumulated * fade[:, None] + mixed, new_peak, total


@kernel("block_tables", "table_stride")
def attend(
    query,  # [T, Hq, D]
    cache,  # one layer of the paged cache, [N, 2, Hkv, block_tokens, D]
    scales,  # float32 [N, 2, Hkv, block_tokens], if SCALED; may be interleaved with the rows of the cache
    block_tables,  # int32 [B, M]
    pieces,  # int32 [>= num_pieces, PIECE_FIELDS]
    num_pieces,  # int32 [1]
    output,  # [T, Hq, D]
    partial,  # float32 [rows, Hq, D]
    partial_lse,  # float32 [rows, Hq], base 2
    sinks,  # [Hq], if SINKS
    alibi_slopes,  # float32 [Hq], if SLOPED
    query_stride,
    block_stride,
    kv_stride,
    head_stride,
    row_stride,
    scale_block_stride,
    scale_kv_stride,
    scale_head_stride,
    scale_row_stride,
    table_stride,
    softmax_scale,
    window,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    ROW_UNIT: tl.constexpr,  # divides row_stride; tells the compiler how wide it may load
):
    """Programs take pieces in turn, with the heads of one piece adjacent because they read the same blocks."""
    softmax_scale = softmax_scale * _LOG2_E
    softcap = softcap * _LOG2_E
    row_stride = row_stride // ROW_UNIT * ROW_UNIT
    rows = tl.arange(0, TILE_TOKENS * GROUP_PAD)
    row_token, row_head = rows // GROUP_PAD, rows % GROUP_PAD
    dims = tl.arange(0, HEAD_PAD)
    for work in range(tl.program_id(0), tl.load(num_pieces) * NUM_KV_HEADS, tl.num_programs(0)):
        piece = pieces + (work // NUM_KV_HEADS) * _PIECE_FIELDS
        kv_head = work % NUM_KV_HEADS
        table = block_tables + tl.load(piece).to(tl.int64) * table_stride
        first, count = tl.load(piece + 1), tl.load(piece + 2)
        position = tl.load(piece + 3)
        begin, end = tl.load(piece + 4), tl.load(piece + 5)
        row = tl.load(piece + 6)

        heads = kv_head * GROUP + row_head
        row_ok = (row_token < count) & (row_head < GROUP)
        row_mask = row_ok[:, None] & (dims < HEAD_DIM)[None, :]
        at = (first + row_token).to(tl.int64)[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        rows_query = tl.load(query + at, mask=row_mask, other=0.0)
        row_positions = position + row_token
        slopes = tl.load(alibi_slopes + heads, mask=row_ok, other=0.0) * _LOG2_E if SLOPED else 0.0
        chunk_begin = position // -window * -window if WINDOWED < 0 else 0

        accumulated = tl.zeros([TILE_TOKENS * GROUP_PAD, HEAD_PAD], dtype=tl.float32)
        peak = tl.full([TILE_TOKENS * GROUP_PAD], float("-inf"), dtype=tl.float32)
        total = tl.zeros([TILE_TOKENS * GROUP_PAD], dtype=tl.float32)
        # Keys that every row sees need no mask: those up to the first query's own position, in whole iterations.
        whole = tl.maximum(tl.minimum(end, position + 1) - begin, 0) // KEYS * KEYS
        if WINDOWED > 0:
            whole = 0
        elif WINDOWED < 0:  # then a page before the chunk, or a part of it, is in the piece
            whole = tl.where(begin < chunk_begin, 0, whole)
        for start in range(begin, begin + whole, KEYS):
            accumulated, peak, total = _visit(
                rows_query, row_positions, chunk_begin, accumulated, peak, total, cache, scales, table, start, end,
                block_stride, kv_stride, kv_head * head_stride, row_stride,
                scale_block_stride, scale_kv_stride, kv_head * scale_head_stride, scale_row_stride,
                softmax_scale, window, softcap, slopes,
                HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, KEYS, False, WINDOWED, CAPPED, SLOPED, SCALED, WIDE,
            )  # fmt: skip
        for start in range(begin + whole, end, KEYS):
            accumulated, peak, total = _visit(
                rows_query, row_positions, chunk_begin, accumulated, peak, total, cache, scales, table, start, end,
                block_stride, kv_stride, kv_head * head_stride, row_stride,
                scale_block_stride, scale_kv_stride, kv_head * scale_head_stride, scale_row_stride,
                softmax_scale, window, softcap, slopes,
                HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, KEYS, True, WINDOWED, CAPPED, SLOPED, SCALED, WIDE,
            )  # fmt: skip

        put(
            accumulated / divisor(peak, total, row, sinks, heads, row_ok, SINKS)[:, None], peak, total,
            first, row, row_token, heads, row_ok, row_mask, output, partial, partial_lse,
            NUM_KV_HEADS * GROUP, HEAD_DIM, HEAD_PAD,
        )  # fmt: skip


@kernel()
def merge(
    partial,  # float32 [rows, Hq, D]
    partial_lse,  # float32 [rows, Hq]
    merge_tokens,  # int32 [tokens to merge]
    merge_starts,  # int32 [tokens to merge + 1]
    merge_rows,  # int32
    num_tokens,  # int32 [1]
    sinks,  # [Hq], if SINKS
    output,  # [T, Hq, D]
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,  # loaded at a time: loaded one by one, each would be waited for
):
    """``sum(2^lse_i · o_i) / sum(2^lse_i)`` over the parts of each token and head, in the plan's order."""
    dims = tl.arange(0, HEAD_PAD)
    dim_ok = dims < HEAD_DIM
    for work in range(tl.program_id(0), tl.load(num_tokens) * NUM_HEADS, tl.num_programs(0)):
        index, head = work // NUM_HEADS, work % NUM_HEADS
        accumulated = tl.zeros([HEAD_PAD], dtype=tl.float32)
        peak = tl.full([1], float("-inf"), dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        last = tl.load(merge_starts + index + 1)
        for start in range(tl.load(merge_starts + index), last, PARTS):
            entries = start + tl.arange(0, PARTS)
            given = entries < last
            parts = tl.load(merge_rows + entries, mask=given, other=0).to(tl.int64) * NUM_HEADS + head
            lse = tl.load(partial_lse + parts, mask=given, other=float("-inf"))
            loaded = given[:, None] & dim_ok[None, :]
            values = tl.load(partial + parts[:, None] * HEAD_DIM + dims[None, :], mask=loaded, other=0.0)
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            fade, weights = tl.exp2(peak - base), tl.exp2(lse - base)
            accumulated = accumulated * fade + tl.sum(values * weights[:, None], 0)
            total = total * fade + tl.sum(weights, 0)
            peak = new_peak
        if SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2_E - peak)
        result = accumulated / tl.where(total == 0.0, 1.0, total)
        at = (tl.load(merge_tokens + index).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
        tl.store(output + at + dims, result.to(output.dtype.element_ty), mask=dim_ok)
