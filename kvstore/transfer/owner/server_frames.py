"""What a segment's owner does with each frame of an admitted peer: it checks and lands a write, answers a read, tells
of a block that was put, or lets the peer continue over another transport.

C++ code (``native_owner``) handles most frames of TCP connections by itself; what it leaves, and all frames without it,
is handled here. This module knows neither how connections begin and end, nor who is granted what.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.segment import Segment
from kvstore.transfer import protocol
from kvstore.transfer.owner.grants import Grants
from kvstore.transfer.owner.native_owner import Event, NativeConnection, NativeOwner
from kvstore.transfer.owner.server_connection import NOWHERE, Put, ServerConnection
from kvstore.transfer.protocol import Frame, Operation, ProtocolViolation, Status, WireRange
from kvstore.transfer.sockets import Wire
from kvstore.transfer.transport import Exporter, PathFailed
from mooncake.errors import MooncakeError

log = logging.getLogger(__name__)

FRAME_TIMEOUT_S = 30.0  # from a frame's first byte to its last, and for a peer to accept a reply
_BY_KEY = (Operation.FETCH, Operation.PUT, Operation.COMMIT, Operation.ASK)
_FOUND_BYTES = {Operation.FETCH: protocol.FOUND_BYTES, Operation.ASK: 1}  # in the answer, per key
_ZEROS = memoryview(bytes(1 << 16))


class FrameServer:
    """Handles the frames of one segment's connections, each on its own connection's thread."""

    def __init__(
        self,
        segment: Segment,
        node_id: str,
        grants: Grants,
        changed: threading.Condition,
        exporters: Sequence[Exporter],
        on_put: Callable[[Put], object] | None,
    ) -> None:
        """``changed`` guards the grants, and where connections land. ``exporters`` may be filled in later. ``on_put``
        as for ``SegmentServer``."""
        self.credit_bytes = 0  # per connection, told to peers in each reply
        self._segment = segment
        self._node_id = node_id
        self._grants = grants
        self._changed = changed
        self._exporters = exporters
        self._on_put = on_put

    def serve(self, connection: ServerConnection, owner: NativeOwner | None) -> None:
        """Wait for the connection's next frame and handle it, by ``owner`` where it can. Raises ProtocolViolation,
        DeadlineExceeded or OSError: then the connection is to be closed."""
        wire, head = connection.wire, connection.head
        if owner is not None and connection.native is not None and connection.attachment is None:
            event = owner.serve(connection.native)
            if event is Event.LANDED:
                self._tell_of_put(connection, owner, connection.native)
                return
        else:
            wire.receive_when_it_comes(head, FRAME_TIMEOUT_S)
        if connection.is_local:
            raise ProtocolViolation("a frame over the unix socket")
        if connection.attachment is not None:
            raise ProtocolViolation("a frame over the connection of an attachment")
        frame = protocol.unpack_frame(head)
        deadline = time.monotonic() + FRAME_TIMEOUT_S
        if frame.operation in _BY_KEY:  # native code would have answered it if possible
            _discard(wire, frame.payload_bytes, deadline)
            found = bytes(frame.num_ranges * _FOUND_BYTES.get(frame.operation, 0))
            reply = self._reply(Status.NOT_OFFERED, 0, len(found), frame.frame_id)
            wire.send([reply + found], deadline)
            return
        rows = head[protocol.FRAME_BYTES :]
        if frame.num_ranges > 1:
            rest = wire.receive((frame.num_ranges - 1) * protocol.RANGE_BYTES, deadline)
            rows = memoryview(bytes(rows) + rest)
        ranges = protocol.unpack_ranges(rows, frame)
        if frame.operation is Operation.WRITE:
            self._serve_write(connection, frame, ranges, deadline)
        elif frame.operation is Operation.READ:
            self._serve_read(connection, frame, ranges, deadline)
        else:
            self._serve_attach(connection, frame, deadline)

    def _tell_of_put(self, connection: ServerConnection, owner: NativeOwner, native: NativeConnection) -> None:
        if self._on_put is None:
            return
        frame = protocol.unpack_frame(connection.head)
        try:
            landed = native.landed()
        except ProtocolViolation:
            if frame.operation is Operation.PUT:  # then the slot was ours, and contains nothing with a name
                owner.give_ahead(*native.landed_in)
            raise

        def answer(status: Status) -> None:
            reply = self._reply(status, 0, 0, frame.frame_id)
            try:
                is_sent = connection.wire.sock.send(reply, socket.MSG_DONTWAIT) == len(reply)
            except OSError:
                is_sent = False
            if not is_sent:  # the peer has gone, or accepts no answers
                connection.wire.shut()

        self._on_put(Put(landed, answer))

    def _serve_write(
        self, connection: ServerConnection, frame: Frame, ranges: list[WireRange], deadline: float
    ) -> None:
        status, refused = self._begin_landing(connection, ranges)
        if status is Status.OK:
            try:
                connection.wire.receive_into([self._view(item) for item in ranges], deadline)
            finally:
                self._end_landing(connection)
            connection.counts.bytes_in += frame.payload_bytes
        else:
            _discard(connection.wire, frame.payload_bytes, deadline)
            connection.counts.refused += 1
        connection.wire.send([self._reply(status, refused, 0, frame.frame_id)], deadline)

    def _serve_read(self, connection: ServerConnection, frame: Frame, ranges: list[WireRange], deadline: float) -> None:
        size, wire = frame.payload_bytes, connection.wire
        outside = protocol.first_outside(ranges, self._segment.block_bytes, self._segment.num_blocks)
        if outside is not None:
            connection.counts.refused += 1
            wire.send([self._reply(Status.BAD_RANGE, outside, size, frame.frame_id)], deadline, more=True)
            for start in range(0, size, len(_ZEROS)):
                wire.send([_ZEROS[: size - start]], deadline)
            return
        wire.send([self._reply(Status.OK, 0, size, frame.frame_id), *map(self._view, ranges)], deadline)
        connection.counts.bytes_out += size

    def _serve_attach(self, connection: ServerConnection, frame: Frame, deadline: float) -> None:
        """The peer continues over another transport; this connection stays open, silently, as long as that one."""
        name, request = protocol.unpack_attach(connection.wire.receive(frame.payload_bytes, deadline))
        exporter = next((each for each in self._exporters if each.name == name), None)
        try:
            if exporter is None:
                raise PathFailed("it is not offered here")
            # Broken, the peer may be well and attach again. Until it ends this connection it is not gone, with all that
            # it writes.
            connection.attachment = exporter.attach(request, on_broken=connection.wire.say_end)
            status, answer = Status.OK, connection.attachment.reply
        except (PathFailed, MooncakeError) as error:
            log.warning("segment of %s: cannot attach %s by %s: %s", self._node_id, connection.peer, name, error)
            status, answer = Status.NOT_OFFERED, str(error).encode()
        answer = answer[: protocol.MAX_ATTACH_BYTES]
        connection.wire.send([self._reply(status, 0, len(answer), frame.frame_id), answer], deadline)

    def _begin_landing(self, connection: ServerConnection, ranges: list[WireRange]) -> tuple[Status, int]:
        """Check a write as a whole, under the lock that ``revoke`` takes, and record where it is about to land."""
        outside = protocol.first_outside(ranges, self._segment.block_bytes, self._segment.num_blocks)
        if outside is not None:
            return Status.BAD_RANGE, outside
        with self._changed:
            for index, item in enumerate(ranges):
                if item.epoch == 0 or self._grants.table[item.block] != item.epoch:
                    return Status.STALE_EPOCH, index
            connection.landing_here = frozenset([item.block for item in ranges])
        return Status.OK, 0

    def _end_landing(self, connection: ServerConnection) -> None:
        with self._changed:
            connection.landing_here = NOWHERE

    def _view(self, item: WireRange) -> memoryview:
        start = item.block * self._segment.block_bytes + item.offset
        return self._segment.buffer[start : start + item.length]

    def _reply(self, status: Status, refused: int, payload_bytes: int, frame_id: int) -> bytes:
        return protocol.pack_reply(status, refused, payload_bytes, frame_id, self.credit_bytes)


def _discard(wire: Wire, size: int, deadline: float) -> None:
    """Read the payload of a refused write, so that the next frame can be found."""
    scratch = memoryview(bytearray(min(size, 1 << 16)))
    for start in range(0, size, len(scratch)):
        wire.receive_into([scratch[: size - start]], deadline)
