"""The Store service: translates wire messages to calls of the store, and limits what a message may request."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from kvstore.block_names import checked_key, checked_parent, checked_tenant
from kvstore.checksum import checksums_from_wire, checksums_to_wire
from kvstore.index.types import OWN, BlockName, Grant, LeasedBlock, Offer
from kvstore.slots_ahead import Committed
from kvstore.store import Store
from kvstore.writing import Sealing, Wanted
from mooncake.errors import InvalidRequest
from mooncake.rpc import store_pb2 as pb
from mooncake.rpc import store_pb2_grpc
from mooncake.rpc.convert import segment_to_wire
from mooncake.rpc.server import check_arrived
from mooncake.types import BlockKey, SegmentAddress

MAX_BLOCKS = 65536  # in one message
MAX_WRITER_ID_BYTES = 300  # a peer's id and its incarnation take up to 272 (``transport.Caller``)
MAX_WAIT_S = 30.0  # for room
MAX_PIN_S = 30 * 86400.0

Context = grpc.aio.ServicerContext[object, object]


class StoreServicer(store_pb2_grpc.StoreServicer):
    """Runs on the store's event loop."""

    def __init__(self, store: Store, address: SegmentAddress, board_path: str, fast_rpc_port: int) -> None:
        """``board_path``: where clients on this host get the board; "": nowhere. ``fast_rpc_port``: where this is also
        served by fast RPC."""
        self._store = store
        self._segment = segment_to_wire(address)
        self._board_path = board_path
        self._fast_rpc_port = fast_rpc_port

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:  # noqa: N802
        _check_count(len(request.blocks))
        if not 1 <= len(request.writer_id) <= MAX_WRITER_ID_BYTES or request.writer_id.startswith(OWN):
            raise InvalidRequest("a reservation needs the id of its writer", "writer_id")
        wanted = Wanted(
            [BlockName(checked_key(block.key), checked_parent(block.parent)) for block in request.blocks],
            request.writer_id,
            request.length,
            request.ranges,
            checked_tenant(request.tenant),
            request.into_dram,
            request.number,
        )
        offers = await self._store.reserve(wanted, min(request.wait_ms / 1e3, MAX_WAIT_S))
        return pb.ReserveResponse(segment=self._segment, slots=map(_offer_to_wire, offers))

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealResponse:  # noqa: N802
        _check_count(len(request.blocks))
        check_arrived(request.blocks)
        sealings = [Sealing(_grant(block.slot), checksums_from_wire(block.checksums)) for block in request.blocks]
        sealed = await self._store.seal(sealings, request.durable)
        return pb.SealResponse(
            sealed=[block.is_sealed for block in sealed], durable=[block.is_durable for block in sealed]
        )

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:  # noqa: N802
        response = pb.CommitResponse()
        if request.writer_id.startswith(OWN):
            raise InvalidRequest("this writer is the store's own", "writer_id")
        if request.HasField("slot"):
            name = BlockName(checked_key(request.block.key), checked_parent(request.block.parent))
            checksums = checksums_from_wire(request.checksums)
            grant = _grant(request.slot)
            outcome = self._store.ahead.commit(
                request.writer_id, grant, name, request.length, checksums, checked_tenant(request.tenant)
            )
            response.outcome = _OUTCOMES[outcome]
        self._store.settle()
        self._store.give_ahead(request.writer_id)
        return response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        _check_count(len(request.slots) + len(request.numbers))
        check_arrived(request.slots or request.numbers)
        self._store.abort(map(_grant, request.slots))
        self._store.abort_numbers(request.writer_id, request.numbers)
        return pb.AbortResponse()

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:  # noqa: N802
        keys = _keys(request.keys)
        if request.ended_lease_ids:
            _check_count(len(request.ended_lease_ids))
            self._store.release(request.ended_lease_ids)
        lease = await self._store.acquire(keys, request.recompute_ms, request.scattered)
        blocks = list(map(_leased_to_wire, lease.blocks))
        if request.scattered:
            by_key = {block.key: wire for block, wire in zip(lease.blocks, blocks, strict=True)}
            blocks = [by_key.get(key, _NO_BLOCK) for key in keys]
        return pb.AcquireResponse(
            segment=self._segment, lease_id=lease.lease_id, lease_s=self._store.lease_s, blocks=blocks
        )

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:  # noqa: N802
        _check_count(len(request.lease_ids))
        self._store.release(request.lease_ids, _keys(request.corrupt_keys))
        return pb.ReleaseResponse()

    async def Exists(self, request: pb.ExistsRequest, context: Context) -> pb.ExistsResponse:  # noqa: N802
        return pb.ExistsResponse(stored=self._store.exists(_keys(request.keys)))

    async def Remove(self, request: pb.RemoveRequest, context: Context) -> pb.RemoveResponse:  # noqa: N802
        return pb.RemoveResponse(removed=await self._store.remove(_keys(request.keys)))

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:  # noqa: N802
        keys = _keys(request.keys)
        if request.level == pb.PinRequest.NONE:
            return pb.PinResponse(pinned=self._store.unpin(keys))
        if not 0 < request.ttl_s <= MAX_PIN_S:
            raise InvalidRequest(f"a pin lasts more than 0 and at most {MAX_PIN_S:g} seconds", "ttl_s")
        is_hard = request.level == pb.PinRequest.HARD
        return pb.PinResponse(pinned=await self._store.pin(keys, is_hard, request.ttl_s))

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:  # noqa: N802
        self._store.settle()
        counts, ssd = self._store.counts, self._store.ssd
        return pb.StatsResponse(
            blocks_total=counts.free + counts.reserved + counts.sealed + counts.quarantined,
            blocks_free=counts.free,
            blocks_sealed=counts.sealed,
            blocks_reserved=counts.reserved,
            blocks_quarantined=counts.quarantined,
            leases=counts.leases,
            counters=self._store.counters,
            ssd_blocks=len(ssd.index) if ssd else 0,
            ssd_bytes=ssd.index.live_bytes if ssd else 0,
            ssd_capacity_bytes=ssd.index.capacity_bytes if ssd else 0,
            pins=self._store.num_pinned,
            tenant_bytes=self._store.tenant_bytes,
            fast_rpc_port=self._fast_rpc_port,
            board_path=self._board_path,
            segment=self._segment,
        )


def _check_count(count: int) -> None:
    if count > MAX_BLOCKS:
        raise InvalidRequest(f"at most {MAX_BLOCKS} blocks in one message, got {count}")


def _keys(keys: Sequence[bytes]) -> list[BlockKey]:
    _check_count(len(keys))
    return [checked_key(key) for key in keys]


def _grant(slot: pb.Slot) -> Grant:
    return Grant(slot.index, slot.epoch)


_OUTCOMES = {
    Committed.OVER: pb.CommitResponse.OVER,
    Committed.STORED: pb.CommitResponse.STORED,
    Committed.BUSY: pb.CommitResponse.BUSY,
}
_NO_BLOCK = pb.LeasedBlock()


def _leased_to_wire(block: LeasedBlock) -> pb.LeasedBlock:
    return pb.LeasedBlock(slot=block.slot, length=block.length, checksums=checksums_to_wire(block.checksums))


def _offer_to_wire(offer: Offer) -> pb.OptionalSlot:
    message = pb.OptionalSlot(stored=offer.is_stored)
    if offer.grant is not None:
        message.slot.index, message.slot.epoch = offer.grant.slot, offer.grant.epoch
    return message
