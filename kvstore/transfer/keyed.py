"""The client's end of a connection that fetches and puts whole blocks by key: one message there, one back.

What moves comes as steps that may be given up for a while and taken up again where they were. This module must not know
what keys mean, nor what else a store could be asked when the answer is no.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.checksum import Checksums
from kvstore.transfer import protocol
from kvstore.transfer.native import MAX_SUMS, MIN_SUM_BYTES, Memory, NativeWire, rows_of
from kvstore.transfer.protocol import ProtocolViolation, Reply, Status

MAX_KEYS = protocol.MAX_RANGES  # of one message

Step = Callable[[float], None]
"""Moves something, until a deadline. After DeadlineExceeded it may be called again, and goes on; any other error, which
is an OSError or a ProtocolViolation, is the connection's end."""


def can_put(nbytes: int, ranges: int) -> bool:
    """Whether a block like this can be put in one message, if it fits a slot."""
    return 1 <= ranges <= MAX_SUMS and not nbytes % ranges and nbytes >= MIN_SUM_BYTES * ranges


class KeyedWire:
    """One exchange at a time; one that was given up half-way leaves the connection of no use."""

    def __init__(self, wire: NativeWire) -> None:
        self.wire = wire
        self._frame_ids = itertools.count()

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        """Ask for blocks, at most MAX_KEYS. Nothing has been sent yet."""
        return Fetch(self.wire, keys, next(self._frame_ids))

    def put(self, key: bytes, parent: bytes, tenant: str, data: memoryview, ranges: int) -> Put:
        """Send a block that ``can_put``. Nothing has been sent yet."""
        return Put(self.wire, (key, parent, tenant), data, ranges, next(self._frame_ids))

    def shut(self) -> None:
        """Wake whoever is moving something."""
        self.wire.shut()

    def close(self) -> None:
        self.wire.close()


class _Exchange:
    def __init__(self, wire: NativeWire, frame_id: int, extra_bytes: int) -> None:
        self._wire = wire
        self._frame_id = frame_id
        self._answer = bytearray(protocol.REPLY_BYTES + extra_bytes)

    def _reply(self) -> Reply:
        """Raises ProtocolViolation."""
        reply = protocol.unpack_reply(self._answer[: protocol.REPLY_BYTES])
        if reply.frame_id != self._frame_id or reply.payload_bytes > len(self._answer) - protocol.REPLY_BYTES:
            raise ProtocolViolation("a reply that answers another frame")
        return reply


class Fetch(_Exchange):
    """``ask``; what was ``found``; ``receive`` it into memory; see which of it ``is_right``."""

    def __init__(self, wire: NativeWire, keys: Sequence[bytes], frame_id: int) -> None:
        super().__init__(wire, frame_id, len(keys) * protocol.FOUND_BYTES)
        self._request = protocol.pack_fetch(keys, frame_id)
        self._sums: list[tuple[Checksums, Checksums]] = []  # as listed and as made of each block

    def ask(self) -> Step:
        out, back = self._wire.sending(rows_of([(self._request, None)])), rows_of([(self._answer, None)])
        return _in_order([out.run, self._wire.receiving(back).run])

    def found(self) -> list[tuple[int, int]]:
        """Length and number of ranges of each block, zeros for what is not there. Raises ProtocolViolation."""
        if self._reply().status is not Status.OK:
            raise ProtocolViolation("blocks cannot be fetched by key here")
        return protocol.unpack_found(memoryview(self._answer)[protocol.REPLY_BYTES :], MAX_SUMS)

    def receive(self, found: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> Step:
        """All that was found, into memory of just its lengths. Its checksums come first, and are made on the way."""
        sizes = [(length // ranges, ranges) for length, ranges in found if length]
        listed: Checksums = np.empty(sum(ranges for _, ranges in sizes), dtype=np.uint64)
        end = 0
        self._sums = []
        groups: list[tuple[int, list[tuple[Memory, Checksums | None]]]] = []
        for (size, ranges), memory in zip(sizes, into, strict=True):
            made: Checksums = np.empty(ranges, dtype=np.uint64)
            self._sums.append((listed[end : end + ranges], made))
            end += ranges
            if not groups or groups[-1][0] != size:
                groups.append((size, [] if groups else [(listed.data.cast("B"), None)]))
            groups[-1][1].append((memory, made))
        return _in_order([self._wire.receiving(rows_of(parts), size).run for size, parts in groups])

    def is_right(self) -> list[bool]:
        """Of each block received, whether it is what its checksums say. If not, it may have left its slot meanwhile."""
        return [bool((listed == made).all()) for listed, made in self._sums]


class Put(_Exchange):
    """``send``; what the ``status`` is then."""

    def __init__(
        self, wire: NativeWire, name: tuple[bytes, bytes, str], data: memoryview, ranges: int, frame_id: int
    ) -> None:
        super().__init__(wire, frame_id, 0)
        self._data = data
        self._sums: Checksums = np.empty(ranges, dtype=np.uint64)
        self._head = protocol.pack_put(*name, data.nbytes, ranges, frame_id)

    def send(self) -> Step:
        """The block with its checksums behind it, which are made on the way; and take the answer."""
        sums = self._sums.data.cast("B")
        rows = rows_of([(self._head, None), (self._data, self._sums), (sums, None)])
        out = self._wire.sending(rows, self._data.nbytes // len(self._sums))
        return _in_order([out.run, self._wire.receiving(rows_of([(self._answer, None)])).run])

    def status(self) -> Status:
        """OK once everybody can read it. Raises ProtocolViolation."""
        return self._reply().status


def _in_order(steps: Sequence[Step]) -> Step:
    waiting = deque(steps)

    def go_on(deadline: float) -> None:
        while waiting:
            waiting[0](deadline)
            waiting.popleft()

    return go_on
