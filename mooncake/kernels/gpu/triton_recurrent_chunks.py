"""The layers of ``recurrent`` for prompts, in Triton: a chunk of tokens at once, as matrix products.

The gated delta rule is in the WY form (Yang et al. 2024, arXiv 2406.06484 and 2412.06464): in a chunk that begins with
the state S, token t writes k_t ⊗ e_t, and with g_tj the sum of decays behind j up to t

    (I + A) E = β (V - exp(g) K S),  A_tj = β_t exp(g_tj) k_t·k_j for j < t,

so that E = U - W S, where U and W need no state. What tokens read and what is left of S are then as in a state space,
whose chunks (Dao and Gu 2024, arXiv 2405.21060, section 6) have E = step x. ``score`` and ``solve`` compute what needs
no state, a program a chunk; ``walk`` goes from chunk to chunk, a program for some columns of one head's matrix.

Sums of decays are products with ones, not differences of sums from the chunk's begin: they are as exact where much is
forgotten, and none is above 0. Products are float32's, of three tensor core products each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mooncake.kernels.gpu.triton_launch import kernel
from mooncake.kernels.gpu.triton_recurrent import continues, convolved

_TF32 = tl.constexpr(-1 << 13)  # the bits of a float32 that tensor cores multiply


@triton.jit
def _split(numbers):
    """A number as the sum of what tensor cores can multiply, and of what they may lose a millionth of."""
    high = (numbers.to(tl.int32, bitcast=True) & _TF32).to(tl.float32, bitcast=True)
    return high, numbers - high


@triton.jit
def _multiplied(left, right, sums):
    return tl.dot(left, right, sums, input_precision="tf32")


@triton.jit
def _product(left, right):
    left_high, left_low = _split(left)
    right_high, right_low = _split(right)
    small = _multiplied(left_low, right_high, _multiplied(left_high, right_low, None))
    return _multiplied(left_high, right_high, small)


@triton.jit
def _decays(at, ok):
    """e^-100 is nothing, and what is more has a sum."""
    return tl.maximum(tl.load(at, mask=ok, other=0.0), -100.0)


@triton.jit
def _sums_of(of_token, CHUNK: tl.constexpr):
    """[CHUNK, CHUNK]: of the tokens behind the column's, up to the row's."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    high, low = _split(tl.where(row > column, of_token[:, None], 0.0))
    ones = tl.where(row >= column, 1.0, 0.0)
    return tl.where(row >= column, _multiplied(ones, high, _multiplied(ones, low, None)), float("-inf"))


@kernel()
def convolve_chunks(
    inputs,  # float32 [T, C]
    taps,  # float32 [TAPS, C]
    bias,  # float32 [C], if HAS_BIAS
    states,  # float32 [N, ...]: a page's state begins with the last inputs, [TAPS - 1, C]
    spans,  # int64 [chunks, 4]
    output,  # float32 [T, C]
    channels,
    state_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a program
):
    """Reads states and writes none."""
    span = spans + tl.program_id(0) * 4
    first, end, begin, source = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    token = first + tl.arange(0, CHUNK)[:, None]
    ok = (token < end) & (channel < channels)
    kept = states + source * state_stride + (TAPS - 1 - begin) * channels + channel
    mixed = convolved(inputs, taps, bias, kept, token, ok, begin, source, channel, channels, TAPS, HAS_BIAS, HAS_SILU)
    tl.store(output + token * channels + channel, mixed, mask=ok)


@kernel("num_tokens")
def score(
    mixed,  # float32 [T, C]: what is behind the convolution
    spans,  # int64 [chunks, 4]
    scores,  # float32 [T, NUM_HEADS // OF_KEY, CHUNK]
    scales,  # float32 [2, T, NUM_HEADS // OF_KEY]: what queries and keys are multiplied by
    num_tokens,
    channels,
    eps,
    QUERY_AT: tl.constexpr,  # where each begins in C
    KEY_AT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    OF_KEY: tl.constexpr,  # heads that share keys and queries
    KEY_DIM: tl.constexpr,
    PART: tl.constexpr,  # of a key at once
    IS_DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each token's query with the keys of the tokens of its chunk."""
    span, head = spans + tl.program_id(0) * 4, tl.program_id(1)
    token = tl.load(span) + tl.arange(0, CHUNK)
    ok = token < tl.load(span + 1)
    row = mixed + token[:, None] * channels + head * KEY_DIM
    result = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    query_squares, key_squares = tl.full([CHUNK], eps, dtype=tl.float32), tl.full([CHUNK], eps, dtype=tl.float32)
    for begin in range(0, KEY_DIM, PART):
        keys = begin + tl.arange(0, PART)[None, :]
        given = ok[:, None] & (keys < KEY_DIM)
        query = tl.load(row + QUERY_AT + keys, mask=given, other=0.0)
        key = tl.load(row + KEY_AT + keys, mask=given, other=0.0)
        result += _product(query, tl.trans(key))
        if IS_DELTA:
            query_squares += tl.sum(query * query, 1)
            key_squares += tl.sum(key * key, 1)
    at = token * (NUM_HEADS // OF_KEY) + head
    if IS_DELTA:
        query_scale, key_scale = tl.rsqrt(query_squares) * KEY_DIM**-0.5, tl.rsqrt(key_squares)
        tl.store(scales + at, query_scale, mask=ok)
        tl.store(scales + num_tokens * (NUM_HEADS // OF_KEY) + at, key_scale, mask=ok)
        result = result * query_scale[:, None] * key_scale[None, :]
    tl.store(scores + at[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :], result, mask=ok[:, None])


@triton.jit
def _inverse(strict, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """Of I + ``strict``, which is strictly lower triangular.

    From the inverses of blocks to those of blocks of twice the size, so all that is computed is a part of the result:
    a series of powers would cancel numbers of many digits where keys are alike.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    result = tl.where(row == column, 1.0, 0.0) - tl.where((row >> 1) == (column >> 1), strict, 0.0)
    for doubled in range(1, LEVELS):
        joins = ((row >> doubled) > (column >> doubled)) & ((row >> (doubled + 1)) == (column >> (doubled + 1)))
        result -= _product(_product(result, tl.where(joins, strict, 0.0)), result)
    return result


@kernel("num_tokens")
def solve(
    mixed,  # float32 [T, C]
    decay,  # float32 [T, H]
    share,  # float32 [T, H]: beta
    scales,  # float32 [2, T, NUM_HEADS // OF_KEY]
    spans,  # int64 [chunks, 4]
    of_state,  # float32 [T, H, KEY_DIM]: W
    written,  # float32 [T, H, VALUE_DIM]: U
    num_tokens,
    channels,
    KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    OF_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PART: tl.constexpr,  # of a key or value at once
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # CHUNK is 2 to the power of that
):
    span, head = spans + tl.program_id(0) * 4, tl.program_id(1)
    token = tl.load(span) + tl.arange(0, CHUNK)
    ok = token < tl.load(span + 1)
    key_row = mixed + KEY_AT + token[:, None] * channels + head // OF_KEY * KEY_DIM
    alike = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for begin in range(0, KEY_DIM, PART):
        keys = begin + tl.arange(0, PART)[None, :]
        key = tl.load(key_row + keys, mask=ok[:, None] & (keys < KEY_DIM), other=0.0)
        alike += _product(key, tl.trans(key))
    scale = tl.load(scales + (num_tokens + token) * (NUM_HEADS // OF_KEY) + head // OF_KEY, mask=ok, other=0.0)
    part = tl.load(share + token * NUM_HEADS + head, mask=ok, other=0.0)
    of_token = _decays(decay + token * NUM_HEADS + head, ok)
    alike *= tl.exp(_sums_of(of_token, CHUNK)) * (part * scale)[:, None] * scale[None, :]
    is_before = tl.arange(0, CHUNK)[:, None] > tl.arange(0, CHUNK)[None, :]
    inverse = _inverse(tl.where(is_before, alike, 0.0), CHUNK, LEVELS)
    of_keys = inverse * (part * scale * tl.exp(tl.cumsum(of_token, 0)))[None, :]
    of_values = inverse * part[None, :]
    row = token[:, None] * NUM_HEADS + head
    for begin in range(0, KEY_DIM, PART):
        keys = begin + tl.arange(0, PART)[None, :]
        given = ok[:, None] & (keys < KEY_DIM)
        key = tl.load(key_row + keys, mask=given, other=0.0)
        tl.store(of_state + row * KEY_DIM + keys, _product(of_keys, key), mask=given)
    value_row = mixed + VALUE_AT + token[:, None] * channels + head * VALUE_DIM
    for begin in range(0, VALUE_DIM, PART):
        column = begin + tl.arange(0, PART)[None, :]
        given = ok[:, None] & (column < VALUE_DIM)
        value = tl.load(value_row + column, mask=given, other=0.0)
        tl.store(written + row * VALUE_DIM + column, _product(of_values, value), mask=given)


@kernel("num_runs", "num_few", "num_tokens")
def walk(
    mixed,  # float32 [T, C]
    decay,  # float32 [T, H]
    share,  # float32 [T, H]: the step of a state space
    skip,  # float32 [H], of a state space
    scores,  # float32 [T, NUM_HEADS // OF_KEY, CHUNK]
    scales,  # float32 [2, T, NUM_HEADS // OF_KEY], of the delta rule
    of_state,  # float32 [T, H, KEY_DIM], of the delta rule
    written,  # float32 [T, H, VALUE_DIM], of the delta rule
    states,  # float32 [N, ...]: behind TAIL numbers, a page's state is a matrix per head, [KEY_DIM, VALUE_DIM]
    starts,  # int64 [R + 1]
    sources,  # int64 [R]
    targets,
    chains,  # int64 [chains]: those behind num_few
    output,  # float32 [T, H, VALUE_DIM]
    num_runs,
    num_few,
    num_tokens,
    channels,
    state_stride,
    TAIL: tl.constexpr,
    QUERY_AT: tl.constexpr,
    KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    OF_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # of a key
    COLUMNS: tl.constexpr,  # of a program
    IS_DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
):
    run, head = tl.load(chains + num_few + tl.program_id(0)), tl.program_id(1)
    keys, within = tl.arange(0, PART), tl.arange(0, CHUNK)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    column_ok = columns < VALUE_DIM
    numbers = TAIL + (head * KEY_DIM + keys)[:, None] * VALUE_DIM + columns
    source = tl.load(sources + run)
    matrix = ()  # rows of PART keys each
    for part in tl.static_range(PARTS):
        held = (part * PART + keys < KEY_DIM)[:, None] & column_ok & (source >= 0)
        place = states + source * state_stride + part * PART * VALUE_DIM + numbers
        matrix = matrix + (tl.load(place, mask=held, other=0.0),)  # noqa: RUF005  # Triton has no other way
    key_heads: tl.constexpr = NUM_HEADS // OF_KEY
    row, key_head = within[:, None], head // OF_KEY
    key_at, value_at = row * channels + keys[None, :], row * (NUM_HEADS * VALUE_DIM) + columns
    walks = run < num_runs
    while walks:
        end = tl.load(starts + run + 1)
        for first in range(tl.load(starts + run), end, CHUNK):
            count = end - first
            ok = within < count
            value_ok = ok[:, None] & column_ok
            decays, inputs = decay + first * NUM_HEADS + head, mixed + first * channels
            of_token = _decays(decays + within * NUM_HEADS, ok)
            follows = (within < CHUNK - 1) & (within + 1 < count)
            later = _decays(decays + (within + 1) * NUM_HEADS, follows)
            before, to_end = tl.exp(tl.cumsum(of_token, 0)), tl.exp(tl.cumsum(later, 0, reverse=True))
            left = tl.exp(tl.sum(of_token, 0))
            if IS_DELTA:
                scale_at = scales + first * key_heads + key_head + within * key_heads
                before *= tl.load(scale_at, mask=ok, other=0.0)
                to_end *= tl.load(scale_at + num_tokens * key_heads, mask=ok, other=0.0)
                of_head = first * NUM_HEADS + head
                wrote = tl.load(written + of_head * VALUE_DIM + value_at, mask=value_ok, other=0.0)
            else:
                value_row = inputs + VALUE_AT + head * VALUE_DIM + row * channels + columns
                value = tl.load(value_row, mask=value_ok, other=0.0)
                share_at = share + first * NUM_HEADS + head + within * NUM_HEADS
                wrote = value * tl.load(share_at, mask=ok, other=0.0)[:, None]
            read = tl.zeros([CHUNK, COLUMNS], dtype=tl.float32)
            for part in tl.static_range(PARTS):
                given = ok[:, None] & (part * PART + keys < KEY_DIM)[None, :]
                if IS_DELTA:
                    kept_at = of_state + of_head * KEY_DIM + part * PART + row * (NUM_HEADS * KEY_DIM) + keys[None, :]
                    wrote -= _product(tl.load(kept_at, mask=given, other=0.0), matrix[part])
                query_at = inputs + QUERY_AT + key_head * KEY_DIM + part * PART + key_at
                read += _product(tl.load(query_at, mask=given, other=0.0), matrix[part])
            score_at = scores + (first * key_heads + key_head) * CHUNK + row * (key_heads * CHUNK) + within[None, :]
            weights = tl.load(score_at, mask=ok[:, None], other=0.0) * tl.exp(_sums_of(of_token, CHUNK))
            read = read * before[:, None] + _product(weights, wrote)
            if not IS_DELTA:
                read += tl.load(skip + head) * value
            tl.store(output + (first * NUM_HEADS + head) * VALUE_DIM + value_at, read, mask=value_ok)
            wrote *= to_end[:, None]
            changed = ()
            for part in tl.static_range(PARTS):
                given = ok[:, None] & (part * PART + keys < KEY_DIM)[None, :]
                key = tl.load(inputs + KEY_AT + key_head * KEY_DIM + part * PART + key_at, mask=given, other=0.0)
                changed = changed + (matrix[part] * left + _product(tl.trans(key), wrote),)  # noqa: RUF005
            matrix = changed
        target = tl.load(targets + run)
        tl.debug_barrier()  # all have read what may be overwritten
        for part in tl.static_range(PARTS):
            held = (part * PART + keys < KEY_DIM)[:, None] & column_ok & (target >= 0)
            place = states + target * state_stride + part * PART * VALUE_DIM + numbers
            tl.store(place, matrix[part], mask=held)
        run += 1
        walks = continues(sources, targets, run, num_runs)
