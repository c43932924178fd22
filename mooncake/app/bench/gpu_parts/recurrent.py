"""The part of ``mooncake bench gpu`` for recurrent layers: single ones of Qwen3-Next 80B, Granite 4 H-Small, LFM2 1.2B.

The limit of a decode step is that it reads and writes each sequence's state once. A prompt has no limit but the time
itself: it is timed in chunks, as engines compute it, and token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mooncake.app.bench.gpu_parts.device import Gpu, check, rate
from mooncake.app.bench.report import Figure, Report
from mooncake.kernels import reference
from mooncake.kernels.recurrent import NO_PAGE, RecurrentKernels, Runs
from mooncake.kernels.recurrent_chunks import CHUNK_TOKENS, in_chunks

DECODES, PROMPT = (1, 64), 2048
CHECKED, CHECKED_TOKENS = 4, 2 * CHUNK_TOKENS + 5  # sequences, and of a prompt, that the definition computes, too
MOST_ERROR = 1e-4  # of the norm of the output
STATES_BYTES = 1e9  # that decode steps use in turn: those of one sequence, a few MB, would stay in the L2
MOST_TURNS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    rule: str
    taps: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def state_size(self) -> int:
        matrices = 0 if self.rule == "convolution" else self.heads * self.key_dim * self.value_dim
        return (self.taps - 1) * self.channels + matrices


SHAPES = (
    Shape("delta rule", 4, key_heads=16, heads=32, key_dim=128, value_dim=128),
    Shape("state space", 4, key_heads=1, heads=128, key_dim=128, value_dim=64),
    Shape("convolution", 3, key_heads=0, heads=1, key_dim=0, value_dim=2048),
)
TINY = (Shape("delta rule", 4, 1, 2, 8, 8), Shape("state space", 4, 1, 2, 8, 8), Shape("convolution", 3, 0, 1, 0, 16))


class Layer:
    def __init__(self, gpu: Gpu, shape: Shape, tokens: int, pages: int) -> None:
        self.shape, self._device = shape, gpu.device
        self.inputs = self._random(tokens, shape.channels)
        self.shares = torch.rand(tokens, shape.heads, device=gpu.device)
        self.decays = -torch.rand(tokens, shape.heads, device=gpu.device)
        self.taps, self.bias = self._random(shape.taps, shape.channels), self._random(shape.channels)
        self.skip = self._random(shape.heads)
        self.states = self._random(pages, shape.state_size)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).mul_(0.5)

    def run(self, kernels: RecurrentKernels, states: torch.Tensor, runs: Runs, tokens: int) -> torch.Tensor:
        shape, inputs = self.shape, self.inputs[:tokens]
        if shape.rule == "convolution":
            return kernels.short_convolution(inputs, self.taps, states, runs)
        rows, of_keys = (inputs, self.decays[:tokens], self.shares[:tokens]), (shape.key_heads, shape.key_dim)
        if shape.rule == "delta rule":
            return kernels.gated_delta(*rows, self.taps, states, runs, *of_keys)
        return kernels.state_space(*rows, self.taps, self.bias, self.skip, states, runs, *of_keys)

    def decodes(self, count: int, turn: int = 0) -> Runs:
        """A token of each of so many sequences, whose states change in place; those of another turn are others."""
        pages = torch.arange(count, device=self._device) + turn * count
        return Runs(torch.arange(count + 1, device=self._device), pages, pages)

    def prompt(self, tokens: int) -> Runs:
        runs = Runs(*(torch.tensor(each) for each in ([0, tokens], [NO_PAGE], [1])))
        return in_chunks(runs, lambda part: part.to(self._device))


def recurrent(gpu: Gpu, report: Report, stream: float) -> None:
    for shape in TINY if gpu.scale.tiny else SHAPES:
        for count in DECODES:
            with gpu.trying(f"{shape.rule} of {count} tokens"):
                _decode(gpu, report, stream, shape, gpu.scale.size(count, min(count, 3)))
        with gpu.trying(f"{shape.rule} of a prompt"):
            _prefill(gpu, report, Layer(gpu, shape, gpu.scale.size(PROMPT, CHECKED_TOKENS), pages=2))


def _decode(gpu: Gpu, report: Report, stream: float, shape: Shape, count: int) -> None:
    rule, step_bytes = shape.rule, count * shape.state_size * 4
    turns = gpu.scale.size(min(-int(-STATES_BYTES // step_bytes), MOST_TURNS), 2)
    layer = Layer(gpu, shape, count, pages=count * turns)
    _check(gpu, report, f"{rule} of {count} tokens", layer, layer.decodes(min(count, CHECKED)), min(count, CHECKED))
    seconds = _seconds(gpu, layer, [layer.decodes(count, turn) for turn in range(turns)])
    moved = 2 * step_bytes
    report.add(rate("ours", f"{rule}, decode", "GB/s", moved / 1e9, seconds, tokens=count))
    report.add(Figure("ours", f"{rule}, decode", "us", tuple(1e6 * s for s in seconds), params={"tokens": count}))
    report.ratios[f"{rule.replace(' ', '_')}_decode_{count}_vs_stream"] = moved / stream / min(seconds)


def _prefill(gpu: Gpu, report: Report, layer: Layer) -> None:
    count, rule = len(layer.inputs), layer.shape.rule
    _check(gpu, report, f"{rule} of a prompt", layer, layer.prompt(CHECKED_TOKENS), CHECKED_TOKENS)
    chunks = layer.prompt(count)
    best = {}
    for way, runs in (("chunks", chunks), ("tokens", replace(chunks, chunks=None))):
        seconds = _seconds(gpu, layer, [runs])
        figures, best[way] = tuple(1e6 * s for s in seconds), min(seconds)
        report.add(Figure("ours", f"{rule}, prefill", "us", figures, params={"tokens": count, "by": way}))
    report.ratios[f"{rule.replace(' ', '_')}_prefill_tokens_vs_chunks"] = best["tokens"] / best["chunks"]


def _seconds(gpu: Gpu, layer: Layer, runs: Sequence[Runs]) -> tuple[float, ...]:
    tokens = len(layer.inputs)
    return gpu.timed_s(lambda turn: layer.run(gpu.kernels, layer.states, runs[turn], tokens), len(runs), captured=True)


def _check(gpu: Gpu, report: Report, name: str, layer: Layer, runs: Runs, tokens: int) -> None:
    """Compare with the definition, states too. Raises AssertionError."""
    ours, theirs = layer.states.clone(), layer.states.clone()
    actual, expected = layer.run(gpu.kernels, ours, runs, tokens), layer.run(reference, theirs, runs, tokens)
    check(report, name, actual, expected, MOST_ERROR)
    check(report, f"{name}, states", ours[runs.targets], theirs[runs.targets], MOST_ERROR)
