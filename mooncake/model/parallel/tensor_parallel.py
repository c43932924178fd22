"""Tensor parallelism: one model over several processes, each with part of every layer's heads and MLP (Shoeybi et al.
2019), or with some of its experts (Lepikhin et al. 2020).

The first rank is the engine's model: it sends every step to the others and computes with them. Each layer's attention
and MLP end in one sum over the ranks, and the first one gathers the logits. All of them map one cache, in the same
layout as on every other node, and each reads and writes its KV heads there. ``shards`` says what each rank holds,
``ranks`` how they start, end and communicate.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import msgspec
import numpy as np
import torch

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.errors import InternalError, MooncakeError
from mooncake.kernels.cpu_threads import use_threads
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.load import load_part
from mooncake.model.pages import Mappable, SharedMemory, pages_over
from mooncake.model.parallel.ranks import (
    Group,
    StepAbandoned,
    Workers,
    batch_arrays,
    batch_of,
    find_store,
    leave_group,
    live_with_first,
    rank_threads,
    starting,
)
from mooncake.model.parallel.shards import kv_heads_of, shard_config
from mooncake.model.parallel.vocabulary import Ranks
from mooncake.precision import Precision, WeightFormat
from mooncake.prefault import prefault_in_background
from mooncake.types import KVLayout

log = logging.getLogger(__name__)

_STEP, _STEP_BY_LAYERS = 0, 1


class Setup(msgspec.Struct, frozen=True):
    """What all ranks must know; the other ranks get it on their command line."""

    size: int
    model: str  # as for ``open_checkpoint``, like the next field
    max_model_len: int
    weights: WeightFormat
    layout: KVLayout
    num_blocks: int
    threads: int  # per rank
    cache: int  # file descriptor


class Shard:
    """One rank: its part of the model, and of the cache ``[N, layers, K|V, Hkv, block_tokens, D]`` its KV heads.

    A KV head, or a latent row, that several ranks need is computed by each of them, from the same inputs with the same
    weights, and so to the same bits. Each writes it, so none waits for another before it reads; and a row that is
    written twice does not change the second time.
    """

    def __init__(self, setup: Setup, ranks: Ranks, checkpoint: Checkpoint, pages: torch.Tensor) -> None:
        self._model = load_part(checkpoint, setup.weights, ranks, setup.max_model_len)
        self._cache = pages[:, :, :, kv_heads_of(checkpoint.config, ranks.rank, ranks.size)]

    def forward(self, batch: ForwardBatch, hook: LayerHook) -> torch.Tensor:
        return self._model.forward(batch, self._cache, hook)


class TensorParallelModel:
    """``engine.CausalModel`` over ``size`` processes, for one cache. Close it; otherwise the other ranks end when it is
    collected."""

    def __init__(
        self,
        model: str,
        size: int,
        precision: Precision,
        memory: Mappable,
        layout: KVLayout,
        num_blocks: int,
        max_model_len: int,
        threads: int,
    ) -> None:
        """``model`` and ``max_model_len`` as for ``open_checkpoint``; ``memory`` has ``num_blocks`` blocks of
        ``layout``. Each rank has ``threads`` threads (0: its share of torch's).

        Raises ModelError if the model cannot be split this way or a rank cannot load it, ConfigError for a second one
        in this process, NodeUnavailable if a rank dies as it starts."""
        checkpoint = open_checkpoint(model, max_model_len)
        self.config = checkpoint.config
        shard_config(self.config, size)
        threads = threads or max(torch.get_num_threads() // size, 1)
        self._setup = setup = Setup(
            size=size,
            model=model,
            max_model_len=max_model_len,
            weights=precision.weights,
            layout=layout,
            num_blocks=num_blocks,
            threads=threads,
            cache=memory.fd,
        )
        self._failure: MooncakeError | None = None
        self._workers = Workers("tensor parallel ranks", leave_group)
        port = self._workers.open_store()
        try:
            for rank in range(1, size):
                arguments = [msgspec.json.encode(setup).decode(), rank, port]
                self._workers.start("mooncake.model.parallel.tensor_parallel", arguments, [memory.fd])
            self._group = self._workers.join(size)
            self._pass = _FirstPass(self._group)
            pages = pages_over(np.frombuffer(memory.buffer, np.uint8), layout, num_blocks)
            with rank_threads(threads):
                self._shard = Shard(setup, self._pass, checkpoint, pages)
            self._workers.await_ready()
        except BaseException:
            self._workers.end()
            raise

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``CausalLM.forward``, over the cache shared by all ranks. When it returns or raises, no rank touches it.

        Raises NodeUnavailable if a rank has died, and then on every later call; after an interrupt or a fault
        InternalError on every later call.
        """
        if batch.adapters is not None or batch.reuse is not None:
            raise InternalError("tensor parallel ranks take neither adapters nor reuse")
        if self._failure is not None:
            raise self._failure
        with self._in_step(), rank_threads(self._setup.threads):
            self._pass.begin(hook)
            kind = _STEP_BY_LAYERS if self._pass.wants_layers else _STEP
            self._group.send(kind, *batch_arrays(batch))
            logits = self._shard.forward(batch, self._pass)
            self._pass.end(batch)
        return logits

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """A step that breaks off leaves the others in the middle of it, where they cannot receive later messages."""
        try:
            yield
        except BaseException as error:
            if self._pass.is_abandoned:
                raise
            is_lost = isinstance(error, RuntimeError)  # torch's, when a connection breaks
            self._failure = failure = (
                self._workers.failed(error)
                if is_lost
                else InternalError("the tensor parallel ranks have ended with a step that failed or was interrupted")
            )
            self._workers.end()
            if is_lost:
                raise failure from None
            raise

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return [process.pid for process in self._workers.processes]

    def watch(self, tell: Callable[[MooncakeError], None]) -> None:
        """Call ``tell`` on a thread of its own if a rank dies before ``close``."""
        self._workers.watch(tell)

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._workers.stop()


class _FirstPass:
    """The first rank's hook, and its ``Ranks``.

    A rank touches a layer of the cache after the signal to go on with it and before the layer's first sum, which waits
    for all ranks. So the engine's hook is told of a layer after that sum; and where a step is abandoned, at a signal,
    no rank touches the cache.
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self.begin(NoHook())

    def begin(self, hook: LayerHook) -> None:
        """Before each step."""
        self.wants_layers = hook.wants_layers
        self.is_abandoned = False  # by the hook, on all ranks
        self._hook = hook
        self._written: int | None = None  # a layer by this rank, of which the hook has not been told
        self._error: Exception | None = None  # of the hook, for the next place where the others can be told

    def before_layer(self, layer: int) -> None:
        try:
            self._raise_error()
            self._hook.before_layer(layer)
        except Exception:
            self._signal(goes_on=False)
            self.is_abandoned = self.wants_layers
            raise
        self._signal(goes_on=True)

    def after_layer(self, layer: int) -> None:
        self._written = layer

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        summed = self._group.sum(values)
        self._tell()
        return summed

    def gather(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return self._group.gather(columns, widths)

    def end(self, batch: ForwardBatch) -> None:
        """After the last layer, which has no sum in a step without logits."""
        if not len(batch.logit_rows):
            self._group.wait_for_all()
        self._tell()
        self.is_abandoned = self._error is not None
        self._raise_error()

    def _tell(self) -> None:
        if self._written is not None and self._error is None:
            layer, self._written = self._written, None
            try:
                self._hook.after_layer(layer)
            except Exception as error:
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _signal(self, *, goes_on: bool) -> None:
        if self.wants_layers:
            self._group.signal(goes_on=goes_on)


class _OtherPass:
    """Another rank's hook: it waits for the first one's signals, if there are any in this step."""

    def __init__(self, group: Group, *, wants_layers: bool) -> None:
        self._group = group
        self.wants_layers = wants_layers

    def before_layer(self, layer: int) -> None:
        if self.wants_layers and not self._group.await_signal():
            raise StepAbandoned

    def after_layer(self, layer: int) -> None:
        pass


def _serve(group: Group, shard: Shard) -> NoReturn:
    while True:
        kind, arrays = group.receive()
        batch = batch_of(arrays)
        with contextlib.suppress(StepAbandoned):
            shard.forward(batch, _OtherPass(group, wants_layers=kind == _STEP_BY_LAYERS))
            if not len(batch.logit_rows):
                group.wait_for_all()


def main(argv: Sequence[str]) -> None:
    """Run another rank until the first one stops it or dies."""
    live_with_first()
    setup = msgspec.json.decode(argv[0], type=Setup)
    rank, port = int(argv[1]), int(argv[2])
    torch.set_num_threads(setup.threads)
    use_threads(setup.threads)
    try:
        with starting():
            group = Group(rank, setup.size, find_store(port))
            memory = SharedMemory(setup.cache, setup.num_blocks * setup.layout.block_bytes)
            prefault_in_background(memory.bytes)
            pages = pages_over(memory.bytes, setup.layout, setup.num_blocks)
            shard = Shard(setup, group, open_checkpoint(setup.model, setup.max_model_len), pages)
        _serve(group, shard)
    except RuntimeError as error:  # another rank is gone
        log.warning("a tensor parallel rank ends: %s", error)
    finally:
        leave_group()


if __name__ == "__main__":
    main(sys.argv[1:])
