"""The parts of ``mooncake bench gpu`` that time kernels: the card's limits, attention, and what is around it.

Each part gets the device, a report to add to, and the bytes a second that the card can read.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mooncake.app.bench_report import Figure, Report
from mooncake.kernels.gpu import GpuKernels, Int8Linear, codes_and_scales, copy_pages
from mooncake.kernels.gpu_attention import DECODE_ROWS, PREFILL_ROWS, DevicePlan, Launch, run_plan
from mooncake.kernels.reference import SCALE_BYTES
from mooncake.kernels.triton_launch import INTERPRETED, DoesNotFit
from mooncake.model.gpu_model import PlannedKernels

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B model of the Llama family
READ_STREAM, COPY = "read stream", "copy, read + write"
REPETITION_S = 0.2
RUNS_A_LAP = 8  # of a graph, at least
_Given = tuple[DevicePlan, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Of ``run_plan``: plan, query, pages, their scales, block tables."""
_sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the shapes are; ``tiny`` exercises every line in seconds, on a CPU too."""

    tiny: bool

    def size(self, real: int, tiny: int) -> int:
        return tiny if self.tiny else real


@dataclass(frozen=True, slots=True)
class DecodeShape:
    name: str
    contexts: list[int]
    block_tokens: int
    shared: int = 0  # tokens of a prefix that all sequences share


class Gpu:
    """The device under test and its clock."""

    def __init__(self, scale: Scale, reps: int) -> None:
        self.kernels = PlannedKernels()
        self.device = self.kernels.device
        self.scale = scale
        self.reps = 1 if self.device.type == "cpu" else reps
        self.dtype = torch.float32 if INTERPRETED else torch.bfloat16

    def timed_s(self, run: Callable[[int], object], rotate: int = 1, captured: bool = False) -> tuple[float, ...]:
        """Seconds of ``run(i)``, i in turn below ``rotate``, between two events.

        ``captured``: as a graph, so that what takes microseconds is not the host's time to launch it.
        """
        if self.device.type == "cpu":
            started = time.perf_counter()
            run(0)
            return (time.perf_counter() - started,)
        turns = [index % rotate for index in range(max(rotate, RUNS_A_LAP))] if captured else list(range(rotate))
        for index in turns[: max(rotate, 3)] * 2:
            run(index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        kept: list[object] = []  # what a graph writes to
        if captured:
            with torch.cuda.graph(graph):
                kept += [run(index) for index in turns]

        def laps_s(count: int) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(count):
                if captured:
                    graph.replay()
                else:
                    for index in turns:
                        run(index)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        count = min(max(round(REPETITION_S / laps_s(1)), 1), 100)
        return tuple(laps_s(count) / count / len(turns) for _ in range(self.reps))

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def rate(subject: str, name: str, unit: str, amount: float, seconds: Sequence[float], **params: str | int) -> Figure:
    return Figure(subject, name, unit, tuple(amount / s for s in seconds), more_is_better=True, params=params)


# Limits


def limits(gpu: Gpu, report: Report, _: float) -> None:
    words = torch.ones(gpu.scale.size(4 << 30, 1 << 20) // 4, device=gpu.device)
    read = rate("limit", READ_STREAM, "GB/s", words.nbytes / 1e9, gpu.timed_s(lambda _: words.max(), captured=True))
    target = torch.empty_like(words)
    copy = rate("limit", COPY, "GB/s", 2 * words.nbytes / 1e9, gpu.timed_s(lambda _: target.copy_(words)))
    gpu.free()
    size = gpu.scale.size(8192, 64)
    left, right = (torch.randn(size, size, device=gpu.device).to(gpu.dtype) for _ in range(2))
    product = rate(
        "limit", "matrix product", "TFLOP/s", 2 * size**3 / 1e12, gpu.timed_s(lambda _: left @ right, captured=True)
    )
    report.add(read, copy, product)
    gpu.free()


def stream_of(report: Report) -> float:
    """Bytes a second that can be read. Reading alone is what attention does; a reduction slower than a copy, reads and
    writes together, is no limit."""
    return max(figure.best for figure in report.figures if figure.name in (READ_STREAM, COPY)) * 1e9


# Attention


class DecodeBatch:
    """One decode step's attention over several layers' pages, in a random physical order: none is in the L2."""

    def __init__(self, gpu: Gpu, shape: DecodeShape, layers: int, pages: str = "") -> None:
        """``pages``: "" for numbers as they are, "int8" for rows of codes and their scale as engines have them, or
        "int8_beside" for codes whose scales lie elsewhere."""
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
        )

    def run_s(self, plan: DevicePlan) -> tuple[float, ...]:
        def run(layer: int) -> torch.Tensor:
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

        return self.gpu.timed_s(run, self.layers, captured=True)


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
        batch = DecodeBatch(gpu, shape, layers)
        seconds = batch.run_s(batch.plan())
        figure = rate("ours", "decode attention", "GB/s", batch.kv_bytes / 1e9, seconds, shape=shape.name)
        report.add(figure)
        if ratio:
            report.ratios[ratio] = figure.best * 1e9 / stream
        if shape.name == "64 x 8k":
            report.ratios["decode_64x8k_vs_3400_gb_per_s"] = figure.best / 3400
        if shape.name == "1 x 128k":
            whole = batch.run_s(batch.plan(piece_tokens=1 << 20))
            report.ratios["split_1x128k_vs_one_piece"] = min(whole) / min(seconds)
        if shape.name == "64 x 8k":
            report.ratios["decode_64x8k_vs_sdpa"] = min(_sdpa_s(gpu, batch)) / min(seconds)
        del batch
        gpu.free()
    coded(gpu, report)


def _sdpa_s(gpu: Gpu, batch: DecodeBatch) -> tuple[float, ...]:
    """torch's attention over KV that is contiguous already, query heads of a group as rows of one product."""
    size, context = len(batch.shape.contexts), batch.shape.contexts[0]
    key, value = (
        torch.randn(batch.layers, size, KV_HEADS, context, HEAD_DIM, device=gpu.device, dtype=gpu.dtype)
        for _ in range(2)
    )
    query = batch.query.view(size, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    return gpu.timed_s(lambda layer: _sdpa(query, key[layer], value[layer]), batch.layers, captured=True)


def coded(gpu: Gpu, report: Report) -> None:
    """int8 pages against bfloat16 at the same number of tokens.

    Those of engines, whose rows of 132 bytes come in words of four, beside such as could be read 16 bytes at a time.
    """
    shape = DecodeShape("64 x 8k", [8192] * 64 if not gpu.scale.tiny else [70, 40], 64)
    plain = DecodeBatch(gpu, shape, 2)
    plain_s = plain.run_s(plain.plan())
    del plain
    for name in ("int8", "int8_beside"):
        batch = DecodeBatch(gpu, shape, 2, name)
        seconds = batch.run_s(batch.plan())
        report.add(
            rate("ours", f"decode attention, {name} pages", "GB/s", batch.kv_bytes / 1e9, seconds, shape=shape.name)
        )
        report.ratios[f"{name}_kv_vs_bf16"] = min(plain_s) / min(seconds)
        del batch
        gpu.free()


def cascade(gpu: Gpu, report: Report, _: float) -> None:
    for batch_size, prefix, own in ((64, 32_768, 128), (32, 4096, 512)):
        name = f"{batch_size}x{prefix // 1024}k"
        if gpu.scale.tiny:
            batch_size, prefix, own = 3, 1024, 20
        shape = DecodeShape(name, [prefix + own] * batch_size, 64, shared=prefix)
        batch = DecodeBatch(gpu, shape, 2)
        tree, flat = batch.run_s(batch.plan(cascade=True)), batch.run_s(batch.plan())
        report.add(
            Figure("ours", "shared prefix, cascade", "ms", tuple(1e3 * s for s in tree), params={"shape": name}),
            Figure("ours", "shared prefix, flat", "ms", tuple(1e3 * s for s in flat), params={"shape": name}),
        )
        report.ratios[f"cascade_{name}_vs_flat"] = min(flat) / min(tree)
        del batch
        gpu.free()


def prefill_attention(gpu: Gpu, report: Report, _: float) -> None:
    chunk, block = gpu.scale.size(2048, 40), 64
    for name, history in (("2k_at_0k", 0), ("2k_at_8k", 8192), ("2k_at_32k", 32_768)):
        history = gpu.scale.size(history, min(history, 64))
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
        arguments = (query, cache, tables, starts, contexts, HEAD_DIM**-0.5)
        run = functools.partial(GpuKernels.paged_attention, gpu.kernels, *arguments, plan=plan)
        seconds = gpu.timed_s(lambda _, run=run: run(), captured=True)  # type: ignore[misc]
        keys = history * chunk + chunk * (chunk + 1) / 2
        flops = 4.0 * HEADS * HEAD_DIM * keys
        figure = rate("ours", "prefill attention", "TFLOP/s", flops / 1e12, seconds, chunk=chunk, history=history)
        report.add(figure)
        report.ratios[f"prefill_{name}_vs_788_tflops"] = figure.best / 788
        if history == 0:
            key, value = (torch.randn(1, HEADS, chunk, HEAD_DIM, device=gpu.device, dtype=gpu.dtype) for _ in range(2))
            rows = query.transpose(0, 1)[None]
            sdpa = gpu.timed_s(lambda _, q=rows, k=key, v=value: _sdpa(q, k, v, is_causal=True), captured=True)  # type: ignore[misc]
            report.ratios["prefill_2k_vs_sdpa"] = min(sdpa) / min(seconds)
        gpu.free()


def tiles(gpu: Gpu, report: Report, _: float) -> None:
    """What other launches than ours would give, for the next change of them. Such as do not fit are left out."""
    small = gpu.scale.tiny
    chunk, context = gpu.scale.size(2048, 128), gpu.scale.size(34_816, 256)
    cache = torch.randn(context // 64, 2, KV_HEADS, 64, HEAD_DIM, device=gpu.device, dtype=gpu.dtype)
    tables = torch.randperm(context // 64, device=gpu.device).int()[None]
    query = torch.randn(chunk, HEADS, HEAD_DIM, device=gpu.device, dtype=gpu.dtype)
    host = (np.array([0, chunk], np.int32), np.array([context], np.int32))
    plan = gpu.kernels.plan(*host, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_tokens=64)
    for keys, stages in ((64, 5), (128, 4), (128, 3), (128, 5)):
        launch = Launch(PREFILL_ROWS, keys, num_warps=8, num_stages=stages, per_processor=1)
        _other_launch(gpu, report, "prefill", launch, lambda _: (plan, query, cache, None, tables), 1)
    shape = DecodeShape("64 x 8k", [8192] * 64 if not small else [70, 40], 64)
    others = {"": [(64, 5, 2), (64, 7, 2), (64, 5, 3)], "int8": [(64, 5, 2), (64, 5, 3), (128, 3, 2), (128, 3, 3)]}
    for pages, launches in others.items():
        batch = DecodeBatch(gpu, shape, 2, pages)
        decode_plan = batch.plan()

        def given(layer: int, batch: DecodeBatch = batch, plan: DevicePlan = decode_plan) -> _Given:
            coded = batch.cache[:, layer]
            codes, scales = codes_and_scales(coded) if coded.dtype is torch.int8 else (coded, None)
            return plan, batch.query, codes, scales, batch.tables

        for keys, stages, per_processor in launches:
            launch = Launch(DECODE_ROWS, keys, num_warps=4, num_stages=stages, per_processor=per_processor)
            _other_launch(gpu, report, f"decode {pages}".strip(), launch, given, 2)
        del batch, given
        gpu.free()
    page, count = 32 << 10, gpu.scale.size(16_384, 8)
    memory = torch.empty(count, page, dtype=torch.uint8, pin_memory=gpu.device.type == "cuda")
    target = torch.empty(count, page, dtype=torch.uint8, device=gpu.device)
    order, amount = torch.randperm(count).to(gpu.device), memory.nbytes / 1e9
    for programs, words in ((8, 2048), (8, 4096), (16, 2048), (16, 4096)):
        seconds = gpu.timed_s(lambda _, n=programs, w=words: copy_pages(memory, target, order, order, n, w))  # type: ignore[misc]
        report.add(rate("ours", "launch, page copies", "GB/s", amount, seconds, programs=programs, words=words))


def _other_launch(
    gpu: Gpu, report: Report, name: str, launch: Launch, given: Callable[[int], _Given], layers: int
) -> None:
    def run(layer: int) -> torch.Tensor:
        processors = gpu.kernels.num_processors
        return run_plan(given(layer)[0], processors, *given(layer)[1:], HEAD_DIM**-0.5, 0, choose=lambda *_: launch)

    try:
        seconds = gpu.timed_s(run, layers, captured=True)
    except DoesNotFit:
        return
    chosen = {"keys": launch.keys, "stages": launch.num_stages, "programs": launch.per_processor}
    report.add(Figure("ours", f"launch, {name}", "ms", tuple(1e3 * s for s in seconds), params=chosen))


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
    for tokens in (1, 64, 4096):
        tokens = gpu.scale.size(tokens, min(tokens, 8))
        inputs, outputs = gpu.scale.size(4096, 64), gpu.scale.size(14_336, 96)
        weight = torch.randn(outputs, inputs, device=gpu.device, dtype=gpu.dtype) * 0.02
        hidden = torch.randn(tokens, inputs, device=gpu.device, dtype=gpu.dtype)
        coded_layer = Int8Linear(weight)
        ours = gpu.timed_s(lambda _, c=coded_layer, h=hidden: c(h), captured=True)  # type: ignore[misc]
        plain = gpu.timed_s(lambda _, w=weight, h=hidden: torch.nn.functional.linear(h, w), captured=True)  # type: ignore[misc]
        amount = 2.0 * tokens * inputs * outputs / 1e12
        report.add(rate("ours", "W8A8 product", "TFLOP/s", amount, ours, tokens=tokens))
        report.add(rate("torch", "bf16 product", "TFLOP/s", amount, plain, tokens=tokens))
        report.ratios[f"w8a8_{tokens}_vs_bf16"] = min(plain) / min(ours)


def page_copies(gpu: Gpu, report: Report, _: float) -> None:
    """Pages of 32 KiB from pinned host memory: one long copy, a loop of small ones, and our kernel on 8 programs."""
    page, count = 32 << 10, gpu.scale.size(16_384, 8)
    host = torch.empty(count, page, dtype=torch.uint8, pin_memory=gpu.device.type == "cuda")
    target = torch.empty(count, page, dtype=torch.uint8, device=gpu.device)
    order = torch.randperm(count)
    source_pages, target_pages = order.to(gpu.device), torch.randperm(count).to(gpu.device)
    amount = host.nbytes / 1e9
    link = rate(
        "limit",
        "host to device, one copy",
        "GB/s",
        amount,
        gpu.timed_s(lambda _: target.copy_(host, non_blocking=True)),
    )
    ours = rate("ours", "host to device, 32 KiB pages", "GB/s", amount,
                gpu.timed_s(lambda _: copy_pages(host, target, source_pages, target_pages)))  # fmt: skip
    few = order[: gpu.scale.size(2048, 4)].tolist()

    def one_by_one(_: int) -> None:
        for index in few:
            target[index].copy_(host[index], non_blocking=True)

    loop = rate("torch", "host to device, 32 KiB pages", "GB/s", len(few) * page / 1e9, gpu.timed_s(one_by_one))
    back = rate("ours", "device to host, 32 KiB pages", "GB/s", amount,
                gpu.timed_s(lambda _: copy_pages(target, host, target_pages, source_pages)))  # fmt: skip
    report.add(link, ours, loop, back)
    report.compare("page_copy_vs_link", ours, link)
    report.compare("page_copy_vs_memcpy_loop", ours, loop)


def flex_attention(gpu: Gpu, report: Report, _: float) -> None:
    """torch's compiled FlexAttention over KV that is contiguous already, beside ours over pages."""
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
