"""The bytes of the data plane: a greeting, then frames of ranges, over a stream socket.

Ranges are (block, offset, length) of the one segment that the greeting names; no memory address ever travels. Every
number from the wire is bounded here before anyone allocates, loops or indexes by it. No sockets, no state.

    client  Hello, peer id                    server  Welcome (over a unix socket with two memfds: segment, grants)
    client  proof                             server  Welcome            (only when the first said PROVE)
    client  Frame, Range x count, payload     server  Reply              (WRITE; the payload is all ranges, in order)
    client  Frame, Range x count              server  Reply, payload     (READ; zeros when it was refused)
    client  Frame, Range, request             server  Reply, answer      (ATTACH: how another transport begins)
    client  Frame, Range, lengths, keys       server  Reply, Found x count, checksums, blocks      (FETCH: whole blocks)
    client  Frame, Range, name, block, sums   server  Reply              (PUT: a whole block, named and sealed at once)
    client  Frame, Range, name, sums          server  Reply              (COMMIT: one that is in its slot already)
    client  Frame, Range, lengths, keys       server  Reply, byte x count    (ASK: is it stored? 0 no, 1 yes, 2 perhaps)

A read is answered with as many bytes as it asked for, whatever becomes of it, so that one call of the kernel can take
reply and payload. A frame has at least one range, so that one call can take it, too.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from mooncake.errors import MooncakeError

MAGIC = b"mooncake"
VERSION = 3
MAX_PEER_ID_BYTES = 255
MAX_RANGES = 512  # in a frame; scatter/gather calls take 1024 buffers at most
MAX_FRAME_BYTES = 4 << 20  # of payload
SLICE_BYTES = 1 << 20  # what we put into a frame: it stays in a core's L2 from socket to segment
MAX_CREDIT_BYTES = (1 << 32) - 1
MAX_ATTACH_BYTES = 4096  # in each direction
MAX_KEY_BYTES = 256  # on every way to a store; ``kMaxKeyBytes`` of board.h
MAX_NAME_BYTES = 1024  # of a put block's key, parent and tenant
CHALLENGE_BYTES = 16
PROOF_BYTES = 32

_HELLO = struct.Struct("<8sHHQQ")  # magic, version, length of the peer id, segment incarnation, peer incarnation
_WELCOME = struct.Struct("<8sHHII16s")  # magic, version, status, block bytes, number of blocks, challenge
_FRAME = struct.Struct("<HHIQ")  # operation, number of ranges, payload bytes, frame id
_RANGE = struct.Struct("<IIIQ")  # block, offset, length, epoch
FRAME_1 = "<HHIQIIIQ"  # a frame with its only range
_FRAME_1 = struct.Struct(FRAME_1)
_FOUND = struct.Struct("<IHH")  # length of a block, 0 if missing; number of its ranges; padding
_NAME = struct.Struct("<HHH")  # bytes of key, parent and tenant
_REPLY = struct.Struct("<HHIQI")  # status, index of the refused range, payload bytes, frame id, credit bytes
HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size
FRAME_BYTES = _FRAME.size
RANGE_BYTES = _RANGE.size
REPLY_BYTES = _REPLY.size
FOUND_BYTES = _FOUND.size


class WireRange(NamedTuple):
    """A range on the wire. ``epoch`` fences writes; reads leave it 0."""

    block: int
    offset: int
    length: int
    epoch: int


class ProtocolViolation(MooncakeError):
    """The peer does not follow this protocol; the connection is closed."""


class Operation(IntEnum):
    WRITE = 1
    READ = 2
    ATTACH = 3
    FETCH = 4
    PUT = 5
    COMMIT = 6
    ASK = 7


class Status(IntEnum):
    OK = 0
    STALE_EPOCH = 1  # the block is not granted to this epoch (any more)
    BAD_RANGE = 2  # outside the segment
    WRONG_SEGMENT = 3  # the greeting named another incarnation
    BUSY = 4  # too many connections
    FORBIDDEN = 5  # another user's process, or one without our secret
    PROVE = 6  # answer the challenge first
    NOT_OFFERED = 7  # the requested transport is unknown here
    NO_SLOT = 8  # there is no slot granted in advance for a put block
    CORRUPT = 9  # a put block does not match its checksums
    REFUSED = 10  # by the store, for a put block: another writer is writing it
    HERE = 11  # a committed block is already stored, and its writer keeps the slot


_OPERATIONS = {int(operation): operation for operation in Operation}  # a dict look-up costs a tenth of the enum's call
_MOST_BYTES = {int(Operation.ATTACH): MAX_ATTACH_BYTES, int(Operation.PUT): (1 << 32) - 1}  # of payload
_STATUSES = {int(status): status for status in Status}


@dataclass(frozen=True, slots=True)
class Hello:
    segment_incarnation: int
    peer_incarnation: int
    peer_id_bytes: int  # length of what follows


@dataclass(frozen=True, slots=True)
class Welcome:
    status: Status
    block_bytes: int
    num_blocks: int
    challenge: bytes


class Frame(NamedTuple):
    operation: Operation
    num_ranges: int
    payload_bytes: int
    frame_id: int


class Reply(NamedTuple):
    status: Status
    refused: int  # index of the range that was refused
    payload_bytes: int
    frame_id: int
    credit_bytes: int  # bytes of writes that may be in flight on this connection from now on


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


def pack_welcome(status: Status, block_bytes: int, num_blocks: int, challenge: bytes = bytes(CHALLENGE_BYTES)) -> bytes:
    return _WELCOME.pack(MAGIC, VERSION, status, block_bytes, num_blocks, challenge)


def unpack_welcome(data: bytes | bytearray) -> Welcome:
    """Raises ProtocolViolation."""
    magic, version, status, block_bytes, num_blocks, challenge = _WELCOME.unpack(data)
    _check_greeting(magic, version)
    return Welcome(_status(status), block_bytes, num_blocks, challenge)


def proof(secret: bytes, challenge: bytes, hello: bytes) -> bytes:
    """Proof that the sender of this hello knows the secret. It authenticates the greeting, not the bytes that
    follow."""
    return hmac.digest(secret, b"mooncake data plane" + challenge + hello, hashlib.sha256)


def pack_frame(operation: Operation, ranges: Sequence[WireRange], payload_bytes: int, frame_id: int) -> bytes:
    if len(ranges) == 1:
        return _FRAME_1.pack(operation, 1, payload_bytes, frame_id, *ranges[0])
    packed = b"".join([_RANGE.pack(*item) for item in ranges])
    return pack_frame_of(operation, len(ranges), packed, payload_bytes, frame_id)


def pack_frame_of(operation: Operation, num_ranges: int, ranges: bytes, payload_bytes: int, frame_id: int) -> bytes:
    """For ranges that are packed already."""
    return _FRAME.pack(operation, num_ranges, payload_bytes, frame_id) + ranges


def pack_attach(name: str, request: bytes) -> bytes:
    """``request`` is the first message of the transport with this name."""
    payload = name.encode() + b"\0" + request
    return pack_frame(Operation.ATTACH, [WireRange(0, 0, len(payload), 0)], len(payload), 0) + payload


def unpack_attach(payload: bytes | bytearray) -> tuple[str, bytes]:
    """Name of the transport, and its request. Raises ProtocolViolation."""
    name, separator, request = bytes(payload).partition(b"\0")
    if not separator or not name.isascii():
        raise ProtocolViolation("an attachment without a name")
    return name.decode(), request


def pack_keys(operation: Operation, keys: Sequence[bytes], frame_id: int) -> bytes:
    """FETCH or ASK, for at most MAX_RANGES keys of at most MAX_KEY_BYTES."""
    listed = struct.pack(f"<{len(keys)}H", *map(len, keys)) + b"".join(keys)
    return _FRAME_1.pack(operation, len(keys), len(listed), frame_id, 0, 0, len(listed), 0) + listed


def unpack_found(
    data: bytes | bytearray | memoryview, most_ranges: int, least_range_bytes: int
) -> list[tuple[int, int]]:
    """Length and number of ranges of each block. Raises ProtocolViolation."""
    found = [(length, ranges) for length, ranges, _ in _FOUND.iter_unpack(data)]
    for length, ranges in found:
        is_sound = 1 <= ranges <= most_ranges and length % ranges == 0 and length >= ranges * least_range_bytes
        if length and not is_sound:
            raise ProtocolViolation(f"a block of {length} bytes in {ranges} ranges")
    return found


def pack_put(key: bytes, parent: bytes, tenant: str, length: int, ranges: int, frame_id: int) -> bytes:
    """What precedes the block; its checksums follow it."""
    name = _pack_name(key, parent, tenant)
    payload = len(name) + length + 8 * ranges
    return _FRAME_1.pack(Operation.PUT, 1, payload, frame_id, ranges, len(name), length, 0) + name


def pack_commit(
    key: bytes, parent: bytes, tenant: str, slot: int, epoch: int, length: int, sums: bytes, frame_id: int
) -> bytes:
    """``sums`` are the checksums of the block's ranges, uint64 each."""
    name = _pack_name(key, parent, tenant)
    payload = len(name) + len(sums)
    return _FRAME_1.pack(Operation.COMMIT, 1, payload, frame_id, slot, len(name), length, epoch) + name + sums


def _pack_name(key: bytes, parent: bytes, tenant: str) -> bytes:
    who = tenant.encode()
    return _NAME.pack(len(key), len(parent), len(who)) + key + parent + who


def unpack_name(data: bytes) -> tuple[bytes, bytes, str]:
    """Key, parent and tenant. Raises ProtocolViolation."""
    try:
        key, parent, tenant = _NAME.unpack_from(data)
        if _NAME.size + key + parent + tenant != len(data):
            raise ProtocolViolation("a name that is not as long as it says")
        rest = data[_NAME.size :]
        return rest[:key], rest[key : key + parent], rest[key + parent :].decode()
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("a name that is none") from None


def unpack_frame(data: bytes | bytearray | memoryview) -> Frame:
    """Raises ProtocolViolation when a count is out of bounds."""
    operation, num_ranges, payload_bytes, frame_id = _FRAME.unpack_from(data)
    if operation not in _OPERATIONS:
        raise ProtocolViolation(f"operation {operation}")
    if not 1 <= num_ranges <= MAX_RANGES:
        raise ProtocolViolation(f"{num_ranges} ranges in a frame")
    if not 1 <= payload_bytes <= _MOST_BYTES.get(operation, MAX_FRAME_BYTES):
        raise ProtocolViolation(f"a payload of {payload_bytes} bytes")
    return Frame(_OPERATIONS[operation], num_ranges, payload_bytes, frame_id)


def unpack_range(data: bytes | bytearray | memoryview) -> WireRange:
    return WireRange._make(_RANGE.unpack(data))


def unpack_ranges(data: bytes | bytearray | memoryview, frame: Frame) -> list[WireRange]:
    """Raises ProtocolViolation unless the lengths add up to the frame's payload and none is empty."""
    if frame.num_ranges == 1:
        only = unpack_range(data)
        if only.length != frame.payload_bytes:  # which is not 0
            raise ProtocolViolation("the range is not as long as the payload")
        return [only]
    ranges = [WireRange._make(row) for row in _RANGE.iter_unpack(data)]
    lengths = [item.length for item in ranges]
    if min(lengths) < 1 or sum(lengths) != frame.payload_bytes:
        raise ProtocolViolation("the ranges do not add up to the payload")
    return ranges


def first_outside(ranges: Sequence[WireRange], block_bytes: int, num_blocks: int) -> int | None:
    """Index of the first range that is not inside one block of the segment, or None."""
    for index, item in enumerate(ranges):
        if item.block >= num_blocks or item.offset + item.length > block_bytes:
            return index
    return None


def pack_reply(status: Status, refused: int, payload_bytes: int, frame_id: int, credit_bytes: int) -> bytes:
    return _REPLY.pack(status, refused, payload_bytes, frame_id, credit_bytes)


def unpack_reply(data: bytes | bytearray | memoryview) -> Reply:
    """Raises ProtocolViolation."""
    status, refused, payload_bytes, frame_id, credit_bytes = _REPLY.unpack(data)
    return Reply(_status(status), refused, payload_bytes, frame_id, credit_bytes)


def _check_greeting(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolViolation("not a mooncake data-plane connection")
    if version != VERSION:
        raise ProtocolViolation(f"the peer speaks version {version} of the data plane, this process {VERSION}")


def _status(value: int) -> Status:
    try:
        return _STATUSES[value]
    except KeyError:
        raise ProtocolViolation(f"status {value}") from None
