"""A model on a GPU behind the same ``forward`` as on a CPU: plans attention, moves the batch, replays decode steps.

A decode step of a small model is hundreds of short kernels, and launching them one by one takes longer than running
them. So decode-only batches are captured once a bucket of batch sizes as a CUDA graph and replayed with new contents in
the same buffers; all graphs share one memory pool. Everything else runs kernel by kernel.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mooncake.checkpoint import ModelConfig
from mooncake.kernels.attention_plan import PIECES_PER_PROCESSOR
from mooncake.kernels.gpu import DECODE_ROWS, DevicePlan, GpuKernels
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.llama import CausalLM

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Decode batch sizes that get a graph; a batch is padded to the next one, by at most a half."""

NO_SLOT = -1  # where a padding token's keys and values go: nowhere


class PlannedKernels(GpuKernels):
    """Kernels whose attention follows the plan of the step that is running."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__(device)
        self.step_plan: DevicePlan | None = None

    def paged_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        plan: DevicePlan | None = None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return super().paged_attention(
            query,
            cache_layer,
            block_tables,
            query_starts,
            context_lens,
            scale,
            window,
            plan or self.step_plan,
            scales,
        )


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch  # the buffers that the graph reads
    logits: torch.Tensor  # and the one it writes, [bucket, V]


class GpuModel:
    """``engine.CausalModel`` on one GPU. One thread may call it at a time."""

    def __init__(
        self,
        build: Callable[[PlannedKernels], CausalLM],
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        buckets: tuple[int, ...] = BUCKETS,
        host_logits: bool = True,
    ) -> None:
        """``build`` makes the model over these kernels, which compute in ``dtype``.

        A sequence has ``max_blocks`` blocks at most. Without ``buckets`` nothing is captured. ``host_logits`` brings
        the logits to the host, where the engine samples.
        """
        self.kernels = PlannedKernels(device)
        self._device = self.kernels.device
        self._model = build(self.kernels)
        self._dtype = dtype
        self._max_blocks = max_blocks
        self._buckets = sorted(buckets)
        self._host_logits = host_logits
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None  # torch's handle of the memory that graphs share
        self._decode_plan: DevicePlan | None = None  # of every graph
        self._cache: torch.Tensor | None = None  # what the graphs were captured over

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``CausalLM.forward``, with ``batch`` on the host and ``cache`` on the GPU.

        A hook that waits or copies between layers forbids a graph.
        """
        with torch.cuda.device_of(cache):  # type: ignore[no-untyped-call]  # Triton launches where its thread is
            return self._forward(batch, cache, hook)

    def _forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        size = batch.num_sequences
        decodes_only = len(batch.tokens) == size == len(batch.logit_rows)
        is_plain = decodes_only and batch.adapters is None  # adapters differ from step to step: kernel by kernel
        if is_plain and not hook.wants_layers and self._buckets and size <= self._buckets[-1]:
            logits = self._replay(batch, cache)
        else:
            self.kernels.step_plan = self._plan(batch, cache)
            logits = self._model.forward(self._on_device(batch), cache, hook)
        return logits.cpu() if self._host_logits else logits

    def _plan(self, batch: ForwardBatch, cache: torch.Tensor, buffers: DevicePlan | None = None) -> DevicePlan:
        config = self.config
        return self.kernels.plan(
            batch.query_starts.numpy(),
            batch.context_lens.numpy(),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_tokens=cache.shape[4],
            window=config.sliding_window or 0,
            # A captured plan is one pass: its buffers have the smallest tiles, and a cascade has wider ones.
            block_tables=None if buffers is not None else batch.block_tables.numpy(),
            wide=self._dtype is torch.float32,
            buffers=buffers,
        )

    def _on_device(self, batch: ForwardBatch) -> ForwardBatch:
        given = {name: getattr(batch, name) for name in ForwardBatch.__slots__}
        moved = {name: part.to(self._device, non_blocking=True) for name, part in given.items() if part is not None}
        return ForwardBatch(**moved)

    # Graphs

    def _replay(self, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        if self._cache is not None and self._cache.data_ptr() != cache.data_ptr():
            self._graphs.clear()
        self._cache = cache
        size = batch.num_sequences
        bucket = self._buckets[bisect.bisect_left(self._buckets, size)]
        captured = self._graphs.get(bucket)
        if captured is None:
            captured = self._graphs[bucket] = self._capture(bucket, cache)
        if self._plan(batch, cache, self._decode_plan) is not self._decode_plan:
            raise AssertionError("a decode plan outgrew its buffers")
        buffers, blocks = captured.batch, batch.block_tables.shape[1]
        buffers.tokens[:size].copy_(batch.tokens, non_blocking=True)
        buffers.positions[:size].copy_(batch.positions, non_blocking=True)
        buffers.slots[:size].copy_(batch.slots, non_blocking=True)
        buffers.slots[size:].fill_(NO_SLOT)
        buffers.block_tables[:size, :blocks].copy_(batch.block_tables, non_blocking=True)
        captured.graph.replay()
        return captured.logits[:size]

    def _capture(self, bucket: int, cache: torch.Tensor) -> _Captured:
        """Run the step once as it is, for what is initialised lazily, and record it the second time."""
        buffers = self._empty_batch(bucket)
        self._decode_plan = self._decode_plan or self._largest_decode_plan()
        self._decode_plan.num_pieces.zero_()  # the recorded run computes nothing and writes nowhere
        self._decode_plan.num_merged.zero_()
        self.kernels.step_plan = self._decode_plan
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._model.forward(buffers, cache, NoHook())
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Threads that copy blocks meanwhile are no part of it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._model.forward(buffers, cache, NoHook())
        self._pool = self._pool or graph.pool()
        log.debug("captured a decode step of %d sequences", bucket)
        return _Captured(graph, buffers, logits)

    def _empty_batch(self, bucket: int) -> ForwardBatch:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        return ForwardBatch(
            tokens=zeros(bucket),
            positions=zeros(bucket),
            query_starts=torch.arange(bucket + 1, dtype=torch.int32, device=self._device),
            context_lens=torch.ones(bucket, dtype=torch.int32, device=self._device),
            block_tables=zeros(bucket, self._max_blocks, dtype=torch.int32),
            slots=zeros(bucket) + NO_SLOT,
            logit_rows=torch.arange(bucket, device=self._device),
        )

    def _largest_decode_plan(self) -> DevicePlan:
        """Room for any decode plan: each sequence may have one piece more than equal shares of the whole give it."""
        config = self.config
        group = 1 << (config.num_heads // config.num_kv_heads - 1).bit_length()
        most = self._buckets[-1]
        pieces = most + self.kernels.num_processors * PIECES_PER_PROCESSOR
        return DevicePlan.empty(
            max(DECODE_ROWS // group, 1),
            pieces,
            pieces,
            most,
            pieces,
            config.num_heads,
            config.head_dim,
            self._device,
        )
