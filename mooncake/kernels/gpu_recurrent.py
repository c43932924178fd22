"""Host side of ``triton_recurrent``: the functions of ``recurrent`` on a GPU, one or two launches each.

States, runs and everything else lie on the device; sizes of grids depend on shapes alone, so a captured graph replays
any runs of as many sequences.
"""

from __future__ import annotations

import torch
import triton

from mooncake.kernels import triton_recurrent as kernels
from mooncake.kernels.recurrent import L2_EPS, Runs

CONVOLVED_TOKENS, CONVOLVED_CHANNELS = 8, 64  # of a program at once
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
    num_runs, channels, output = len(runs.sources), inputs.shape[1], torch.empty_like(inputs)
    if num_runs:
        kernels.convolve[(num_runs, triton.cdiv(channels, CONVOLVED_CHANNELS))](
            inputs,
            taps,
            taps if bias is None else bias,
            states,
            runs.starts,
            runs.sources,
            runs.targets,
            output,
            num_runs,
            channels,
            states.stride(0),
            TAPS=len(taps),
            TAIL_PAD=triton.next_power_of_2(max(len(taps) - 1, 1)),
            HAS_BIAS=bias is not None,
            HAS_SILU=has_silu,
            TOKENS=CONVOLVED_TOKENS,
            CHANNELS=CONVOLVED_CHANNELS,
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
    channels = mixed.shape[1]
    value_dim = (channels - 2 * num_key_heads * key_dim) // num_heads
    output = mixed.new_empty((tokens, num_heads * value_dim))
    key_pad, columns = matrix_part(key_dim, value_dim)
    num_runs = len(runs.sources)
    if num_runs:
        kernels.recur[(num_runs, num_heads, triton.cdiv(value_dim, columns))](
            mixed,
            decay,
            share,
            decay if skip is None else skip,
            states,
            runs.starts,
            runs.sources,
            runs.targets,
            output,
            num_runs,
            channels,
            states.stride(0),
            L2_EPS,
            TAIL=(num_taps - 1) * channels,
            **dict(zip(("QUERY_AT", "KEY_AT", "VALUE_AT"), places, strict=True)),
            NUM_HEADS=num_heads,
            OF_KEY=num_heads // num_key_heads,
            KEY_DIM=key_dim,
            KEY_PAD=key_pad,
            VALUE_DIM=value_dim,
            COLUMNS=columns,
            IS_DELTA=skip is None,
            num_warps=1,
        )
    return output


def matrix_part(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Rows, padded, and columns that a program holds of a head's matrix: all rows, because they are summed over."""
    rows = triton.next_power_of_2(key_dim)
    return rows, min(max(MATRIX_NUMBERS // rows, 1), triton.next_power_of_2(value_dim))
