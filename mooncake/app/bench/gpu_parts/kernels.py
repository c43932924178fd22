"""The parts of ``mooncake bench gpu`` that time kernels: limits of the GPU, attention, and the kernels around it.

Each part gets the device, a report to add to, and the bytes per second that the GPU can read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mooncake.app.bench.gpu_parts.device import DECODE, DECODE_INT8, PREFILL, Gpu, check, rate
from mooncake.app.bench.report import Figure, Report
from mooncake.kernels import reference
from mooncake.kernels.gpu.attention import DevicePlan
from mooncake.kernels.gpu.kernels import COPY_PROGRAMS, COPY_WORDS, GpuKernels, codes_and_scales, copy_pages
from mooncake.kernels.gpu.products import Int8Linear
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.kernels.reference import SCALE_BYTES
from mooncake.precision import Coding

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B model of the Llama family
READ_STREAM, COPY = "read stream", "copy, read + write"
MOST_ERROR = 0.02  # of the norm of attention's output: bfloat16 weights cost some thousandths
PRODUCT_LAYERS = 8  # one's 59 MB of codes would stay in the L2 in part, and twice as many bytes of bfloat16 would not
INT8_TOPS = 1979  # of int8 matrix products without sparsity, by an H200's data sheet
CODINGS: dict[Coding, str] = {"w8a8": "W8A8 product", "int8": "product with int8 weights"}
COPY_LAUNCHES = ((COPY_PROGRAMS, COPY_WORDS), (8, 2048), (16, 2048), (16, 4096))  # programs, words
_sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class DecodeShape:
    name: str
    contexts: list[int]
    block_tokens: int
    shared: int = 0  # tokens of a prefix that all sequences share


# Limits


def limits(gpu: Gpu, report: Report, _: float) -> None:
    words = torch.rand(gpu.scale.size(4 << 30, 1 << 20) // 4, device=gpu.device)
    with gpu.trying("copies"):
        target = torch.empty_like(words)
        seconds = gpu.timed_s(lambda _: target.copy_(words))
        report.add(rate("limit", COPY, "GB/s", 2 * words.nbytes / 1e9, seconds))
    with gpu.trying("reads"):
        seconds = gpu.timed_s(lambda _: words.max(), captured=True)
        report.add(rate("limit", READ_STREAM, "GB/s", words.nbytes / 1e9, seconds))
    with gpu.trying("products"):
        size = gpu.scale.size(8192, 64)
        left, right = (torch.randn(size, size, device=gpu.device).to(gpu.dtype) for _ in range(2))
        seconds = gpu.timed_s(lambda _: left @ right, captured=True)
        report.add(rate("limit", "matrix product", "TFLOP/s", 2 * size**3 / 1e12, seconds))


def stream_of(report: Report) -> float:
    """Bytes per second that can be read: the faster of a reduction, which only reads as attention does, and a copy,
    reads and writes counted; 0 where neither has been measured."""
    return max((figure.best for figure in report.figures if figure.name in (READ_STREAM, COPY)), default=0.0) * 1e9


# Attention


class DecodeBatch:
    """Attention of one decode step over the pages of several layers, in random physical order: none is in the L2."""

    def __init__(self, gpu: Gpu, shape: DecodeShape, layers: int, pages: str = "") -> None:
        """``pages``: "" for unquantised rows; "int8" for rows of codes with their scale, as in engines; "int8_beside"
        for codes whose scales are stored separately."""
        self.gpu, self.shape, self.layers = gpu, shape, layers
        block, batch = shape.block_tokens, len(shape.contexts)
        per_sequence = [-(-context // block) for context in shape.contexts]
        shared = shape.shared // block
        num_blocks = shared + sum(count - shared for count in per_sequence)
        order = torch.randperm(num_blocks).int().tolist()
        tables = np.zeros((batch, max(per_sequence)), np.int32)
        used = shared
        for row, count in zip(tables, per_sequence, strict=True):
            row[:shared] = order[:shared]
            row[shared:count] = order[used : used + count - shared]
            used += count - shared
        self.is_coded = bool(pages)
        width = HEAD_DIM + (SCALE_BYTES if pages == "int8" else 0)
        cache_shape = (num_blocks, layers, 2, KV_HEADS, block, width)
        self.scales: torch.Tensor | None = None
        if pages:
            self.cache = torch.randint(-127, 128, cache_shape, dtype=torch.int8, device=gpu.device)
        else:
            self.cache = torch.randn(cache_shape, device=gpu.device, dtype=gpu.dtype)
        if pages == "int8":
            codes_and_scales(self.cache)[1].fill_(0.01)
        elif pages:
            self.scales = torch.full(cache_shape[:-1], 0.01, device=gpu.device)
        self.query = torch.randn(batch, HEADS, HEAD_DIM, device=gpu.device, dtype=gpu.dtype)
        self.tables = torch.from_numpy(tables).to(gpu.device)
        self._host = (np.arange(batch + 1, dtype=np.int32), np.array(shape.contexts, np.int32))
        self.starts, self.contexts = (torch.from_numpy(array).to(gpu.device) for array in self._host)
        self.host_tables = tables
        token_bytes = 2 * KV_HEADS * (HEAD_DIM * self.cache.element_size() + (SCALE_BYTES if pages else 0))
        self.kv_bytes = (shape.shared + sum(context - shape.shared for context in shape.contexts)) * token_bytes

    def plan(self, cascade: bool = False, piece_tokens: int = 0) -> DevicePlan:
        return self.gpu.kernels.plan(
            *self._host,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_tokens=self.shape.block_tokens,
            block_tables=self.host_tables if cascade else None,
            piece_tokens=piece_tokens,
            wide=self.gpu.dtype is torch.float32,
            scaled=self.is_coded,
        )

    def attend(self, plan: DevicePlan, layer: int) -> torch.Tensor:
        return GpuKernels.paged_attention(
            self.gpu.kernels,
            self.query,
            self.cache[:, layer],
            self.tables,
            self.starts,
            self.contexts,
            HEAD_DIM**-0.5,
            plan=plan,
            scales=None if self.scales is None else self.scales[:, layer],
        )

    def run_s(self, plan: DevicePlan) -> tuple[float, ...]:
        return self.gpu.timed_s(lambda layer: self.attend(plan, layer), self.layers, captured=True)

    def check(self, report: Report, name: str, plan: DevicePlan) -> None:
        """Compare the first and the last sequence with the reference in float32. Raises AssertionError."""
        actual, layer = self.attend(plan, 0), self.cache[:, 0]
        codes, scales = codes_and_scales(layer) if self.is_coded and self.scales is None else (layer, None)
        scales = self.scales[:, 0] if self.scales is not None else scales
        for row in sorted({0, len(actual) - 1}):
            pages = self.tables[row, : -(-self.shape.contexts[row] // self.shape.block_tokens)].long()
            values = codes[pages].float() if scales is None else codes[pages] * scales[pages][..., None]
            expected = reference.paged_attention(
                self.query[row : row + 1].float(),
                values,
                torch.arange(len(pages), dtype=torch.int32)[None],
                torch.tensor([0, 1]),
                torch.tensor([self.shape.contexts[row]]),
                HEAD_DIM**-0.5,
            )
            check(report, f"{name}, sequence {row}", actual[row : row + 1], expected, MOST_ERROR)


def decode_attention(gpu: Gpu, report: Report, stream: float) -> None:
    small = gpu.scale.tiny
    lengths = np.random.default_rng(0).lognormal(8.6, 1.1, 64).clip(128, 32_000).astype(int).tolist()
    shapes = [
        (DecodeShape("64 x 8k", [8192] * 64 if not small else [70, 40], 64), 2, "decode_64x8k_vs_stream"),
        (DecodeShape("64 x 8k, pages of 16", [8192] * 64 if not small else [70], 16), 2, ""),
        (DecodeShape("1 x 128k", [131_072] if not small else [300], 64), 4, "decode_1x128k_vs_stream"),
        (DecodeShape("8 x 1k", [1024] * 8 if not small else [33], 64), 8, ""),
        (DecodeShape("64 ragged, 128 to 32k", lengths if not small else [5, 90], 64), 2, "decode_ragged_vs_stream"),
    ]
    for shape, layers, ratio in shapes:
        with gpu.trying(shape.name):
            _decode(gpu, report, stream, shape, layers, ratio)
    with gpu.trying("int8 pages"):
        coded(gpu, report)


def _decode(gpu: Gpu, report: Report, stream: float, shape: DecodeShape, layers: int, ratio: str) -> None:
    batch, is_first = DecodeBatch(gpu, shape, layers), shape.name == "64 x 8k"
    plan = batch.plan()
    seconds = gpu.tuned(report, DECODE, lambda: batch.run_s(plan)) if is_first else batch.run_s(plan)
    figure = rate("ours", "decode attention", "GB/s", batch.kv_bytes / 1e9, seconds, shape=shape.name)
    report.add(figure)
    if ratio:
        report.ratios[ratio] = figure.best * 1e9 / stream
    if shape.name == "1 x 128k":
        whole = batch.run_s(batch.plan(piece_tokens=1 << 20))
        report.ratios["split_1x128k_vs_one_piece"] = min(whole) / min(seconds)
    if is_first:
        report.ratios["decode_64x8k_vs_3400_gb_per_s"] = figure.best / 3400
        report.ratios["decode_64x8k_vs_sdpa"] = min(_sdpa_s(gpu, batch)) / min(seconds)
    batch.check(report, f"decode {shape.name}", plan)


def _sdpa_s(gpu: Gpu, batch: DecodeBatch) -> tuple[float, ...]:
    """torch's attention over contiguous KV, with the query heads of a group as rows of one product."""
    size, context = len(batch.shape.contexts), batch.shape.contexts[0]
    key, value = (
        torch.randn(batch.layers, size, KV_HEADS, context, HEAD_DIM, device=gpu.device, dtype=gpu.dtype)
        for _ in range(2)
    )
    query = batch.query.view(size, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    return gpu.timed_s(lambda layer: _sdpa(query, key[layer], value[layer]), batch.layers, captured=True)


def coded(gpu: Gpu, report: Report) -> None:
    """int8 pages compared with bfloat16 at the same number of tokens.

    Rows of engines have 132 bytes and are read in words of 4; the others could be read 16 bytes at a time.
    """
    shape = DecodeShape("64 x 8k", [8192] * 64 if not gpu.scale.tiny else [70, 40], 64)
    plain = DecodeBatch(gpu, shape, 2)
    plain_s = plain.run_s(plain.plan())
    del plain
    for name in ("int8", "int8_beside"):
        gpu.free()
        batch = DecodeBatch(gpu, shape, 2, name)
        plan = batch.plan()
        timed = functools.partial(batch.run_s, plan)
        seconds = gpu.tuned(report, DECODE_INT8, timed) if name == "int8" else timed()
        report.add(
            rate("ours", f"decode attention, {name} pages", "GB/s", batch.kv_bytes / 1e9, seconds, shape=shape.name)
        )
        report.ratios[f"{name}_kv_vs_bf16"] = min(plain_s) / min(seconds)
        batch.check(report, f"decode, {name} pages", plan)
        del batch


def cascade(gpu: Gpu, report: Report, _: float) -> None:
    for batch_size, prefix, own in ((64, 32_768, 128), (32, 4096, 512)):
        with gpu.trying(f"cascade of {batch_size} over {prefix}"):
            _cascade(gpu, report, f"{batch_size}x{prefix // 1024}k", batch_size, prefix, own)


def _cascade(gpu: Gpu, report: Report, name: str, batch_size: int, prefix: int, own: int) -> None:
    if gpu.scale.tiny:
        batch_size, prefix, own = 3, 512, 20
    contexts = [prefix + own] * batch_size
    batch = DecodeBatch(gpu, DecodeShape(name, contexts, 64, shared=prefix), 2)
    plans = {"cascade": batch.plan(cascade=True), "flat": batch.plan()}
    found = {way: batch.run_s(plan) for way, plan in plans.items()}
    copies = DecodeBatch(gpu, DecodeShape(name, contexts, 64), 2)
    found["flat, a prefix each"] = copies.run_s(copies.plan())
    del copies
    for way, seconds in found.items():
        milliseconds = tuple(1e3 * s for s in seconds)
        report.add(Figure("ours", f"shared prefix, {way}", "ms", milliseconds, params={"shape": name}))
    report.ratios[f"cascade_{name}_vs_flat"] = min(found["flat"]) / min(found["cascade"])
    report.ratios[f"cascade_{name}_vs_a_prefix_each"] = min(found["flat, a prefix each"]) / min(found["cascade"])
    tree, flat = (batch.attend(plan, 0) for plan in plans.values())
    check(report, f"cascade {name}", tree, flat, MOST_ERROR)


def prefill_attention(gpu: Gpu, report: Report, _: float) -> None:
    for name, history in (("2k_at_32k", 32_768), ("2k_at_8k", 8192), ("2k_at_0k", 0)):
        with gpu.trying(f"prefill {name}"):
            _prefill(gpu, report, name, gpu.scale.size(history, min(history, 64)), is_first=name == "2k_at_32k")


def _prefill(gpu: Gpu, report: Report, name: str, history: int, is_first: bool) -> None:
    chunk, block = gpu.scale.size(2048, 40), 64
    context = history + chunk
    blocks = -(-context // block)
    cache = torch.randn(blocks, 2, KV_HEADS, block, HEAD_DIM, device=gpu.device, dtype=gpu.dtype)
    tables = torch.randperm(blocks, device=gpu.device).int()[None]
    query = torch.randn(chunk, HEADS, HEAD_DIM, device=gpu.device, dtype=gpu.dtype)
    host = (np.array([0, chunk], np.int32), np.array([context], np.int32))
    starts, contexts = (torch.from_numpy(array).to(gpu.device) for array in host)
    plan = gpu.kernels.plan(
        *host,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=block,
        wide=gpu.dtype is torch.float32,
    )

    def run(_: int) -> torch.Tensor:
        places = (query, cache, tables, starts, contexts)
        return GpuKernels.paged_attention(gpu.kernels, *places, HEAD_DIM**-0.5, plan=plan)

    def timed() -> tuple[float, ...]:
        return gpu.timed_s(run, captured=True)

    seconds = gpu.tuned(report, PREFILL, timed) if is_first else timed()
    keys = history * chunk + chunk * (chunk + 1) / 2
    flops = 4.0 * HEADS * HEAD_DIM * keys
    figure = rate("ours", "prefill attention", "TFLOP/s", flops / 1e12, seconds, chunk=chunk, history=history)
    report.add(figure)
    report.ratios[f"prefill_{name}_vs_788_tflops"] = figure.best / 788
    if name == "2k_at_0k":
        key, value = (torch.randn(1, HEADS, chunk, HEAD_DIM, device=gpu.device, dtype=gpu.dtype) for _ in range(2))
        rows = query.transpose(0, 1)[None]
        sdpa = gpu.timed_s(lambda _: _sdpa(rows, key, value, is_causal=True), captured=True)
        report.ratios["prefill_2k_vs_sdpa"] = min(sdpa) / min(seconds)
    few = slice(chunk - 16, chunk)  # each of them sees one key more than the one before
    last = (tables.cpu(), torch.tensor([0, 16]), torch.tensor([context]), HEAD_DIM**-0.5)
    expected = reference.paged_attention(query[few].float(), cache.float(), *last)
    check(report, f"prefill {name}", run(0)[few], expected, MOST_ERROR)


# Around attention


def elementwise(gpu: Gpu, report: Report, _: float) -> None:
    tokens, width, inner = gpu.scale.size(16_384, 8), gpu.scale.size(4096, 64), gpu.scale.size(14_336, 96)
    hidden, update = (torch.randn(tokens, width, device=gpu.device, dtype=gpu.dtype) for _ in range(2))
    weight = torch.ones(width, device=gpu.device, dtype=gpu.dtype)
    seconds = gpu.timed_s(lambda _: gpu.kernels.add_rms_norm(hidden, update, weight, 1e-5), captured=True)
    report.add(rate("ours", "add + rms norm", "GB/s", 4 * hidden.nbytes / 1e9, seconds, tokens=tokens))
    gate_up = torch.randn(tokens, 2 * inner, device=gpu.device, dtype=gpu.dtype)
    seconds = gpu.timed_s(lambda _: gpu.kernels.silu_mul(gate_up), captured=True)
    report.add(rate("ours", "silu mul", "GB/s", 1.5 * gate_up.nbytes / 1e9, seconds, tokens=tokens))


def int8_products(gpu: Gpu, report: Report, _: float) -> None:
    for name, full in (("1", 1), ("64", 64), ("4k", 4096)):
        tokens = gpu.scale.size(full, min(full, 8))
        inputs, outputs = gpu.scale.size(4096, 64), gpu.scale.size(14_336, 96)
        shape = (PRODUCT_LAYERS, outputs, inputs)
        weights = torch.randn(shape, device=gpu.device, dtype=gpu.dtype).mul_(0.02).unbind()
        hidden = torch.randn(tokens, inputs, device=gpu.device, dtype=gpu.dtype)
        plain = _products_s(gpu, [reference.Linear(weight) for weight in weights], hidden)
        amount = 2.0 * tokens * inputs * outputs / 1e12
        report.add(rate("torch", "bf16 product", "TFLOP/s", amount, plain, tokens=tokens))
        for coding, what in CODINGS.items():
            ours = _products_s(gpu, [gpu.kernels.linear(weight, coding=coding) for weight in weights], hidden)
            report.add(rate("ours", what, "TFLOP/s", amount, ours, tokens=tokens))
            report.ratios[f"{coding}_{name}_vs_bf16"] = min(plain) / min(ours)
            if (coding, full) == ("w8a8", 4096):
                report.ratios[f"w8a8_{name}_vs_{INT8_TOPS}_tops"] = amount / min(ours) / INT8_TOPS


def _products_s(gpu: Gpu, layers: Sequence[reference.Linear | Int8Linear], hidden: torch.Tensor) -> tuple[float, ...]:
    return gpu.timed_s(lambda index: layers[index](hidden), len(layers), captured=True)


def page_copies(gpu: Gpu, report: Report, _: float) -> None:
    """Pages of 32 KiB from pinned host memory: one long copy, a loop of small ones, and our kernel with 8 programs."""
    page, count = 32 << 10, gpu.scale.size(16_384, 8)
    host = torch.empty(count, page, dtype=torch.uint8, pin_memory=gpu.device.type == "cuda")
    target = torch.empty(count, page, dtype=torch.uint8, device=gpu.device)
    order = torch.randperm(count)
    source_pages, target_pages = order.to(gpu.device), torch.randperm(count).to(gpu.device)
    there, back_again = (host, target, source_pages, target_pages), (target, host, target_pages, source_pages)
    amount = host.nbytes / 1e9
    link = rate(
        "limit",
        "host to device, one copy",
        "GB/s",
        amount,
        gpu.timed_s(lambda _: target.copy_(host, non_blocking=True)),
    )
    report.add(link)
    found: list[Figure] = []
    for programs, words in COPY_LAUNCHES:
        with gpu.trying(f"copies by {programs} programs of {words} words"):
            seconds = gpu.timed_s(lambda _, n=programs, w=words: copy_pages(*there, n, w))  # type: ignore[misc]
            chosen = {"programs": programs, "words": words}
            found.append(rate("ours", "host to device, 32 KiB pages", "GB/s", amount, seconds, **chosen))
    ours = max(found, key=lambda figure: figure.best)
    report.add(*found)
    report.compare("page_copy_vs_link", ours, link)
    report.compare("page_copy_as_it_is_vs_link", found[0], link)
    few = order[: gpu.scale.size(2048, 4)].tolist()

    def one_by_one(_: int) -> None:
        for index in few:
            target[index].copy_(host[index], non_blocking=True)

    loop = rate("torch", "host to device, 32 KiB pages", "GB/s", len(few) * page / 1e9, gpu.timed_s(one_by_one))
    report.add(loop)
    report.compare("page_copy_vs_memcpy_loop", ours, loop)
    back = gpu.timed_s(lambda _: copy_pages(*back_again))
    report.add(rate("ours", "device to host, 32 KiB pages", "GB/s", amount, back))
    seconds = gpu.timed_s(lambda _: host.copy_(target, non_blocking=True))
    report.add(rate("limit", "device to host, one copy", "GB/s", amount, seconds))
    host.random_()
    copy_pages(*there)
    assert torch.equal(target.cpu()[target_pages.cpu()], host[source_pages.cpu()]), "other bytes"


def flex_attention(gpu: Gpu, report: Report, _: float) -> None:
    """torch's compiled FlexAttention over contiguous KV, compared with ours over pages."""
    if INTERPRETED:
        return
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    compiled = torch.compile(flex)
    small = gpu.scale.tiny
    ours = DecodeBatch(gpu, DecodeShape("64 x 8k", [8192] * 64 if not small else [256] * 2, 64), 2)
    size, context = len(ours.shape.contexts), ours.shape.contexts[0]
    key, value = (
        torch.randn(2, size, KV_HEADS, context, HEAD_DIM, device=gpu.device, dtype=gpu.dtype) for _ in range(2)
    )
    query = ours.query[:, :, None]
    theirs = gpu.timed_s(lambda i: compiled(query, key[i], value[i], enable_gqa=True), 2)
    report.ratios["decode_64x8k_vs_flex"] = min(theirs) / min(ours.run_s(ours.plan()))
    length = gpu.scale.size(8192, 256)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=str(gpu.device))
    rows = torch.randn(1, HEADS, length, HEAD_DIM, device=gpu.device, dtype=gpu.dtype)
    keys, values = (torch.randn(1, KV_HEADS, length, HEAD_DIM, device=gpu.device, dtype=gpu.dtype) for _ in range(2))
    theirs = gpu.timed_s(lambda _: compiled(rows, keys, values, block_mask=mask, enable_gqa=True))
    flops = 2.0 * HEADS * HEAD_DIM * length * (length + 1)
    report.add(rate("torch", "FlexAttention, prefill", "TFLOP/s", flops / 1e12, theirs, chunk=length))
