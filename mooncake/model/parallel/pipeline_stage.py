"""One stage of a pipeline: a process with a run of a model's layers, over a cache that all stages map.

It takes the pieces of a step in order, each as soon as the previous stage has left its rows of the residual stream in
the memory between them, and notifies the next stage. The first rank (``pipeline``) gets messages about completed
layers, logits and the end of the step. Messages are bytes over socket pairs; when a process dies, the others notice
because its sockets close.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from multiprocessing.connection import Connection, wait

import msgspec
import numpy as np
import torch

from mooncake.checkpoint import open_checkpoint
from mooncake.kernels.cpu_threads import use_threads
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.decoder import Decoder
from mooncake.model.llama import CausalLM
from mooncake.model.load import load_model
from mooncake.model.pages import SharedMemory, pages_over
from mooncake.model.parallel.ranks import StepAbandoned, batch_of, live_with_first, starting
from mooncake.precision import WeightFormat
from mooncake.prefault import prefault_in_background
from mooncake.types import KVLayout


class StageTask(msgspec.Struct, frozen=True):
    """What a stage is started with. File descriptors are its own; -1 if it has no such neighbour."""

    model: str
    max_model_len: int
    weights: WeightFormat
    layout: KVLayout
    num_blocks: int
    threads: int
    cache: int
    first_layer: int = 0
    end_layer: int = 0
    cores: tuple[int, ...] = ()  # (): the first rank's
    control: int = -1  # connection with the first rank
    before: int = -1  # from the previous stage
    behind: int = -1  # to the next stage
    entering: int = -1  # memory in which the previous stage leaves rows
    leaving: int = -1


class Kind(IntEnum):
    """The kind of a message: its first number. The second is the step's number."""

    FAILED = 0  # the reason, as data
    STEP = 1  # which layers to report (Reporting), sizes of its arrays; the arrays, cuts first, as data
    OPEN = 2  # a layer whose reused keys and values have been loaded
    ABANDON = 3
    PIECE = 4  # a piece that the previous stage has finished
    LAYER = 5  # a layer whose keys and values are in the cache, and for how many of the step's tokens
    LOGITS = 6  # number of rows; the rows as data
    DONE = 7  # bytes sent to the next stage; start, end and waiting time of each piece, ns, as data
    ABANDONED = 8


class Reporting(IntEnum):
    """Which layers are reported to the first rank, and by which pieces; layers that are reported are also waited
    for."""

    NOTHING = 0
    LAST_PIECE = 1
    EVERY_PIECE = 2


WITH_DATA = frozenset({Kind.FAILED, Kind.STEP, Kind.LOGITS, Kind.DONE})
"""These consist of two messages; the second is the data."""


def send(connection: Connection, kind: Kind, *numbers: int) -> None:
    connection.send_bytes(np.array([kind, *numbers], np.int64).tobytes())


def receive(connection: Connection) -> tuple[Kind, list[int]]:
    kind, *numbers = np.frombuffer(connection.recv_bytes(), np.int64).tolist()
    return Kind(kind), numbers


class Stage:
    def __init__(self, task: StageTask, model: CausalLM | Decoder) -> None:
        self._model = model
        self._layers = range(task.first_layer, task.end_layer)
        cache = SharedMemory(task.cache, task.num_blocks * task.layout.block_bytes)
        prefault_in_background(cache.bytes)
        self._cache = pages_over(cache.bytes, task.layout, task.num_blocks)
        width = model.config.hidden_size
        most_tokens = task.num_blocks * task.layout.block_tokens
        self._entering = rows_between(task.entering, most_tokens, width) if task.entering >= 0 else None
        self._leaving = rows_between(task.leaving, most_tokens, width) if task.leaving >= 0 else None
        self._control = Connection(task.control)
        self._before = Connection(task.before) if task.before >= 0 else None
        self._behind = Connection(task.behind) if task.behind >= 0 else None
        self._step = 0
        self._num_open = 0  # layers below this may be read
        self._waited_ns = 0  # in this piece, for others

    def serve(self) -> None:
        """Runs until the first rank stops it or dies. If a neighbour dies, the first rank ends this stage, and knows
        which one to blame."""
        try:
            self._serve()
        except (EOFError, OSError):
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._control.recv_bytes()

    def _serve(self) -> None:
        while True:
            kind, numbers = receive(self._control)
            if kind is Kind.STEP:  # other messages belong to a step that has ended here
                self._serve_step(*numbers)

    def open_up_to(self, layer: int) -> None:
        """Return once ``layer`` may be read. Raises StepAbandoned."""
        started_ns = time.monotonic_ns()
        while self._num_open <= layer:
            self._obey()
        self._waited_ns += time.monotonic_ns() - started_ns

    def tell_layer(self, layer: int, num_tokens: int) -> None:
        send(self._control, Kind.LAYER, self._step, layer, num_tokens)

    def _serve_step(self, step: int, reporting: int, *sizes: int) -> None:
        everything = torch.frombuffer(bytearray(self._control.recv_bytes()), dtype=torch.int64)
        cuts, *arrays = torch.split(everything, list(sizes))
        self._step, self._num_open = step, 0 if reporting else self._layers.stop
        try:
            self._compute(batch_of(arrays), cuts.tolist(), Reporting(reporting))
        except StepAbandoned:
            send(self._control, Kind.ABANDONED, step)
        except (EOFError, OSError):
            raise
        except Exception as error:
            send(self._control, Kind.FAILED, step)
            self._control.send_bytes(f"{type(error).__name__}: {error}".encode())

    def _compute(self, batch: ForwardBatch, cuts: list[int], reporting: Reporting) -> None:
        times_ns = np.zeros((len(cuts) - 1, 3), np.int64)
        for piece, (begin, end) in enumerate(pairwise(cuts)):
            self._await_piece(piece)
            self._waited_ns = 0
            tells = reporting is Reporting.EVERY_PIECE or end == cuts[-1]
            hook = _Gate(self, end if tells else 0) if reporting else NoHook()
            started_ns = time.monotonic_ns()
            logits = self._forward(batch.part(begin, end), begin, end, hook)
            times_ns[piece] = started_ns, time.monotonic_ns(), self._waited_ns
            if self._behind is not None:
                send(self._behind, Kind.PIECE, self._step, piece)
            if logits.shape[0]:
                send(self._control, Kind.LOGITS, self._step, logits.shape[0])
                self._control.send_bytes(logits.numpy().data)
        num_bytes = 0 if self._leaving is None else self._leaving[: cuts[-1]].nbytes
        send(self._control, Kind.DONE, self._step, num_bytes)
        self._control.send_bytes(times_ns.tobytes())

    def _forward(self, piece: ForwardBatch, begin: int, end: int, hook: LayerHook) -> torch.Tensor:
        entering = None if self._entering is None else self._entering[begin:end]
        leaving = None if self._leaving is None else self._leaving[begin:end]
        return self._model.forward(piece, self._cache, hook, entering, leaving)

    def _await_piece(self, piece: int) -> None:
        """Wait for the previous stage. Raises StepAbandoned, also without a previous stage."""
        while self._control.poll():
            self._obey()
        while self._before is not None:
            ready = wait([self._control, self._before])
            if self._control in ready:
                self._obey()
            elif receive(self._before) == (Kind.PIECE, [self._step, piece]):
                return  # otherwise it belongs to an abandoned step

    def _obey(self) -> None:
        """Wait for a message of the first rank to this step."""
        kind, numbers = receive(self._control)
        if kind is Kind.ABANDON and numbers[0] == self._step:
            raise StepAbandoned
        if kind is Kind.OPEN and numbers[0] == self._step:
            self._num_open = max(self._num_open, numbers[1] + 1)


class _Gate:
    """Waits until a layer may be read, and reports how many tokens of it are in the cache, if wanted."""

    wants_layers = True

    def __init__(self, stage: Stage, num_tokens: int) -> None:
        self._stage = stage
        self._num_tokens = num_tokens

    def before_layer(self, layer: int) -> None:
        self._stage.open_up_to(layer)

    def after_layer(self, layer: int) -> None:
        if self._num_tokens:
            self._stage.tell_layer(layer, self._num_tokens)


def rows_between(fd: int, most_tokens: int, width: int) -> torch.Tensor:
    """The memory between two stages: the residual stream, float32 ``[most_tokens, width]``."""
    memory = SharedMemory(fd, bytes_between(most_tokens, width))
    return torch.from_numpy(memory.bytes).view(torch.float32).view(most_tokens, width)


def bytes_between(num_tokens: int, width: int) -> int:
    return num_tokens * width * 4


def main(argv: Sequence[str]) -> None:
    """Run until the first rank stops this stage or dies."""
    live_with_first()
    task = msgspec.json.decode(argv[0], type=StageTask)
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    torch.set_num_threads(task.threads)
    use_threads(task.threads)
    with starting():
        checkpoint = open_checkpoint(task.model, task.max_model_len)
        layers = range(task.first_layer, task.end_layer)
        model = load_model(checkpoint, task.weights, task.max_model_len, layers=layers)
        stage = Stage(task, model)
    stage.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
