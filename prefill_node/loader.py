"""Loads reused prefixes: a thread reads stored blocks layer by layer, ahead of the computation.

The engine's thread waits for a layer only when it gets there first. A load may skip layers, and read others into side
buffers instead of the cache. Bytes are checked against the checksums they were sealed with, and against the lease's
clock, before a layer counts as loaded. They go to host memory, and from there to a cache on a GPU.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.checksum import checksum
from kvstore.layout.reader import LayoutReader, WrongBytes
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.requests import ReadRange
from kvstore.transfer.transport import Priority
from mooncake.engine.cache.kv_cache import HERE, Arrival, Mirror
from mooncake.engine.step_plan import BlockToLoad
from mooncake.errors import ChecksumMismatch, KVLoadFailed, LeaseExpired, MooncakeError
from mooncake.page_groups import UNIFORM, PageGroups
from mooncake.types import BlockKey, KVLayout, SegmentAddress
from prefill_node.converted_prefix import ConvertedLease

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedPrefix:
    """Stored blocks that may be read until ``expires_s`` (monotonic). Lists run over the prefix's blocks."""

    address: SegmentAddress
    lease_ids: Sequence[int]
    expires_s: float
    slots: list[int]
    checksums: list[npt.NDArray[np.uint64]]


class PrefixLoad:
    """One request's load. Layers become ready in order; an error makes all remaining ones fail at once."""

    def __init__(
        self,
        request_id: str,
        blocks: list[BlockToLoad],
        lease: Callable[[], LeasedPrefix | ConvertedLease],
        release: Callable[[LeasedPrefix | ConvertedLease, list[BlockKey]], None],
        layout: KVLayout,
        deadline: float,
        order: Sequence[int] | None = None,
        side_buffers: Mapping[int, npt.NDArray[np.uint8]] | None = None,
        groups: PageGroups = UNIFORM,
    ) -> None:
        """``lease`` returns a lease for the prefix up to the last of ``blocks`` (blocking; raises KVLoadFailed);
        ``release`` returns it, with the keys of corrupt blocks. ``order`` lists the layers of ``layout`` to read, in
        turn; None: all. Layers with a ``side_buffers`` entry are written there, [blocks, layer_bytes], instead of to
        the cache. With several ``groups`` of layers, ``layout`` is a page's."""
        self.request_id = request_id
        self.load_ms = 0.0
        self.num_blocks = sum(block.group == 0 for block in blocks)
        self._blocks = blocks
        self._block_ids = tuple(block.block_id for block in blocks)
        self._lease = lease
        self._release = release
        self._layout = layout
        self._groups = groups
        self._deadline = deadline
        self._order = range(len(groups.places) or layout.num_layers) if order is None else order
        self._turns = {layer: turn for turn, layer in enumerate(self._order)}
        self._side_buffers = side_buffers or {}
        self._arrivals: list[Arrival] = []  # of the layers that are ready, in order
        self._is_reading = False  # whether bytes may be on their way into the cache
        self._error: KVLoadFailed | None = None
        self._changed = threading.Condition()

    def wait(self, layer: int) -> None:
        """Block until ``layer`` is there, if it is among those read. Raises KVLoadFailed (with ``request_ids``) when
        it will not come."""
        turn = self._turns.get(layer)
        if turn is None:
            return
        with self._changed:
            while len(self._arrivals) <= turn and self._error is None:
                left = self._deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    self._error = KVLoadFailed("the stored prefix did not arrive in time", (self.request_id,))
            if len(self._arrivals) > turn:
                self._arrivals[turn].order()
                return
        self.wait_idle()
        assert self._error is not None
        raise self._error

    def wait_side_buffers(self) -> None:
        """Likewise, for all layers in ``side_buffers``."""
        for layer in self._side_buffers:
            self.wait(layer)

    def cancel(self) -> None:
        """Cancel, and return once nothing is written into the cache any more."""
        self._fail(KVLoadFailed("the request is gone"))
        self.wait_idle()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def wait_idle(self) -> None:
        """Block until no read is in progress and the blocks may be reused. A read has a deadline."""
        with self._changed:
            while self._is_reading:
                self._changed.wait()

    def run(self, transfer: TransferEngine, reader: LayoutReader, mirror: Mirror) -> None:
        """Read every layer of every block. Called on the loader's thread."""
        with self._changed:
            if self._error is not None:
                return
            self._is_reading = True
        started_s = time.monotonic()
        corrupt: list[BlockKey] = []
        lease: LeasedPrefix | ConvertedLease | None = None
        try:
            lease = self._lease()
            if isinstance(lease, ConvertedLease):
                self._read_converted(lease, reader, mirror, corrupt)
                return
            for layer in self._order:
                if self.has_failed:
                    return
                self._load_layer(layer, lease, transfer, mirror, corrupt)
        except KVLoadFailed as error:
            self._fail(error)
        except MooncakeError as error:
            self._fail(KVLoadFailed(f"reading the stored prefix failed: {error.message}"))
        except Exception as error:  # a bug must cost this load, not the loader
            log.exception("loading the prefix of %s", self.request_id)
            self._fail(KVLoadFailed(f"reading the stored prefix failed: {error!r}"))
        finally:
            self.load_ms = (time.monotonic() - started_s) * 1e3
            self._end_reading()
            if lease is not None:
                self._release(lease, corrupt)

    def _load_layer(
        self,
        layer: int,
        lease: LeasedPrefix,
        transfer: TransferEngine,
        mirror: Mirror,
        corrupt: list[BlockKey],
    ) -> None:
        group, rows = self._groups.rows_of(layer)
        blocks = [block for block in self._blocks if block.group == group]
        if not blocks:  # a window of one token
            self._mark_loaded([HERE])
            return
        row_bytes = self._layout.layer_bytes
        offset, size = rows.start * row_bytes, len(rows) * row_bytes
        side_buffer = self._side_buffers.get(layer)
        if side_buffer is None:
            targets = [mirror.memory[block.block_id, offset : offset + size] for block in blocks]
        else:
            targets = list(side_buffer)
        ranges = [
            ReadRange(lease.slots[block.index], offset, target.data)
            for block, target in zip(blocks, targets, strict=True)
        ]
        transfer.read(lease.address, ranges, min(self._deadline, lease.expires_s), Priority.URGENT)
        if time.monotonic() > lease.expires_s:
            raise LeaseExpired("the lease ran out while the stored prefix was read")
        for block, target in zip(blocks, targets, strict=True):
            found = [checksum(target.data[at : at + row_bytes]) for at in range(0, size, row_bytes)]
            if found != [lease.checksums[block.index][row] for row in rows]:
                corrupt.append(block.key)
        if corrupt:
            raise ChecksumMismatch(f"{len(corrupt)} stored blocks have wrong bytes in layer {layer}")
        here = [block.block_id for block in blocks]
        arrivals = [mirror.to_device(here, row) for row in rows] if side_buffer is None else [HERE]
        self._mark_loaded(arrivals[-1:])  # the last one follows all others

    def _read_converted(
        self, lease: ConvertedLease, reader: LayoutReader, mirror: Mirror, corrupt: list[BlockKey]
    ) -> None:
        """Read all layers at once, because pieces of another layout may span several."""
        targets: list[npt.NDArray[np.uint8] | None] = [None] * lease.num_blocks
        for block in self._blocks:
            targets[block.index] = mirror.memory[block.block_id]
        try:
            reader.read_blocks(lease.plan, lease.shards, targets, min(self._deadline, lease.expires_s))
        except WrongBytes as error:
            corrupt.append(lease.key_of(error.slot))
            raise
        if time.monotonic() > lease.expires_s:
            raise LeaseExpired("the lease ran out while the stored prefix was read")
        self._mark_loaded([mirror.to_device(self._block_ids)] * self._layout.num_layers)

    def _end_reading(self) -> None:
        """Wake the waiters even if the last copy fails."""
        try:
            for arrival in self._arrivals[-1:]:  # the last one follows all others
                arrival.wait()
        except Exception:
            log.exception("loading the prefix of %s", self.request_id)
        with self._changed:
            self._is_reading = False
            self._changed.notify_all()

    def _mark_loaded(self, layers: list[Arrival]) -> None:
        with self._changed:
            self._arrivals += layers
            self._changed.notify_all()

    def _fail(self, error: KVLoadFailed) -> None:
        error.request_ids = (self.request_id,)
        with self._changed:
            if self._error is None and len(self._arrivals) < len(self._order):
                self._error = error
            self._changed.notify_all()


class Loader:
    """One thread that runs loads in the order of admission."""

    def __init__(self, transfer: TransferEngine, mirror: Mirror) -> None:
        self._transfer = transfer
        self._reader = LayoutReader(transfer)
        self._mirror = mirror
        self._loads: queue.SimpleQueue[PrefixLoad | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def submit(self, load: PrefixLoad) -> None:
        self._loads.put(load)

    def stop(self) -> None:
        self._loads.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (load := self._loads.get()) is not None:
            load.run(self._transfer, self._reader, self._mirror)
        self._reader.close()
