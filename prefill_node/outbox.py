"""Where computed layers go: sinks (one hand-off, one pool) fed by the engine's thread and drained by sender threads.

The engine's thread only appends; a sender thread checksums the ranges and writes them through the transfer engine. A
sink that is not open yet (the decode node has still to reserve) just collects; nobody waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.checksum import checksum
from kvstore.transfer.engine import Priority, TransferEngine, WriteRange
from mooncake.engine.kv_cache import HERE, Arrival
from mooncake.errors import HandoffFailed, InternalError, MooncakeError
from mooncake.types import KVLayout, SegmentAddress

log = logging.getLogger(__name__)

LAYERS_PER_TURN = 8  # written for one sink before the next sink has its turn


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layer ``layer`` of the prompt's blocks ``first``, ``first + 1``, … is final, in these cache blocks: in host
    memory once it has arrived there."""

    layer: int
    first: int
    block_ids: tuple[int, ...]
    arrival: Arrival = HERE


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a sink's blocks go; those without a slot are skipped."""

    address: SegmentAddress
    slots: dict[int, tuple[int, int]]  # block index -> (slot, epoch)


class Sink:
    """The layers of one request on their way to one destination. Thread-safe."""

    def __init__(self, name: str, layout: KVLayout, deadline: float) -> None:
        self.name = name
        self.deadline = deadline  # monotonic s
        self.done: Future[None] = Future()  # all that was pushed before ``end`` is written, or the error
        self.sent_bytes = 0
        self.transport = ""  # that carried the last bytes
        self.checksums: dict[int, npt.NDArray[np.uint64]] = {}  # block index -> one a layer
        self._layout = layout
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # held while bytes move: ``close`` waits for it
        self._pending: deque[LayerRun] = deque()
        self._destination: Destination | None = None
        self._ended = False
        self._closed = False

    @property
    def address(self) -> SegmentAddress | None:
        """Where it goes; None until it is open."""
        return self._destination.address if self._destination else None

    def push(self, run: LayerRun) -> None:
        with self._lock:
            if not self._closed:
                self._pending.append(run)

    def open(self, destination: Destination) -> None:
        with self._lock:
            self._destination = destination

    def end(self) -> None:
        """Nothing more will be pushed."""
        with self._lock:
            self._ended = True

    def fail(self, error: MooncakeError) -> None:
        with self._lock:
            self._pending.clear()
            self._closed = True
        if not self.done.done():
            self.done.set_exception(error)

    def close(self) -> None:
        """Blocks until no write is under way; after it none will start. Idempotent."""
        self.fail(HandoffFailed(f"{self.name}: closed"))
        with self._writing:
            pass

    def drain_some(self, transfer: TransferEngine, memory: npt.NDArray[np.uint8], priority: Priority) -> bool:
        """Write up to LAYERS_PER_TURN runs. True when more is waiting. Called by one sender thread at a time."""
        with self._writing:
            with self._lock:
                destination = self._destination
                if destination is None or self._closed:
                    return False
                runs = [self._pending.popleft() for _ in range(min(LAYERS_PER_TURN, len(self._pending)))]
            try:
                if runs:
                    self._write(runs, destination, transfer, memory, priority)
            except MooncakeError as error:
                self.fail(error)
                return False
            except Exception as error:  # a bug must cost this sink, not the sender
                log.exception("%s", self.name)
                self.fail(InternalError(f"{self.name}: {error!r}"))
                return False
        with self._lock:
            more = bool(self._pending)
            finished = self._ended and not more and not self._closed
        if finished and not self.done.done():
            self.done.set_result(None)
        return more

    def _write(
        self,
        runs: list[LayerRun],
        destination: Destination,
        transfer: TransferEngine,
        memory: npt.NDArray[np.uint8],
        priority: Priority,
    ) -> None:
        ranges: list[WriteRange] = []
        for run in runs:
            offset = run.layer * self._layout.layer_bytes
            run.arrival.wait()
            for index, block_id in enumerate(run.block_ids, run.first):
                if index not in destination.slots:
                    continue
                slot, epoch = destination.slots[index]
                data = memory[block_id, offset : offset + self._layout.layer_bytes]
                sums = self.checksums.setdefault(index, np.zeros(self._layout.num_layers, np.uint64))
                sums[run.layer] = checksum(data.data)
                ranges.append(WriteRange(slot, offset, data.data, epoch))
        if ranges:
            report = transfer.write(destination.address, ranges, self.deadline, priority)
            self.transport = report.transport
            self.sent_bytes += report.nbytes


class Outbox:
    """One sender thread, serving its sinks in turns. ``on_sent(sink, bytes, ms)`` is told what each turn moved."""

    def __init__(
        self,
        name: str,
        transfer: TransferEngine,
        memory: npt.NDArray[np.uint8],
        on_sent: Callable[[Sink, int, float], None],
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self._transfer = transfer
        self._memory = memory
        self._on_sent = on_sent
        self._priority = priority
        self._turns: queue.SimpleQueue[Sink | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def kick(self, sink: Sink) -> None:
        """The sink may have something to write."""
        self._turns.put(sink)

    def stop(self) -> None:
        self._turns.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (sink := self._turns.get()) is not None:
            before, started_s = sink.sent_bytes, time.monotonic()
            more = sink.drain_some(self._transfer, self._memory, self._priority)
            if moved := sink.sent_bytes - before:
                self._on_sent(sink, moved, (time.monotonic() - started_s) * 1e3)
            if more:
                self._turns.put(sink)
