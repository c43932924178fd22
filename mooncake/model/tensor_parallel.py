"""One model over several processes: each holds a part of every layer's heads and of its MLP (Shoeybi et al. 2019).

The first rank is the engine's model: it sends every step to the others and computes with them. A layer's attention and
MLP each end in one sum over the ranks. Communication is torch.distributed: gloo between CPUs, nccl between GPUs. Ranks
are started as processes of their own (``python -m mooncake.model.tensor_parallel``) and end with the first one: each
reads from a pipe that only the first one's end closes.

    rank r of S has query heads r·Hq/S …, key and value heads r·Hkv/S … (one of them, repeated, when S > Hkv)
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mooncake.checkpoint import FAMILIES, Checkpoint, ModelConfig, open_checkpoint
from mooncake.errors import InternalError, ModelError
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model.llama import CausalLM
from mooncake.model.weights import load_weights

log = logging.getLogger(__name__)

START_S = 120  # for every rank to load its weights
IDLE = timedelta(days=30)  # ranks wait this long for a step; they end with their parent, not by this

_STEP, _COPY, _STOP = 1, 2, 0
_HEADER = 8  # int64: kind, then sizes
_FIELDS = ("tokens", "positions", "query_starts", "context_lens", "slots", "logit_rows")


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one rank's part. Raises ModelError when the model cannot be cut into ``size`` equal ones."""
    if config.architecture not in FAMILIES:
        raise ModelError(f"tensor parallelism is for the Llama family, not for {config.architecture}")
    if config.num_heads % size or config.intermediate_size % size:
        raise ModelError(
            f"{config.num_heads} heads and an MLP of {config.intermediate_size} cannot be cut into {size} equal parts"
        )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ModelError(
            f"{config.num_kv_heads} KV heads can neither be cut into {size} parts nor be repeated for them"
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        intermediate_size=config.intermediate_size // size,
    )


def shard_weights(weights: Weights, config: ModelConfig, rank: int, size: int) -> Weights:
    """The part of each weight that ``rank`` computes with; embeddings, norms and head are whole."""
    dim = config.head_dim
    query = slice(rank * config.num_heads // size * dim, (rank + 1) * config.num_heads // size * dim)
    first_kv = rank * config.num_kv_heads // size
    kv = slice(first_kv * dim, (first_kv + max(config.num_kv_heads // size, 1)) * dim)
    inner = slice(rank * config.intermediate_size // size, (rank + 1) * config.intermediate_size // size)
    rows = {"q_proj": query, "k_proj": kv, "v_proj": kv, "gate_proj": inner, "up_proj": inner}
    columns = {"o_proj": query, "down_proj": inner}

    def part(name: str) -> torch.Tensor:
        tensor, kind = weights[name], name.split(".")[-2]
        if kind in rows:
            tensor = tensor[rows[kind]]
        elif kind in columns:
            tensor = tensor[:, columns[kind]]
        return tensor.contiguous()

    return WeightsOnDemand(weights, part)


class Ranks:
    """The group of processes, as one of them sees it."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size = rank, size
        timeout = timedelta(seconds=START_S)
        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=IDLE)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """In place, the same bits on every rank."""
        dist.all_reduce(values)
        return values

    def send(self, kind: int, *arrays: npt.NDArray[np.int64]) -> None:
        """From the first rank to all: a header of sizes, then everything in one message."""
        header = torch.tensor([kind, *(len(array) for array in arrays), *[0] * _HEADER][:_HEADER])
        dist.broadcast(header, 0)
        if arrays:
            dist.broadcast(torch.from_numpy(np.concatenate(arrays)), 0)

    def receive(self) -> tuple[int, list[torch.Tensor]]:
        header = torch.empty(_HEADER, dtype=torch.int64)
        dist.broadcast(header, 0)
        kind, *sizes = header.tolist()
        if not any(sizes):
            return kind, []
        everything = torch.empty(sum(sizes), dtype=torch.int64)
        dist.broadcast(everything, 0)
        return kind, list(torch.split(everything, sizes))


class Shard:
    """One rank: its part of the model and of the paged cache ``[N, layers, 2, Hkv / S, block_tokens, D]``."""

    def __init__(
        self, ranks: Ranks, checkpoint: Checkpoint, dtype: str, num_blocks: int, block_tokens: int, max_model_len: int
    ) -> None:
        whole = checkpoint.config
        config = shard_config(whole, ranks.size)
        weights = shard_weights(load_weights(checkpoint, dtype), whole, ranks.rank, ranks.size)
        self.model = CausalLM(config, weights, max_model_len, reduce=ranks.sum)
        self.cache = torch.zeros(
            (num_blocks, len(config.kv_owners), 2, config.num_kv_heads, block_tokens, config.head_dim),
            dtype=getattr(torch, dtype),
        )


class TensorParallelModel:
    """``engine.CausalModel`` and ``engine.Cache`` over ``size`` processes. Close it, or use it in a ``with``: else the
    others end when it is collected."""

    def __init__(
        self, model: str, size: int, dtype: str, num_blocks: int, block_tokens: int, max_model_len: int = 0
    ) -> None:
        """``model`` and ``max_model_len`` as for ``open_checkpoint``. Raises ModelError when it cannot be cut so."""
        checkpoint = open_checkpoint(model, max_model_len)
        self.config = checkpoint.config
        shard_config(self.config, size)
        self.num_blocks = num_blocks
        self.layout = checkpoint.kv_layout(block_tokens, dtype)
        port = _free_port()
        arguments = [model, size, dtype, num_blocks, block_tokens, max_model_len, torch.get_num_threads(), port]
        command = [sys.executable, "-m", "mooncake.model.tensor_parallel", *map(str, arguments)]
        self._workers = [subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE) for rank in range(1, size)]
        self._finalizer = weakref.finalize(self, _end, self._workers)
        try:
            self._ranks = Ranks(0, size, port)
            self._shard = Shard(self._ranks, checkpoint, dtype, num_blocks, block_tokens, max_model_len)
        except BaseException:
            self._finalizer()
            raise

    num_places = 0  # for preempted sequences: their blocks are computed again

    def __enter__(self) -> TensorParallelModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tensor(self) -> torch.Tensor:
        """The first rank's part of the cache, as the engine hands it to ``forward``."""
        return self._shard.cache

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``CausalLM.forward``; all ranks have written their heads' keys and values when it returns.

        Raises InternalError when a rank has died.
        """
        arrays = [getattr(batch, name).numpy().astype(np.int64) for name in _FIELDS]
        with self._others():
            self._ranks.send(_STEP, *arrays, batch.block_tables.numpy().astype(np.int64).ravel())
            return self._shard.model.forward(batch, cache, hook)

    def copy_block(self, source: int, target: int) -> None:
        with self._others():
            self._ranks.send(_COPY, np.array([source, target], np.int64))
        self._shard.cache[target] = self._shard.cache[source]

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        if not self._finalizer.alive:
            return
        with contextlib.suppress(RuntimeError):
            self._ranks.send(_STOP)
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(10)
        self._finalizer()

    @contextlib.contextmanager
    def _others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's own, when a connection breaks
            dead = [rank for rank, worker in enumerate(self._workers, 1) if worker.poll() is not None]
            raise InternalError(f"tensor parallel ranks {dead or 'unknown'} have failed: {error}") from None


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Of the other ranks, if need be, and of this process's part in the group."""
    for worker in workers:
        worker.kill()
        worker.wait()
        assert worker.stdin is not None
        worker.stdin.close()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _end_with(pipe: int) -> None:
    """This process ends when nobody can write into the pipe any more, whatever it is doing."""

    def wait() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=wait, name="first rank", daemon=True).start()


def _serve(ranks: Ranks, shard: Shard) -> None:
    while True:
        kind, parts = ranks.receive()
        if kind == _STOP:
            return
        if kind == _COPY:
            source, target = parts[0].tolist()
            shard.cache[target] = shard.cache[source]
            continue
        *fields, tables = parts
        values = dict(zip(_FIELDS, fields, strict=True))
        sequences = len(values["context_lens"])
        batch = ForwardBatch(
            tokens=values["tokens"],
            positions=values["positions"],
            query_starts=values["query_starts"].int(),
            context_lens=values["context_lens"].int(),
            block_tables=tables.int().view(sequences, -1),
            slots=values["slots"],
            logit_rows=values["logit_rows"],
        )
        shard.model.forward(batch, shard.cache, NoHook())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main(argv: Sequence[str]) -> None:
    """One of the other ranks, until the first one stops it or dies."""
    _end_with(sys.stdin.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides
    parser = argparse.ArgumentParser("mooncake.model.tensor_parallel")
    parser.add_argument("model")
    parser.add_argument("size", type=int)
    parser.add_argument("dtype")
    for name in ("num_blocks", "block_tokens", "max_model_len", "threads", "port", "rank"):
        parser.add_argument(name, type=int)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    ranks = Ranks(options.rank, options.size, options.port)
    shard = Shard(
        ranks,
        open_checkpoint(options.model, options.max_model_len),
        options.dtype,
        options.num_blocks,
        options.block_tokens,
        options.max_model_len,
    )
    try:
        _serve(ranks, shard)
    except RuntimeError as error:  # the first rank is gone
        log.warning("a tensor parallel rank ends: %s", error)


if __name__ == "__main__":
    main(sys.argv[1:])
