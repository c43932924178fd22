"""What models over several processes of one machine share: how their ranks start and end, and a step as a message.

The first rank is the engine's model. It starts the others as separate processes (``python -m MODULE``), which end with
it, whatever they are doing: each reads from a pipe that closes when the first rank ends. ``Group`` is for ranks that
communicate through torch.distributed (gloo). This module does not know how a model is split.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mooncake.errors import NodeUnavailable
from mooncake.model.batch import ForwardBatch

START_S = 120  # for all ranks to load their weights
END_S = 10  # for a rank that was told to end
DEATH_S = 1  # between the end of a process's connections and its own
IDLE = timedelta(days=30)  # ranks wait this long for a step; they end with their parent, not by this timeout

_HEADER = 16  # int64: kind, number of arrays, then their sizes
_FIELDS = ("tokens", "positions", "query_starts", "context_lens", "slots", "logit_rows")


class Workers:
    """The other ranks' processes. They are killed at the latest when this object is collected."""

    def __init__(self, what: str, end: Callable[[], None] = lambda: None) -> None:
        """``what`` they are, for errors; ``end`` is called once they have ended."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._what = what
        self._finalizer = weakref.finalize(self, _end, self.processes, end)

    def start(self, module: str, arguments: Sequence[object], share: Collection[int] = ()) -> None:
        """Start one more; it inherits the file descriptors ``share``."""
        # -P: a folder with our name in the user's directory must not take precedence
        command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=share))

    @property
    def are_alive(self) -> bool:
        """Whether they have not been ended."""
        return self._finalizer.alive

    def failed(self, error: BaseException | None) -> NodeUnavailable:
        """The error to raise after communication failed with ``error``: it says which ranks are dead. Another node can
        take over the work."""
        given_up_s = time.monotonic() + DEATH_S
        while not (dead := [rank for rank, process in enumerate(self.processes, 1) if process.poll() is not None]):
            if time.monotonic() > given_up_s:
                break
            time.sleep(0.01)
        return NodeUnavailable(f"{self._what} {dead or 'unknown'} have failed" + (f": {error}" if error else ""))

    def wait(self) -> None:
        """Wait briefly for ranks that were told to end."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)

    def end(self) -> None:
        """End them now. Idempotent."""
        self._finalizer()


def _end(processes: Sequence[subprocess.Popen[bytes]], then: Callable[[], None]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
    then()


def live_with_first() -> None:
    """In another rank: end this process when the first rank's end of its standard input closes, whatever it is doing.
    Signals that ask to end may reach the whole process group; they are left to the first rank."""
    pipe = sys.stdin.fileno()

    def wait() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=wait, name="first rank", daemon=True).start()
    for request in (signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.SIG_IGN)


class Group:
    """The ranks that communicate through torch.distributed, from the view of one of them.

    Messages travel between processors, by gloo; what is computed does so too, or between GPUs, by nccl. Methods raise
    RuntimeError, torch's own, if a connection breaks.
    """

    def __init__(self, rank: int, size: int, port: int, *, on_gpus: bool = False) -> None:
        """``on_gpus``: what ``sum``, ``gather`` and ``share`` take is on GPUs, one per rank."""
        self.rank, self.size = rank, size
        timeout = timedelta(seconds=START_S)
        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timeout)  # type: ignore[attr-defined]
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


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
