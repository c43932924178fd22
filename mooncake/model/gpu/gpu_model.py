"""A model on a GPU behind the same ``forward`` as on a CPU: plans attention, moves the batch, replays decode steps.

A decode step of a small model is hundreds of short kernels, and launching them one by one takes longer than running
them. So decode-only batches are captured as CUDA graphs before the first request, one per bucket of batch sizes, and
replayed with new contents in the same buffers; all graphs share one memory pool. Everything else runs kernel by kernel.

A decode step can be started without waiting for it (``start``): its tokens are sampled on the device, and are the next
step's input before the host knows them.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from mooncake.errors import ConfigError
from mooncake.kernels.gpu.attention import DECODE_ROWS, DevicePlan
from mooncake.kernels.gpu.attention_plan import MIN_SHARED_TOKENS, PIECES_PER_PROCESSOR
from mooncake.kernels.gpu.kernels import pack
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.decoder import Decoder
from mooncake.model.gpu.device_batch import NEWEST_ROW, Buffers, DeviceBatches
from mooncake.model.gpu.device_sampler import Draws, choose
from mooncake.model.gpu.planned_kernels import Kind, PlannedKernels, Plans
from mooncake.model.llama import CausalLM
from mooncake.model_config import ModelConfig
from mooncake.page_groups import UNIFORM, PageGroups

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Decode batch sizes that get a graph; a batch is padded to the next one, by at most a half."""

CASCADE_BYTES = 40e9
"""Bytes of keys and values that a decode step must save by reading shared prefixes once to run kernel by kernel for it:
about 10 ms of a card's reads, against the 5 ms that launching a step of an 8B model may take. An estimate; ``mooncake
bench gpu`` times both ways."""

WARM_UP_TOKENS = (8192, 512, 128, 64, 16, 2)
"""Prompt chunks whose kernels differ: wide tiles and narrow ones, of experts, of W8A8 and all. The largest that an
engine makes also shows that there is memory for it."""


def captured_buckets(max_sequences: int, buckets: Sequence[int] = BUCKETS) -> Sequence[int]:
    """Those that get a graph where so many sequences run at once."""
    last = min(bisect.bisect_left(buckets, max_sequences), len(buckets) - 1)
    return buckets[: last + 1]


@contextlib.contextmanager
def fitting_into(where: str, what: str = "the weights and kv_gb") -> Iterator[None]:
    """Raises ConfigError if the GPU has no room. Only torch's allocator has an error of its own for that; libraries and
    the driver raise RuntimeError, and so does the end of a capture in which the allocator has raised its own."""
    try:
        yield
    except RuntimeError as error:
        if (told := _no_room(error)) is None:
            raise
        raise ConfigError(f"{what} do not fit into {where}: {told.splitlines()[0]}") from None


def _no_room(error: BaseException | None) -> str | None:
    while error is not None:
        told = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in told or "ALLOC_FAILED" in told:
            return told
        error = error.__context__
    return None


class _Graph(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Rerun:
    """For Triton's interpreter: recomputes the step on each replay."""

    step: Callable[[], torch.Tensor]
    logits: torch.Tensor

    def replay(self) -> None:
        self.logits.copy_(self.step())


@dataclass(slots=True)
class _Captured:
    graph: _Graph
    buffers: Buffers  # that the graph reads
    logits: torch.Tensor  # and the one it writes, [bucket, V]


class _Started:
    """``engine.StartedStep``: its tokens are being copied to the host."""

    def __init__(self, drawn: torch.Tensor) -> None:
        self._tokens = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=drawn.is_cuda)
        self._tokens.copy_(drawn, non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if drawn.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def tokens(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class GpuModel:
    """``engine.AsyncModel`` on one GPU. One thread may call it at a time.

    Block tables passed in must not be modified: those of the previous step are not copied again.
    """

    def __init__(
        self,
        build: Callable[[PlannedKernels], CausalLM | Decoder],
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        buckets: tuple[int, ...] = BUCKETS,
        host_logits: bool = True,
        share: Callable[[torch.Tensor], torch.Tensor] = lambda drawn: drawn,
        groups: PageGroups = UNIFORM,
    ) -> None:
        """``build`` makes the model over these kernels, which compute in ``dtype``.

        A sequence has at most ``max_blocks`` blocks. Without ``buckets`` nothing is captured. ``host_logits`` copies
        the logits to the host, where the engine samples.

        If this is one rank's part of a model, ``share`` gives every rank the first one's tokens ``[R]``, and the model
        gives the first one all logits, and the others no rows of them. ``groups`` are those of the engine.
        """
        self.kernels = PlannedKernels(device)
        self._device = self.kernels.device
        self._model = build(self.kernels)
        self.adapter_places = self._model.adapter_places if isinstance(self._model, CausalLM) else None
        self._dtype = dtype
        self._max_blocks = max_blocks
        self._batches = DeviceBatches(self.config, groups, max_blocks, self._device)
        self._buckets = sorted(buckets)
        self._host_logits = host_logits
        self._share = share
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None  # torch's handle of the memory that graphs share
        self._stream: torch.cuda.Stream | None = None  # that all are captured on
        self._stateful = self.config.recurrence.layers if self.config.recurrence else ()
        self._attending = sorted(set(range(self.config.num_layers)).difference(self._stateful))
        self._kinds = sorted({self._kind_of(layer) for layer in self._attending})
        self._decode_plans: Plans = {}  # of every graph
        self._cache: torch.Tensor | None = None  # what the graphs were captured over
        self.cascade_bytes = CASCADE_BYTES
        self._shared: tuple[torch.Tensor | None, bool] = (None, False)  # block tables, and whether they share so much
        self._drawn = torch.empty(0, dtype=torch.int64)  # by the step that was started last, on the device

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_async_sequences(self) -> int:
        """None if layers keep states: a step that is discarded is computed again, and they take a token in once."""
        if self._stateful:
            return 0
        return self._buckets[-1] if self._buckets else sys.maxsize

    @torch.inference_mode()
    def warm_up(self, cache: torch.Tensor, max_sequences: int, max_tokens: int = 0) -> None:
        """Compile what steps over ``cache`` need and capture their graphs, before anyone waits for them. A step has up
        to ``max_tokens`` of prompts (0: whole prompts).

        The cache is unchanged: these steps have no slots in it.
        """
        if not self._buckets:
            return
        started = time.monotonic()
        with torch.cuda.device_of(cache):  # type: ignore[no-untyped-call]
            longest = self._max_blocks * cache.shape[4]
            most = min(max_tokens or longest, longest)
            for length in sorted({min(tokens, most) for tokens in WARM_UP_TOKENS}, reverse=True):
                self._forward(self._batches.empty_step([0, length], length), cache, NoHook())
            # Two sequences that share enough to be read once, if one can be so long
            context = min(MIN_SHARED_TOKENS + cache.shape[4], longest)
            self._run_eagerly(self._batches.empty_step([0, 1, 2], context), cache, NoHook())
            captured = captured_buckets(max_sequences, self._buckets)
            self._use(cache)
            for bucket in reversed(captured):  # the largest first: others fit into its memory
                self._graphs[bucket] = self._capture(bucket, cache)
            self._draw_once(self._graphs[captured[-1]], cache)
            if cache.is_cuda:
                torch.cuda.synchronize()
        took_s = time.monotonic() - started
        log.info("captured decode steps of up to %d sequences in %.1f s", captured[-1], took_s)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``CausalLM.forward``, with ``batch`` on the host and ``cache`` on the GPU.

        A hook that waits or copies between layers forbids a graph.
        """
        with torch.cuda.device_of(cache):  # type: ignore[no-untyped-call]  # Triton launches where its thread is
            return self._forward(batch, cache, hook)

    @torch.inference_mode()
    def start(
        self, batch: ForwardBatch, cache: torch.Tensor, draws: Draws | None, newest: Sequence[int] | None = None
    ) -> _Started:
        """As ``engine.AsyncModel.start``."""
        with torch.cuda.device_of(cache):  # type: ignore[no-untyped-call]
            logits = self._logits(batch, cache, NoHook(), newest)
            self._drawn = self._share(choose(logits, *self._draws_on_device(draws)))
            return _Started(self._drawn)

    @torch.inference_mode()
    def follow(
        self,
        batch: ForwardBatch,
        cache: torch.Tensor,
        newest: Sequence[int] | None,
        hook: LayerHook,
        *,
        replays: bool,
        draws: bool,
    ) -> None:
        """On another rank: compute its part of a step of the first rank, and learn the tokens drawn there, if there are
        any. ``replays`` is what the first rank decided, because the same collectives must run on all ranks; such a
        step has no ``hook``."""
        with torch.cuda.device_of(cache):  # type: ignore[no-untyped-call]
            if replays:
                self._replay(batch, cache, newest)
            else:
                self._run_eagerly(batch, cache, hook, newest)
            if draws:
                self._drawn = self._share(torch.empty(len(batch.logit_rows), dtype=torch.int64, device=self._device))

    def replays(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> bool:
        """Whether this step is the replay of a graph; the others run kernel by kernel."""
        size = batch.num_sequences
        decodes_only = len(batch.tokens) == size == len(batch.logit_rows)
        # Adapters differ from step to step, and so do hidden states that are wanted: kernel by kernel.
        is_plain = decodes_only and batch.adapters is None and batch.hidden is None
        is_captured = is_plain and not hook.wants_layers and bool(self._buckets) and size <= self._buckets[-1]
        return is_captured and not self._is_cascade(batch, cache)

    def close(self) -> None:
        """Free the graphs. Those with collectives must be gone before their communicators. Idempotent."""
        self._graphs.clear()
        self._pool = None

    def _forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        logits = self._logits(batch, cache, hook)
        return logits.cpu() if self._host_logits else logits

    def _logits(
        self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook, newest: Sequence[int] | None = None
    ) -> torch.Tensor:
        if self.replays(batch, cache, hook):
            return self._replay(batch, cache, newest)
        return self._run_eagerly(batch, cache, hook, newest)

    def _run_eagerly(
        self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook, newest: Sequence[int] | None = None
    ) -> torch.Tensor:
        moved = self._batches.of(batch, cache.shape[4])
        self.kernels.follow(self._plan(batch, cache), moved.query_starts)
        if newest is not None:
            rows = self._batches.moved(np.asarray(newest, np.int64))
            moved = replace(moved, tokens=self._newest(rows, moved.tokens))
        return self._model.forward(moved, cache, hook)

    def _is_cascade(self, batch: ForwardBatch, cache: torch.Tensor) -> bool:
        """Whether neighbours in the batch share so much that it should be read once, which no graph can do."""
        if self._shared[0] is not batch.block_tables:  # else as many blocks as before
            self._shared = batch.block_tables, self._shared_bytes(batch, cache) >= self.cascade_bytes
        return self._shared[1]

    def _shared_bytes(self, batch: ForwardBatch, cache: torch.Tensor) -> float:
        """Bytes saved by reading each shared block once, in layers without a window. Latent rows are already shared by
        all heads: a tile has few more queries than one token's, so a graph is worth more. With ALiBi a tile has to know
        where each of its queries is, and one of several sequences does not."""
        if self.config.latent is not None or self.config.alibi_slopes:
            return 0.0
        tables = batch.block_tables.numpy()
        full_blocks = (batch.context_lens.numpy() - 1) // cache.shape[4]
        differs = tables[1:] != tables[:-1]
        same = np.where(differs.any(axis=1), differs.argmax(axis=1), tables.shape[1])
        blocks = np.minimum(same, np.minimum(full_blocks[1:], full_blocks[:-1])).sum()
        kinds = [self._kind_of(layer) for layer in self._attending]
        elements = sum(kind.num_kv_heads * kind.head_dim for kind in kinds if not kind.window)
        return float(blocks) * cache[0, 0].nbytes * elements / math.prod(self.config.row_heads)

    def _kind_of(self, layer: int) -> Kind:
        return Kind(self.config.window_of(layer), *self.config.heads_of(layer))

    def _newest(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens sampled by these rows of the last started step, and ``tokens`` where a row is negative. For a row
        that could not sample one, the result is arbitrary: nobody uses what follows."""
        drawn = self._drawn.index_select(0, rows.clamp(min=0)).clamp_(min=0)
        return torch.where(rows < 0, tokens, drawn)

    def _draws_on_device(self, draws: Draws | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if draws is None:
            return None, None
        moved = self._batches.moved
        return moved(draws.values), moved(draws.cut_rows) if len(draws.cut_rows) else None

    def _draw_once(self, captured: _Captured, cache: torch.Tensor) -> None:
        """Run once kernel by kernel in all variants, so that everything such a step needs is loaded and known to
        fit."""
        batch = captured.buffers.batch
        self.kernels.follow(self._decode_plans, batch.query_starts)
        logits = self._model.forward(batch, cache, NoHook())
        rows = len(logits)
        if not rows:  # of a rank that draws nothing
            return
        values = np.tile(np.array([[1.0], [2.0], [0.5], [0.1], [0.5]]), rows)
        choose(logits, *self._draws_on_device(Draws(values, np.arange(rows))))

    def _plan(self, batch: ForwardBatch, cache: torch.Tensor, buffers: Plans | None = None) -> Plans:
        config = self.config
        return {
            kind: self.kernels.plan(
                batch.query_starts.numpy(),
                batch.context_lens.numpy(),
                num_heads=config.num_heads,
                num_kv_heads=kind.num_kv_heads,
                head_dim=kind.head_dim,
                block_tokens=cache.shape[4],
                window=kind.window,
                # A captured plan is one pass, and a cascade has another one.
                block_tables=None if buffers is not None or config.alibi_slopes else batch.block_tables.numpy(),
                wide=self._dtype is torch.float32,
                scaled=cache.dtype is torch.int8,
                latent=config.latent is not None,
                buffers=None if buffers is None else buffers[kind],
            )
            for kind in self._kinds
        }

    # Graphs

    def _replay(self, batch: ForwardBatch, cache: torch.Tensor, newest: Sequence[int] | None) -> torch.Tensor:
        self._use(cache)
        size = batch.num_sequences
        bucket = self._buckets[bisect.bisect_left(self._buckets, size)]
        captured = self._graphs.get(bucket)
        if captured is None:
            captured = self._graphs[bucket] = self._capture(bucket, cache)
        plans = self._plan(batch, cache, self._decode_plans)
        assert all(plans[kind] is plan for kind, plan in self._decode_plans.items()), "a plan outgrew its buffers"
        self._fill(captured.buffers, batch, newest, cache.shape[4])
        captured.graph.replay()
        return captured.logits[:size]

    def _fill(self, buffers: Buffers, batch: ForwardBatch, newest: Sequence[int] | None, block_tokens: int) -> None:
        self._batches.fill(buffers, batch, newest, block_tokens)
        if newest is not None:
            tokens = buffers.batch.tokens[: batch.num_sequences]
            tokens.copy_(self._newest(buffers.numbers[NEWEST_ROW, : batch.num_sequences], tokens))

    def _use(self, cache: torch.Tensor) -> None:
        """Graphs contain addresses: those over another cache are useless, and torch captures none in the memory that
        the last of them has left."""
        if self._cache is not None and self._cache.data_ptr() != cache.data_ptr():
            self.close()
        self._cache = cache

    def _capture(self, bucket: int, cache: torch.Tensor) -> _Captured:
        """Run the step once normally, for lazy initialisation, and capture it the second time."""
        buffers = self._batches.buffers(bucket)
        self._decode_plans = self._decode_plans or {kind: self._largest_decode_plan(kind) for kind in self._kinds}
        for plan in self._decode_plans.values():  # the recorded run computes nothing and writes nowhere
            plan.passes[0].num_pieces.zero_()
            plan.num_merged.zero_()

        def step() -> torch.Tensor:
            self.kernels.follow(self._decode_plans, buffers.batch.query_starts)
            return self._model.forward(buffers.batch, cache, NoHook())

        if not cache.is_cuda:
            logits = step()
            return _Captured(_Rerun(step, logits), buffers, logits)
        # Torch's own stream for captures is on the GPU of the process's first one.
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Threads that copy blocks meanwhile are no part of it.
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            logits = step()
        self._pool = self._pool or graph.pool()
        log.debug("captured a decode step of %d sequences", bucket)
        return _Captured(graph, buffers, logits)

    def _largest_decode_plan(self, kind: Kind) -> DevicePlan:
        """Room for any decode plan: each sequence may have one piece more than with equal shares of the whole."""
        config = self.config
        is_latent, is_wide = config.latent is not None, self._dtype is torch.float32
        heads = pack(config.num_heads, kind.num_kv_heads, is_wide, is_latent)
        most = self._buckets[-1]
        pieces = most + self.kernels.num_processors * PIECES_PER_PROCESSOR
        return DevicePlan.empty(
            [(heads.tile_tokens(DECODE_ROWS), pieces)],
            pieces,
            most,
            pieces,
            config.num_heads,
            kind.head_dim,
            self._device,
        )
