"""The part of ``mooncake bench gpu`` that times latent attention: DeepSeek-V3's 128 heads and Moonlight's 16.

A token is one row of 576 numbers, 1152 bytes in bfloat16, read by all heads; each head computes 2 · (576 + 512) FLOP
with it. So 16 heads compute 30 FLOP per byte and are limited by memory, which an H100 reads at 3.35 TB/s. 128 heads
compute 242, where the matrix units (788 TFLOP/s, as products reach) and the memory are equally busy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mooncake.app.bench.gpu_parts.device import Gpu, check, rate
from mooncake.app.bench.gpu_parts.kernels import MOST_ERROR
from mooncake.app.bench.report import Figure, Report
from mooncake.kernels import reference
from mooncake.kernels.gpu.attention import DevicePlan
from mooncake.kernels.gpu.kernels import GpuKernels, codes_and_scales
from mooncake.kernels.reference import SCALE_BYTES

ROW, VALUE = 576, 512  # columns of a row, and how many of them are the value
DEEPSEEK, MOONLIGHT = 128, 16  # heads
BLOCK = 64
PRODUCTS = 788e12  # FLOP/s


@dataclass(frozen=True, slots=True)
class LatentShape:
    heads: int
    queries: list[int]
    contexts: list[int]
    pages: str = ""  # "int8": rows of codes with their scale

    @property
    def flops(self) -> float:
        """Required FLOP: a query sees the keys up to its own position."""
        pairs = sum(q * (c - q) + q * (q + 1) / 2 for q, c in zip(self.queries, self.contexts, strict=True))
        return 2.0 * (ROW + VALUE) * self.heads * pairs


class LatentBatch:
    """A step over the pages of several layers, in random physical order: none is in the L2."""

    def __init__(self, gpu: Gpu, shape: LatentShape, layers: int) -> None:
        self.gpu, self.shape, self.layers = gpu, shape, layers
        counts = [-(-context // BLOCK) for context in shape.contexts]
        tables = np.zeros((len(counts), max(counts)), np.int32)
        order, used = torch.randperm(sum(counts)).int().numpy(), 0
        for row, count in zip(tables, counts, strict=True):
            row[:count] = order[used : used + count]
            used += count
        width = ROW + (SCALE_BYTES if shape.pages else 0)
        size = (sum(counts), layers, 1, 1, BLOCK, width)
        if shape.pages:
            self.cache = torch.randint(-127, 128, size, dtype=torch.int8, device=gpu.device)
            codes_and_scales(self.cache)[1].fill_(0.01)
        else:
            self.cache = torch.randn(size, device=gpu.device, dtype=gpu.dtype)
        self.query = torch.randn(sum(shape.queries), shape.heads, ROW, device=gpu.device, dtype=gpu.dtype)
        self._host = (np.cumsum([0, *shape.queries], dtype=np.int32), np.array(shape.contexts, np.int32))
        self.starts, self.contexts = (torch.from_numpy(array).to(gpu.device) for array in self._host)
        self.tables = torch.from_numpy(tables).to(gpu.device)
        self.read_bytes = sum(shape.contexts) * width * self.cache.element_size()

    def plan(self, piece_tokens: int = 0) -> DevicePlan:
        return self.gpu.kernels.plan(
            *self._host,
            num_heads=self.shape.heads,
            num_kv_heads=1,
            head_dim=ROW,
            block_tokens=BLOCK,
            piece_tokens=piece_tokens,
            wide=self.gpu.dtype is torch.float32,
            scaled=bool(self.shape.pages),
            latent=True,
        )

    def attend(self, plan: DevicePlan, layer: int) -> torch.Tensor:
        places = (self.query, self.cache[:, layer], self.tables, self.starts, self.contexts)
        return GpuKernels.paged_attention(self.gpu.kernels, *places, ROW**-0.5, plan=plan)

    def run_s(self, plan: DevicePlan) -> tuple[float, ...]:
        return self.gpu.timed_s(lambda layer: self.attend(plan, layer), self.layers, captured=True)

    def check(self, report: Report, name: str, plan: DevicePlan) -> None:
        """Compare the last query of the first and of the last sequence with the reference. Raises AssertionError."""
        actual = self.attend(plan, 0)
        for row in sorted({0, len(self.shape.contexts) - 1}):
            context, last = self.shape.contexts[row], int(self._host[0][row + 1]) - 1
            pages = self.cache[self.tables[row, : -(-context // BLOCK)].long(), 0]
            expected = reference.paged_attention(
                self.query[last : last + 1].float(),
                reference.from_page_rows(pages),
                torch.arange(len(pages), dtype=torch.int32)[None],
                torch.tensor([0, 1]),
                torch.tensor([context]),
                ROW**-0.5,
            )
            check(report, f"{name}, sequence {row}", actual[last : last + 1], expected, MOST_ERROR)


def latent_attention(gpu: Gpu, report: Report, stream: float) -> None:
    """Decode steps of 64 sequences and of one long one, a chunk of a prompt, and the kernel that rotates queries and
    writes rows."""
    tiny = gpu.scale.tiny
    many, long = ([8192] * 64, [131_072]) if not tiny else ([70, 40], [300])
    chunk, history = (2048, 8192) if not tiny else (5, 30)
    for heads in (MOONLIGHT, DEEPSEEK):
        for name, contexts, layers in (("64x8k", many, 4), ("1x128k", long, 8)):
            with gpu.trying(f"latent {heads} heads, {name}"):
                _timed(gpu, report, stream, name, LatentShape(heads, [1] * len(contexts), contexts), layers)
        with gpu.trying(f"latent {heads} heads, prefill"):
            _timed(gpu, report, stream, "prefill_2k_at_8k", LatentShape(heads, [chunk], [history + chunk]), 1)
        with gpu.trying(f"latent {heads} heads, int8"):
            _timed(gpu, report, stream, "int8_64x8k", LatentShape(heads, [1] * len(many), many, "int8"), 4)
        for tokens in (64, 4096):
            with gpu.trying(f"latent {heads} heads, {tokens} rows turned and written"):
                _turned(gpu, report, heads, gpu.scale.size(tokens, 3))


def _timed(gpu: Gpu, report: Report, stream: float, name: str, shape: LatentShape, layers: int) -> None:
    batch = LatentBatch(gpu, shape, layers)
    plan = batch.plan()
    seconds, key = batch.run_s(plan), f"latent_{shape.heads}_{name}"
    report.add(Figure("ours", "latent attention", "ms", tuple(1e3 * s for s in seconds), params={"shape": key}))
    report.add(rate("ours", "latent attention", "TFLOP/s", shape.flops / 1e12, seconds, shape=key))
    report.ratios[f"{key}_vs_788_tflops"] = shape.flops / PRODUCTS / min(seconds)
    if max(shape.queries) == 1:
        report.add(rate("ours", "latent attention", "GB/s", batch.read_bytes / 1e9, seconds, shape=key))
        report.ratios[f"{key}_vs_stream"] = batch.read_bytes / stream / min(seconds)
    batch.check(report, key, plan)


def _turned(gpu: Gpu, report: Report, heads: int, tokens: int) -> None:
    cache = torch.zeros((-(-tokens // BLOCK), 1, 1, BLOCK, ROW), device=gpu.device, dtype=gpu.dtype)
    rows = torch.randn(tokens, (heads + 1) * ROW, device=gpu.device, dtype=gpu.dtype)
    angles = torch.rand(tokens, ROW // 2, device=gpu.device)
    cos, sin, places = angles.cos(), angles.sin(), torch.arange(tokens, device=gpu.device)
    seconds = gpu.timed_s(lambda _: gpu.kernels.rope_write_kv(rows, cos, sin, places, cache, places), captured=True)
    amount = 2 * rows.nbytes / 1e9
    report.add(rate("ours", "latent rows turned and written", "GB/s", amount, seconds, heads=heads, tokens=tokens))
