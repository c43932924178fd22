"""Mixtures of experts in Triton: a product with the weights of all experts of a layer is one launch.

A *pair* is a token and one of its experts. ``sort_pairs`` sorts pairs by expert on the device: the host need not know
who chose whom. Products are divided into *tiles* of some rows of one expert. Each program finds its tile from where the
experts' pairs end, and the grid has as many tiles as any choice can need. Sums are float32. ``reference.Experts`` is
the definition, except that a token's experts are added in the order it chose them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mooncake.kernels.gpu.triton_launch import kernel


@kernel("pairs")
def sort_pairs(
    chosen,  # int64 [P]: each pair's expert
    order,  # int32 [P]: the pairs by expert, written
    ends,  # int32 [E]: where in ``order`` each expert's pairs end, written
    pairs,
    first,  # number of expert 0; pairs of experts held elsewhere are omitted
    BLOCK: tl.constexpr,
):
    """One program per expert: it counts the pairs of earlier experts, and writes its own after them."""
    expert = tl.program_id(0) + first
    place = 0
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        experts = tl.load(chosen + at, mask=at < pairs, other=1 << 30)
        place += tl.sum(((experts >= first) & (experts < expert)).to(tl.int32), 0)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        own = (tl.load(chosen + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - own, at, mask=own > 0)
        place += tl.sum(own, 0)
    tl.store(ends + tl.program_id(0), place)


@triton.jit
def _tile(ends, tile, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, ROWS: tl.constexpr):
    """The expert that ``tile`` belongs to, and where it begins and ends in the order; empty past the last tile."""
    experts = tl.arange(0, EXPERTS_PAD)
    known = experts < NUM_EXPERTS
    end = tl.load(ends + experts, mask=known, other=0)
    begin = tl.load(ends + experts - 1, mask=known & (experts > 0), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    is_it = experts == expert
    first = tl.sum(tl.where(is_it, begin + (tile - tiles_end + tiles) * ROWS, 0), 0)
    last = tl.minimum(first + ROWS, tl.sum(tl.where(is_it, end, 0), 0))
    return expert.to(tl.int64), first, last


@triton.jit
def _dot(rows, weights, WIDE: tl.constexpr):
    """``rows @ weights.T``; ``WIDE`` multiplies in float32: exact mode, and the interpreter (no bfloat16)."""
    if WIDE:
        return tl.dot(rows.to(tl.float32), tl.trans(weights).to(tl.float32), input_precision="ieee")
    return tl.dot(rows, tl.trans(weights))


@kernel()
def gate_and_up(
    hidden,  # [T, width]
    weight,  # [E, 2 * inner, width], gates above ups; if IS_RELU2 [E, inner, width], ups alone
    bias,  # [E, 2 * inner], if HAS_BIAS
    gated,  # [P, inner], in the order of the pairs, written
    order,
    ends,
    hidden_stride,
    width,
    inner,
    alpha,  # of a SwiGLU with bounds, if BOUNDED
    limit,
    PER_TOKEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_RELU2: tl.constexpr,
    WIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """SwiGLU of a tile's tokens, or what the arguments say in its place; some columns per program."""
    expert, first, last = _tile(ends, tl.program_id(1), NUM_EXPERTS, EXPERTS_PAD, ROWS)
    if first == last:
        return
    place = first + tl.arange(0, ROWS)
    row_ok = place < last
    token = tl.load(order + place, mask=row_ok, other=0) // PER_TOKEN
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < inner
    depth = tl.arange(0, DEPTH)
    rows_at = hidden + token.to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    first_up = expert * inner if IS_RELU2 else expert * (2 * inner) + inner
    ups_at = weight + (first_up + column)[:, None] * width + depth[None, :]
    gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, width, DEPTH):
        deep_ok = (start + depth < width)[None, :]
        rows = tl.load(rows_at + start, mask=row_ok[:, None] & deep_ok, other=0.0)
        ups = tl.load(ups_at + start, mask=column_ok[:, None] & deep_ok, other=0.0)
        if not IS_RELU2:
            gates = tl.load(ups_at - inner * width + start, mask=column_ok[:, None] & deep_ok, other=0.0)
            gate += _dot(rows, gates, WIDE)
        up += _dot(rows, ups, WIDE)
    if HAS_BIAS:
        bias_at = bias + expert * (2 * inner) + column
        gate += tl.load(bias_at, mask=column_ok, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_at + inner, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if BOUNDED:
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
        result = gate / (1.0 + tl.exp(-alpha * gate)) * up
    elif IS_GELU:  # with tanh, as in vectors.h
        result = gate / (1.0 + tl.exp(gate * (-1.5957691216057308 - 0.0713548162726 * gate * gate))) * up
    elif IS_RELU2:
        result = tl.maximum(up, 0.0) * tl.maximum(up, 0.0)
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    at = place.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(gated + at, result.to(gated.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@kernel()
def down(
    gated,  # [P, inner], in the order of the pairs
    weight,  # [E, width, inner]
    bias,  # [E, width], if HAS_BIAS
    shares,  # float32 [P]
    parts,  # [P, width]: one row per pair, written
    order,
    ends,
    inner,
    width,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The weighted contribution of a tile's pairs to their tokens; some columns per program."""
    expert, first, last = _tile(ends, tl.program_id(1), NUM_EXPERTS, EXPERTS_PAD, ROWS)
    if first == last:
        return
    place = first + tl.arange(0, ROWS)
    row_ok = place < last
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < width
    depth = tl.arange(0, DEPTH)
    rows_at = gated + place.to(tl.int64)[:, None] * inner + depth[None, :]
    weights_at = weight + (expert * width + column)[:, None] * inner + depth[None, :]
    result = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, inner, DEPTH):
        deep_ok = (start + depth < inner)[None, :]
        rows = tl.load(rows_at + start, mask=row_ok[:, None] & deep_ok, other=0.0)
        weights = tl.load(weights_at + start, mask=column_ok[:, None] & deep_ok, other=0.0)
        result += _dot(rows, weights, WIDE)
    if HAS_BIAS:
        result += tl.load(bias + expert * width + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order + place, mask=row_ok, other=0).to(tl.int64)
    result = result * tl.load(shares + pair, mask=row_ok, other=0.0)[:, None]
    at = pair[:, None] * width + column[None, :]
    tl.store(parts + at, result.to(parts.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@kernel()
def add_parts(
    parts,  # [T, k, width]
    output,  # [T, width]
    width,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each token's sum; a program computes ``BLOCK`` elements of one token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(PER_TOKEN):
        total += tl.load(parts + (token * PER_TOKEN + choice) * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * width + at, total.to(output.dtype.element_ty), mask=inside)
