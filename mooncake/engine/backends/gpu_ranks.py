"""Tensor parallelism over the GPUs of one machine: a process per rank, which computes on a GPU of its own.

As in ``model.parallel.tensor_parallel``, the first rank is the engine's model and sends each step to the others, from
processor to processor. What is computed travels between GPUs: sums, logits, and the tokens that the first rank draws,
which the other GPUs need where a step is started before the host knows them. Every rank has a paged cache of its own KV
heads, under the same block numbers; a node's ranks share a mirror of whole blocks in host memory (``rank_mirror``).

Sums are part of the captured graphs, too. That works because all ranks capture the same ones in the same order, and
the first rank says of each step whether it is a replay. A step whose hook wants layers is none: before each layer the
first rank says whether it goes on, which loaded blocks to wait for, and what to copy out of the layer before.

In Triton's interpreter all of it runs on processors, step by step.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec
import numpy as np
import torch

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.backends.gpu_passes import FirstPass, OtherPass
from mooncake.engine.cache.device_cache import DeviceCache, HostMirror, Share
from mooncake.engine.cache.rank_mirror import RankCopies, RanksMirror, connect
from mooncake.engine.contract import StartedStep
from mooncake.errors import InternalError, MooncakeError, NodeUnavailable
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.gpu.device_sampler import Draws
from mooncake.model.gpu.gpu_model import BUCKETS, GpuModel, fitting_into
from mooncake.model.load import load_part
from mooncake.model.pages import TORCH_DTYPES, Mappable, SharedMemory
from mooncake.model.parallel.ranks import (
    Group,
    StepAbandoned,
    Workers,
    batch_arrays,
    batch_of,
    find_store,
    kill_all,
    live_with_first,
    starting,
)
from mooncake.model.parallel.shards import copies_heads_of, kv_heads_of, shard_config
from mooncake.precision import WeightFormat
from mooncake.types import KVLayout

log = logging.getLogger(__name__)

_FORWARD, _BY_LAYERS, _START, _COPY = range(4)  # what ranks are told between steps


class Setup(msgspec.Struct, frozen=True):
    """What all ranks must know; the other ranks get it on their command line."""

    size: int
    model: str  # as for ``open_checkpoint``
    max_model_len: int  # tokens, of sequences
    weights: WeightFormat
    layout: KVLayout  # of a block with all KV heads
    num_blocks: int
    num_places: int
    max_sequences: int
    max_step_tokens: int
    first_gpu: int = 0  # the first rank's; the others are on those that follow
    mirror: int = -1  # file descriptor of its memory, or -1: there is none

    def gpu_of(self, rank: int) -> int:
        return self.first_gpu + rank


class _Rank:
    """One rank: its part of the model and of the cache, on its GPU. Once all ranks are there, ``warm_up``."""

    def __init__(
        self, setup: Setup, group: Group, checkpoint: Checkpoint, end: ExitStack, mirrored: memoryview | None
    ) -> None:
        """``end`` frees its graphs before the group is left, also if this fails half-way. Raises ConfigError if it does
        not fit into the GPU, or ``mirrored``, the mirror's memory here, cannot be pinned."""
        gpu = setup.gpu_of(group.rank)
        with _fitting_into(gpu):
            self.model = GpuModel(
                lambda kernels: load_part(checkpoint, setup.weights, group, setup.max_model_len, kernels),
                max_blocks=-(-setup.max_model_len // setup.layout.block_tokens),
                dtype=TORCH_DTYPES[setup.weights.dtype],
                device=None if INTERPRETED else f"cuda:{gpu}",
                buckets=() if INTERPRETED else BUCKETS,
                host_logits=group.rank == 0,
                share=group.share,
            )
            end.callback(self.model.close)
            layout = replace(setup.layout, num_kv_heads=self.model.config.num_kv_heads)
            self.cache = DeviceCache(layout, setup.num_blocks, self.model.kernels.device, setup.num_places)
            self._gpu, self._limits = gpu, (setup.max_sequences, setup.max_step_tokens)
        self.mirror: HostMirror | None = None
        if mirrored is not None:
            share = _share_of(checkpoint, setup, group)
            self.mirror = HostMirror(self.cache, mirrored, share)

    def warm_up(self) -> None:
        """Raises like the constructor."""
        with _fitting_into(self._gpu):
            self.model.warm_up(self.cache.tensor, *self._limits)


def _share_of(checkpoint: Checkpoint, setup: Setup, group: Group) -> Share:
    heads = kv_heads_of(checkpoint.config, group.rank, group.size)
    return Share(setup.layout, heads, goes_out=not copies_heads_of(checkpoint.config, group.rank, group.size))


def _fitting_into(gpu: int) -> contextlib.AbstractContextManager[None]:
    return fitting_into(f"GPU {gpu}", "a tensor parallel rank's weights and its part of the cache (kv_gb)")


class _Watch:
    """Whether another rank has died. On GPUs nobody else would notice: a sum waits for a dead rank for ever."""

    def __init__(self, group: Group) -> None:
        self.is_over = False  # the ranks are to end
        self.has_lost = False
        self._group = group

    def over(self, process: subprocess.Popen[bytes]) -> None:
        threading.Thread(target=self._wait_for, args=(process,), name="watch a rank", daemon=True).start()

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self.is_over:
            self.has_lost = True
            self._group.abort()


class _Checked:
    """``StartedStep`` whose tokens are worth nothing once a rank has died."""

    def __init__(self, step: StartedStep, owner: TensorParallelGpuModel) -> None:
        self._step, self._owner = step, owner

    def tokens(self) -> list[int]:
        with self._owner.in_step():
            return self._step.tokens()


class TensorParallelGpuModel:
    """``engine.AsyncModel`` and ``engine.Cache`` over one GPU per rank. Close it, or use it in a ``with``; otherwise
    the other ranks end when it is collected."""

    def __init__(self, setup: Setup, memory: Mappable | None = None, timeout_s: float = 0.0) -> None:
        """``memory``, if others are to see its blocks, is for the mirror of all ranks' caches. Its owner may close the
        descriptor afterwards. A rank that takes longer than ``timeout_s`` for a copy (0: any time) ends, as if it had
        died.

        Raises ModelError if the model cannot be split this way or another rank cannot load it, ConfigError if it
        does not fit into the first GPU and for a second one in this process, NodeUnavailable if another rank dies as it
        starts."""
        checkpoint = open_checkpoint(setup.model)
        self.config = checkpoint.config
        shard_config(self.config, setup.size)
        self.num_blocks, self.num_places = setup.num_blocks, setup.num_places
        if memory is not None:
            setup = msgspec.structs.replace(setup, mirror=memory.fd)
        self.mirror: RanksMirror | None = None
        self._failure: NodeUnavailable | InternalError | None = None
        self._end = ExitStack()  # once the other ranks have ended
        after_all = self._end.enter_context(ExitStack())  # only then does nothing wait for them on the GPU
        self._workers = Workers("tensor parallel ranks", self._end.close)
        port = self._workers.open_store()
        try:
            links = [self._start_rank(setup, rank, port) for rank in range(1, setup.size)]
            self._group = self._workers.join(setup.size, on_gpus=not INTERPRETED)
            self._end.callback(self._group.leave)
            self._watch = _Watch(self._group)
            for process in self._workers.processes:
                self._watch.over(process)
            mirrored = None if memory is None else memory.buffer
            self._rank = _Rank(setup, self._group, checkpoint, self._end, mirrored)
            if self._rank.mirror is not None:
                give_up = partial(kill_all, self._workers.processes)  # not a method: nothing may keep the workers
                self.mirror = RanksMirror(self._rank.mirror, links, give_up, timeout_s)
                after_all.callback(self.mirror.close)
            self._workers.await_ready()
            with self.in_step():
                self._rank.warm_up()
        except BaseException:
            self._workers.end()
            raise

    def _start_rank(self, setup: Setup, rank: int, port: int) -> Connection:
        """Returns this one's end of the connection for copies."""
        link, its_end = connect()
        given = [msgspec.json.encode(setup).decode(), rank, port, its_end.fileno()]
        with its_end:
            fds = [fd for fd in (its_end.fileno(), setup.mirror) if fd >= 0]
            self._workers.start("mooncake.engine.backends.gpu_ranks", given, fds)
        return link

    def __enter__(self) -> TensorParallelGpuModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tensor(self) -> torch.Tensor:
        """The first rank's part of the cache, which the engine passes to ``forward``."""
        return self._rank.cache.tensor

    @property
    def max_async_sequences(self) -> int:
        return self._rank.model.max_async_sequences

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``GpuModel.forward``. With a mirror nothing is running on any rank when it returns, or raises what the
        hook raised. Raises NodeUnavailable if a rank has died; after that, or after an interrupt or a fault, the same
        or InternalError on every later step."""
        if hook.wants_layers:
            return self._forward_by_layers(batch, cache, hook)
        with self.in_step():
            self._send(_FORWARD, batch, hook, None)
            logits = self._rank.model.forward(batch, cache, hook)
            if not len(batch.logit_rows):  # else the others have computed their part of them
                self._settle()
            return logits

    def _forward_by_layers(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        with self.in_step(), contextlib.nullcontext() if self.mirror is None else self.mirror.in_step():
            self._send(_BY_LAYERS, batch, hook, None)
            step = FirstPass(self._group, hook, self.mirror)
            logits = torch.empty(0)
            with contextlib.suppress(StepAbandoned):
                logits = self._rank.model.forward(batch, cache, step)
                step.end()
            self._settle()
        if step.error is not None:
            raise step.error
        return logits

    def _settle(self) -> None:
        """Return once no rank computes or copies out any more, where there is a mirror: through it others touch a block
        as soon as the engine has given it to them."""
        if self.mirror is not None:
            self.mirror.settle()
            self._group.wait_for_all()

    def start(
        self, batch: ForwardBatch, cache: torch.Tensor, draws: Draws | None, newest: Sequence[int] | None = None
    ) -> StartedStep:
        """As ``GpuModel.start``; raises like ``forward``."""
        with self.in_step():
            self._send(_START, batch, NoHook(), newest)
            return _Checked(self._rank.model.start(batch, cache, draws, newest), self)

    def copy_block(self, source: int, target: int) -> None:
        with self.in_step():
            self._group.send(_COPY, np.array([source, target], np.int64))
            self._rank.cache.copy_block(source, target)
            if self.mirror is not None:  # bytes that come in for the source's next owner would overtake a slow rank
                self._group.wait_for_all()

    def _send(self, kind: int, batch: ForwardBatch, hook: LayerHook, newest: Sequence[int] | None) -> None:
        replays = self._rank.model.replays(batch, self.tensor, hook)
        known = np.array([] if newest is None else newest, np.int64)
        self._group.send(kind, np.array([replays], np.int64), known, *batch_arrays(batch))

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A step that breaks off leaves the others in the middle of it, where they cannot receive later messages."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
            if self._watch.has_lost:
                raise self._workers.failed(None)
        except BaseException as error:
            is_fault = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
            is_lost = self._watch.has_lost or is_fault
            self._failure = (
                self._workers.failed(error)
                if is_lost
                else InternalError("the tensor parallel ranks have ended with a step that failed or was interrupted")
            )
            self._watch.is_over = True
            self._workers.end()
            if is_lost:
                raise self._failure from None
            raise

    def watch(self, tell: Callable[[MooncakeError], None]) -> None:
        """Call ``tell`` on a thread of its own if a rank dies before ``close``."""
        self._workers.watch(tell)

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._watch.is_over = True
        self._workers.stop()


def _serve(rank: _Rank, group: Group, copies: RankCopies | None) -> NoReturn:
    while True:
        kind, arrays = group.receive()
        if kind == _COPY:
            rank.cache.copy_block(*arrays[0].tolist())
            if copies is not None:
                group.wait_for_all()
            continue
        replays, newest, *fields = arrays
        batch = batch_of(fields)
        step = OtherPass(group, copies) if kind == _BY_LAYERS else NoHook()
        with contextlib.suppress(StepAbandoned):
            rank.model.follow(
                batch,
                rank.cache.tensor,
                newest.tolist() or None,
                step,
                replays=bool(replays),
                draws=kind == _START,
            )
            if isinstance(step, OtherPass):
                step.hear()
        if copies is not None and (kind == _BY_LAYERS or (kind == _FORWARD and not len(batch.logit_rows))):
            copies.settle()
            group.wait_for_all()


def main(argv: Sequence[str]) -> None:
    """Run another rank until the first one stops it or dies."""
    live_with_first()
    setup = msgspec.json.decode(argv[0], type=Setup)
    index, port, link = map(int, argv[1:])
    torch.set_num_threads(1)
    if not INTERPRETED:
        torch.cuda.set_device(setup.gpu_of(index))
    with ExitStack() as end:
        try:
            with starting():
                group = Group(index, setup.size, find_store(port), on_gpus=not INTERPRETED)
                end.callback(group.leave)
                mirrored = None
                if setup.mirror >= 0:
                    mirrored = SharedMemory(setup.mirror, setup.num_blocks * setup.layout.block_bytes).buffer
                rank = _Rank(setup, group, open_checkpoint(setup.model), end, mirrored)
            rank.warm_up()
            _serve(rank, group, None if rank.mirror is None else RankCopies(rank.mirror, link))
        except RuntimeError as error:  # another rank is gone, or this one's GPU has no room
            log.warning("a tensor parallel rank ends: %s", error)


if __name__ == "__main__":
    main(sys.argv[1:])
