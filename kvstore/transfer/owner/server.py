"""The owner's side of the data plane: who may write which block, and the sockets through which peers reach a segment.

A write carries an epoch, and lands only if the block is granted to that epoch. Over TCP the owner checks: once
``revoke`` has returned, no TCP write can land any more. Over shared memory the writer itself checks the grants table
before and after each copy, and the owner cannot stop a copy in progress. So the rule for owners is: after ``revoke``, a
block may be reused at once if ``maps_memory(writer)`` is False, and otherwise only after the writer has said that it is
done (seal, commit, abort, close), or once ``on_peer_gone`` has named it, unless it ``is_connected`` again. RDMA is
fenced by its own hardware: see ``Exporter.revoke``. What peers send is handled in ``server_frames``. This module knows
neither what blocks hold nor why they are granted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable

from kvstore.segment import Segment, host_id
from kvstore.transfer import protocol
from kvstore.transfer.greeting import Door
from kvstore.transfer.owner.grants import Grants
from kvstore.transfer.owner.native_owner import MappedBoard, NativeConnection, NativeOwner, load_owner
from kvstore.transfer.owner.server_connection import Counts, Put, ServerConnection, ServerStats
from kvstore.transfer.owner.server_frames import FrameServer
from kvstore.transfer.protocol import ProtocolViolation, Status
from kvstore.transfer.sockets import Wire, bound_to, tune
from kvstore.transfer.transport import Exporter, PathFailed
from mooncake.addresses import join_address
from mooncake.errors import ConfigError, DeadlineExceeded
from mooncake.threads import Expendable
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
HELLO_TIMEOUT_S = 5.0
CREDIT_BYTES = 256 << 20  # writes in flight to this owner, over all connections
_LANDING_POLL_S = 0.001
_LANDING_GRACE_S = 0.05  # how long a revoke waits for half-received frames before it cuts their connections
RETURN_S = 1.0  # for a peer to connect again whose last connection we cut: it is not gone, and writes elsewhere, too
_JOIN_TIMEOUT_S = 5.0
_TELL_EVERY_S = 10.0  # about connections that cannot be accepted


class SegmentServer:
    """Serves one segment. ``start`` and ``stop`` once; every method may be called from any thread.

    ``on_peer_gone`` is called once for each peer (``TransferEngine.writer_id``), on a thread of the server, when its
    last connection has ended. It must not block.
    """

    def __init__(
        self,
        segment: Segment,
        node_id: str,
        transports: tuple[str, ...] = ("shm", "tcp"),
        host: str = "127.0.0.1",
        on_peer_gone: Callable[[str], object] | None = None,
        secret: str = "",
        credit_bytes: int = CREDIT_BYTES,
        is_native: bool = True,
        listing: MappedBoard | None = None,
        on_put: Callable[[Put], object] | None = None,
        advertise: str = "",
    ) -> None:
        """With a ``secret``, peers must know it to use TCP; over the unix socket the user id decides. Without
        ``is_native``, or a compiler, Python serves them. Blocks of the ``listing`` can be fetched by key. With
        ``on_put`` whole blocks can be put into the slots of ``give_ahead``, and committed, and are listed; it is
        called, on threads of the server, with those that may have to be refused, must answer each, and must not
        block. ``advertise`` is the name or address of ``host`` told to peers, if they know another one."""
        self.on_peer_gone = on_peer_gone
        self._credit_bytes = credit_bytes
        self._segment = segment
        self._node_id = node_id
        self._door = Door(segment, node_id, secret.encode())
        self._transports = transports
        self._host = host
        self._advertise = advertise
        self._grants = Grants(segment.num_blocks)
        library = load_owner() if is_native and "tcp" in transports else None
        self._native = (
            NativeOwner(library, segment, self._grants.map, listing, on_put is not None)
            if library is not None
            else None
        )
        self._changed = threading.Condition()  # guards everything below, and the grants
        self._connections: set[ServerConnection] = set()
        self._threads: set[threading.Thread] = set()
        self._ended = Counts()  # of connections that have ended
        self._listeners: list[socket.socket] = []
        self._exporters: list[Exporter] = []  # from ``start`` on
        self._frames = FrameServer(segment, node_id, self._grants, self._changed, self._exporters, on_put)
        self._host_id = host_id()
        self._unix_path = ""
        self._tcp_address = ""
        self._stopping = False

    def start(self) -> None:
        """Listen. Raises ConfigError when the address is unavailable."""
        if "shm" in self._transports:
            self._unix_path = f"@mooncake-{self._segment.incarnation:016x}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind("\0" + self._unix_path[1:])
            self._listen(listener, is_local=True)
        if {"tcp", "rdma"} & set(self._transports):  # RDMA starts over TCP
            listener = _tcp_listener(self._host)
            host, port = listener.getsockname()[:2]
            self._tcp_address = join_address(self._advertise or host, port)
            self._exporters += self._make_exporters()
            self._listen(listener, is_local=False)

    @property
    def address(self) -> SegmentAddress:
        return SegmentAddress(
            node_id=self._node_id,
            incarnation=self._segment.incarnation,
            host_id=self._host_id,
            unix_path=self._unix_path,
            tcp_address=self._tcp_address,
            block_bytes=self._segment.block_bytes,
            num_blocks=self._segment.num_blocks,
            rdma=any(exporter.name == "rdma" for exporter in self._exporters),
        )

    def grant(self, block_ids: Iterable[int], epoch: int) -> None:
        """From now on these blocks accept writes of ``epoch`` (1 or more), and of no other."""
        if epoch < 1:
            raise ValueError("epochs count from 1")
        with self._changed:
            before = [(block, self._grants.table[block]) for block in block_ids]
            for block, _ in before:
                self._grants.table[block] = epoch
        self._close_windows([block for block, held in before if held not in (0, epoch)])

    def revoke(self, block_ids: Iterable[int]) -> None:
        """No TCP or RDMA write into these blocks lands after this returns. For shared memory see the rule at the top.

        A half-received frame gets a moment to finish; then its connection is cut. Blocks no longer than that.
        """
        blocks = frozenset(block_ids)
        self._forbid(blocks)
        self._close_windows(blocks)

    def give_ahead(self, slot: int, epoch: int) -> bool:
        """A slot, granted to this epoch, that a block may be put into. False when there are enough, or puts are
        impossible."""
        return self._native is not None and self._native.give_ahead(slot, epoch)

    def take_ahead(self) -> tuple[int, int] | None:
        """Take one of these back, with its epoch, unless all are in use. It is not revoked yet."""
        return None if self._native is None else self._native.take_ahead()

    def _close_windows(self, blocks: Collection[int]) -> None:
        if blocks:
            for exporter in self._exporters:
                exporter.revoke(blocks)

    def _forbid(self, blocks: frozenset[int]) -> None:
        with self._changed:
            for block in blocks:
                self._grants.table[block] = 0
            if self._native is not None:
                self._native.fence()
            patience = time.monotonic() + _LANDING_GRACE_S
            while landing := [each for each in self._connections if each.landing & blocks]:
                left = patience - time.monotonic()
                if left <= 0:
                    for connection in landing:
                        connection.was_cut = True
                        connection.wire.shut()
                self._changed.wait(_LANDING_POLL_S)

    def maps_memory(self, peer: str) -> bool:
        """Whether this peer has the segment mapped, so that one of its copies could still be in progress."""
        with self._changed:
            return any(each.peer == peer and each.is_local for each in self._connections)

    def is_connected(self, peer: str) -> bool:
        """Ask before you act on ``on_peer_gone``: by then it may be back, and in the middle of a copy."""
        with self._changed:
            return self._is_here(peer)

    def stats(self) -> ServerStats:
        total = Counts()
        with self._changed:
            for counts in (self._ended, *(each.total() for each in self._connections)):
                total.add(counts)
            open_now = len(self._connections)
        total.bytes_in += sum(exporter.bytes_in for exporter in self._exporters)
        return ServerStats(total.bytes_in, total.bytes_out, total.refused, total.violations, open_now)

    def stop(self) -> None:
        """Close every connection and end every thread. Peers see their transfers fail."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
            for listener in self._listeners:
                _shut(listener)
            for connection in self._connections:
                connection.wire.shut()
            threads = list(self._threads)
        for thread in threads:
            thread.join(_JOIN_TIMEOUT_S)
        for listener in self._listeners:
            listener.close()
        for exporter in self._exporters:
            exporter.close()
        self._native = None
        self._grants.close()

    def _make_exporters(self) -> list[Exporter]:
        """What this machine cannot do is logged once, and left out of the address."""
        if "rdma" not in self._transports:
            return []
        try:
            from kvstore.transfer.rdma.owner import RdmaExporter

            return [RdmaExporter(self._segment.buffer, self._segment.block_bytes, self._grants.table)]
        except (PathFailed, ImportError) as error:
            log.warning("segment of %s: rdma is configured but not offered: %s", self._node_id, error)
            return []

    def _listen(self, listener: socket.socket, is_local: bool) -> None:
        listener.listen(128)
        self._listeners.append(listener)
        self._spawn(lambda: self._accept(listener, is_local), "accept")

    def _spawn(self, work: Callable[[], None], name: str, kind: type[threading.Thread] = threading.Thread) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._changed:
                    self._threads.discard(threading.current_thread())

        thread = kind(target=run, name=f"{self._node_id}-segment-{name}", daemon=True)
        with self._changed:  # a thread that finds it there may join it
            thread.start()
            self._threads.add(thread)

    def _accept(self, listener: socket.socket, is_local: bool) -> None:
        told_at = -math.inf
        while True:
            try:
                sock, _ = listener.accept()
                self._admit(sock, is_local)
            except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError: no thread can be started
                if self._stopping:
                    return
                if time.monotonic() - told_at >= _TELL_EVERY_S:
                    log.warning("segment of %s cannot accept a connection: %s", self._node_id, error)
                    told_at = time.monotonic()
                time.sleep(0.1)  # out of file descriptors or threads: let some end

    def _admit(self, sock: socket.socket, is_local: bool) -> None:
        connection = ServerConnection(Wire(sock), is_local)
        with self._changed:
            full = len(self._connections) >= MAX_CONNECTIONS
            if not (full or self._stopping):
                self._connections.add(connection)
                self._share_credit()
        if full or self._stopping:
            with contextlib.suppress(OSError):
                sock.send(self._door.welcome(Status.BUSY))
            sock.close()
            return
        try:
            self._spawn(lambda: self._serve(connection), "peer", Expendable)
        except (RuntimeError, MemoryError):
            self._end(connection)
            raise

    def _serve(self, connection: ServerConnection) -> None:
        """One connection from its greeting to its end."""
        try:
            if not connection.is_local:
                tune(connection.wire.sock)
            self._greet(connection)
            if self._native is not None and not connection.is_local:
                connection.native = NativeConnection(connection.wire.sock)
                connection.head = connection.native.head
            while connection.peer:
                self._frames.serve(connection, self._native)
        except ProtocolViolation as error:
            connection.counts.violations += 1
            log.info("segment of %s: closing a connection: %s", self._node_id, error.message)
        except (OSError, DeadlineExceeded) as error:
            log.debug("segment of %s: connection of %s ended: %s", self._node_id, connection.peer or "?", error)
        finally:
            self._end(connection)

    def _greet(self, connection: ServerConnection) -> None:
        deadline = time.monotonic() + HELLO_TIMEOUT_S
        wire = connection.wire
        status, writer_id = self._door.judge(wire, connection.is_local, deadline)
        if status is not Status.OK:
            connection.counts.refused += status is Status.FORBIDDEN
            wire.send([self._door.welcome(status)], deadline)
            return
        with self._changed:
            connection.peer = writer_id
            self._changed.notify_all()
        files = [self._segment.fd, self._grants.read_only_fd] if connection.is_local else []
        socket.send_fds(wire.sock, [self._door.welcome(Status.OK)], files)

    def _is_here(self, peer: str) -> bool:
        """``is_connected``, called under the lock."""
        return any(each.peer == peer for each in self._connections)

    def _share_credit(self) -> None:
        """Connections have come or gone; called under the lock."""
        credit = max(protocol.SLICE_BYTES, self._credit_bytes // max(1, len(self._connections)))
        self._frames.credit_bytes = min(credit, protocol.MAX_CREDIT_BYTES)
        if self._native is not None:
            self._native.set_credit(self._frames.credit_bytes)

    def _end(self, connection: ServerConnection) -> None:
        with self._changed:
            attachment = connection.attachment
        if attachment is not None:
            attachment.close()
        with self._changed:
            connection.wire.close()
            self._connections.discard(connection)
            self._ended.add(connection.total())
            self._share_credit()
            self._changed.notify_all()
            back_by = time.monotonic() + RETURN_S if connection.was_cut else 0.0
            while not self._is_here(connection.peer) and not self._stopping and back_by > time.monotonic():
                self._changed.wait(back_by - time.monotonic())
            gone = bool(connection.peer) and not self._is_here(connection.peer) and not self._stopping
        if gone and self.on_peer_gone is not None:
            self.on_peer_gone(connection.peer)


def _tcp_listener(host: str) -> socket.socket:
    try:
        return bound_to(host)
    except OSError as error:
        raise ConfigError(f"node.host: cannot listen on {host!r} for transfers: {error.strerror}") from None


def _shut(sock: socket.socket) -> None:
    """Wake whoever waits on this socket; its own thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
