"""The client's end of a connection that fetches and puts whole blocks by key, with one message each way.

Every step may be interrupted by a deadline and resumed. This module knows neither what keys mean, nor what to do when
the answer is no.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvstore.checksum import Checksums
from kvstore.transfer import protocol
from kvstore.transfer.native import MAX_SUMS, MIN_SUM_BYTES, NativeKeyed
from kvstore.transfer.protocol import Operation, ProtocolViolation, Reply, Status

MAX_KEYS = protocol.MAX_RANGES  # of one message

Step = Callable[[float], None]
"""Moves something, until a deadline. After DeadlineExceeded it may be called again, and goes on; any other error, which
is an OSError or a ProtocolViolation, is the connection's end."""


_KNOWN = {0: False, 1: True}


def can_put(nbytes: int, ranges: int) -> bool:
    """Whether a block like this can be put in one message, if it fits a slot."""
    return 1 <= ranges <= MAX_SUMS and not nbytes % ranges and nbytes >= MIN_SUM_BYTES * ranges


class KeyedWire:
    """One exchange at a time; one abandoned half-way leaves the connection unusable."""

    def __init__(self, native: NativeKeyed) -> None:
        self.wire = native.wire
        self._native = native
        self._frame_ids = itertools.count()

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        """Request blocks, at most MAX_KEYS. Nothing has been sent yet."""
        return Fetch(self._native, keys, next(self._frame_ids))

    def get(self, key: bytes, into: memoryview) -> Get:
        """Request one block. Nothing has been sent yet."""
        return Get(self._native, protocol.pack_keys(Operation.FETCH, [key], next(self._frame_ids)), into)

    def ask(self, keys: Sequence[bytes]) -> Ask:
        """Ask whether blocks are stored, at most MAX_KEYS. Nothing has been sent yet."""
        return Ask(self._native, keys, next(self._frame_ids))

    def put(self, key: bytes, parent: bytes, tenant: str, data: memoryview, ranges: int) -> Put:
        """Send a block that ``can_put``. Nothing has been sent yet."""
        frame_id = next(self._frame_ids)
        return Put(
            self._native, protocol.pack_put(key, parent, tenant, data.nbytes, ranges, frame_id), data, ranges, frame_id
        )

    def commit(
        self, key: bytes, parent: bytes, tenant: str, slot: int, epoch: int, length: int, sums: Checksums
    ) -> Commit:
        """Name a block that is in one of our slots. Nothing has been sent yet."""
        frame_id = next(self._frame_ids)
        request = protocol.pack_commit(key, parent, tenant, slot, epoch, length, sums.tobytes(), frame_id)
        return Commit(self._native, request, frame_id)

    def shut(self) -> None:
        """Wake whoever is moving something."""
        self.wire.shut()

    def close(self) -> None:
        self.wire.close()


class Fetch:
    """Call ``ask``, look at what was ``found``, ``receive`` that into memory, and check which of it ``is_right``."""

    def __init__(self, native: NativeKeyed, keys: Sequence[bytes], frame_id: int) -> None:
        self._native = native
        self._frame_id = frame_id
        self._request = protocol.pack_keys(Operation.FETCH, keys, frame_id)
        self._answer_bytes = protocol.REPLY_BYTES + len(keys) * protocol.FOUND_BYTES
        self.is_right: list[bool] = []
        """Of each block received, whether it is what its checksums say. If not, it may have left its slot meanwhile."""

    def ask(self, deadline: float) -> None:
        self._native.ask(self._request, self._answer_bytes, deadline)

    def found(self) -> list[tuple[int, int]]:
        """Length and number of ranges of each block, zeros for missing ones. Raises ProtocolViolation."""
        reply = _reply_of(self._native, self._frame_id, self._answer_bytes - protocol.REPLY_BYTES)
        if reply.status is not Status.OK:
            raise ProtocolViolation("blocks cannot be fetched by key here")
        found = self._native.answer[protocol.REPLY_BYTES : self._answer_bytes]
        return protocol.unpack_found(found, MAX_SUMS, MIN_SUM_BYTES)

    def receive(self, into: Sequence[tuple[memoryview, int]]) -> Step:
        """Receive everything found: memory of exactly its length, and the number of ranges, for each."""

        def go_on(deadline: float) -> None:
            for view, ranges in into[len(self.is_right) :]:
                self.is_right.append(self._native.receive(view, ranges, deadline))

        return go_on


class Get:
    """Call ``go``; then ``length`` is 0 if it is not there, and ``is_right`` tells whether it is intact. If it is
    longer than the memory for it, the connection becomes unusable."""

    def __init__(self, native: NativeKeyed, request: bytes, into: memoryview) -> None:
        self._native, self._request, self._into = native, request, into
        self.length, self.is_right = 0, False

    def go(self, deadline: float) -> None:
        self.length, self.is_right = self._native.get(self._request, self._into, deadline)


class Ask:
    """Call ``send``, then ``known``."""

    def __init__(self, native: NativeKeyed, keys: Sequence[bytes], frame_id: int) -> None:
        self._native, self._num_keys, self._frame_id = native, len(keys), frame_id
        self._request = protocol.pack_keys(Operation.ASK, keys, frame_id)

    def send(self, deadline: float) -> None:
        """Send, and receive the answer."""
        self._native.ask(self._request, protocol.REPLY_BYTES + self._num_keys, deadline)

    def known(self) -> list[bool | None]:
        """Whether each is stored; None where only the store itself can tell. Raises ProtocolViolation."""
        if _reply_of(self._native, self._frame_id, self._num_keys).status is not Status.OK:
            raise ProtocolViolation("this server does not list what is stored")
        answer = bytes(self._native.answer[protocol.REPLY_BYTES : protocol.REPLY_BYTES + self._num_keys])
        return list(map(_KNOWN.get, answer))


class Put:
    """Call ``send``, then ``status``."""

    def __init__(self, native: NativeKeyed, head: bytes, data: memoryview, ranges: int, frame_id: int) -> None:
        self._native, self._head, self._data, self._ranges, self._frame_id = native, head, data, ranges, frame_id

    def send(self, deadline: float) -> None:
        """Send the block, followed by its checksums, which are computed on the way; and receive the answer."""
        self._native.put(self._head, self._data, self._ranges, deadline)

    def status(self) -> Status:
        """OK once everybody can read it. Raises ProtocolViolation."""
        return _reply_of(self._native, self._frame_id, 0).status


class Commit:
    """Call ``send``, then ``status``."""

    def __init__(self, native: NativeKeyed, request: bytes, frame_id: int) -> None:
        self._native, self._request, self._frame_id = native, request, frame_id

    def send(self, deadline: float) -> None:
        """Send, and receive the answer."""
        self._native.ask(self._request, protocol.REPLY_BYTES, deadline)

    def status(self) -> Status:
        """OK once everybody can read it, HERE if it was already stored. Raises ProtocolViolation."""
        return _reply_of(self._native, self._frame_id, 0).status


def _reply_of(native: NativeKeyed, frame_id: int, payload_bytes: int) -> Reply:
    reply = protocol.unpack_reply(bytes(native.answer[: protocol.REPLY_BYTES]))
    if reply.frame_id != frame_id or reply.payload_bytes != payload_bytes:
        raise ProtocolViolation("a reply that answers another frame")
    return reply
