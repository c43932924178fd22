"""Writes computed KV to other nodes: a stream of layers per request and destination, and the thread that serves them.

The engine's thread only appends to streams. The writer's thread checksums the ranges and hands them to the transfer
engine, one turn per peer at a time; it waits for no peer, so a stalled one delays only its own streams. A stream
collects until a turn is worth its cost, and as long as it is not open yet (the decode node has not reserved blocks).
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
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.requests import Request, Transfer, WriteRange
from kvstore.transfer.transport import Priority
from mooncake.engine.cache.kv_cache import HERE, Arrival
from mooncake.errors import HandoffFailed, MooncakeError, as_ours
from mooncake.types import KVLayout, SegmentAddress

log = logging.getLogger(__name__)

LAYERS_PER_TURN = 8  # written for one stream before the peer's next stream has its turn; more where they are small
MIN_TURN_BYTES = 1 << 20  # a turn wakes threads, which takes cores from the computation; less only at a stream's end


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """One layer of the prompt's blocks ``first``, ``first + 1``, …: final in these blocks of the cache, and in host
    memory once ``arrival`` is done. With groups of layers: one row of the group's pages, by page number."""

    layer: int
    first: int
    block_ids: tuple[int, ...]
    arrival: Arrival = HERE


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a stream's blocks go; blocks without a slot are skipped."""

    address: SegmentAddress
    slots: dict[int, tuple[int, int]]  # block index -> (slot, epoch)


class WriteStream:
    """One request's layers on their way to one destination. Thread-safe."""

    def __init__(self, name: str, layout: KVLayout, deadline: float, writer: KVWriter) -> None:
        """``writer`` writes it; whoever changes the stream must ``kick`` it."""
        self.name = name
        self.writer = writer
        self.deadline = deadline  # monotonic s
        self.done: Future[None] = Future()  # everything pushed before ``end`` is written, or the error
        self.done.set_running_or_notify_cancel()  # waiters cannot cancel it: only we settle it
        self.sent_bytes = 0
        self.transport = ""  # the transport of the last write
        self.checksums: dict[int, npt.NDArray[np.uint64]] = {}  # block index -> one per layer
        self._layout = layout
        self._lock = threading.Lock()
        self._starting = threading.Lock()  # held while a turn starts: ``close`` waits for it
        self._transfer: Transfer | None = None  # this turn's
        self._began_s = 0.0
        self._pending: deque[LayerBlocks] = deque()
        self._pending_bytes = 0
        self._destination: Destination | None = None
        self._ended = False
        self._closed = False

    @property
    def address(self) -> SegmentAddress | None:
        """Its destination; None until it is open."""
        return self._destination.address if self._destination else None

    @property
    def is_written(self) -> bool:
        """Whether everything is, so that ``close`` need not wait."""
        return self.done.done() and self.done.exception() is None

    def push(self, blocks: LayerBlocks) -> bool:
        """Whether enough is pending for a turn."""
        with self._lock:
            if not self._closed:
                self._pending.append(blocks)
                self._pending_bytes += self._num_bytes(blocks)
            return self._pending_bytes >= MIN_TURN_BYTES

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
            self._pending_bytes = 0
            self._closed = True
            if not self.done.done():
                self.done.set_exception(error)

    def close(self) -> None:
        """Blocks until no write is in progress. Idempotent."""
        self.fail(HandoffFailed(f"{self.name}: closed"))
        with self._starting:
            transfer = self._transfer
        if transfer is not None:
            transfer.cancel()
            transfer.wait()

    def start_turn(self, engine: TransferEngine, memory: npt.NDArray[np.uint8], priority: Priority) -> Transfer | None:
        """Start writing some layers; the caller must pass the result to ``end_turn``. None when there is nothing to
        write now. Only for the writer's thread, and not while a write is in progress."""
        with self._starting:
            self._began_s = time.monotonic()
            try:
                while (layers := self._take_pending()) and not (ranges := self._ranges(layers, memory)):
                    pass
                if layers:
                    assert self._destination is not None
                    [self._transfer] = engine.submit(
                        [Request(self._destination.address, ranges, self.deadline, priority)]
                    )
                else:
                    self._settle()
            except MooncakeError as error:
                self.fail(error)
            except Exception as error:  # a bug must cost this stream, not the others
                log.exception("%s", self.name)
                self.fail(as_ours(error, self.name))
            return self._transfer

    def end_turn(self, transfer: Transfer) -> float:
        """The writes of this turn have ended. Returns the ms they took, checksums included."""
        self._transfer = None
        if transfer.error is not None:
            self.fail(transfer.error)
        else:
            self.transport = transfer.transport
            self.sent_bytes += transfer.moved_bytes
            self._settle()
        return (transfer.ended - self._began_s) * 1e3

    def _take_pending(self) -> list[LayerBlocks]:
        """The layers to write next."""
        layers: list[LayerBlocks] = []
        with self._lock:
            if self._destination is None or (self._pending_bytes < MIN_TURN_BYTES and not self._ended):
                return []
            num_bytes = 0
            while self._pending and (len(layers) < LAYERS_PER_TURN or num_bytes < MIN_TURN_BYTES):
                layers.append(self._pending.popleft())
                num_bytes += self._num_bytes(layers[-1])
            self._pending_bytes -= num_bytes
        return layers

    def _num_bytes(self, blocks: LayerBlocks) -> int:
        return len(blocks.block_ids) * self._layout.layer_bytes

    def _settle(self) -> None:
        """No write is in progress: settle ``done`` if nothing is left."""
        with self._lock:
            if self._ended and not self._pending and self._destination is not None and not self.done.done():
                self.done.set_result(None)

    def _ranges(self, layers: list[LayerBlocks], memory: npt.NDArray[np.uint8]) -> list[WriteRange]:
        assert self._destination is not None
        slots, size = self._destination.slots, self._layout.layer_bytes
        ranges: dict[tuple[int, int], WriteRange] = {}  # the last of each counts: an abandoned step's come before
        for blocks in layers:
            offset = blocks.layer * size
            blocks.arrival.wait()
            for index, block_id in enumerate(blocks.block_ids, blocks.first):
                if index not in slots:
                    continue
                slot, epoch = slots[index]
                data = memory[block_id, offset : offset + size]
                sums = self.checksums.setdefault(index, np.zeros(self._layout.num_layers, np.uint64))
                sums[blocks.layer] = checksum(data.data)
                ranges[slot, offset] = WriteRange(slot, offset, data.data, epoch)
        return list(ranges.values())


class KVWriter:
    """The thread that serves all streams of one kind. ``on_sent(stream, bytes, ms)`` is called after each turn."""

    def __init__(
        self,
        name: str,
        transfer: TransferEngine,
        memory: npt.NDArray[np.uint8],
        on_sent: Callable[[WriteStream, int, float], None],
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self._transfer = transfer
        self._memory = memory
        self._on_sent = on_sent
        self._priority = priority
        self._events: queue.SimpleQueue[tuple[WriteStream, Transfer | None] | None] = queue.SimpleQueue()
        self._waiting: dict[SegmentAddress, deque[WriteStream]] = {}  # by peer: streams waiting for a turn
        self._busy: set[SegmentAddress] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def kick(self, stream: WriteStream) -> None:
        """The stream may have something to write."""
        self._events.put((stream, None))

    def stop(self) -> None:
        """Start no further writes."""
        self._events.put(None)
        self._thread.join()

    def _on_ended(self, stream: WriteStream, transfer: Transfer) -> None:
        """Called on any thread."""
        self._events.put((stream, transfer))

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            stream, transfer = event
            peer = stream.address
            if peer is None:
                continue
            if transfer is not None:
                self._busy.discard(peer)
                self._end_turn(stream, transfer)
            waiting = self._waiting.setdefault(peer, deque())
            if stream not in waiting:
                waiting.append(stream)
            if peer not in self._busy:
                self._start_turn(peer, waiting)

    def _end_turn(self, stream: WriteStream, transfer: Transfer) -> None:
        try:
            elapsed_ms = stream.end_turn(transfer)
            if transfer.error is None:
                self._on_sent(stream, transfer.moved_bytes, elapsed_ms)
        except Exception as error:  # a bug must cost this stream, not the others
            log.exception("%s", stream.name)
            stream.fail(as_ours(error, stream.name))

    def _start_turn(self, peer: SegmentAddress, waiting: deque[WriteStream]) -> None:
        """Of the first waiting stream that has something to write."""
        while waiting:
            stream = waiting.popleft()
            transfer = stream.start_turn(self._transfer, self._memory, self._priority)
            if transfer is not None:
                self._busy.add(peer)
                transfer.when_ended(partial(self._on_ended, stream))
                return
        del self._waiting[peer]
