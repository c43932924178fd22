"""Chunked pipeline parallelism (Mooncake, FAST'25, section 3.3): one model over several processes in a row, each with a
run of its layers.

A step is split into pieces (``pieces``); while a stage computes one of them, the stage before computes the next. A
piece needs the keys and values of earlier pieces only in its own layers, so only the residual stream crosses between
two stages: tokens · hidden size · 4 bytes. All stages map one cache, in the same layout as on every other node. This
process, the first rank, computes nothing: it splits steps, sends messages, and calls the hook.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from mooncake.checkpoint import open_checkpoint
from mooncake.errors import InternalError, ModelError, MooncakeError, NodeUnavailable
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook, PieceHook
from mooncake.model.pages import SharedMemory
from mooncake.model.parallel.pieces import CostFit, Cutter, PieceCost, Span, cut_spans, fastest, guessed_cost
from mooncake.model.parallel.pipeline_stage import WITH_DATA, Kind, Reporting, StageTask, bytes_between, receive, send
from mooncake.model.parallel.ranks import Workers, batch_arrays
from mooncake.model_config import ModelConfig
from mooncake.precision import Precision
from mooncake.types import KVLayout

STAGE = "mooncake.model.parallel.pipeline_stage"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What the last step took. ``pieces_ms`` is ``[stages, pieces, 3]``: start and end of each piece, counted from the
    start of the step, and how long it waited for reused keys and values."""

    cuts: list[int]
    pieces_ms: npt.NDArray[np.float64]
    elapsed_ms: float
    bytes_between: list[int]  # one per boundary


class PipelineModel:
    """``engine.CausalModel`` over ``num_stages`` processes, for one cache. Close it; otherwise they end when it is
    collected."""

    def __init__(
        self,
        model: str,
        precision: Precision,
        cache: SharedMemory,
        layout: KVLayout,
        num_blocks: int,
        num_stages: int,
        max_model_len: int = 0,
        threads: int = 0,
        cores: Sequence[int] = (),
        cut: Cutter = fastest,
    ) -> None:
        """``model`` and ``max_model_len`` are as for ``open_checkpoint``; ``cache`` has ``num_blocks`` blocks of
        ``layout``. Each stage has ``threads`` threads (0: its share of torch's) on as many of ``cores``, if there are
        enough.

        Raises ModelError if the model cannot be split this way, ConfigError if there is too little memory,
        NodeUnavailable if a stage dies as it starts.
        """
        self.config: ModelConfig = open_checkpoint(model, max_model_len).config
        self.last_step: StepTimes | None = None
        threads = threads or max(torch.get_num_threads() // num_stages, 1)
        self._stages = layers_of_stages(self.config, num_stages)
        self.cut = cut  # for the next step
        self._costs = [CostFit(guessed_cost(self.config, len(layers), threads)) for layers in self._stages]
        self._step = 0
        self._failure: MooncakeError | None = None
        self._controls: list[Connection] = []
        self._workers = Workers("pipeline stages")
        task = StageTask(
            model=model,
            max_model_len=max_model_len,
            weights=precision.weights,
            layout=layout,
            num_blocks=num_blocks,
            threads=threads,
            cache=cache.fd,
        )
        try:
            self._start(task, cores if len(cores) >= num_stages * threads else ())
            self._workers.await_ready()
        except BaseException:
            self._end()
            raise

    def _start(self, shared: StageTask, cores: Sequence[int]) -> None:
        """Start one process per stage, each with its ends of the connections to others."""
        # No step has more tokens than the cache has slots.
        room = bytes_between(shared.num_blocks * shared.layout.block_tokens, self.config.hidden_size)
        with contextlib.ExitStack() as opened:
            behind, memory_behind = -1, -1  # of the previous stage
            for index, layers in enumerate(self._stages):
                control, its_control = Pipe()
                self._controls.append(control)
                before, memory_before = behind, memory_behind
                opened.enter_context(its_control)
                its_behind = memory_behind = -1
                if index + 1 < len(self._stages):
                    hears, tells = Pipe(duplex=False)
                    opened.enter_context(hears)
                    opened.enter_context(tells)
                    between = opened.enter_context(contextlib.closing(SharedMemory.create(room)))
                    behind, its_behind, memory_behind = hears.fileno(), tells.fileno(), between.fd
                task = msgspec.structs.replace(
                    shared,
                    first_layer=layers.start,
                    end_layer=layers.stop,
                    cores=tuple(cores[index * shared.threads : (index + 1) * shared.threads]),
                    control=its_control.fileno(),
                    before=before,
                    behind=its_behind,
                    entering=memory_before,
                    leaving=memory_behind,
                )
                fds = (task.control, task.before, task.behind, task.cache, task.entering, task.leaving)
                self._workers.start(STAGE, [msgspec.json.encode(task).decode()], [fd for fd in fds if fd >= 0])

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """As ``CausalLM.forward``, over the cache shared by all stages. When it returns or raises, all stages are idle.
        Raises NodeUnavailable if a stage has died, and then on every later call."""
        if batch.adapters is not None or batch.reuse is not None:
            raise InternalError("a pipeline takes neither adapters nor reuse")
        if self._failure is not None:
            raise self._failure
        spans = spans_of(batch)
        step = _Step(self, batch, self.cut(spans, self.costs), hook)
        self._step += 1
        try:
            try:
                step.run()
            except Exception as error:
                if not isinstance(error, StageLost):
                    step.abandon()
                raise
        except StageLost as error:
            raise self._failed(error) from None
        except BaseException as error:
            if not isinstance(error, Exception):  # perhaps Ctrl-C in the middle of a message
                self._failure = InternalError("the pipeline was interrupted in the middle of a step")
                self._end()
            raise
        self.last_step = times = step.times()
        pieces = cut_spans(spans, times.cuts)
        for fit, (begins, ends, waits) in zip(self._costs, times.pieces_ms.transpose(0, 2, 1), strict=True):
            fit.note(pieces, (ends - begins - waits).tolist())
        return step.logits

    @property
    def costs(self) -> list[PieceCost]:
        """The stages' current estimates."""
        return [fit.cost for fit in self._costs]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._workers.processes]

    def watch(self, tell: Callable[[MooncakeError], None]) -> None:
        """Call ``tell`` on a thread of its own if a stage dies before ``close``."""
        self._workers.watch(tell)

    def close(self) -> None:
        """End the stages. Idempotent."""
        self._workers.stop()
        self._end()

    def _failed(self, error: BaseException) -> NodeUnavailable:
        """A pipeline that has lost a stage cannot continue."""
        self._failure = failure = self._workers.failed(error)
        self._end()
        return failure

    def _end(self) -> None:
        self._workers.end()
        for control in self._controls:
            control.close()


class StageLost(Exception):
    """A connection to a stage has broken."""


@contextlib.contextmanager
def _speaking() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise StageLost(str(error) or type(error).__name__) from None


class _Step:
    """One step, in progress through the stages."""

    def __init__(self, model: PipelineModel, batch: ForwardBatch, cuts: list[int], hook: LayerHook) -> None:
        self._controls = model._controls
        self._layers = model._stages
        self._number = model._step
        self._cuts = cuts
        self._hook = hook
        self._batch = batch
        self._at_work = set(model._controls)
        self._computed: set[int] = set()  # complete, but not yet reported
        self._next_told = 0
        rows = batch.logit_rows
        wanted = [((rows >= begin) & (rows < end)).nonzero().flatten() for begin, end in pairwise(cuts)]
        self._wanted = deque(places for places in wanted if len(places))
        self.logits = torch.empty((len(rows), model.config.vocab_size))
        self._times: dict[Connection, tuple[int, npt.NDArray[np.int64]]] = {}

    def run(self) -> None:
        """Raises what the hook raises, InternalError if a stage cannot compute it, StageLost."""
        self._started_ns = time.monotonic_ns()
        reporting = Reporting.NOTHING
        if self._hook.wants_layers:
            reporting = Reporting.EVERY_PIECE if isinstance(self._hook, PieceHook) else Reporting.LAST_PIECE
        arrays = [np.array(self._cuts, np.int64), *batch_arrays(self._batch)]
        with _speaking():
            message = np.concatenate(arrays).tobytes()
            for control in self._controls:
                send(control, Kind.STEP, self._number, reporting, *map(len, arrays))
                control.send_bytes(message)
        if reporting:
            for control, layers in zip(self._controls, self._layers, strict=True):
                for layer in layers:
                    self._hook.before_layer(layer)
                    with _speaking():
                        send(control, Kind.OPEN, self._number, layer)
                    self._listen(0)
        while self._at_work:
            self._listen(None)
        self._elapsed_ms = (time.monotonic_ns() - self._started_ns) / 1e6

    def abandon(self) -> None:
        """Return once all stages are idle. Raises StageLost."""
        self._hook = NoHook()  # report nothing more
        with _speaking():
            for control in self._at_work:
                send(control, Kind.ABANDON, self._number)
        while self._at_work:
            with contextlib.suppress(InternalError):  # a failure no longer matters
                self._listen(None)

    def times(self) -> StepTimes:
        told = [self._times[control] for control in self._controls]
        times_ns = np.stack([times for _, times in told])
        times_ns[:, :, :2] -= self._started_ns
        return StepTimes(self._cuts, times_ns / 1e6, self._elapsed_ms, [sent for sent, _ in told[:-1]])

    def _listen(self, timeout_s: float | None) -> None:
        """Take one message from each stage that has sent one."""
        for control in wait(list(self._at_work), timeout_s):
            assert isinstance(control, Connection)
            with _speaking():
                kind, (_, *numbers) = receive(control)
                data = control.recv_bytes() if kind in WITH_DATA else b""
            self._take(control, kind, numbers, data)

    def _take(self, control: Connection, kind: Kind, numbers: list[int], data: bytes) -> None:
        if kind in (Kind.DONE, Kind.ABANDONED, Kind.FAILED):
            self._at_work.discard(control)
        if kind is Kind.LAYER:
            self._tell_layer(*numbers)
        elif kind is Kind.LOGITS:
            places = self._wanted.popleft()
            self.logits.numpy()[places.numpy()] = np.frombuffer(data, np.float32).reshape(numbers[0], -1)
        elif kind is Kind.DONE:
            self._times[control] = numbers[0], np.frombuffer(data, np.int64).reshape(-1, 3)
        elif kind is Kind.FAILED:
            raise InternalError(f"a stage of the pipeline failed: {data.decode()}")

    def _tell_layer(self, layer: int, num_tokens: int) -> None:
        """Report complete layers in order, whichever stage finishes first."""
        if num_tokens < self._cuts[-1]:
            if isinstance(self._hook, PieceHook):
                self._hook.after_piece(layer, num_tokens)
            return
        self._computed.add(layer)
        while self._next_told in self._computed:
            self._next_told += 1
            self._hook.after_layer(self._next_told - 1)


def layers_of_stages(config: ModelConfig, num_stages: int) -> list[range]:
    """Divide the layers as evenly as possible. Raises ModelError if a stage would have none."""
    if num_stages > config.num_layers:
        raise ModelError(f"{config.num_layers} layers are not enough for {num_stages} stages")
    cuts = [config.num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]


def spans_of(batch: ForwardBatch) -> list[Span]:
    counts = batch.query_starts.diff()
    firsts = batch.context_lens - counts
    return [Span(first, count) for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)]
