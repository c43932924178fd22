"""The bytes of the data plane: a greeting, then frames of ranges, over a stream socket.

Ranges are (block, offset, length) of the one segment that the greeting names; no memory address ever travels. Every
number from the wire is bounded here before anyone allocates, loops or indexes by it. No sockets, no state.

    client  Hello, peer id                    server  Welcome (over a unix socket with two memfds: segment, grants)
    client  Frame, Range x count, payload     server  Reply              (WRITE; the payload is all ranges, in order)
    client  Frame, Range x count              server  Reply, payload     (READ; no payload unless the status is OK)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from mooncake.errors import MooncakeError

MAGIC = b"mooncake"
VERSION = 1
MAX_PEER_ID_BYTES = 255
MAX_RANGES = 512  # in a frame; a scatter of the kernel takes 1024 buffers at most
MAX_FRAME_BYTES = 4 << 20  # of payload
SLICE_BYTES = 1 << 20  # what we put into a frame: it stays in a core's L2 from socket to segment

_HELLO = struct.Struct("<8sHHQQ")  # magic, version, length of the peer id, segment incarnation, peer incarnation
_WELCOME = struct.Struct("<8sHHII")  # magic, version, status, block bytes, number of blocks
_FRAME = struct.Struct("<HHIQ")  # operation, number of ranges, payload bytes, frame id
_RANGE = struct.Struct("<IIIQ")  # block, offset, length, epoch
_REPLY = struct.Struct("<HHIQ")  # status, index of the refused range, payload bytes, frame id
HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size
FRAME_BYTES = _FRAME.size
RANGE_BYTES = _RANGE.size
REPLY_BYTES = _REPLY.size


class WireRange(NamedTuple):
    """A range as it travels. ``epoch`` fences writes; reads leave it 0."""

    block: int
    offset: int
    length: int
    epoch: int


class ProtocolViolation(MooncakeError):
    """The other side does not speak this protocol; the connection is closed."""


class Operation(IntEnum):
    WRITE = 1
    READ = 2


class Status(IntEnum):
    OK = 0
    STALE_EPOCH = 1  # the block is not granted to this epoch (any more)
    BAD_RANGE = 2  # outside the segment
    WRONG_SEGMENT = 3  # the greeting named another incarnation
    BUSY = 4  # too many connections
    FORBIDDEN = 5  # another user's process asked for our memory


@dataclass(frozen=True, slots=True)
class Hello:
    segment_incarnation: int
    peer_incarnation: int
    peer_id_bytes: int  # what follows


@dataclass(frozen=True, slots=True)
class Welcome:
    status: Status
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Frame:
    operation: Operation
    num_ranges: int
    payload_bytes: int
    frame_id: int


@dataclass(frozen=True, slots=True)
class Reply:
    status: Status
    refused: int  # index of the range that was refused
    payload_bytes: int
    frame_id: int


def pack_hello(segment_incarnation: int, peer_id: str, peer_incarnation: int) -> bytes:
    name = peer_id.encode()
    return _HELLO.pack(MAGIC, VERSION, len(name), segment_incarnation, peer_incarnation) + name


def unpack_hello(data: bytes | bytearray) -> Hello:
    """Raises ProtocolViolation."""
    magic, version, length, segment_incarnation, peer_incarnation = _HELLO.unpack(data)
    _check_greeting(magic, version)
    if not 1 <= length <= MAX_PEER_ID_BYTES:
        raise ProtocolViolation(f"a peer id of {length} bytes")
    return Hello(segment_incarnation, peer_incarnation, length)


def unpack_peer_id(data: bytes | bytearray) -> str:
    """Raises ProtocolViolation."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ProtocolViolation("a peer id that is not UTF-8") from None


def pack_welcome(status: Status, block_bytes: int, num_blocks: int) -> bytes:
    return _WELCOME.pack(MAGIC, VERSION, status, block_bytes, num_blocks)


def unpack_welcome(data: bytes | bytearray) -> Welcome:
    """Raises ProtocolViolation."""
    magic, version, status, block_bytes, num_blocks = _WELCOME.unpack(data)
    _check_greeting(magic, version)
    return Welcome(_status(status), block_bytes, num_blocks)


def pack_frame(operation: Operation, ranges: Sequence[WireRange], payload_bytes: int, frame_id: int) -> bytes:
    head = _FRAME.pack(operation, len(ranges), payload_bytes, frame_id)
    return head + b"".join(_RANGE.pack(*item) for item in ranges)


def unpack_frame(data: bytes | bytearray) -> Frame:
    """Raises ProtocolViolation when a count is out of bounds."""
    operation, num_ranges, payload_bytes, frame_id = _FRAME.unpack(data)
    if operation not in (Operation.WRITE, Operation.READ):
        raise ProtocolViolation(f"operation {operation}")
    if not 1 <= num_ranges <= MAX_RANGES:
        raise ProtocolViolation(f"{num_ranges} ranges in a frame")
    if not 1 <= payload_bytes <= MAX_FRAME_BYTES:
        raise ProtocolViolation(f"a payload of {payload_bytes} bytes")
    return Frame(Operation(operation), num_ranges, payload_bytes, frame_id)


def unpack_ranges(data: bytes | bytearray, frame: Frame) -> list[WireRange]:
    """Raises ProtocolViolation unless the lengths add up to the frame's payload and none is empty."""
    ranges = [WireRange(*row) for row in _RANGE.iter_unpack(data)]
    if min(item.length for item in ranges) < 1 or sum(item.length for item in ranges) != frame.payload_bytes:
        raise ProtocolViolation("the ranges do not add up to the payload")
    return ranges


def first_outside(ranges: Sequence[WireRange], block_bytes: int, num_blocks: int) -> int | None:
    """Index of the first range that is not inside one block of the segment, or None."""
    for index, item in enumerate(ranges):
        if item.block >= num_blocks or item.offset + item.length > block_bytes:
            return index
    return None


def pack_reply(status: Status, refused: int, payload_bytes: int, frame_id: int) -> bytes:
    return _REPLY.pack(status, refused, payload_bytes, frame_id)


def unpack_reply(data: bytes | bytearray) -> Reply:
    """Raises ProtocolViolation."""
    status, refused, payload_bytes, frame_id = _REPLY.unpack(data)
    return Reply(_status(status), refused, payload_bytes, frame_id)


def _check_greeting(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolViolation("not a mooncake data-plane connection")
    if version != VERSION:
        raise ProtocolViolation(f"the peer speaks version {version} of the data plane, this process {VERSION}")


def _status(value: int) -> Status:
    try:
        return Status(value)
    except ValueError:
        raise ProtocolViolation(f"status {value}") from None
