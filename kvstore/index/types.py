"""The values that a store's index returns: names, grants, leases, and blocks held in place.

Frozen; they know only keys, slots and checksums.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.checksum import Checksums
from mooncake.types import BlockKey


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block's key and that of the block before it (empty for a first block)."""

    key: BlockKey
    parent: bytes = b""


NO_NAME = BlockName(BlockKey(b""))
OWN = "\0"  # prefix of the store's own writers: they always report when they are done


@dataclass(frozen=True, slots=True)
class Grant:
    """One writer's right to one slot. The epoch is never reused, so it also identifies the slot's content."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Offer:
    """The answer for one block of a reservation. Without a grant it is stored, being written, or there is no room."""

    grant: Grant | None = None
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a writer promised to write."""

    grant: Grant
    writer: str
    length: int  # bytes
    ranges: int  # equal parts of it, each with a checksum


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    key: BlockKey
    slot: int
    length: int
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read some slots until ``expires_s``. ``lease_id`` is 0 when there is nothing to read."""

    lease_id: int
    expires_s: float
    blocks: tuple[LeasedBlock, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A block held in place because it is being saved elsewhere or is about to be read. ``let_go`` ends that.
    ``must_go``: the policy has chosen it, and its slot will be reused once it is saved."""

    must_go: bool
    grant: Grant
    name: BlockName
    tenant: str
    length: int
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Counts:
    free: int
    reserved: int
    sealed: int
    quarantined: int
    leases: int
