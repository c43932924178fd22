"""TCP: a few connections to a peer, each carrying slices one behind the other.

A caller's thread drives one connection, and helpers drive the others while there is enough to share. Whoever is free
takes the next slice, so a slow connection carries less and a dead one's slices travel elsewhere.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvstore.transfer import protocol, sockets
from kvstore.transfer.batch import Batch, PathFailed, Slice
from kvstore.transfer.greeting import check_welcome
from kvstore.transfer.protocol import Operation, ProtocolViolation, Status
from mooncake.errors import DeadlineExceeded, InvalidRequest, MooncakeError, StaleEpoch
from mooncake.rpc.server import split_address
from mooncake.types import SegmentAddress

WINDOW = 4  # slices on their way on one connection
MAX_FAILURES = 3  # connections that a batch may lose before it gives the peer up


class TcpPath:
    """Up to ``streams`` connections to one peer, opened when needed and kept. Thread-safe."""

    def __init__(self, address: SegmentAddress, hello: bytes, streams: int, helpers: ThreadPoolExecutor) -> None:
        self._address = address
        self._hello = hello
        self._streams = streams
        self._helpers = helpers
        self._changed = threading.Condition()
        self._idle: list[_Stream] = []
        self._num_open = 0
        self._closed = False

    def run(self, batch: Batch) -> None:
        """Move what waits in the batch. Raises PathFailed, DeadlineExceeded, Cancelled, StaleEpoch (at connecting)."""
        failures = 0
        while not batch.is_finished and batch.refused is None:
            stream = self._borrow(batch.deadline)
            helping = self._call_helpers(batch)
            try:
                self._drive(stream, batch)
            except (OSError, ProtocolViolation) as error:
                failures += 1
                if failures == MAX_FAILURES:
                    raise PathFailed(f"connections to {self._address.node_id} keep breaking: {error}") from None
            finally:
                if busy := [future for future in helping if not future.cancel()]:
                    wait(busy)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop_idle()

    def _call_helpers(self, batch: Batch) -> list[Future[None]]:
        futures: list[Future[None]] = []
        wanted = min(self._streams, batch.num_waiting) - 1
        if wanted < 1:
            return futures
        with contextlib.suppress(RuntimeError):  # the engine is closing: work alone
            futures.extend(self._helpers.submit(self._help, batch) for _ in range(wanted))
        return futures

    def _help(self, batch: Batch) -> None:
        """Drive another connection if one is to be had. What goes wrong here the batch's own thread will meet too."""
        with contextlib.suppress(MooncakeError, PathFailed, OSError):
            stream = self._try_borrow(batch.deadline)
            if stream is not None:
                self._drive(stream, batch)

    def _drive(self, stream: _Stream, batch: Batch) -> None:
        """Move slices over one connection until none is waiting; the connection goes back, or is closed on error."""
        try:
            stream.carry(batch)
        except BaseException:
            self._lose(stream)
            raise
        with self._changed:
            self._idle.append(stream)
            self._changed.notify()
        if self._closed:
            self._drop_idle()

    def _borrow(self, deadline: float) -> _Stream:
        """An idle connection, a new one, or the next that another thread gives back. Raises like ``_connect``."""
        while True:
            stream = self._try_borrow(deadline)
            if stream is not None:
                return stream
            with self._changed:
                if not self._idle and self._num_open >= self._streams:
                    self._changed.wait(sockets.time_left(deadline))

    def _try_borrow(self, deadline: float) -> _Stream | None:
        """Like ``_borrow``, but None when all connections are at work."""
        with self._changed:
            if self._closed:
                raise PathFailed(f"the connections to {self._address.node_id} have been closed")
            if self._idle:
                return self._idle.pop()
            if self._num_open >= self._streams:
                return None
            self._num_open += 1
        try:
            return _connect(self._address, self._hello, deadline)
        except BaseException:
            with self._changed:
                self._num_open -= 1
                self._changed.notify()
            raise

    def _lose(self, stream: _Stream) -> None:
        """One broken connection says that the idle ones may be broken too: open new ones."""
        stream.close()
        with self._changed:
            self._num_open -= 1
            self._changed.notify()
        self._drop_idle()

    def _drop_idle(self) -> None:
        with self._changed:
            idle, self._idle = self._idle, []
            self._num_open -= len(idle)
            self._changed.notify_all()
        for stream in idle:
            stream.close()


class _Stream:
    """One connection. Slices go out up to WINDOW deep; replies come back in the same order."""

    def __init__(self, sock: socket.socket, node_id: str) -> None:
        self._sock = sock
        self._node_id = node_id
        self._next_id = 0

    def carry(self, batch: Batch) -> None:
        """On any error the slices on their way are given back and this connection must not be used again."""
        on_way: deque[tuple[int, Slice]] = deque()
        try:
            while True:
                while len(on_way) < WINDOW and (part := batch.take()) is not None:
                    on_way.append((self._next_id, part))
                    self._send(batch, part)
                if not on_way:
                    return
                self._finish(batch, *on_way[0])
                on_way.popleft()
        except BaseException:
            batch.give_back(part for _, part in on_way)
            raise

    def close(self) -> None:
        self._sock.close()

    def _send(self, batch: Batch, part: Slice) -> None:
        ranges = [piece.wire for piece in part.pieces]
        head = memoryview(protocol.pack_frame(batch.operation, ranges, part.nbytes, self._next_id))
        self._next_id += 1
        payload = [piece.local for piece in part.pieces] if batch.operation is Operation.WRITE else []
        sockets.send_all(self._sock, [head, *payload], batch.deadline)

    def _finish(self, batch: Batch, frame_id: int, part: Slice) -> None:
        """Take one reply. A refusal is the batch's, not the connection's: the stream of frames stays in step."""
        reply = protocol.unpack_reply(sockets.receive(self._sock, protocol.REPLY_BYTES, batch.deadline))
        is_read = batch.operation is Operation.READ and reply.status is Status.OK
        if reply.frame_id != frame_id or reply.payload_bytes != (part.nbytes if is_read else 0):
            raise ProtocolViolation("a reply that answers another frame")
        if reply.status is not Status.OK:
            batch.refuse(self._refusal(reply.status, part, reply.refused))
            return
        if is_read:
            sockets.receive_into(self._sock, [piece.local for piece in part.pieces], batch.deadline)
        batch.done(part)

    def _refusal(self, status: Status, part: Slice, index: int) -> MooncakeError:
        if index >= len(part.pieces):
            raise ProtocolViolation("a refusal of a range that was not sent")
        wire = part.pieces[index].wire
        if status is Status.STALE_EPOCH:
            return StaleEpoch(f"{self._node_id}: block {wire.block} is no longer granted to epoch {wire.epoch}")
        return InvalidRequest(f"{self._node_id} refused block {wire.block}: {status.name.lower()}")


def _connect(address: SegmentAddress, hello: bytes, deadline: float) -> _Stream:
    """Raises PathFailed, StaleEpoch (another incarnation runs there) or DeadlineExceeded."""
    try:
        sock = socket.create_connection(split_address(address.tcp_address), timeout=sockets.time_left(deadline))
    except TimeoutError:
        raise DeadlineExceeded(f"{address.node_id} at {address.tcp_address} did not answer in time") from None
    except (OSError, ValueError) as error:
        raise PathFailed(f"cannot connect to {address.node_id} at {address.tcp_address}: {error}") from None
    try:
        sock.settimeout(None)
        sockets.tune(sock)
        sockets.send_all(sock, [memoryview(hello)], deadline)
        check_welcome(sockets.receive(sock, protocol.WELCOME_BYTES, deadline), address)
    except (OSError, ProtocolViolation) as error:
        sock.close()
        raise PathFailed(f"{address.node_id} at {address.tcp_address}: {error}") from None
    except BaseException:
        sock.close()
        raise
    return _Stream(sock, address.node_id)
