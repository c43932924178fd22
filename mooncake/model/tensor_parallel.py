"""Tensor parallelism: one model over several processes, each with part of every layer's heads and MLP (Shoeybi et al.
2019), or with some of its experts (Lepikhin et al. 2020).

The first rank is the engine's model: it sends every step to the others and computes with them. Each layer's attention
and MLP end in one sum over the ranks, and the first one gathers the logits. ``shards`` says what each rank holds,
``ranks`` how they start, end and communicate.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
import torch

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.errors import InternalError
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.load import load_part
from mooncake.model.ranks import (
    Group,
    Workers,
    batch_arrays,
    batch_of,
    free_port,
    leave_group,
    live_with_first,
    speaking_to,
)
from mooncake.model.shards import shard_config
from mooncake.precision import Coding

log = logging.getLogger(__name__)

_STEP, _COPY, _STOP = 1, 2, 0


class Shard:
    """One rank: its part of the model and of the paged cache ``[N, layers, K|V, Hkv / S, block_tokens, D]``."""

    def __init__(
        self,
        group: Group,
        checkpoint: Checkpoint,
        dtype: str,
        num_blocks: int,
        block_tokens: int,
        max_model_len: int,
        coding: Coding,
        codes: Coding,
        keeps_groups: bool,
    ) -> None:
        self.model = load_part(
            checkpoint, dtype, group, max_model_len, coding=coding, codes=codes, keeps_groups=keeps_groups
        )
        config = self.model.config
        self.cache = torch.zeros(
            (num_blocks, len(config.kv_owners), config.kv_kinds, config.num_kv_heads, block_tokens, config.head_dim),
            dtype=getattr(torch, dtype),
        )


class TensorParallelModel:
    """``engine.CausalModel`` and ``engine.Cache`` over ``size`` processes. Close it, or use it in a ``with``; otherwise
    the other ranks end when it is collected."""

    def __init__(
        self,
        model: str,
        size: int,
        dtype: str,
        num_blocks: int,
        block_tokens: int,
        max_model_len: int = 0,
        coding: Coding = "",
        codes: Coding = "",
        keeps_groups: bool = False,
    ) -> None:
        """``model`` and ``max_model_len`` as for ``open_checkpoint``, ``coding`` and what follows as for ``load_part``.
        Raises ModelError if it cannot be split this way."""
        checkpoint = open_checkpoint(model, max_model_len)
        self.config = checkpoint.config
        shard_config(self.config, size)
        self.num_blocks = num_blocks
        self.layout = checkpoint.kv_layout(block_tokens, dtype)
        port = free_port()
        form = coding, codes, keeps_groups
        arguments = [model, size, dtype, coding, codes, num_blocks, block_tokens, max_model_len]
        arguments += [int(keeps_groups), torch.get_num_threads(), port]
        self._workers = Workers("tensor parallel ranks", leave_group)
        try:
            for rank in range(1, size):
                self._workers.start("mooncake.model.tensor_parallel", [*arguments, rank])
            self._group = Group(0, size, port)
            self._shard = Shard(self._group, checkpoint, dtype, num_blocks, block_tokens, max_model_len, *form)
        except BaseException:
            self._workers.end()
            raise

    num_places = 0  # for preempted sequences: none, their blocks are recomputed

    def __enter__(self) -> TensorParallelModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tensor(self) -> torch.Tensor:
        """The first rank's part of the cache, which the engine passes to ``forward``."""
        return self._shard.cache

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``CausalLM.forward``; when it returns, all ranks have written their heads' keys and values.

        Raises NodeUnavailable if a rank has died; after that, or after an interrupt, InternalError on every later step.
        """
        with self._in_step():
            self._group.send(_STEP, *batch_arrays(batch))
            return self._shard.model.forward(batch, cache, hook)

    def copy_block(self, source: int, target: int) -> None:
        with self._in_step():
            self._group.send(_COPY, np.array([source, target], np.int64))
        self._shard.cache[target] = self._shard.cache[source]

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """An interrupted step would leave the others in the middle of it, where they cannot receive later messages."""
        if not self._workers.are_alive:
            raise InternalError("the tensor parallel ranks have ended with a step that failed or was interrupted")
        try:
            with speaking_to(self._workers):
                yield
        except BaseException:
            self._workers.end()
            raise

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        if not self._workers.are_alive:
            return
        with contextlib.suppress(RuntimeError):
            self._group.send(_STOP)
        self._workers.wait()
        self._workers.end()


def _serve(group: Group, shard: Shard) -> None:
    while True:
        kind, arrays = group.receive()
        if kind == _STOP:
            return
        if kind == _COPY:
            source, target = arrays[0].tolist()
            shard.cache[target] = shard.cache[source]
            continue
        shard.model.forward(batch_of(arrays), shard.cache, NoHook())


def main(argv: Sequence[str]) -> None:
    """Run another rank until the first one stops it or dies."""
    live_with_first()
    parser = argparse.ArgumentParser("mooncake.model.tensor_parallel")
    parser.add_argument("model")
    parser.add_argument("size", type=int)
    for name in ("dtype", "coding", "codes"):
        parser.add_argument(name)
    for name in ("num_blocks", "block_tokens", "max_model_len", "keeps_groups", "threads", "port", "rank"):
        parser.add_argument(name, type=int)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    group = Group(options.rank, options.size, options.port)
    shard = Shard(
        group,
        open_checkpoint(options.model, options.max_model_len),
        options.dtype,
        options.num_blocks,
        options.block_tokens,
        options.max_model_len,
        options.coding,
        options.codes,
        bool(options.keeps_groups),
    )
    try:
        _serve(group, shard)
    except RuntimeError as error:  # the first rank is gone
        log.warning("a tensor parallel rank ends: %s", error)
    finally:
        leave_group()


if __name__ == "__main__":
    main(sys.argv[1:])
