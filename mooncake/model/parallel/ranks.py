"""What models over several processes of one machine share: how their ranks start and end, and a step as a message.

The first rank is the engine's model. It starts the others as separate processes (``python -m MODULE``), which end with
it, whatever they are doing: each reads from a pipe that closes when the first rank ends. Through it they are also told
to end, because a message of the group may wait for ever for a rank that hangs. Through another pipe each says how its
start went. ``Group`` is for ranks that communicate through torch.distributed (gloo). This module does not know
how a model is split.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from subprocess import PIPE

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mooncake.errors import ConfigError, ModelError, MooncakeError, NodeUnavailable
from mooncake.kernels.cpu_threads import threads_for
from mooncake.model.batch import ForwardBatch

JOIN_S = 120  # for ranks that are alive to find each other
END_S = 10  # for ranks that were told to end, or were killed
DEATH_S = 1  # between the end of a process's connections and its own
POLL_S = 0.1  # between two looks at whether all ranks are alive
IDLE = timedelta(days=30)  # ranks wait this long for a step; they end with their parent, not by this timeout

_HEADER = 16  # int64: kind, number of arrays, then their sizes
_HERE, _READY = b"\1", b"\0"  # what a rank says as it starts, and then, unless it says why it could not
_STOP = b"\0"  # what it is told at the end
_FIELDS = ("tokens", "positions", "query_starts", "context_lens", "slots", "logit_rows")


class StepAbandoned(Exception):
    """By the first rank: not an error of this one."""


class Workers:
    """The other ranks' processes. They are killed at the latest when this object is collected."""

    def __init__(self, what: str, end: Callable[[], None] = lambda: None) -> None:
        """``what`` they are, for errors; ``end`` is called once they have ended, if there were any."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self.are_to_end = False  # whether their end is no failure
        self._what = what
        self._store: TCPStore | None = None
        self._finalizer = weakref.finalize(self, _end, self.processes, end)

    def start(self, module: str, arguments: Sequence[object], share: Collection[int] = ()) -> None:
        """Start one more; it inherits the file descriptors ``share``."""
        # -P: a folder with our name in the user's directory must not take precedence
        command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        process = subprocess.Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, pass_fds=share)
        self.processes.append(process)

    def open_store(self) -> int:
        """Open what the ranks of a ``Group`` find each other through; returns its port. Raises ConfigError for a second
        group in this process."""
        if dist.is_initialized():
            raise ConfigError("this process has a model over several ranks already; it can have one")
        self._store = _store(0, is_first=True)
        return int(self._store.port)

    def join(self, size: int, *, on_gpus: bool = False) -> Group:
        """The first rank's place in the group, once the others have taken theirs. Raises NodeUnavailable if one dies
        before that."""
        for word in self._hear(1):
            if not word:
                raise self.failed(None)
        assert self._store is not None, "it has been opened"
        own_store, joined = find_store(self._store.port), threading.Event()

        def watch() -> None:
            while not joined.wait(POLL_S):
                if self._dead():
                    self._store = None  # torch waits for the dead until it closes
                    return

        threading.Thread(target=watch, name="watch ranks join", daemon=True).start()
        try:
            with speaking_to(self):
                return Group(0, size, own_store, on_gpus=on_gpus)
        finally:
            joined.set()

    def await_ready(self) -> None:
        """Return once all ranks have started. Raises ModelError with a rank's own words for why it could not,
        NodeUnavailable if one has died."""
        for words in self._hear(-1):
            said = words.removeprefix(_HERE)
            if not said:
                raise self.failed(None)
            if said != _READY:
                raise ModelError(said.decode())

    def _hear(self, count: int) -> Iterator[bytes]:
        """What each rank says next, as they say it, ``count`` bytes (-1: all); nothing if it has died."""
        waiting = {said.fileno(): said for process in self.processes if (said := process.stdout) is not None}
        while waiting:
            for one in wait(waiting):
                assert isinstance(one, int)
                yield waiting.pop(one).read(count)

    def watch(self, tell: Callable[[MooncakeError], None]) -> None:
        """Call ``tell`` on a thread of its own if a rank dies before it is to end."""

        def wait_for(process: subprocess.Popen[bytes]) -> None:
            process.wait()
            if not self.are_to_end:
                tell(self.failed(None))

        for process in self.processes:
            threading.Thread(target=wait_for, args=(process,), name="watch a rank", daemon=True).start()

    @property
    def are_alive(self) -> bool:
        """Whether they have not been ended."""
        return self._finalizer.alive

    def failed(self, error: BaseException | None) -> NodeUnavailable:
        """The error to raise after communication failed with ``error``: it says which ranks are dead. Another node can
        take over the work."""
        given_up_s = time.monotonic() + DEATH_S
        while not (dead := self._dead()):
            if time.monotonic() > given_up_s:
                break
            time.sleep(0.01)
        return NodeUnavailable(f"{self._what} {dead or 'unknown'} have failed" + (f": {error}" if error else ""))

    def _dead(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes, 1) if process.poll() is not None]

    def stop(self) -> None:
        """Tell them to end, whatever they are doing, and end those that have not after ``END_S``. Idempotent."""
        self.are_to_end = True
        if self.are_alive:
            for process in self.processes:
                assert process.stdin is not None
                with contextlib.suppress(OSError):  # it has died
                    process.stdin.write(_STOP)
            _await(self.processes)
        self.end()

    def end(self) -> None:
        """End them now. Idempotent."""
        self._finalizer()


def kill_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Of ranks that hang: everyone who waits for one of them is told. Any thread may call it."""
    for process in processes:
        process.kill()


def _end(processes: Sequence[subprocess.Popen[bytes]], then: Callable[[], None]) -> None:
    kill_all(processes)
    _await(processes)  # no longer than that for one that a driver holds
    for process in processes:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
    if processes:
        then()


def _await(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, for ``END_S`` at most."""
    given_up_s = time.monotonic() + END_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(given_up_s - time.monotonic(), 0))


def live_with_first() -> None:
    """In another rank: end this process when the first rank says so, or has ended and its end of the standard input
    closes; at once, whatever this process is doing, so without the ends of libraries, which might wait for others.
    Signals that ask to end may reach the whole process group; they are left to the first rank."""
    pipe = sys.stdin.fileno()

    def wait() -> None:
        os._exit(0 if os.read(pipe, 1) == _STOP else 1)

    threading.Thread(target=wait, name="first rank", daemon=True).start()
    for request in (signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.SIG_IGN)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """In another rank, around its start, which begins with joining the group, if there is one: tell the first rank how
    it goes. A MooncakeError ends this process."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as report:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for whatever libraries print
        report.write(_HERE)
        try:
            yield
        except MooncakeError as error:
            report.write(error.message.encode())
            sys.exit(1)
        report.write(_READY)


@contextlib.contextmanager
def rank_threads(count: int) -> Iterator[None]:
    """Use this many threads in the kernels and in torch while the other ranks use theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threads_for(count):
            yield
    finally:
        torch.set_num_threads(before)


def find_store(port: int) -> TCPStore:
    """In another rank: what the first one has opened at that port."""
    return _store(port, is_first=False)


def _store(port: int, *, is_first: bool) -> TCPStore:
    timeout = timedelta(seconds=JOIN_S)
    return TCPStore("127.0.0.1", port, None, is_first, timeout, wait_for_workers=False)


class Group:
    """The ranks that communicate through torch.distributed, from the view of one of them.

    Messages travel between processors, by gloo; what is computed does so too, or between GPUs, by nccl. Methods raise
    RuntimeError, torch's own, if a connection breaks.
    """

    def __init__(self, rank: int, size: int, store: TCPStore, *, on_gpus: bool = False) -> None:
        """Returns once all have come. ``on_gpus``: what ``sum``, ``gather`` and ``share`` take is on GPUs, one per
        rank."""
        self.rank, self.size = rank, size
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=IDLE)
        self._computing: dist.ProcessGroup | None = None  # the default group, if it is None
        self._abort_lock, self._is_aborted = threading.Lock(), False
        if on_gpus:
            # torch's own watch would end this process with a dead rank's: whoever asks for GPUs watches them
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            self._computing = dist.new_group(backend="nccl", timeout=IDLE)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """In place; bit-identical on every rank."""
        dist.all_reduce(values, group=self._computing)
        return values

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's, in place."""
        dist.broadcast(values, 0, group=self._computing)
        return values

    def gather(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Every rank's ``columns`` ``[R, widths[rank]]`` side by side, on the first rank; no rows on others."""
        padded = torch.nn.functional.pad(columns, (0, max(widths) - columns.shape[1]))
        pieces = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        dist.gather(padded, pieces, group=self._computing)
        if pieces is None:
            return columns.new_empty((0, sum(widths)))
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths, strict=True)], dim=1)

    def send(self, kind: int, *arrays: npt.NDArray[np.int64]) -> None:
        """From the first rank to all: a header with sizes, then everything in one message."""
        header = torch.tensor([kind, len(arrays), *(len(array) for array in arrays), *[0] * _HEADER][:_HEADER])
        dist.broadcast(header, 0)
        if arrays:
            dist.broadcast(torch.from_numpy(np.concatenate(arrays)), 0)

    def receive(self) -> tuple[int, list[torch.Tensor]]:
        """What the first rank has sent: its kind and arrays."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        dist.broadcast(header, 0)
        kind, count, *sizes = header.tolist()
        if not count:
            return kind, []
        sizes = sizes[:count]
        everything = torch.empty(sum(sizes), dtype=torch.int64)
        dist.broadcast(everything, 0)
        return kind, list(torch.split(everything, sizes))

    def signal(self, *, goes_on: bool) -> None:
        """From the first rank to all: whether the step goes on."""
        dist.broadcast(torch.tensor([goes_on], dtype=torch.uint8), 0)

    def await_signal(self) -> bool:
        goes_on = torch.empty(1, dtype=torch.uint8)
        dist.broadcast(goes_on, 0)
        return bool(goes_on.item())

    def wait_for_all(self) -> None:
        """Until all ranks are here."""
        dist.barrier()

    def abort(self) -> None:
        """End what runs on this rank's GPU and waits for a rank that is gone: its results are of no use, and neither is
        the group. Returns once no graph has a part of it any more. Idempotent; any thread may call it."""
        with self._abort_lock:
            if self._computing is not None and not self._is_aborted:
                self._is_aborted = True
                self._computing.abort()

    def leave(self) -> None:
        """As ``leave_group``."""
        self.abort()
        leave_group()


def leave_group() -> None:
    """Leave the group. Idempotent. A process that ends inside a group may abort, because gloo's threads are still
    running."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@contextlib.contextmanager
def speaking_to(workers: Workers) -> Iterator[None]:
    """Turns errors of a ``Group`` into NodeUnavailable."""
    try:
        yield
    except RuntimeError as error:
        raise workers.failed(error) from None


def batch_arrays(batch: ForwardBatch) -> list[npt.NDArray[np.int64]]:
    """A step as a message; ``batch_of`` reads it. Batches with adapters or reuse cannot be sent to ranks."""
    arrays = [getattr(batch, name).numpy().astype(np.int64) for name in _FIELDS]
    return [*arrays, batch.block_tables.numpy().astype(np.int64).ravel()]


def batch_of(arrays: Sequence[torch.Tensor]) -> ForwardBatch:
    *fields, tables = arrays
    values = dict(zip(_FIELDS, fields, strict=True))
    return ForwardBatch(
        tokens=values["tokens"],
        positions=values["positions"],
        query_starts=values["query_starts"].int(),
        context_lens=values["context_lens"].int(),
        block_tables=tables.int().view(len(values["context_lens"]), -1),
        slots=values["slots"],
        logit_rows=values["logit_rows"],
    )
