"""A short convolution, and behind one the gated delta rule or a state space (Mamba-2), over states in pages: the
definition, in plain torch.

A state is what a layer keeps of all tokens so far, flat in float32: the last ``taps - 1`` inputs of the convolution,
``[taps - 1, C]``, and a matrix per value head, ``[Hv, Dk, Dv]``. A page has the state after
the last computed token of its block. A step is cut into *runs*, consecutive tokens of a sequence in one block: a run
reads the state of one page, which may be that of the run before it, and writes that of another or of the same. Each run
is computed token by token, so a token gets the same bits in any batch and chunk (on GPUs, if it is no prompt's:
``Chunks``).

Letters as in ``reference``; ``C`` channels of the convolution, ``Hk`` and ``Hv`` heads of keys and values of ``Dk`` and
``Dv`` elements, ``R`` runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

L2_EPS = 1e-6  # of the norms of queries and keys, as published
NO_PAGE = -1  # the state before a sequence's first token: zeros


@dataclass(frozen=True, slots=True)
class Runs:
    """In the order of their tokens; those of a sequence follow each other."""

    starts: torch.Tensor  # int64 [R + 1]: the tokens of run r are starts[r] ≤ t < starts[r + 1]
    sources: torch.Tensor  # int64 [R]: the page with the state before the run, or NO_PAGE
    targets: torch.Tensor  # int64 [R]: the page for the state after it
    chunks: Chunks | None = field(default=None, kw_only=True)  # on GPUs, of steps with prompts


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which runs go in chunks of tokens (``recurrent_chunks``). A *chain* is runs that each read what the one before
    them writes."""

    chains: torch.Tensor  # int64: the first run of each; those of few tokens, which go token by token, first
    num_few: int
    spans: torch.Tensor  # int64 [C, 4] of the others: first token, one behind the last, the chain's first, its source


@runtime_checkable
class RecurrentKernels(Protocol):
    """Kernels that have these functions. A module is an implementation."""

    def gated_delta(
        self,
        inputs: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        taps: torch.Tensor,
        states: torch.Tensor,
        runs: Runs,
        num_key_heads: int,
        key_dim: int,
    ) -> torch.Tensor: ...

    def state_space(
        self,
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
    ) -> torch.Tensor: ...

    def short_convolution(
        self, inputs: torch.Tensor, taps: torch.Tensor, states: torch.Tensor, runs: Runs
    ) -> torch.Tensor: ...


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
    """``[T, Hv * Dv]``; all tensors are float32. ``inputs`` [T, C] are queries, keys and values before the convolution,
    whose weights are ``taps`` [taps, C], the newest token's last. ``decay`` [T, Hv] is the logarithm of what is left of
    a matrix, ``beta`` [T, Hv] the share of the error that is written. ``states`` [N, numbers of a state] is a view of
    pages.

    Per value head, with the normalised q and k of its key head: S ← exp(decay) S; S ← S + k ⊗ beta (v − kᵀ S);
    output qᵀ S / √Dk.
    """
    num_heads, keys, channels = decay.shape[1], num_key_heads * key_dim, inputs.shape[1]
    values = channels - 2 * keys
    tail = (len(taps) - 1) * channels
    outputs = inputs.new_empty((len(inputs), num_heads, values // num_heads))
    for first, end, state, target in _each(runs, states):
        seen = torch.cat([state[:tail].view(-1, channels), inputs[first:end]])
        mixed = _convolved(seen, taps)
        query, key, value = torch.split(torch.nn.functional.silu(mixed), [keys, keys, values], dim=1)
        query, key = (
            _normalised(heads.view(-1, num_key_heads, key_dim)).repeat_interleave(num_heads // num_key_heads, dim=1)
            for heads in (query, key)
        )
        query, value = query * key_dim**-0.5, value.view(-1, *outputs.shape[1:])
        matrices = state[tail:].view(num_heads, key_dim, -1)
        for t in range(end - first):
            matrices *= decay[first + t].exp()[:, None, None]
            error = (value[t] - (matrices * key[t, :, :, None]).sum(1)) * beta[first + t, :, None]
            matrices += key[t, :, :, None] * error[:, None]
            outputs[first + t] = (matrices * query[t, :, :, None]).sum(1)
        states[target, :tail] = seen[end - first :].flatten()
        states[target, tail:] = matrices.flatten()
    return outputs.flatten(1)


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
    """``[T, H * P]``, of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 5): attention without a softmax, whose
    keys and queries are the B and C of a group of heads, and whose values are x.

    All tensors are float32. ``inputs`` [T, C] are x, B and C before the convolution of ``taps`` [taps, C] and ``bias``
    [C]. ``step`` [T, H] is how much of a token is written, ``decay`` [T, H] the logarithm of what is left of a matrix:
    both are computed from the same number, and the latter is never above 0. ``skip`` [H] is D.

    Per head: S ← exp(decay) S; S ← S + B ⊗ (step x); output Cᵀ S + D x.
    """
    num_heads, of_group, channels = decay.shape[1], num_groups * state_dim, inputs.shape[1]
    values = channels - 2 * of_group
    tail = (len(taps) - 1) * channels
    outputs = inputs.new_empty((len(inputs), num_heads, values // num_heads))
    for first, end, state, target in _each(runs, states):
        seen = torch.cat([state[:tail].view(-1, channels), inputs[first:end]])
        mixed = torch.nn.functional.silu(_convolved(seen, taps) + bias)
        value, key, query = torch.split(mixed, [values, of_group, of_group], dim=1)
        key, query = (
            heads.view(-1, num_groups, state_dim).repeat_interleave(num_heads // num_groups, dim=1)
            for heads in (key, query)
        )
        value = value.view(-1, *outputs.shape[1:])
        matrices = state[tail:].view(num_heads, state_dim, -1)
        for t in range(end - first):
            matrices *= decay[first + t].exp()[:, None, None]
            matrices += key[t, :, :, None] * (value[t] * step[first + t, :, None])[:, None]
            outputs[first + t] = (matrices * query[t, :, :, None]).sum(1) + skip[:, None] * value[t]
        states[target, :tail] = seen[end - first :].flatten()
        states[target, tail:] = matrices.flatten()
    return outputs.flatten(1)


def short_convolution(inputs: torch.Tensor, taps: torch.Tensor, states: torch.Tensor, runs: Runs) -> torch.Tensor:
    """``[T, C]``: the convolution of ``gated_delta`` alone, whose states have no matrices."""
    channels, outputs = inputs.shape[1], torch.empty_like(inputs)
    for first, end, state, target in _each(runs, states):
        seen = torch.cat([state.view(-1, channels), inputs[first:end]])
        outputs[first:end] = _convolved(seen, taps)
        states[target] = seen[end - first :].flatten()
    return outputs


def _each(runs: Runs, states: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor, int]]:
    """Each run's tokens, from one to before the other; a copy of the state before them; and where it goes."""
    starts, sources, targets = (each.tolist() for each in (runs.starts, runs.sources, runs.targets))
    for first, end, source, target in zip(starts, starts[1:], sources, targets, strict=False):
        yield first, end, torch.zeros_like(states[target]) if source == NO_PAGE else states[source].clone(), target


def _convolved(seen: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Of ``seen``, the inputs of the tokens and of those before them."""
    count = len(seen) - len(taps) + 1
    mixed = torch.zeros_like(seen[:count])
    for tap, weights in enumerate(taps):
        mixed += seen[tap : tap + count] * weights
    return mixed


def _normalised(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
