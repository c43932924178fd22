"""Tensor parallelism over the GPUs of one machine: a process per rank, which computes on the GPU of that number.

As in ``model.tensor_parallel``, the first rank is the engine's model and sends each step to the others, from processor
to processor. What is computed travels between GPUs: sums, logits, and the tokens that the first rank draws, which the
other GPUs need where a step is started before the host knows them. Every rank has a paged cache of its own KV heads,
under the same block numbers.

Sums are part of the captured graphs, too. That works because all ranks capture the same ones in the same order, and
the first rank says of each step whether it is a replay. In Triton's interpreter all of it runs on processors, step by
step.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

import msgspec
import numpy as np
import torch

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.contract import StartedStep
from mooncake.engine.device_cache import DeviceCache
from mooncake.errors import ConfigError, InternalError, NodeUnavailable
from mooncake.kernels.triton_launch import INTERPRETED
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.device_sampler import Draws
from mooncake.model.gpu_model import BUCKETS, GpuModel
from mooncake.model.load import load_part
from mooncake.model.pages import TORCH_DTYPES
from mooncake.model.ranks import Group, Workers, batch_arrays, batch_of, find_store, live_with_first, starting
from mooncake.model.shards import shard_config
from mooncake.types import KVLayout

log = logging.getLogger(__name__)

_FORWARD, _START, _COPY = range(3)


class Setup(msgspec.Struct, frozen=True):
    """What all ranks must know; the other ranks get it on their command line."""

    size: int
    model: str  # as for ``open_checkpoint``
    max_model_len: int  # tokens, of sequences
    dtype: str
    layout: KVLayout  # of a block with all KV heads
    num_blocks: int
    num_places: int
    max_sequences: int


class _Rank:
    """One rank: its part of the model and of the cache, on its GPU. Once all ranks are there, ``warm_up``."""

    def __init__(self, setup: Setup, group: Group, checkpoint: Checkpoint, end: ExitStack) -> None:
        """``end`` frees its graphs before the group is left, also if this fails half-way. Raises ConfigError if it does
        not fit into the GPU."""
        with _fitting_into(group.rank):
            self.model = GpuModel(
                lambda kernels: load_part(checkpoint, setup.dtype, group, setup.max_model_len, kernels),
                max_blocks=-(-setup.max_model_len // setup.layout.block_tokens),
                dtype=TORCH_DTYPES[setup.dtype],
                device=None if INTERPRETED else f"cuda:{group.rank}",
                buckets=() if INTERPRETED else BUCKETS,
                host_logits=group.rank == 0,
                share=group.share,
            )
            end.callback(self.model.close)
            layout = replace(setup.layout, num_kv_heads=self.model.config.num_kv_heads)
            self.cache = DeviceCache(layout, setup.num_blocks, self.model.kernels.device, setup.num_places)
            self._number, self._max_sequences = group.rank, setup.max_sequences

    def warm_up(self) -> None:
        """Raises like the constructor."""
        with _fitting_into(self._number):
            self.model.warm_up(self.cache.tensor, self._max_sequences)


@contextlib.contextmanager
def _fitting_into(gpu: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = str(error).splitlines()[0]
        raise ConfigError(f"a tensor parallel rank's weights and kv_gb do not fit into GPU {gpu}: {what}") from None


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
    """``engine.StartingModel`` and ``engine.Cache`` over one GPU per rank. Close it, or use it in a ``with``; otherwise
    the other ranks end when it is collected."""

    def __init__(self, setup: Setup) -> None:
        """Raises ModelError if the model cannot be split this way or another rank cannot load it, ConfigError if it
        does not fit into the first GPU and for a second one in this process, NodeUnavailable if another rank dies as it
        starts."""
        checkpoint = open_checkpoint(setup.model)
        self.config = checkpoint.config
        shard_config(self.config, setup.size)
        self.num_blocks, self.num_places = setup.num_blocks, setup.num_places
        given = msgspec.json.encode(setup).decode()
        self._failure: NodeUnavailable | InternalError | None = None
        self._end = ExitStack()  # once the other ranks have ended
        self._workers = Workers("tensor parallel ranks", self._end.close)
        port = self._workers.open_store()
        try:
            for rank in range(1, setup.size):
                self._workers.start("mooncake.engine.gpu_ranks", [given, rank, port])
            self._group = self._workers.join(setup.size, on_gpus=not INTERPRETED)
            self._end.callback(self._group.leave)
            self._watch = _Watch(self._group)
            for process in self._workers.processes:
                self._watch.over(process)
            self._rank = _Rank(setup, self._group, checkpoint, self._end)
            self._workers.await_ready()
            with self.in_step():
                self._rank.warm_up()
        except BaseException:
            self._workers.end()
            raise

    def __enter__(self) -> TensorParallelGpuModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tensor(self) -> torch.Tensor:
        """The first rank's part of the cache, which the engine passes to ``forward``."""
        return self._rank.cache.tensor

    @property
    def most_started(self) -> int:
        return self._rank.model.most_started

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``GpuModel.forward``. Raises NodeUnavailable if a rank has died; after that, or after an interrupt or a
        fault, the same or InternalError on every later step."""
        with self.in_step():
            self._send(_FORWARD, batch, hook, None)
            return self._rank.model.forward(batch, cache, hook)

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

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._watch.is_over = True
        self._workers.stop()


def _serve(rank: _Rank, group: Group) -> NoReturn:
    while True:
        kind, arrays = group.receive()
        if kind == _COPY:
            rank.cache.copy_block(*arrays[0].tolist())
            continue
        replays, newest, *batch = arrays
        rank.model.follow(
            batch_of(batch), rank.cache.tensor, newest.tolist() or None, replays=bool(replays), draws=kind == _START
        )


def main(argv: Sequence[str]) -> None:
    """Run another rank until the first one stops it or dies."""
    live_with_first()
    setup = msgspec.json.decode(argv[0], type=Setup)
    index, port = int(argv[1]), int(argv[2])
    torch.set_num_threads(1)
    if not INTERPRETED:
        torch.cuda.set_device(index)
    with ExitStack() as end:
        try:
            with starting():
                group = Group(index, setup.size, find_store(port), on_gpus=not INTERPRETED)
                end.callback(group.leave)
                rank = _Rank(setup, group, open_checkpoint(setup.model), end)
            rank.warm_up()
            _serve(rank, group)
        except RuntimeError as error:  # another rank is gone, or this one's GPU has no room
            log.warning("a tensor parallel rank ends: %s", error)


if __name__ == "__main__":
    main(sys.argv[1:])
