"""The part of ``mooncake bench gpu`` that times mixtures of experts: single layers of Qwen3-30B-A3B.

The limit of a decode step is the bytes of the experts that its tokens chose, that of a prompt its matrix products.
"""

from __future__ import annotations

import torch

from mooncake.app.bench.gpu_parts.device import Gpu, check, rate
from mooncake.app.bench.report import Figure, Report
from mooncake.kernels import reference

EXPERTS, PER_TOKEN, HIDDEN, INNER = 128, 8, 2048, 768
LAYERS = 8  # of one token 600 MB in all: few weights stay in the L2 while the others are read
DECODES, PROMPTS = (1, 16, 64, 256), (2048, 8192)
MOST_ERROR = 0.02  # of the norm of the output
PEAK_TFLOPS = 788  # bfloat16 matrix products, the same limit as for attention


class Layers:
    """Layers with random weights."""

    def __init__(self, gpu: Gpu) -> None:
        size, self.gpu = gpu.scale.size, gpu
        self.count, self.hidden, self.inner = size(EXPERTS, 6), size(HIDDEN, 64), size(INNER, 48)
        self.per_token = size(PER_TOKEN, 2)
        self.weights = [
            (self._random(self.count, 2 * self.inner, self.hidden), self._random(self.count, self.hidden, self.inner))
            for _ in range(size(LAYERS, 1))
        ]
        self.experts = [gpu.kernels.experts(*weights) for weights in self.weights]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.gpu.device, dtype=self.gpu.dtype).mul_(float(shape[-1]) ** -0.5)

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random rows, and the experts and shares of each, chosen uniformly."""
        shares, chosen = torch.randn(count, self.count, device=self.gpu.device).softmax(-1).topk(self.per_token)
        return torch.randn(count, self.hidden, device=self.gpu.device, dtype=self.gpu.dtype), chosen, shares

    def timed_s(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[float, ...]:
        return self.gpu.timed_s(lambda layer: self.experts[layer](*given), len(self.experts), captured=True)

    @property
    def expert_numbers(self) -> int:
        return 3 * self.hidden * self.inner


def experts(gpu: Gpu, report: Report, stream: float) -> None:
    layers = Layers(gpu)
    for count in DECODES:
        with gpu.trying(f"experts of {count} tokens"):
            _decode(layers, report, stream, count)
    for count in PROMPTS:
        with gpu.trying(f"experts of a prompt of {count}"):
            _prefill(layers, report, count)


def _decode(layers: Layers, report: Report, stream: float, count: int) -> None:
    given = layers.tokens(layers.gpu.scale.size(count, min(count, 3)))
    seconds = layers.timed_s(given)
    read = len(set(given[1].flatten().tolist())) * layers.expert_numbers * layers.gpu.dtype.itemsize
    report.add(rate("ours", "experts, decode", "GB/s", read / 1e9, seconds, tokens=count))
    report.add(Figure("ours", "experts, decode", "us", tuple(1e6 * s for s in seconds), params={"tokens": count}))
    report.ratios[f"experts_decode_{count}_vs_roofline"] = read / stream / min(seconds)
    _check(layers, report, f"experts of {count} tokens", given)


def _prefill(layers: Layers, report: Report, count: int) -> None:
    given = layers.tokens(layers.gpu.scale.size(count, 20))
    seconds = layers.timed_s(given)
    flops = 2.0 * given[1].numel() * layers.expert_numbers
    figure = rate("ours", "experts, prefill", "TFLOP/s", flops / 1e12, seconds, tokens=count)
    report.add(figure)
    report.ratios[f"experts_prefill_{count // 1024}k_vs_{PEAK_TFLOPS}_tflops"] = figure.best / PEAK_TFLOPS
    _check(layers, report, f"experts of a prompt of {count}", given)


def _check(layers: Layers, report: Report, name: str, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Compare some of the tokens with the reference in float32. Raises AssertionError."""
    rows, chosen, shares = (part[:: max(len(part) // 64, 1)] for part in given)
    expected = reference.experts(*layers.weights[0])(rows.float(), chosen, shares)
    check(report, name, layers.experts[0](*given)[:: max(len(given[0]) // 64, 1)], expected, MOST_ERROR)
