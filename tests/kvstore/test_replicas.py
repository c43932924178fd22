"""Copies between stores: the source may be anything, and answer anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from kvstore.checksum import range_checksums
from kvstore.segment import Segment
from kvstore.transfer.owner.server import SegmentServer
from mooncake.rpc import replica_pb2, replica_pb2_grpc, store_pb2_grpc
from mooncake.rpc import store_pb2 as pb
from mooncake.rpc.convert import segment_to_wire
from mooncake.rpc.server import RpcServer

BLOCK = 64 << 10
SLOTS = 8


class Source(store_pb2_grpc.StoreServicer):
    """A foreign store that leases whatever the test wants."""

    def __init__(self) -> None:
        self.segment = Segment.create("source", BLOCK, 2)
        self.segment.block(0)[:] = b"s" * BLOCK
        self.server = SegmentServer(self.segment, "source", ("tcp",))
        self.server.start()
        self.rpc = RpcServer()
        self.rpc.add(store_pb2_grpc.add_StoreServicer_to_server, self, "mooncake.v1.Store")
        self.blocks: list[pb.LeasedBlock] = []

    def leased(self, length: int = BLOCK, ranges: int = 1) -> pb.LeasedBlock:
        data = bytes(self.segment.block(0))[:length]
        return pb.LeasedBlock(slot=0, length=length, checksums=range_checksums(data, ranges).tobytes())

    async def Acquire(self, request: Any, context: Any) -> pb.AcquireResponse:  # noqa: N802
        segment = segment_to_wire(self.server.address)
        return pb.AcquireResponse(segment=segment, lease_id=1, lease_s=10, blocks=self.blocks)

    async def Release(self, request: Any, context: Any) -> pb.ReleaseResponse:  # noqa: N802
        return pb.ReleaseResponse()


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    source = Source()
    yield source
    await source.rpc.stop()
    source.server.stop()
    source.segment.close()


async def test_no_name_and_no_answer_of_a_source_hurts_the_store_that_copies(
    source: Source, start_actor: Callable[..., Any]
) -> None:
    settings = [f"store.dram_gb={SLOTS * BLOCK / 1e9 + 1e-6}"]
    store = start_actor("store", block_bytes=BLOCK, settings=settings)
    address = f"127.0.0.1:{await source.rpc.start('127.0.0.1', 0)}"
    good, key = source.leased(), b"k" * 32
    async with grpc.aio.insecure_channel(store.greeting["control"]) as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        for keys, blocks, status in (
            ([b"k" * (2 << 20)], [good], grpc.StatusCode.INVALID_ARGUMENT),
            ([key, b"k" * 257], [good, good], grpc.StatusCode.INVALID_ARGUMENT),
            ([key, b""], [good, good], grpc.StatusCode.INVALID_ARGUMENT),
            ([key], [good, good], grpc.StatusCode.UNAVAILABLE),  # more than was asked for
            ([key, b"two"], [good, source.leased(BLOCK // 2)], grpc.StatusCode.UNAVAILABLE),
            ([key, b"two"], [good, source.leased(ranges=2)], grpc.StatusCode.UNAVAILABLE),
            ([key], [pb.LeasedBlock(slot=0, length=BLOCK + 1, checksums=bytes(8))], grpc.StatusCode.INVALID_ARGUMENT),
            ([key], [pb.LeasedBlock(slot=0, length=BLOCK)], grpc.StatusCode.INVALID_ARGUMENT),
        ):
            source.blocks = blocks
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Fetch(replica_pb2.FetchRequest(source=address, keys=keys), timeout=10)
            assert refused.value.code() == status, refused.value.details()
            assert store.ask("counts")["free"] == SLOTS
        for nowhere in ("", "\0", "a store", "a/b:1"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Fetch(replica_pb2.FetchRequest(source=nowhere, keys=[key]), timeout=10)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        source.blocks = [pb.LeasedBlock(slot=0, length=BLOCK, checksums=bytes(8))]  # of other bytes
        fetched = await stub.Fetch(replica_pb2.FetchRequest(source=address, keys=[key]), timeout=10)
        assert (fetched.held, fetched.copied) == (0, 0) and store.ask("counts")["free"] == SLOTS
        source.blocks = [good, good]
        fetched = await stub.Fetch(replica_pb2.FetchRequest(source=address, keys=[key, b"two", b"three"]), timeout=10)
        assert (fetched.held, fetched.copied) == (2, 2) and store.ask("counts")["sealed"] == 2

        for keys in ([], [key, b"k" * 257], [b""]):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GiveUp(replica_pb2.GiveUpRequest(keys=keys), timeout=10)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        for keys, given_up, left in (([key], 0, 2), ([key, b"two"], 2, 0), ([key, b"two"], 0, 0)):
            response = await stub.GiveUp(replica_pb2.GiveUpRequest(keys=keys), timeout=10)
            assert (response.given_up, store.ask("counts")["sealed"]) == (given_up, left)


async def test_nobody_gets_a_slot_that_a_slow_copy_still_writes_into(
    source: Source, start_actor: Callable[..., Any]
) -> None:
    settings = [f"store.dram_gb={SLOTS * BLOCK / 1e9 + 1e-6}", "store.reserve_timeout_s=0.2"]
    store = start_actor("store", block_bytes=BLOCK, settings=[*settings, "transfer.max_mb_per_s=0.02"])
    address = f"127.0.0.1:{await source.rpc.start('127.0.0.1', 0)}"
    source.blocks = [source.leased()]
    async with grpc.aio.insecure_channel(store.greeting["control"]) as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        fetching = asyncio.ensure_future(
            stub.Fetch(replica_pb2.FetchRequest(source=address, keys=[b"k" * 32]), timeout=20)
        )
        async with asyncio.timeout(30):
            while (counts := store.ask("counts"))["free"] == SLOTS or counts["reserved"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not fetching.done() and counts["quarantined"] == 1
        assert (await fetching).copied == 0 and store.ask("counts")["free"] == SLOTS
