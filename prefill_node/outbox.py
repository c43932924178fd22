"""Sends computed layers: sinks (one hand-off, one pool), and the thread that starts their writes.

The engine's thread only appends. The outbox's thread checksums the ranges and hands them to the transfer engine, one
turn per peer at a time; it waits for no peer, so a stalled one delays only its own sinks. A sink that is not open yet
(the decode node has not reserved) just collects.
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
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.checksum import checksum
from kvstore.transfer.engine import Priority, Request, Transfer, TransferEngine, WriteRange
from mooncake.engine.kv_cache import HERE, Arrival
from mooncake.errors import HandoffFailed, InternalError, MooncakeError
from mooncake.types import KVLayout, SegmentAddress

log = logging.getLogger(__name__)

LAYERS_PER_TURN = 8  # written for one sink before the peer's next sink has its turn


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layer ``layer`` of the prompt's blocks ``first``, ``first + 1``, … is final in these cache blocks, and in host
    memory once ``arrival`` is done. With groups of layers: one row of the group's pages, by page number."""

    layer: int
    first: int
    block_ids: tuple[int, ...]
    arrival: Arrival = HERE


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a sink's blocks go; blocks without a slot are skipped."""

    address: SegmentAddress
    slots: dict[int, tuple[int, int]]  # block index -> (slot, epoch)


class Sink:
    """One request's layers on their way to one destination. Thread-safe."""

    def __init__(self, name: str, layout: KVLayout, deadline: float) -> None:
        self.name = name
        self.deadline = deadline  # monotonic s
        self.done: Future[None] = Future()  # everything pushed before ``end`` is written, or the error
        self.done.set_running_or_notify_cancel()  # waiters cannot cancel it: only we settle it
        self.sent_bytes = 0
        self.transport = ""  # the transport of the last write
        self.checksums: dict[int, npt.NDArray[np.uint64]] = {}  # block index -> one per layer
        self._layout = layout
        self._lock = threading.Lock()
        self._starting = threading.Lock()  # held while a turn starts: ``close`` waits for it
        self._moving: Transfer | None = None  # this turn's
        self._began_s = 0.0
        self._pending: deque[LayerRun] = deque()
        self._destination: Destination | None = None
        self._ended = False
        self._closed = False

    @property
    def address(self) -> SegmentAddress | None:
        """Its destination; None until it is open."""
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
        """Start no further writes."""
        with self._lock:
            self._pending.clear()
            self._closed = True
            if not self.done.done():
                self.done.set_exception(error)

    def close(self) -> None:
        """Blocks until no write is in progress. Idempotent."""
        self.fail(HandoffFailed(f"{self.name}: closed"))
        with self._starting:
            moving = self._moving
        if moving is not None:
            moving.cancel()
            moving.wait()

    def start(self, transfer: TransferEngine, memory: npt.NDArray[np.uint8], priority: Priority) -> Transfer | None:
        """Start writing up to LAYERS_PER_TURN runs; the caller must pass the result to ``ended``. None when there is
        nothing to write now. Only for the outbox's thread, and not while a write is in progress."""
        with self._starting:
            self._began_s = time.monotonic()
            try:
                while (runs := self._take()) and not (ranges := self._ranges(runs, memory)):
                    pass
                if runs:
                    assert self._destination is not None
                    [self._moving] = transfer.submit(
                        [Request(self._destination.address, ranges, self.deadline, priority)]
                    )
                else:
                    self._settle()
            except MooncakeError as error:
                self.fail(error)
            except Exception as error:  # a bug must cost this sink, not the others
                log.exception("%s", self.name)
                self.fail(InternalError(f"{self.name}: {error!r}"))
            return self._moving

    def ended(self, moved: Transfer) -> float:
        """The writes of this turn have ended. Returns the ms they took, checksums included."""
        self._moving = None
        if moved.error is not None:
            self.fail(moved.error)
        else:
            self.transport = moved.transport
            self.sent_bytes += moved.moved_bytes
            self._settle()
        return (moved.ended - self._began_s) * 1e3

    def _take(self) -> list[LayerRun]:
        """The runs to write next."""
        with self._lock:
            if self._destination is None or self._closed:
                return []
            return [self._pending.popleft() for _ in range(min(LAYERS_PER_TURN, len(self._pending)))]

    def _settle(self) -> None:
        """No write is in progress: settle ``done`` if nothing is left."""
        with self._lock:
            if self._ended and not self._pending and self._destination is not None and not self.done.done():
                self.done.set_result(None)

    def _ranges(self, runs: list[LayerRun], memory: npt.NDArray[np.uint8]) -> list[WriteRange]:
        assert self._destination is not None
        slots, size = self._destination.slots, self._layout.layer_bytes
        ranges: list[WriteRange] = []
        for run in runs:
            offset = run.layer * size
            run.arrival.wait()
            for index, block_id in enumerate(run.block_ids, run.first):
                if index not in slots:
                    continue
                slot, epoch = slots[index]
                data = memory[block_id, offset : offset + size]
                sums = self.checksums.setdefault(index, np.zeros(self._layout.num_layers, np.uint64))
                sums[run.layer] = checksum(data.data)
                ranges.append(WriteRange(slot, offset, data.data, epoch))
        return ranges


class Outbox:
    """One thread. ``on_sent(sink, bytes, ms)`` is called after each turn."""

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
        self._events: queue.SimpleQueue[tuple[Sink, Transfer | None] | None] = queue.SimpleQueue()
        self._lines: dict[SegmentAddress, deque[Sink]] = {}  # by peer: sinks waiting for a turn
        self._busy: set[SegmentAddress] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def kick(self, sink: Sink) -> None:
        """The sink may have something to write."""
        self._events.put((sink, None))

    def stop(self) -> None:
        """Start no further writes."""
        self._events.put(None)
        self._thread.join()

    def _moved(self, sink: Sink, moved: Transfer) -> None:
        """Called on any thread."""
        self._events.put((sink, moved))

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            sink, moved = event
            peer = sink.address
            if peer is None:
                continue
            if moved is not None:
                self._busy.discard(peer)
                self._note(sink, moved)
            line = self._lines.setdefault(peer, deque())
            if sink not in line:
                line.append(sink)
            if peer not in self._busy:
                self._next(peer, line)

    def _note(self, sink: Sink, moved: Transfer) -> None:
        """A turn has ended."""
        try:
            elapsed_ms = sink.ended(moved)
            if moved.error is None:
                self._on_sent(sink, moved.moved_bytes, elapsed_ms)
        except Exception as error:  # a bug must cost this sink, not the others
            log.exception("%s", sink.name)
            sink.fail(InternalError(f"{sink.name}: {error!r}"))

    def _next(self, peer: SegmentAddress, line: deque[Sink]) -> None:
        """Give the first sink in line a turn."""
        while line:
            sink = line.popleft()
            moving = sink.start(self._transfer, self._memory, self._priority)
            if moving is not None:
                self._busy.add(peer)
                moving.when_ended(partial(self._moved, sink))
                return
        del self._lines[peer]
