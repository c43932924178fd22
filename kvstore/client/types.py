"""The values that a store's client returns, and their wire forms.

They know neither connections nor the memory that blocks are read into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.checksum import Checksums, checksums_from_wire
from mooncake.errors import InvalidRequest
from mooncake.rpc import store_pb2 as pb
from mooncake.rpc.convert import segment_from_wire
from mooncake.types import SegmentAddress

MAX_BATCH = 2048  # blocks in one message to a store: with a thousand checksums each they still fit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot to write one block into. ``epoch`` goes with every write and fences late ones."""

    segment: SegmentAddress
    index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A readable block: its slot, its length in bytes, and a checksum for each equal range of it."""

    slot: int
    length: int
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read ``blocks`` until ``expires_s`` (this process's monotonic clock, conservatively). The store
    knows it by ``lease_ids``: one for each batch of blocks, none when there is nothing to read."""

    segment: SegmentAddress
    lease_ids: tuple[int, ...]
    expires_s: float
    blocks: tuple[StoredBlock, ...]


def in_batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Parts of at most ``MAX_BATCH``."""
    return (items[at : at + MAX_BATCH] for at in range(0, len(items), MAX_BATCH))


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's accounts: ``free + reserved + sealed + quarantined == total``, always."""

    total: int
    free: int
    reserved: int
    sealed: int
    quarantined: int
    leases: int
    counters: Mapping[str, int]
    ssd_blocks: int = 0
    ssd_bytes: int = 0
    ssd_capacity_bytes: int = 0
    pins: int = 0
    tenant_bytes: Mapping[str, int] = field(default_factory=dict)  # in DRAM


def room_in(into: memoryview, length: int) -> memoryview:
    """The part of a buffer that a block is read into. Raises InvalidRequest when the block is longer."""
    if length > into.nbytes:
        raise InvalidRequest(f"the block has {length} bytes, there is room for {into.nbytes}", "into")
    return into[:length]


def renumbered(room: Callable[[int, int], memoryview], numbers: Sequence[int]) -> Callable[[int, int], memoryview]:
    """``room(index, length)`` for whoever knows the blocks ``numbers`` as 0, 1, …"""
    return lambda index, length: room(numbers[index], length)


def slot_to_wire(slot: Reservation) -> pb.Slot:
    return pb.Slot(index=slot.index, epoch=slot.epoch)


def reservations_from_wire(response: pb.ReserveResponse) -> list[Reservation | None]:
    segment = segment_from_wire(response.segment)
    return [
        Reservation(segment, slot.slot.index, slot.slot.epoch) if slot.HasField("slot") else None
        for slot in response.slots
    ]


def lease_from_wire(response: pb.AcquireResponse, asked_s: float) -> Lease:
    """``asked_s`` is when it was requested: the store's clock starts later, so ours ends earlier."""
    blocks = tuple(
        StoredBlock(block.slot, block.length, checksums_from_wire(block.checksums)) for block in response.blocks
    )
    ids = (response.lease_id,) if response.lease_id else ()
    return Lease(segment_from_wire(response.segment), ids, asked_s + response.lease_s, blocks)


def joined(leases: Sequence[Lease]) -> Lease:
    """One lease of all their blocks, which are of one segment."""
    if len(leases) == 1:
        return leases[0]
    return Lease(
        leases[0].segment,
        tuple(lease_id for lease in leases for lease_id in lease.lease_ids),
        min(lease.expires_s for lease in leases),
        tuple(block for lease in leases for block in lease.blocks),
    )


def stats_from_wire(response: pb.StatsResponse) -> StoreStats:
    return StoreStats(
        total=response.blocks_total,
        free=response.blocks_free,
        reserved=response.blocks_reserved,
        sealed=response.blocks_sealed,
        quarantined=response.blocks_quarantined,
        leases=response.leases,
        counters=dict(response.counters),
        ssd_blocks=response.ssd_blocks,
        ssd_bytes=response.ssd_bytes,
        ssd_capacity_bytes=response.ssd_capacity_bytes,
        pins=response.pins,
        tenant_bytes=dict(response.tenant_bytes),
    )
