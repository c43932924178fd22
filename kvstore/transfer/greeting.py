"""How a client says hello over a stream socket and takes the owner's welcome, whichever way the socket came about."""

from __future__ import annotations

from kvstore.transfer import protocol
from kvstore.transfer.protocol import ProtocolViolation, Status, Welcome
from kvstore.transfer.sockets import Wire
from kvstore.transfer.transport import Caller, PathFailed
from mooncake.errors import StaleEpoch
from mooncake.types import SegmentAddress


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
    """Raises PathFailed, StaleEpoch (the address is of an owner that has been replaced) or ProtocolViolation."""
    if welcome.status is Status.WRONG_SEGMENT:
        raise StaleEpoch(f"{address.node_id} has restarted: its segment {address.incarnation:016x} is gone")
    if welcome.status is Status.FORBIDDEN:
        raise PathFailed(f"{address.node_id} refused the connection: another user, or another transfer.secret_file")
    if welcome.status is not Status.OK:
        raise PathFailed(f"{address.node_id} refused the connection: {welcome.status.name.lower()}")
    if (welcome.block_bytes, welcome.num_blocks) != (address.block_bytes, address.num_blocks):
        raise ProtocolViolation(f"{address.node_id} does not serve the segment that its address describes")
