"""The format of a record in the SSD's log: a header of whole pages, then the block's bytes, padded to whole pages.

    magic | checksum of the rest of the header | kind, lengths | segment, sequence, durable | key, parent, tenant | body

The body of a block's header is its checksums, one per range; that of a *drop* is a list of records to be forgotten.
``segment`` and ``sequence`` tie a record to its place, so that bytes of an earlier run are never mistaken for one.
``durable`` is the last sequence number that was durable when this record was written: everything up to the largest one
found is whole; what comes after may be torn. Pure: bytes in, values out. It knows neither files nor threads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.checksum import Checksums, checksum, checksums_from_wire, checksums_to_wire
from mooncake.types import BlockKey

PAGE = 4096
MAX_HEADER_BYTES = 16 * PAGE  # 8,000 ranges
MAX_DROPS = 200  # in one record, with keys of at most 256 bytes

_MAGIC = b"MCKVLOG1"
_HEAD = struct.Struct("<8sQ HHHH III QQQ")
_DROP = struct.Struct("<HQQ")
_BLOCK, _DROPS = 1, 2


class NotARecord(Exception):
    """These bytes are not a record for this place: the log ends before them."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A stored block, under its name in the pool; ``length`` is its bytes without padding."""

    key: BlockKey
    parent: bytes
    tenant: str
    length: int
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Drop:
    """The record ``sequence`` of ``key`` in ``segment`` is void."""

    key: BlockKey
    segment: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Record:
    """One record as found. Exactly one of ``block`` and ``drops`` is set."""

    segment: int
    sequence: int
    durable: int
    header_bytes: int
    block: BlockHeader | None
    drops: tuple[Drop, ...]

    @property
    def size(self) -> int:
        """Bytes on the disk, up to the next record."""
        return self.header_bytes + (padded(self.block.length) if self.block else 0)


def padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def block_size(block: BlockHeader) -> int:
    """Bytes on the disk of a block's record."""
    return header_size(block) + padded(block.length)


def header_size(block: BlockHeader) -> int:
    names = len(block.key) + len(block.parent) + len(block.tenant.encode())
    return padded(_HEAD.size + names + 8 * len(block.checksums))


def pack_block(block: BlockHeader, segment: int, sequence: int, durable: int) -> bytes:
    """The header's pages; the block's bytes follow it. Raises ValueError when there are too many ranges."""
    names = (bytes(block.key), bytes(block.parent), block.tenant.encode())
    body = checksums_to_wire(block.checksums)
    return _pack(_BLOCK, names, block.length, len(block.checksums), body, (segment, sequence, durable))


def pack_drops(drops: Sequence[Drop], segment: int, sequence: int, durable: int) -> bytes:
    """A whole record. At most MAX_DROPS fit."""
    body = b"".join(_DROP.pack(len(drop.key), drop.segment, drop.sequence) + drop.key for drop in drops)
    return _pack(_DROPS, (b"", b"", b""), 0, len(drops), body, (segment, sequence, durable))


def is_header(page: bytes | bytearray) -> bool:
    """Whether these may be the first bytes of a header, of any version."""
    return page[:4] == _MAGIC[:4]


def parse(data: bytes, segment: int) -> Record:
    """The record whose header begins ``data`` (MAX_HEADER_BYTES of it, or up to the end of the segment).

    Raises NotARecord for anything but a complete header written for this segment.
    """
    if len(data) < PAGE:
        raise NotARecord
    magic, expected, *head = _HEAD.unpack_from(data)
    kind, key_bytes, parent_bytes, tenant_bytes, length, count, body_bytes, place, sequence, durable = head
    used = _HEAD.size + key_bytes + parent_bytes + tenant_bytes + body_bytes
    if magic != _MAGIC or place != segment or used > min(MAX_HEADER_BYTES, len(data)) or padded(used) > len(data):
        raise NotARecord
    if checksum(data[16 : padded(used)]) != expected:
        raise NotARecord
    names, body = data[_HEAD.size : used - body_bytes], data[used - body_bytes : used]
    if kind == _DROPS:
        return Record(segment, sequence, durable, padded(used), None, _parse_drops(body, count))
    block = BlockHeader(
        BlockKey(names[:key_bytes]),
        names[key_bytes : key_bytes + parent_bytes],
        names[key_bytes + parent_bytes :].decode(),
        length,
        checksums_from_wire(body),
    )
    if kind != _BLOCK or len(block.checksums) != count or count < 1 or length % count:
        raise NotARecord
    return Record(segment, sequence, durable, padded(used), block, ())


def _pack(
    kind: int, names: tuple[bytes, bytes, bytes], length: int, count: int, body: bytes, place: tuple[int, int, int]
) -> bytes:
    lengths = (len(names[0]), len(names[1]), len(names[2]), length, count, len(body))
    rest = _HEAD.pack(_MAGIC, 0, kind, *lengths, *place)[16:] + b"".join(names) + body
    size = padded(16 + len(rest))
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes; there is room for {MAX_HEADER_BYTES}")
    rest = rest.ljust(size - 16, b"\0")
    return _MAGIC + checksum(rest).to_bytes(8, "little") + rest


def _parse_drops(body: bytes, count: int) -> tuple[Drop, ...]:
    drops: list[Drop] = []
    at = 0
    for _ in range(count):
        key_bytes, segment, sequence = _DROP.unpack_from(body, at)
        at += _DROP.size
        drops.append(Drop(BlockKey(body[at : at + key_bytes]), segment, sequence))
        at += key_bytes
    return tuple(drops)
