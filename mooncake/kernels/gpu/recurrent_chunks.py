"""Host side of ``triton_recurrent_chunks``: what is behind the convolution, for chains of many tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from mooncake.kernels.gpu import triton_recurrent_chunks as kernels
from mooncake.kernels.recurrent import L2_EPS, Runs
from mooncake.kernels.recurrent_chunks import CHUNK_TOKENS

PART, COLUMNS = 32, 64  # of keys at once, and of a head's matrix that a program has
WARPS, WALKING_WARPS = 2, 8  # of products of 32 rows and columns; of ``walk``: 8 columns each
STAGES = 2  # one chunk is on its way while another is computed


def recur_in_chunks(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    share: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    runs: Runs,
    output: torch.Tensor,
    constants: Mapping[str, int],
) -> None:
    """Writes rows of ``output`` [T, H * Dv], and states. ``constants``: those of ``walk`` that a model has."""
    chunks, tokens, channels = runs.chunks, *mixed.shape
    assert chunks is not None
    num_heads, key_dim, value_dim = (constants[name] for name in ("NUM_HEADS", "KEY_DIM", "VALUE_DIM"))
    num_key_heads = num_heads // constants["OF_KEY"]
    of_chunk = {"PART": PART, "CHUNK": CHUNK_TOKENS, "num_stages": STAGES}
    scores = mixed.new_empty((tokens, num_key_heads, CHUNK_TOKENS))
    scales = mixed.new_empty((2, tokens, num_key_heads))
    kernels.score[(len(chunks.spans), num_key_heads)](
        mixed,
        chunks.spans,
        scores,
        scales,
        tokens,
        channels,
        L2_EPS,
        **of_score(constants),
        **of_chunk,
        num_warps=WARPS,
    )
    of_state = written = scores
    if constants["IS_DELTA"]:
        of_state, written = (mixed.new_empty((tokens, num_heads, size)) for size in (key_dim, value_dim))
        rows = (mixed, decay, share, scales, chunks.spans, of_state, written)
        kernels.solve[(len(chunks.spans), num_heads)](
            *rows, tokens, channels, **of_solve(constants), **of_chunk, num_warps=WARPS
        )
    kernels.walk[(len(chunks.chains) - chunks.num_few, num_heads, triton.cdiv(value_dim, COLUMNS))](
        mixed,
        decay,
        share,
        skip,
        scores,
        scales,
        of_state,
        written,
        states,
        runs.starts,
        runs.sources,
        runs.targets,
        chunks.chains,
        output,
        len(runs.sources),
        chunks.num_few,
        tokens,
        channels,
        states.stride(0),
        **of_walk(constants),
        **of_chunk,
        num_warps=WALKING_WARPS,
    )


def of_score(constants: Mapping[str, int]) -> dict[str, int]:
    return {name: constants[name] for name in ("QUERY_AT", "KEY_AT", "NUM_HEADS", "OF_KEY", "KEY_DIM", "IS_DELTA")}


def of_solve(constants: Mapping[str, int]) -> dict[str, int]:
    names = ("KEY_AT", "VALUE_AT", "NUM_HEADS", "OF_KEY", "KEY_DIM", "VALUE_DIM")
    return {name: constants[name] for name in names} | {"LEVELS": CHUNK_TOKENS.bit_length() - 1}


def of_walk(constants: Mapping[str, int]) -> dict[str, int]:
    return {**constants, "PARTS": triton.cdiv(constants["KEY_DIM"], PART), "COLUMNS": COLUMNS}
