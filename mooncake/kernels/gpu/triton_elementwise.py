"""Everything between the matrix products and attention, in Triton: norms, SiLU-mul, RoPE and cache write, page copies.

Each kernel makes one pass over its data; sums are float32. Shapes and meaning are those of ``reference``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mooncake.kernels.gpu.triton_launch import kernel


@kernel()
def add_rms_norm(
    residual,  # [T, width], written if HAS_UPDATE
    update,  # [T, width]
    weight,  # [width]
    output,  # [T, width]
    residual_stride,
    update_stride,
    width,
    eps,
    HAS_UPDATE: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """One program per token: ``residual += update`` if there is one, then its norm."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_PAD)
    inside = at < width
    kind: tl.constexpr = output.dtype.element_ty
    values = tl.load(residual + token * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        values = values + tl.load(update + token * update_stride + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(kind)
        tl.store(residual + token * residual_stride + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = (values * scale).to(kind).to(tl.float32)
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * width + at, (weights * normed).to(kind), mask=inside)


@kernel()
def silu_mul(gate_up, output, width, stride, BLOCK: tl.constexpr):
    """``silu(gate) * up`` of ``[T, 2 * width]``; a program computes ``BLOCK`` elements of one token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + token * width + at, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _head_norm(low, high, weight, halves, half_ok, HALF: tl.constexpr, eps, kind: tl.constexpr):
    """rms_norm over each head, held as its two halves ``[H, HALF]``."""
    mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)[:, None]
    low_weight = tl.load(weight + halves, mask=half_ok, other=0.0).to(tl.float32)[None, :]
    high_weight = tl.load(weight + HALF + halves, mask=half_ok, other=0.0).to(tl.float32)[None, :]
    low = ((low * scale).to(kind).to(tl.float32) * low_weight).to(kind).to(tl.float32)
    high = ((high * scale).to(kind).to(tl.float32) * high_weight).to(kind).to(tl.float32)
    return low, high


@triton.jit
def _rounded(x):
    """Round to the nearest integer, halves away from zero; written out because the interpreter has no ``rint``."""
    return tl.where(x < 0, tl.ceil(x - 0.5), tl.floor(x + 0.5))


@triton.jit
def _store_head(
    cache, scales, at, scale_at, low, high, halves, ok, head_ok, HALF: tl.constexpr, SCALED: tl.constexpr,
    MAX_CODE: tl.constexpr,
):  # fmt: skip
    """Write one token's keys or values to the cache, ``[H, HALF]`` twice; quantised with a scale per head if
    ``SCALED``."""
    if SCALED:
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        scale = largest / MAX_CODE
        inverse = tl.where(largest > 0, MAX_CODE / tl.where(largest > 0, largest, 1.0), 0.0)[:, None]
        tl.store(scales + scale_at, scale, mask=head_ok)
        low, high = low * inverse, high * inverse
        if cache.dtype.element_ty == tl.int8:
            low, high = _rounded(low), _rounded(high)
    kind: tl.constexpr = cache.dtype.element_ty
    tl.store(cache + at, low.to(kind), mask=ok)
    tl.store(cache + at + HALF, high.to(kind), mask=ok)


@kernel("positions", "slots")
def rope_write_kv(
    qkv,  # [T, (Hq + 2 Hkv) * D]: queries are rotated in place
    cos,  # float32 [P, D / 2]
    sin,
    positions,  # int64 [T]
    cache,  # one layer, [N, 2, Hkv, block_tokens, D]; of keys alone, [N, 1, ...], unless HAS_VALUES
    scales,  # float32 [N, 2, Hkv, block_tokens], if SCALED
    slots,  # int64 [T]
    query_norm,  # [D], if NORMED
    key_norm,
    eps,
    qkv_stride,
    block_stride,
    kv_stride,
    head_stride,
    row_stride,
    scale_block_stride,
    scale_kv_stride,
    scale_head_stride,
    scale_row_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # query heads per program
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    MAX_CODE: tl.constexpr,
):
    """Each program normalises and rotates some query heads of one token. The first one also does the token's keys, and
    writes them and the values to its slot.

    A negative slot marks a token that only pads a captured graph: nothing of it is stored in the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = qkv.dtype.element_ty
    halves = tl.arange(0, HALF_PAD)
    half_ok = halves < HALF
    position = tl.load(positions + token)
    cosine = tl.load(cos + position * HALF + halves, mask=half_ok, other=0.0)[None, :]
    sine = tl.load(sin + position * HALF + halves, mask=half_ok, other=0.0)[None, :]
    row = qkv + token * qkv_stride

    part = tl.program_id(1)
    heads = part * HEADS + tl.arange(0, HEADS)
    ok = (heads < NUM_HEADS)[:, None] & half_ok[None, :]
    at = heads[:, None] * (2 * HALF) + halves[None, :]
    low = tl.load(row + at, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(row + at + HALF, mask=ok, other=0.0).to(tl.float32)
    if NORMED:
        low, high = _head_norm(low, high, query_norm, halves, half_ok, HALF, eps, kind)
    low, high = low * cosine - high * sine, high * cosine + low * sine
    tl.store(row + at, low.to(kind), mask=ok)
    tl.store(row + at + HALF, high.to(kind), mask=ok)

    if part > 0:
        return

    slot = tl.load(slots + token)
    kv_heads = tl.arange(0, KV_HEADS_PAD)
    head_ok = tl.where(slot >= 0, kv_heads, NUM_KV_HEADS) < NUM_KV_HEADS
    ok = (kv_heads < NUM_KV_HEADS)[:, None] & half_ok[None, :]
    stored = head_ok[:, None] & half_ok[None, :]
    at = (NUM_HEADS + kv_heads)[:, None] * (2 * HALF) + halves[None, :]
    low = tl.load(row + at, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(row + at + HALF, mask=ok, other=0.0).to(tl.float32)
    if NORMED:
        low, high = _head_norm(low, high, key_norm, halves, half_ok, HALF, eps, kind)
    low, high = low * cosine - high * sine, high * cosine + low * sine
    low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    block, in_block = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    to = block * block_stride + kv_heads[:, None] * head_stride + in_block * row_stride + halves[None, :]
    scale_to = block * scale_block_stride + kv_heads * scale_head_stride + in_block * scale_row_stride
    _store_head(cache, scales, to, scale_to, low, high, halves, stored, head_ok, HALF, SCALED, MAX_CODE)

    if HAS_VALUES:
        at = at + NUM_KV_HEADS * (2 * HALF)
        low = tl.load(row + at, mask=ok, other=0.0).to(tl.float32)
        high = tl.load(row + at + HALF, mask=ok, other=0.0).to(tl.float32)
        to, scale_to = to + kv_stride, scale_to + scale_kv_stride
        _store_head(cache, scales, to, scale_to, low, high, halves, stored, head_ok, HALF, SCALED, MAX_CODE)


@kernel("num_pages")
def copy_pages(
    source,  # int64 words
    target,
    source_pages,  # int64 [num_pages]: which page is copied
    target_pages,  # int64 [num_pages]: where to
    num_pages,
    source_stride,  # words from page to page
    target_stride,
    page_words,
    BLOCK: tl.constexpr,
):
    """Copy scattered pages with a few programs: between pinned host memory and the GPU, or inside either.

    With thousands of small copies the copy engine reaches a fraction of the link's bandwidth; a handful of
    multiprocessors saturate it.
    """
    parts = tl.cdiv(page_words, BLOCK)
    for work in range(tl.program_id(0), num_pages * parts, tl.num_programs(0)):
        page, part = work // parts, work % parts
        at = part * BLOCK + tl.arange(0, BLOCK)
        inside = at < page_words
        here = source + tl.load(source_pages + page) * source_stride
        there = target + tl.load(target_pages + page) * target_stride
        tl.store(there + at, tl.load(here + at, mask=inside), mask=inside)


@kernel()
def quantise_rows(rows, codes, scales, width, stride, WIDTH_PAD: tl.constexpr):
    """int8 codes and one float32 scale per row, ``max|x| / 127``: the activations of W8A8."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_PAD)
    inside = at < width
    values = tl.load(rows + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    inverse = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    tl.store(codes + token * width + at, _rounded(values * inverse).to(tl.int8), mask=inside)
    tl.store(scales + token, largest / 127.0)
