"""Paged attention over int8 pages for few query rows, in Triton: a cheaper ``triton_attention.attend``.

A decode step over int8 pages waits for half as many bytes but computes the same products, so the number of instructions
per byte matters. Codes are loaded two at a time, as a 16-bit number with an even and an odd dimension. Such pairs come
out of shared memory in the layout that matrix units want for 16-bit operands, and five instructions turn four codes
into two float16 pairs (converting codes one by one to bfloat16 took thirteen). For the same reason queries and sums are
split into even and odd dimensions.

Codes are multiplied by a key's weight times its value's scale, in float16, which cannot represent numbers below 6e-8.
So the running peak is not that of the scores ``s`` but of ``s + log2 scale``: the largest of those products is near
2^14 for any scales, and the weights themselves stay float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mooncake.kernels.gpu.attention_plan import PIECE_FIELDS
from mooncake.kernels.gpu.triton_attention import capped, divisor, in_window, pages_of, product, put, sloped
from mooncake.kernels.gpu.triton_launch import kernel

_PIECE_FIELDS = tl.constexpr(PIECE_FIELDS)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_LOG2 = tl.constexpr(-90.0)  # for values that are all zeros: the sums of their keys' weights stay within float32
_SPREAD = tl.constexpr(14.0)  # float16 has more room above 1 than below: the heaviest key weighs 2^14

_UNPACK = tl.constexpr("""{
.reg .b32 odd, even, bias;
mov.b32 bias, 0x64806480;
lop3.b32 even, $2, 0x00ff00ff, bias, 0x6a;
shr.u32 odd, $2, 8;
lop3.b32 odd, odd, 0x00ff00ff, bias, 0x6a;
sub.rn.f16x2 $0, even, bias;
sub.rn.f16x2 $1, odd, bias;
}""")
"""Converts two pairs: byte x with its sign bit flipped, as the mantissa of the float16 number 1024, gives 1152 + x."""


@triton.jit
def _unpacked(pairs, WIDE: tl.constexpr):
    """The low and the high byte of each int16 as signed numbers, in float16 (``WIDE``: float32)."""
    if WIDE:
        even, odd = ((pairs << 8) >> 8).to(tl.float32), (pairs >> 8).to(tl.float32)
    else:
        even, odd = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return even, odd


@triton.jit
def _about_log2(scale):
    """log2 to within 0.1, from the bits of the float32: its exponent plus its mantissa as a fraction."""
    bits = scale.to(tl.int32, bitcast=True).to(tl.float32)
    return tl.maximum(bits * (1.0 / (1 << 23)) - 127.0, _LEAST_LOG2)


@triton.jit
def _visit_codes(
    query_even,
    query_odd,
    row_positions,
    chunk_begin,
    even,
    odd,
    peak,
    total,
    cache,
    scales,
    table,
    start,
    end,
    block_stride,
    head_offset,
    scale_block_stride,
    scale_head_offset,
    window,
    softcap,
    slopes,
    KV_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SCALE_KV_STRIDE: tl.constexpr,
    SCALE_ROW_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """As ``triton_attention._visit``, for queries already scaled."""
    keys = start + tl.arange(0, KEYS)
    halves = tl.arange(0, HALF_PAD)
    if BLOCK_TOKENS % KEYS == 0:
        page = tl.load(table + start // BLOCK_TOKENS).to(tl.int64)
        one = start % BLOCK_TOKENS
        cache += page * block_stride + head_offset + one * ROW_STRIDE
        scales += page * scale_block_stride + scale_head_offset + one * SCALE_ROW_STRIDE
        behind = tl.arange(0, KEYS).to(tl.int64)
        at = behind[:, None] * ROW_STRIDE + halves[None, :]
        scale_at = behind * SCALE_ROW_STRIDE
    else:
        pages = pages_of(table, start, end, BLOCK_TOKENS, KEYS, MASKED)
        in_page = (keys % BLOCK_TOKENS).to(tl.int64)
        at = pages[:, None] * block_stride + head_offset + in_page[:, None] * ROW_STRIDE + halves[None, :]
        scale_at = pages * scale_block_stride + scale_head_offset + in_page * SCALE_ROW_STRIDE
    if MASKED or HALF_PAD != HALF:
        loaded = (keys < end)[:, None] & (halves < HALF)[None, :]
        key = tl.load(cache + at, mask=loaded, other=0)
        value = tl.load(cache + at + KV_STRIDE, mask=loaded, other=0)
    else:
        key = tl.load(cache + at)
        value = tl.load(cache + at + KV_STRIDE)
    if MASKED:
        key_scale = tl.load(scales + scale_at, mask=keys < end, other=0.0)
        value_scale = tl.load(scales + scale_at + SCALE_KV_STRIDE, mask=keys < end, other=1.0)
    else:
        key_scale = tl.load(scales + scale_at)
        value_scale = tl.load(scales + scale_at + SCALE_KV_STRIDE)

    key_even, key_odd = _unpacked(key, WIDE)
    scores = tl.zeros([query_even.shape[0], KEYS], dtype=tl.float32)
    scores = product(query_even, tl.trans(key_even), scores, WIDE)
    scores = product(query_odd, tl.trans(key_odd), scores, WIDE) * key_scale[None, :]
    if CAPPED:
        scores = capped(scores, softcap)
    if SLOPED:
        scores = sloped(scores, slopes, keys, row_positions)
    if MASKED:
        visible = (keys[None, :] <= row_positions[:, None]) & (keys < end)[None, :]
        if WINDOWED:
            visible = visible & in_window(keys, row_positions, chunk_begin, window, WINDOWED)
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores + _about_log2(value_scale)[None, :], 1) - _SPREAD)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade[:, None] + weights  # summed after the loop: here each iteration would wait for it
    value_even, value_odd = _unpacked(value, WIDE)
    weights = (weights * value_scale[None, :]).to(value_even.dtype)
    even = product(weights, value_even, even * fade[:, None], WIDE)
    odd = product(weights, value_odd, odd * fade[:, None], WIDE)
    return even, odd, new_peak, total


@kernel("block_tables", "table_stride")
def attend_codes(
    query,  # [T, Hq, D]
    cache,  # one layer of the paged cache as pairs of codes, int16 [N, 2, Hkv, block_tokens, D / 2]
    scales,  # float32 [N, 2, Hkv, block_tokens]; may be interleaved with the rows of the cache
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
    head_stride,
    scale_block_stride,
    scale_head_stride,
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
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,  # the same in all pages, so that a thread's loads differ by a constant
    ROW_STRIDE: tl.constexpr,
    SCALE_KV_STRIDE: tl.constexpr,
    SCALE_ROW_STRIDE: tl.constexpr,
):
    """Programs take pieces in turn, as in ``triton_attention.attend``."""
    softcap = softcap * _LOG2_E
    rows = tl.arange(0, TILE_TOKENS * GROUP_PAD)
    row_token, row_head = rows // GROUP_PAD, rows % GROUP_PAD
    half: tl.constexpr = HEAD_DIM // 2
    half_pad: tl.constexpr = HEAD_PAD // 2
    halves, dims = tl.arange(0, half_pad), tl.arange(0, HEAD_PAD)
    kind: tl.constexpr = tl.float32 if WIDE else tl.float16
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
        given = row_ok[:, None] & (halves < half)[None, :]
        at = (first + row_token).to(tl.int64)[:, None] * query_stride + heads[:, None] * HEAD_DIM + 2 * halves[None, :]
        query_even = (tl.load(query + at, mask=given, other=0.0).to(tl.float32) * (softmax_scale * _LOG2_E)).to(kind)
        query_odd = (tl.load(query + at + 1, mask=given, other=0.0).to(tl.float32) * (softmax_scale * _LOG2_E)).to(kind)
        row_positions = position + row_token
        slopes = tl.load(alibi_slopes + heads, mask=row_ok, other=0.0) * _LOG2_E if SLOPED else 0.0
        chunk_begin = position // -window * -window if WINDOWED < 0 else 0

        even = tl.zeros([TILE_TOKENS * GROUP_PAD, half_pad], dtype=tl.float32)
        odd = tl.zeros([TILE_TOKENS * GROUP_PAD, half_pad], dtype=tl.float32)
        peak = tl.full([TILE_TOKENS * GROUP_PAD], float("-inf"), dtype=tl.float32)
        weights = tl.zeros([TILE_TOKENS * GROUP_PAD, KEYS], dtype=tl.float32)
        whole = tl.maximum(tl.minimum(end, position + 1) - begin, 0) // KEYS * KEYS
        if WINDOWED > 0:
            whole = 0
        elif WINDOWED < 0:  # then a page before the chunk, or a part of it, is in the piece
            whole = tl.where(begin < chunk_begin, 0, whole)
        for start in range(begin, begin + whole, KEYS):
            even, odd, peak, weights = _visit_codes(
                query_even, query_odd, row_positions, chunk_begin, even, odd, peak, weights, cache, scales, table,
                start, end, block_stride, kv_head * head_stride, scale_block_stride, kv_head * scale_head_stride,
                window, softcap, slopes, KV_STRIDE, ROW_STRIDE, SCALE_KV_STRIDE, SCALE_ROW_STRIDE,
                half, half_pad, BLOCK_TOKENS, KEYS, False, WINDOWED, CAPPED, SLOPED, WIDE,
            )  # fmt: skip
        for start in range(begin + whole, end, KEYS):
            even, odd, peak, weights = _visit_codes(
                query_even, query_odd, row_positions, chunk_begin, even, odd, peak, weights, cache, scales, table,
                start, end, block_stride, kv_head * head_stride, scale_block_stride, kv_head * scale_head_stride,
                window, softcap, slopes, KV_STRIDE, ROW_STRIDE, SCALE_KV_STRIDE, SCALE_ROW_STRIDE,
                half, half_pad, BLOCK_TOKENS, KEYS, True, WINDOWED, CAPPED, SLOPED, WIDE,
            )  # fmt: skip

        total = tl.sum(weights, 1)
        row_mask = row_ok[:, None] & (dims < HEAD_DIM)[None, :]
        put(
            tl.interleave(even, odd) / divisor(peak, total, row, sinks, heads, row_ok, SINKS)[:, None], peak, total,
            first, row, row_token, heads, row_ok, row_mask, output, partial, partial_lse,
            NUM_KV_HEADS * GROUP, HEAD_DIM, HEAD_PAD,
        )  # fmt: skip
