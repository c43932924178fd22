"""Host side of ``triton_recurrent``: the functions of ``recurrent`` on a GPU, one or two launches each, and more where
runs have ``Chunks``.

States, runs and everything else lie on the device; without chunks sizes of grids depend on shapes alone, so a captured
graph replays any runs of as many sequences.
"""

from __future__ import annotations

import torch
import triton

from mooncake.kernels.gpu import triton_recurrent as kernels
from mooncake.kernels.gpu import triton_recurrent_chunks as chunk_kernels
from mooncake.kernels.gpu.recurrent_chunks import recur_in_chunks
from mooncake.kernels.recurrent import L2_EPS, Runs
from mooncake.kernels.recurrent_chunks import CHUNK_TOKENS

CONVOLVED_TOKENS, CONVOLVED_CHANNELS = 8, 64  # of a program at once
CONVOLVED_WARPS = 8  # of a program that has a chunk
MATRIX_NUMBERS = 1024  # of a program, which is one warp: 32 registers of each thread


def gated_delta(
    inputs: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    taps: torch.Tensor,
    states: torch.Tensor,
    runs: Runs,
    num_key_heads: int,
    key_dim: int,
) -> torch.Tensor:
    mixed = _convolved(inputs, taps, None, states, runs, has_silu=True)
    keys = num_key_heads * key_dim
    places = (0, keys, 2 * keys)
    return _recurred(mixed, decay, beta, None, states, runs, num_key_heads, key_dim, len(taps), places)


def state_space(
    inputs: torch.Tensor,
    decay: torch.Tensor,
    step: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    runs: Runs,
    num_groups: int,
    state_dim: int,
) -> torch.Tensor:
    mixed = _convolved(inputs, taps, bias, states, runs, has_silu=True)
    of_group = num_groups * state_dim
    values = inputs.shape[1] - 2 * of_group
    places = (values + of_group, values, 0)
    return _recurred(mixed, decay, step, skip, states, runs, num_groups, state_dim, len(taps), places)


def short_convolution(inputs: torch.Tensor, taps: torch.Tensor, states: torch.Tensor, runs: Runs) -> torch.Tensor:
    return _convolved(inputs, taps, None, states, runs, has_silu=False)


def _convolved(
    inputs: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    runs: Runs,
    has_silu: bool,
) -> torch.Tensor:
    """``[T, C]``; the last inputs of each run are in its target."""
    chunks, channels, output = runs.chunks, inputs.shape[1], torch.empty_like(inputs)
    chains, num_few = chains_of(runs)
    parts = triton.cdiv(channels, CONVOLVED_CHANNELS)
    given = (inputs, taps, taps if bias is None else bias, states)
    settings = {"TAPS": len(taps), "HAS_BIAS": bias is not None, "HAS_SILU": has_silu, "CHANNELS": CONVOLVED_CHANNELS}
    if chunks is not None and len(chunks.spans):  # before any state is overwritten
        chunk_kernels.convolve_chunks[(len(chunks.spans), parts)](
            *given,
            chunks.spans,
            output,
            channels,
            states.stride(0),
            **settings,
            CHUNK=CHUNK_TOKENS,
            num_warps=CONVOLVED_WARPS,
        )
    if len(chains):
        kernels.convolve[(len(chains), parts)](
            *given,
            runs.starts,
            runs.sources,
            runs.targets,
            chains,
            output,
            len(runs.sources),
            num_few,
            channels,
            states.stride(0),
            **settings,
            TAIL_PAD=triton.next_power_of_2(max(len(taps) - 1, 1)),
            LISTED=chunks is not None,
            TOKENS=CONVOLVED_TOKENS,
            num_warps=4,
        )
    return output


def _recurred(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    share: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    runs: Runs,
    num_key_heads: int,
    key_dim: int,
    num_taps: int,
    places: tuple[int, int, int],
) -> torch.Tensor:
    """``[T, H * Dv]``; ``places``: where queries, keys and values begin in ``mixed``; ``skip`` None: the delta rule."""
    tokens, num_heads = decay.shape
    value_dim = (mixed.shape[1] - 2 * num_key_heads * key_dim) // num_heads
    output = mixed.new_empty((tokens, num_heads * value_dim))
    constants = {
        **{"TAIL": (num_taps - 1) * mixed.shape[1], "IS_DELTA": skip is None},
        **dict(zip(("QUERY_AT", "KEY_AT", "VALUE_AT"), places, strict=True)),
        **{"NUM_HEADS": num_heads, "OF_KEY": num_heads // num_key_heads},
        **{"KEY_DIM": key_dim, "VALUE_DIM": value_dim},
    }
    rows = (mixed, decay, share, decay if skip is None else skip)
    chains, num_few = chains_of(runs)
    if num_few:
        key_pad, columns = matrix_part(key_dim, value_dim)
        kernels.recur[(num_few, num_heads, triton.cdiv(value_dim, columns))](
            *rows,
            states,
            runs.starts,
            runs.sources,
            runs.targets,
            chains,
            output,
            len(runs.sources),
            mixed.shape[1],
            states.stride(0),
            L2_EPS,
            **constants,
            KEY_PAD=key_pad,
            COLUMNS=columns,
            LISTED=runs.chunks is not None,
            num_warps=1,
        )
    if num_few < len(chains):
        recur_in_chunks(*rows, states, runs, output, constants)
    return output


def chains_of(runs: Runs) -> tuple[torch.Tensor, int]:
    """The list of chains, or where there is none another of as many programs; and how many go token by token."""
    if runs.chunks is None:
        return runs.sources, len(runs.sources)
    return runs.chunks.chains, runs.chunks.num_few


def matrix_part(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Rows, padded, and columns that a program holds of a head's matrix: all rows, because they are summed over."""
    rows = triton.next_power_of_2(key_dim)
    return rows, min(max(MATRIX_NUMBERS // rows, 1), triton.next_power_of_2(value_dim))
