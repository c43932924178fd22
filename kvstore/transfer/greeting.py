"""How a client takes the owner's welcome, whichever way it came."""

from __future__ import annotations

from kvstore.transfer import protocol
from kvstore.transfer.batch import PathFailed
from kvstore.transfer.protocol import ProtocolViolation, Status
from mooncake.errors import StaleEpoch
from mooncake.types import SegmentAddress


def check_welcome(data: bytes | bytearray, address: SegmentAddress) -> None:
    """Raises PathFailed, StaleEpoch (the address is of an owner that has been replaced) or ProtocolViolation."""
    if len(data) != protocol.WELCOME_BYTES:
        raise PathFailed(f"{address.node_id} closed the connection")
    welcome = protocol.unpack_welcome(data)
    if welcome.status is Status.WRONG_SEGMENT:
        raise StaleEpoch(f"{address.node_id} has restarted: its segment {address.incarnation:016x} is gone")
    if welcome.status is not Status.OK:
        raise PathFailed(f"{address.node_id} refused the connection: {welcome.status.name.lower()}")
    if (welcome.block_bytes, welcome.num_blocks) != (address.block_bytes, address.num_blocks):
        raise ProtocolViolation(f"{address.node_id} does not serve the segment that its address describes")
