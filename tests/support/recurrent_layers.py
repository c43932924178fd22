"""Recurrent layers with random inputs, and their kernels on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mooncake.kernels.recurrent import RecurrentKernels, Runs
from mooncake.kernels.recurrent_chunks import in_chunks

PAGES = 9


class OnDevice:
    """Triton's kernels for tensors on the host: on a GPU, or in the interpreter."""

    def __init__(self, has_chunks: bool = True) -> None:
        self._has_chunks = has_chunks
        self._kernels = pytest.importorskip(
            "mooncake.kernels.gpu.kernels", reason="triton is not installed"
        ).GpuKernels()

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        def call(*given: Any) -> torch.Tensor:
            device = self._kernels.device
            moved = [each.to(device) if isinstance(each, torch.Tensor) else each for each in given]
            moved = [self._moved(each) if isinstance(each, Runs) else each for each in moved]
            output: torch.Tensor = getattr(self._kernels, name)(*moved)
            for before, after in zip(given, moved, strict=True):
                if isinstance(before, torch.Tensor) and before is not after:
                    before.copy_(after)  # states are written in place
            return output.cpu()

        return call

    def _moved(self, runs: Runs) -> Runs:
        moved = in_chunks(runs, lambda part: part.to(self._kernels.device))
        return moved if self._has_chunks else replace(moved, chunks=None)


@dataclass
class Layer:
    """Random inputs of ``count`` tokens."""

    count: int
    key_heads: int = 2
    heads: int = 4
    key_dim: int = 32
    value_dim: int = 48
    num_taps: int = 4

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.count)
        self.channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        self.inputs = torch.randn(self.count, self.channels, generator=random)
        self.decay = -torch.rand(self.count, self.heads, generator=random)
        self.beta = torch.rand(self.count, self.heads, generator=random)
        self.taps = torch.randn(self.num_taps, self.channels, generator=random)
        self.state_size = (self.num_taps - 1) * self.channels + self.heads * self.key_dim * self.value_dim

    def pages(self) -> torch.Tensor:
        """What was never written is NaN; rows do not follow each other without a gap."""
        return torch.full((PAGES, self.state_size + 32), float("nan"))[:, : self.state_size]

    def run(self, kernels: RecurrentKernels, states: torch.Tensor, runs: Runs, tokens: slice) -> torch.Tensor:
        rows = (self.inputs[tokens], self.decay[tokens], self.beta[tokens])
        return kernels.gated_delta(*rows, self.taps, states, runs, self.key_heads, self.key_dim)


@dataclass
class StateSpace(Layer):
    """``key_heads`` groups of B and C, of ``key_dim`` elements; heads of ``value_dim``; ``beta`` are steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        random = torch.Generator().manual_seed(self.heads)
        self.bias, self.skip = torch.randn(self.channels, generator=random), torch.randn(self.heads, generator=random)
        self.rates = -4 * torch.rand(self.heads, generator=random)
        self.decay = self.beta * self.rates

    def run(self, kernels: RecurrentKernels, states: torch.Tensor, runs: Runs, tokens: slice) -> torch.Tensor:
        rows = (self.inputs[tokens], self.decay[tokens], self.beta[tokens])
        of_layer = (self.taps, self.bias, self.skip)
        return kernels.state_space(*rows, *of_layer, states, runs, self.key_heads, self.key_dim)


RULES = pytest.mark.parametrize("rule", [Layer, StateSpace])


def runs_over(*runs: tuple[int, int, int]) -> Runs:
    """Of (number of tokens, source, target)."""
    lengths, sources, targets = (torch.tensor(column) for column in zip(*runs, strict=True))
    return Runs(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), sources, targets)
