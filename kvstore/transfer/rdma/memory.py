"""Local memory that a device may access: what callers have registered, and staging memory for the rest."""

from __future__ import annotations

import bisect
import logging
import threading

import numpy as np
import numpy.typing as npt

from kvstore.pointers import address_of
from kvstore.transfer.protocol import SLICE_BYTES
from kvstore.transfer.rdma.verbs import Access, Device, Registration, VerbsFailed
from kvstore.transfer.transport import Slice

log = logging.getLogger(__name__)

REGISTER_BYTES = 32 << 20  # per piece: the GIL is held while one is pinned


class RegisteredMemory:
    """Local memory that slices can use without a copy. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted, beside ``_pieces``
        self._pieces: list[Registration] = []
        self._kept: list[memoryview] = []  # keeps the memory alive as long as its registration
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def add(self, memory: memoryview) -> None:
        thread = threading.Thread(target=self._pin, args=(memory,), name="rdma-register", daemon=True)
        with self._lock:
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("%s; %d bytes that should be registered are copied", error, memory.nbytes)
                return
            self._kept.append(memory)
            self._threads.append(thread)

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(address, local key), or None for memory that is not inside one registered piece."""
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            piece = self._pieces[index]
        return (address, piece.lkey) if address + nbytes <= piece.address + piece.nbytes else None

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        with self._lock:
            pieces, self._pieces, self._starts = self._pieces, [], []
        for piece in pieces:
            piece.close()
        self._kept.clear()

    def _pin(self, memory: memoryview) -> None:
        start, nbytes = address_of(memory), memory.nbytes
        for offset in range(0, nbytes, REGISTER_BYTES):
            if self._closing.is_set():
                return
            try:
                piece = self._device.register(start + offset, min(REGISTER_BYTES, nbytes - offset), Access.LOCAL_WRITE)
            except VerbsFailed as error:
                log.warning("%s; what lies there is copied", error)
                return
            with self._lock:
                index = bisect.bisect_left(self._starts, piece.address)
                self._starts.insert(index, piece.address)
                self._pieces.insert(index, piece)


class Staging:
    """Registered memory of our own for one slice at a time."""

    def __init__(self, device: Device) -> None:
        self.is_busy = False
        self._device = device
        self._bytes: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._registered: Registration | None = None

    def fit(self, nbytes: int) -> None:
        """Raises VerbsFailed."""
        if self._bytes.nbytes < nbytes:
            self.close()
            self._bytes = np.zeros(max(nbytes, SLICE_BYTES), np.uint8)
            start, size = address_of(self._bytes.data), self._bytes.nbytes
            self._registered = self._device.register(start, size, Access.LOCAL_WRITE)

    def places(self, part: Slice) -> list[tuple[int, int]]:
        assert self._registered is not None
        places: list[tuple[int, int]] = []
        address = self._registered.address
        for piece in part.pieces:
            places.append((address, self._registered.lkey))
            address += piece.wire.length
        return places

    def fill(self, part: Slice) -> None:
        start = 0
        for piece in part.pieces:
            np.copyto(self._bytes[start : start + piece.wire.length], np.frombuffer(piece.local, np.uint8))
            start += piece.wire.length

    def drain(self, part: Slice) -> None:
        start = 0
        for piece in part.pieces:
            np.copyto(np.frombuffer(piece.local, np.uint8), self._bytes[start : start + piece.wire.length])
            start += piece.wire.length

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered = None


Run = tuple[int, int, int, int, int]
"""Local address and key, remote address and key, bytes."""


def merge(runs: list[Run]) -> list[Run]:
    """Join runs that are adjacent on both sides under the same keys."""
    merged: list[Run] = []
    for local, lkey, remote, rkey, nbytes in runs:
        if merged:
            before = merged[-1]
            size = before[4]
            if (before[0] + size, before[1], before[2] + size, before[3]) == (local, lkey, remote, rkey):
                merged[-1] = (before[0], lkey, before[2], rkey, size + nbytes)
                continue
        merged.append((local, lkey, remote, rkey, nbytes))
    return merged
