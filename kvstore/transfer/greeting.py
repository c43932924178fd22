"""The handshake on a stream socket: the client's hello, and the segment owner's decision."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct

from kvstore.segment import Segment
from kvstore.transfer import protocol
from kvstore.transfer.protocol import ProtocolViolation, Status, Welcome
from kvstore.transfer.sockets import Wire
from kvstore.transfer.transport import Caller, NotAllowed, PathFailed
from mooncake.errors import StaleEpoch
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)


def greet(wire: Wire, address: SegmentAddress, caller: Caller, deadline: float) -> None:
    """Say hello, prove that we know the cluster's secret if asked to, and check the welcome. Raises like
    ``check_welcome``, DeadlineExceeded and OSError."""
    hello = protocol.pack_hello(address.incarnation, caller.name, caller.incarnation)
    wire.send([hello], deadline)
    welcome = protocol.unpack_welcome(wire.receive(protocol.WELCOME_BYTES, deadline))
    if welcome.status is Status.PROVE:
        wire.send([protocol.proof(caller.secret, welcome.challenge, hello)], deadline)
        welcome = protocol.unpack_welcome(wire.receive(protocol.WELCOME_BYTES, deadline))
    check_welcome(welcome, address)


def check_welcome(welcome: Welcome, address: SegmentAddress) -> None:
    """Raises PathFailed (or its subclass NotAllowed), StaleEpoch (the addressed owner has been replaced) or
    ProtocolViolation."""
    if welcome.status is Status.WRONG_SEGMENT:
        raise StaleEpoch(f"{address.node_id} has restarted: its segment {address.incarnation:016x} is gone")
    if welcome.status is Status.FORBIDDEN:
        raise NotAllowed(f"{address.node_id} refused the connection: another user, or another transfer.secret_file")
    if welcome.status is not Status.OK:
        raise PathFailed(f"{address.node_id} refused the connection: {welcome.status.name.lower()}")
    if (welcome.block_bytes, welcome.num_blocks) != (address.block_bytes, address.num_blocks):
        raise ProtocolViolation(f"{address.node_id} does not serve the segment that its address describes")


class Door:
    """Whom the owner of a segment admits: clients that name this segment and, over TCP, know the cluster's secret if
    there is one; over a unix socket the user id decides."""

    def __init__(self, segment: Segment, node_id: str, secret: bytes) -> None:
        self._segment = segment
        self._node_id = node_id
        self._secret = secret

    def judge(self, wire: Wire, is_local: bool, deadline: float) -> tuple[Status, str]:
        """The welcome for this connection, and the client's ``Caller.writer_id``.

        Raises ProtocolViolation, OSError or DeadlineExceeded.
        """
        greeting = wire.receive(protocol.HELLO_BYTES, deadline)
        hello = protocol.unpack_hello(greeting)
        name = wire.receive(hello.peer_id_bytes, deadline)
        writer_id = Caller(protocol.unpack_peer_id(name), hello.peer_incarnation).writer_id
        if hello.segment_incarnation != self._segment.incarnation:
            return Status.WRONG_SEGMENT, writer_id
        if is_local:
            is_known = _peer_user(wire.sock) in (os.geteuid(), 0)
        else:
            is_known = not self._secret or self._knows_secret(wire, bytes(greeting + name), deadline)
        return Status.OK if is_known else Status.FORBIDDEN, writer_id

    def welcome(self, status: Status, challenge: bytes = bytes(protocol.CHALLENGE_BYTES)) -> bytes:
        return protocol.pack_welcome(status, self._segment.block_bytes, self._segment.num_blocks, challenge)

    def _knows_secret(self, wire: Wire, greeting: bytes, deadline: float) -> bool:
        challenge = secrets.token_bytes(protocol.CHALLENGE_BYTES)
        wire.send([self.welcome(Status.PROVE, challenge)], deadline)
        answer = wire.receive(protocol.PROOF_BYTES, deadline)
        if hmac.compare_digest(answer, protocol.proof(self._secret, challenge, greeting)):
            return True
        log.warning("segment of %s: a peer does not know what our transfer.secret_file holds", self._node_id)
        return False


def _peer_user(sock: socket.socket) -> int:
    """User id of the process at the other end of a unix socket."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
