"""The layers of ``recurrent`` in Triton: a short convolution, and behind one the gated delta rule or a state space.

A program has a part of a state for itself, some channels of the convolution's last inputs or some columns of one head's
matrix, and walks over the runs of a sequence, so that none reads what another one writes. It goes token by token: sums
have the same order in any batch and chunk. A target below 0 is written nowhere: such a run only pads a captured graph.
In steps with prompts (``recurrent_chunks``) it has the runs of few tokens, and keeps the last inputs of the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mooncake.kernels.gpu.triton_launch import kernel


@triton.jit
def continues(sources, targets, run, num_runs):
    """Whether the run reads what the one before it writes, so that the same programs compute both."""
    source = tl.load(sources + run, mask=run < num_runs, other=-1)
    before = tl.load(targets + run - 1, mask=(run > 0) & (run < num_runs), other=-2)
    return (source >= 0) & (source == before)


@triton.jit
def convolved(
    inputs,
    taps,
    bias,
    kept,  # inputs of tokens before ``begin``, by their number times ``channels``
    token,  # [TOKENS, 1]
    ok,  # [TOKENS, CHANNELS]
    begin,
    source,  # below 0: inputs before ``begin`` are 0
    channel,  # [1, CHANNELS]
    channels,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    inside = channel < channels
    mixed = tl.zeros(ok.shape, dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = token + (tap + 1 - TAPS)
        given = tl.load(inputs + at * channels + channel, mask=ok & (at >= begin), other=0.0)
        before = tl.load(kept + at * channels, mask=ok & (at < begin) & (source >= 0), other=0.0)
        weight = tl.load(taps + tap * channels + channel, mask=inside, other=0.0)
        mixed += tl.where(at < begin, before, given) * weight
    if HAS_BIAS:
        mixed += tl.load(bias + channel, mask=inside, other=0.0)
    if HAS_SILU:
        mixed = mixed / (1.0 + tl.exp(-mixed))
    return mixed


@kernel("num_runs", "num_few")
def convolve(
    inputs,  # float32 [T, C]
    taps,  # float32 [TAPS, C]
    bias,  # float32 [C], if HAS_BIAS
    states,  # float32 [N, ...]: a page's state begins with the last inputs, [TAPS - 1, C]
    starts,  # int64 [R + 1]
    sources,  # int64 [R]
    targets,
    chains,  # int64 [programs]: the first run of each, if LISTED
    output,  # float32 [T, C]
    num_runs,
    num_few,  # of the chains, if LISTED: the others have their outputs from elsewhere
    channels,
    state_stride,
    TAPS: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    LISTED: tl.constexpr,
    TOKENS: tl.constexpr,  # at once
    CHANNELS: tl.constexpr,  # of a program
):
    run = tl.program_id(0).to(tl.int64)
    if LISTED:
        run = tl.load(chains + run)
    elif continues(sources, targets, run, num_runs):
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = channel < channels
    walks = run < num_runs
    while walks:
        first = tl.load(starts + run)
        end = tl.load(starts + run + 1)
        source = tl.load(sources + run)
        target = tl.load(targets + run)
        # the input of a token before ``first``, by the token's number
        kept = states + source * state_stride + (TAPS - 1 - first) * channels + channel
        mixed_end = tl.where(tl.program_id(0) < num_few, end, first) if LISTED else end
        for begin in range(first, mixed_end, TOKENS):
            token = begin + tl.arange(0, TOKENS)[:, None]
            ok = (token < end) & inside
            mixed = convolved(
                inputs, taps, bias, kept, token, ok, first, source, channel, channels, TAPS, HAS_BIAS, HAS_SILU
            )
            tl.store(output + token * channels + channel, mixed, mask=ok)
        row = tl.arange(0, TAIL_PAD)[:, None]
        at = end + 1 - TAPS + row
        ok = (row < TAPS - 1) & inside
        given = tl.load(inputs + at * channels + channel, mask=ok & (at >= first), other=0.0)
        before = tl.load(kept + at * channels, mask=ok & (at < first) & (source >= 0), other=0.0)
        last = tl.where(at < first, before, given)
        tl.debug_barrier()  # all have read what may be overwritten,
        tl.store(states + target * state_stride + row * channels + channel, last, mask=ok & (target >= 0))
        tl.debug_barrier()  # and what the next run reads is written
        run += 1
        walks = continues(sources, targets, run, num_runs)


@kernel("num_runs")
def recur(
    mixed,  # float32 [T, C]: what is behind the convolution
    decay,  # float32 [T, H]
    share,  # float32 [T, H]: beta, or the step
    skip,  # float32 [H], of a state space
    states,  # float32 [N, ...]: behind TAIL numbers, a page's state is a matrix per head, [KEY_DIM, VALUE_DIM]
    starts,  # int64 [R + 1]
    sources,  # int64 [R]
    targets,
    chains,  # int64 [programs]: the first run of each, if LISTED
    output,  # float32 [T, H, VALUE_DIM]
    num_runs,
    channels,
    state_stride,
    eps,
    TAIL: tl.constexpr,
    QUERY_AT: tl.constexpr,  # where each of the three begins in C
    KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    OF_KEY: tl.constexpr,  # heads that share keys and queries
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program
    IS_DELTA: tl.constexpr,
    LISTED: tl.constexpr,
):
    run = tl.program_id(0).to(tl.int64)
    if LISTED:
        run = tl.load(chains + run)
    elif continues(sources, targets, run, num_runs):
        return
    head = tl.program_id(1)
    keys = tl.arange(0, KEY_PAD)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key_ok, column_ok = keys < KEY_DIM, columns < VALUE_DIM
    ok = key_ok[:, None] & column_ok[None, :]
    numbers = TAIL + (head * KEY_DIM + keys)[:, None] * VALUE_DIM + columns[None, :]
    key_at = mixed + KEY_AT + head // OF_KEY * KEY_DIM + keys
    query_at = mixed + QUERY_AT + head // OF_KEY * KEY_DIM + keys
    value_at = mixed + VALUE_AT + head * VALUE_DIM + columns
    source = tl.load(sources + run)
    matrix = tl.load(states + source * state_stride + numbers, mask=ok & (source >= 0), other=0.0)
    walks = run < num_runs
    while walks:
        first = tl.load(starts + run)
        end = tl.load(starts + run + 1)
        key = tl.load(key_at + first * channels, mask=key_ok, other=0.0)
        query = tl.load(query_at + first * channels, mask=key_ok, other=0.0)
        value = tl.load(value_at + first * channels, mask=column_ok, other=0.0)
        part = tl.load(share + first * NUM_HEADS + head)
        left = tl.load(decay + first * NUM_HEADS + head)
        for token in range(first, end):
            # what the next token needs is on its way while this one is computed
            after = tl.minimum(token + 1, end - 1)
            next_key = tl.load(key_at + after * channels, mask=key_ok, other=0.0)
            next_query = tl.load(query_at + after * channels, mask=key_ok, other=0.0)
            next_value = tl.load(value_at + after * channels, mask=column_ok, other=0.0)
            next_part = tl.load(share + after * NUM_HEADS + head)
            next_left = tl.load(decay + after * NUM_HEADS + head)
            matrix = matrix * tl.exp(left)
            if IS_DELTA:
                key = key * tl.rsqrt(tl.sum(key * key, 0) + eps)
                query = query * (tl.rsqrt(tl.sum(query * query, 0) + eps) * KEY_DIM**-0.5)
                written = (value - tl.sum(matrix * key[:, None], 0)) * part
            else:
                written = value * part
            matrix = matrix + key[:, None] * written[None, :]
            read = tl.sum(matrix * query[:, None], 0)
            if not IS_DELTA:
                read += tl.load(skip + head) * value
            tl.store(output + (token * NUM_HEADS + head) * VALUE_DIM + columns, read, mask=column_ok)
            key, query, value, part, left = next_key, next_query, next_value, next_part, next_left
        target = tl.load(targets + run)
        tl.debug_barrier()  # all have read what may be overwritten
        tl.store(states + target * state_stride + numbers, matrix, mask=ok & (target >= 0))
        run += 1
        walks = continues(sources, targets, run, num_runs)
