"""A store node in its own process, used through its client, under every kind of process failure."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from store_alone import LoneStoreClient, connect_store

import kvstore
from kvstore.checksum import range_checksums
from kvstore.fast_rpc import FastRpc
from kvstore.transfer.requests import ReadRange, WriteRange
from mooncake.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVLoadFailed,
    LeaseExpired,
    NodeUnavailable,
    OutOfBlocks,
    StaleEpoch,
)
from mooncake.rpc import common_pb2, common_pb2_grpc, store_pb2
from mooncake.rpc.server import MAX_MESSAGE_BYTES

BLOCK = 1 << 20
Eventually = Callable[..., None]
BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def keep(start_actor: Callable[..., Any]) -> Callable[..., Any]:
    """``keep("store.lease_s=1")``: a store of eight blocks."""

    def start(*settings: str, num_blocks: int = 8) -> Any:
        size = f"store.dram_gb={num_blocks * BLOCK / 1e9 + 1e-6}"
        return start_actor("store", block_bytes=BLOCK, settings=[size, *settings])

    return start


async def join(store: Any, transport: str = "shm", **options: Any) -> LoneStoreClient:
    return await connect_store(store.greeting["control"], transports=(transport,), **options)


def data(seed: int, size: int = BLOCK) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def name(i: int) -> bytes:
    return f"block {i}".encode()


@BOTH
@pytest.mark.parametrize("size", [0, 257, 70_000])  # the last would not fit its field in a frame
async def test_a_key_that_is_too_short_or_too_long_is_refused_whatever_it_is_for(keep, transport, size):
    store, wrong, room = keep(), b"k" * size, memoryview(bytearray(BLOCK))
    async with await join(store, transport) as client:
        assert await client.put(name(1), data(1))
        for work in (
            client.put(wrong, data(1)),
            client.shortcuts.put((wrong, b""), room, 1, 5.0),
            client.shortcuts.put((name(2), wrong or b"k" * 257), room, 1, 5.0),
            client.get(wrong),
            client.get_one(wrong, room),
            client.get_all([name(1), wrong], lambda _, length: room[:length]),
            client.exists([name(1), wrong]),
            client.ranges.acquire([wrong]),
            client.remove([wrong]),
        ):
            with pytest.raises(InvalidRequest, match="a block key has"):
                await work
        assert await client.get_one(name(1), room) == BLOCK and room == data(1)


@BOTH
async def test_a_tenant_has_a_name_of_128_bytes_at_most(keep, transport):
    store = keep()
    with pytest.raises(InvalidRequest, match="a tenant's name has at most 128 bytes"):
        await kvstore.Client.connect(store.greeting["control"], transports=(transport,), tenant="é" * 65)
    async with await join(store, transport, tenant="é" * 64) as client:
        assert await client.put(name(1), data(1))


@BOTH
async def test_what_one_process_puts_another_gets(keep, transport):
    store = keep()
    async with await join(store, transport) as writer, await join(store, transport, name="reader") as reader:
        for i, size in enumerate((BLOCK, BLOCK - 1, 1, 4096)):
            assert await reader.get(name(i)) is None
            assert await writer.put(name(i), data(i, size), parent=name(i - 1) if i else b"")
            assert await writer.put(name(i), data(i, size))  # once more is no error
            assert await reader.get(name(i)) == data(i, size)
        into = np.zeros(BLOCK, dtype=np.uint8)
        assert await reader.get_into(name(3), into) == 4096
        assert into[:4096].tobytes() == data(3, 4096) and not into[4096:].any()
        with pytest.raises(InvalidRequest, match="there is room for 10"):
            await reader.get_into(name(0), bytearray(10))
        assert await reader.exists([name(3), name(9)]) == [True, False]
        assert await reader.remove([name(3), name(9)]) == 1
        assert await reader.get(name(3)) is None
        assert await reader.get_into(name(3), into) is None
    counts = store.ask("counts")
    assert (counts["free"], counts["sealed"], counts["leases"]) == (5, 3, 0)


@BOTH
async def test_layers_are_written_and_read_as_ranges(keep, transport):
    store = keep()
    layers, size = 8, BLOCK // 8
    blocks = np.frombuffer(data(1, 2 * BLOCK), np.uint8).reshape(2, layers, size)
    async with await join(store, transport) as client:
        slots = await client.ranges.reserve([(name(0), b""), (name(1), name(0))], BLOCK, layers)
        assert [slot is not None for slot in slots] == [True, True]
        assert await client.ranges.reserve([(name(0), b"")], BLOCK, layers) == [None]
        for layer in range(layers):
            ranges = [WriteRange(s.index, layer * size, blocks[i, layer], s.epoch) for i, s in enumerate(slots)]
            report = await client.ranges.write_ranges(slots[0].segment, ranges)
            assert report.transport == transport
        assert (await client.ranges.acquire([name(0)])).blocks == ()
        sums = [range_checksums(block.data, layers) for block in blocks]
        assert await client.ranges.seal(list(zip(slots, sums, strict=True))) == [True, True]
        assert await client.ranges.seal([(slots[0], sums[0])]) == [False]

        lease = await client.ranges.acquire([name(0), name(1), name(2)])
        assert [block.length for block in lease.blocks] == [BLOCK, BLOCK]
        into = np.empty((2, size), dtype=np.uint8)
        await client.ranges.read_ranges(
            lease, [ReadRange(b.slot, 3 * size, into[i]) for i, b in enumerate(lease.blocks)]
        )
        assert np.array_equal(into, blocks[:, 3])
        assert [int(block.checksums[3]) for block in lease.blocks] == [
            int(range_checksums(part.data, 1)[0]) for part in into
        ]
        await client.ranges.release([lease])
        names = [(name(i), b"") for i in (1, 2, 3)]
        assert await client.put_blocks(names, [blocks[0]] * 3, [sums[0]] * 3) == 2  # one was there
    assert store.ask("counts")["sealed"] == 4


async def test_wrong_checksums_and_wrong_epochs_are_not_stored(keep):
    store = keep()
    async with await join(store, "tcp") as client:
        [slot] = await client.ranges.reserve([(name(0), b"")], BLOCK, 2)
        await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, data(0), slot.epoch)])
        sums = range_checksums(data(0), 2)
        assert await client.ranges.seal([(slot, sums + np.uint64(1))]) == [False]
        assert await client.ranges.seal([(slot, sums)]) == [False]  # the reservation is over
        with pytest.raises(StaleEpoch):
            await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, data(0), slot.epoch)])
        [again] = await client.ranges.reserve([(name(0), b"")], BLOCK, 2)
        assert (again.index, again.epoch) != (slot.index, slot.epoch)
        await client.ranges.abort([again])
        with pytest.raises(StaleEpoch):
            await client.ranges.write_ranges(slot.segment, [WriteRange(again.index, 0, b"x", again.epoch)])
        assert (await client.stats()).counters["checksum_mismatches"] == 1
        for length, ranges in ((BLOCK + 1, 1), (0, 1), (10, 3), (10, 0)):
            with pytest.raises(InvalidRequest):
                await client.ranges.reserve([(name(0), b"")], length, ranges)
        with pytest.raises(InvalidRequest):
            await client.exists([b""])
    assert store.ask("counts")["free"] == 8


@BOTH
async def test_a_flipped_bit_is_found_and_the_block_is_gone_for_everyone(keep, transport):
    store = keep()
    async with await join(store, transport) as client:
        await client.put(name(0), data(0))
        [block] = (lease := await client.ranges.acquire([name(0)])).blocks
        store.ask("flip", block.slot, 12345)
        assert await client.get(name(0)) is None
        assert await client.exists([name(0)]) == [False]
        await client.ranges.release([lease])
        assert await client.put(name(0), data(0))
        assert await client.get(name(0)) == data(0)
        assert (await client.stats()).counters["checksum_mismatches"] == 1
    assert store.ask("counts")["sealed"] == 1


async def test_a_lease_that_ran_out_refuses_the_read(keep, eventually: Eventually):
    store = keep("store.lease_s=0.3", num_blocks=2)
    async with await join(store) as client:
        await client.put(name(0), data(0))
        lease = await client.ranges.acquire([name(0)])
        into = bytearray(BLOCK)
        await client.ranges.read_ranges(lease, [ReadRange(lease.blocks[0].slot, 0, into)])
        await asyncio.sleep(lease.expires_s - time.monotonic())
        with pytest.raises(LeaseExpired):
            await client.ranges.read_ranges(lease, [ReadRange(lease.blocks[0].slot, 0, into)])
        eventually(lambda: store.ask("counts")["leases"] == 0)
        for i in (1, 2):  # it protects no more
            assert await client.put(name(i), data(i))
        assert await client.exists([name(0)]) == [False]
        await client.ranges.release([lease])
    assert store.ask("counts")["sealed"] == 2


async def test_a_slow_read_ends_when_its_lease_does(keep):
    store = keep("store.lease_s=0.3")
    async with await join(store) as fast, await join(store, "tcp", max_mb_per_s=1.0) as slow:
        await fast.put(name(0), data(0))
        started = time.monotonic()
        with pytest.raises(LeaseExpired):
            await slow.get(name(0))
        assert time.monotonic() - started < 1.0


async def test_a_full_store_refuses_and_then_evicts(keep):
    store = keep(num_blocks=3)
    async with await join(store) as client:
        for i in range(3):
            await client.put(name(i), data(i), parent=name(i - 1) if i else b"")
        lease = await client.ranges.acquire([name(i) for i in range(3)])
        with pytest.raises(OutOfBlocks):
            await client.put(name(9), data(9))
        await client.ranges.release([lease])
        assert await client.put(name(9), data(9))
        assert await client.exists([name(i) for i in (0, 1, 2, 9)]) == [True, True, False, True]
    assert store.ask("counts") == {"free": 0, "reserved": 0, "sealed": 3, "quarantined": 0, "leases": 0}


@BOTH
async def test_a_writer_killed_in_the_middle_gives_its_slots_back(keep, start_actor, eventually: Eventually, transport):
    store = keep()
    async with await join(store) as observer:
        stub_client = await join(store)
        writer = start_actor(
            "writer",
            address=store.greeting["segment"],
            transports=[transport],
            mb_per_s=5.0,
            blocks=[0],
        )
        stub_client.ranges._writer_id = writer.greeting  # reserve in the name of the process that will write
        slots = await stub_client.ranges.reserve([(name(i), b"") for i in range(3)], BLOCK, 1)
        assert slots[0].index == 0
        assert writer.ask(slots[0].epoch) == "writing"
        assert store.ask("counts")["reserved"] == 3
        writer.kill()
        eventually(lambda: store.ask("counts")["free"] == 8)
        assert await observer.put(name(0), data(0))
        assert await observer.get(name(0)) == data(0)
        await stub_client.close()
    assert store.ask("counts")["free"] == 7


@BOTH
async def test_a_writer_that_is_too_slow_is_fenced(keep, eventually: Eventually, transport):
    """Its slots are freed at once over TCP; over shared memory only once it reports that it has stopped."""
    store = keep("store.reserve_timeout_s=0.4")
    async with await join(store, transport) as client, await join(store) as other:
        [slot] = await client.ranges.reserve([(name(0), b"")], BLOCK, 1)
        await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, b"first bytes", slot.epoch)])
        eventually(lambda: store.ask("counts")["reserved"] == 0)
        quarantined = 1 if transport == "shm" else 0
        assert store.ask("counts")["quarantined"] == quarantined
        with pytest.raises(StaleEpoch):
            await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, data(0), slot.epoch)])
        assert await client.ranges.seal([(slot, range_checksums(data(0), 1))]) == [False]
        assert await other.put(name(0), data(0))  # another writer may store the same block meanwhile
        await client.ranges.abort([slot])
        assert store.ask("counts")["quarantined"] == 0
    assert store.ask("counts")["free"] == 7


@pytest.mark.parametrize("late_s", [0.9, 1.0, 1.1, 2.0])
async def test_a_seal_that_comes_too_late_is_refused_and_leaves_free_slots_and_no_error(keep, late_s):
    """Also if the time runs out while the store verifies; the bytes are right."""
    store = keep("store.reserve_timeout_s=1", num_blocks=32)
    async with await join(store) as client:
        slots = await client.ranges.reserve([(name(i), b"") for i in range(32)], BLOCK, 2)
        reserved_s = time.monotonic()
        for slot in slots:
            await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, data(1), slot.epoch)])
        await asyncio.sleep(max(0.0, reserved_s + late_s - time.monotonic()))
        sealed = await client.ranges.seal([(slot, range_checksums(data(1), 2)) for slot in slots])
        stats = await client.stats()
        assert "checksum_mismatches" not in stats.counters
        assert (stats.free, stats.sealed) == (32 - sum(sealed), sum(sealed))


@BOTH
async def test_a_killed_store_is_noticed_at_once(keep, transport):
    store = keep()
    async with await join(store, transport) as client:
        await client.put(name(0), data(0))
        lease = await client.ranges.acquire([name(0)])
        [slot] = await client.ranges.reserve([(name(1), b"")], BLOCK, 1)
        store.kill()
        started = time.monotonic()
        with pytest.raises(NodeUnavailable):
            await client.ranges.read_ranges(lease, [ReadRange(lease.blocks[0].slot, 0, bytearray(BLOCK))])
        with pytest.raises(NodeUnavailable):
            await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, data(1), slot.epoch)])
        with pytest.raises(NodeUnavailable):
            await client.get(name(0))
        assert time.monotonic() - started < 2.0


async def test_a_frozen_store_costs_the_deadline_and_no_more(keep):
    store = keep()
    async with await join(store, "tcp") as client:
        await client.put(name(0), data(0))
        lease = await client.ranges.acquire([name(0)])
        store.freeze()
        started = time.monotonic()
        with pytest.raises((DeadlineExceeded, KVLoadFailed)):
            await client.ranges.read_ranges(
                lease, [ReadRange(lease.blocks[0].slot, 0, bytearray(BLOCK))], timeout_s=0.4
            )
        with pytest.raises(DeadlineExceeded):
            await client.get(name(0), timeout_s=0.4)
        with pytest.raises(DeadlineExceeded):
            await client.put(name(1), data(1), timeout_s=0.4)
        assert time.monotonic() - started < 2.5
        store.thaw()
        assert await client.get(name(0)) == data(0)


async def test_a_writer_that_could_not_say_so_says_later_that_it_has_stopped(keep, eventually: Eventually):
    """Otherwise its slots would stay quarantined for as long as it lives."""
    store = keep("store.reserve_timeout_s=0.4")
    async with await join(store, "shm") as client:
        [slot] = await client.ranges.reserve([(name(0), b"")], BLOCK, 1)
        await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, b"some", slot.epoch)])
        store.freeze()
        with pytest.raises(DeadlineExceeded):
            await client.ranges.abort([slot], timeout_s=0.2)
        store.thaw()
        assert await client.put(name(1), data(1))
        eventually(lambda: store.ask("counts")["free"] == 7)
        assert store.ask("counts")["quarantined"] == 0


async def test_a_client_that_was_not_heard_says_it_again_though_it_is_idle(keep):
    store = keep()
    async with await join(store, "shm") as client:
        [slot] = await client.ranges.reserve([(name(0), b"")], BLOCK, 1)
        assert client._calls.fast_rpc is not None
        client._calls.fast_rpc.abort()  # as if the network had cut it
        with pytest.raises(NodeUnavailable):
            await client.ranges.abort([slot])
        assert store.ask("counts")["reserved"] == 1
        await all_free(store, 8)


WAYS = pytest.mark.parametrize("way", ["fast RPC", "gRPC"])


async def join_by(store: Any, way: str) -> LoneStoreClient:
    """A client that has the segment mapped."""
    client = await join(store, "shm")
    assert await client.put(name(0), data(0)) and await client.remove([name(0)]) == 1
    if way == "gRPC":
        assert client._calls.fast_rpc is not None
        client._calls.fast_rpc.close()
        client._calls.fast_rpc = None
    return client


async def all_free(store: Any, num_blocks: int) -> None:
    async with asyncio.timeout(10):
        while store.ask("counts")["free"] < num_blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@WAYS
async def test_slots_for_somebody_who_waits_for_them_no_more_are_given_back(keep, way):
    """The caller was cancelled, or timed out, before the answer. Otherwise they would be held as long as the client
    lives."""
    store = keep("store.reserve_timeout_s=0.4")
    async with await join_by(store, way) as client:
        store.ask("hang")
        cancelled = asyncio.create_task(client.ranges.reserve([(name(1), b""), (name(2), b"")], BLOCK, 1))
        with pytest.raises(DeadlineExceeded):
            await client.put(name(3), data(3), timeout_s=0.3)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        store.tell("wake")
        assert (await client.ranges.acquire([name(0)])).blocks == ()  # what came before it has been answered
        await all_free(store, 8)
        names = [(name(1), b""), (name(3), b"")]
        assert await client.put_blocks(names, [data(1)] * 2, [range_checksums(data(1), 1)] * 2) == 2


class Wire:
    """A relay between a client and a store that can lose the store's answers, and the connection."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: list[asyncio.StreamWriter] = []
        self._carrying: list[asyncio.Task[None]] = []
        self.loses_answers = False

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """The connections that there are; others may come."""
        self.loses_answers = False
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._writers += [writer, back]
        ways = (self._carry(reader, back, is_answer=False), self._carry(there, writer, is_answer=True))
        self._carrying += map(asyncio.ensure_future, ways)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not (is_answer and self.loses_answers):
                    writer.write(data)
        writer.close()


@WAYS
async def test_slots_whose_answer_was_lost_with_its_connection_are_given_back(keep, way):
    """The client does not know their epochs: they are identified by the number of the call."""
    store = keep("store.reserve_timeout_s=0.4")
    host, _, port = store.greeting["control"].rpartition(":")
    wire = Wire(host, int(port))
    if way == "gRPC":
        store.greeting["control"] = f"127.0.0.1:{await wire.start()}"
    async with await join_by(store, way) as client:
        if way == "fast RPC":
            client._calls.fast_rpc.close()
            stats = await client._calls.stub.Stats(store_pb2.StatsRequest())
            wire = Wire(host, stats.fast_rpc_port)
            client._calls.fast_rpc = await FastRpc.open("store", "127.0.0.1", await wire.start())
        wire.loses_answers = True
        reserving = asyncio.create_task(client.ranges.reserve([(name(1), b""), (name(2), b"")], BLOCK, 1))
        async with asyncio.timeout(10):
            while store.ask("counts")["free"] > 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        wire.cut()
        with pytest.raises(NodeUnavailable):
            await reserving
        await all_free(store, 8)
        assert await client.put(name(1), data(1))
    await wire.stop()


async def test_a_lease_for_somebody_who_waits_for_it_no_more_ends_at_once(keep):
    """The caller was cancelled, or timed out. Otherwise its blocks could not be evicted until it expires."""
    store = keep("store.lease_s=600")
    async with await join_by(store, "fast RPC") as client:
        assert await client.put(name(1), data(1))
        store.ask("hang")
        cancelled = asyncio.create_task(client.ranges.acquire([name(1)]))
        with pytest.raises(DeadlineExceeded):
            await client.ranges.acquire([name(1)], timeout_s=0.3)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        store.tell("wake")
        assert (await client.ranges.acquire([name(0)])).blocks == ()  # what came before it has been answered
        async with asyncio.timeout(10):
            while store.ask("counts")["leases"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@WAYS
async def test_a_caller_may_be_cancelled_at_any_moment_of_a_reservation(keep, way):
    store = keep(num_blocks=64)
    async with await join_by(store, way) as client:
        for turn in range(60):
            reserving = asyncio.create_task(client.ranges.reserve([(name(turn), b"")], BLOCK, 1))
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            await asyncio.sleep(turn // 4 * 0.0002)
            reserving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await client.ranges.abort(filter(None, await reserving))
        await all_free(store, 64)


async def test_a_late_message_to_an_earlier_life_touches_nothing(keep):
    """Two stores represent two incarnations at one address: a message for the first has no effect on the second."""
    first, second = keep(), keep()
    async with await join(first) as one, await join(second) as two:
        old = await one.ranges.reserve([(name(i), b"") for i in range(4)], BLOCK, 1)
        new = await two.ranges.reserve([(name(i), b"") for i in range(4)], BLOCK, 1)
        assert [slot.index for slot in old] == [slot.index for slot in new]
        await two.ranges.abort(old)
        assert await two.ranges.seal([(slot, range_checksums(data(0), 1)) for slot in old]) == [False] * 4
        assert second.ask("counts")["reserved"] == 4


async def test_events_tell_what_became_readable_and_what_left(keep):
    store = keep(num_blocks=2)
    async with await join(store) as client:
        for i in range(3):
            await client.put(name(i), data(i))
        async with grpc.aio.insecure_channel(store.greeting["control"]) as channel:
            events = common_pb2_grpc.CacheEventsStub(channel).Subscribe(common_pb2.SubscribeRequest())
            snapshot = await asyncio.wait_for(events.read(), 5)
            assert snapshot.reset and {event.key for event in snapshot.events} == {name(1), name(2)}
            await client.put(name(3), data(3), parent=name(2))
            changes: list[tuple[bool, bytes, bytes]] = []
            while len(changes) < 2:
                message = await asyncio.wait_for(events.read(), 5)
                changes.extend((event.stored, event.key, event.parent) for event in message.events)
            assert changes == [(False, name(1), b""), (True, name(3), name(2))]
            events.cancel()


async def test_many_clients_at_once_leave_clean_accounts(keep):
    store = keep(num_blocks=6)
    clients = [await join(store, "shm" if i % 2 else "tcp", name=f"c{i}") for i in range(4)]

    async def use(client: LoneStoreClient, seed: int) -> int:
        good = 0
        order = np.random.default_rng(seed).integers(0, 12, 40)
        for i in map(int, order):
            try:
                if (found := await client.get(name(i), timeout_s=20)) is None:
                    await client.put(name(i), data(i), timeout_s=20)
                else:
                    assert found == data(i)
                    good += 1
            except OutOfBlocks:
                pass
        return good

    assert sum(await asyncio.gather(*(use(client, i) for i, client in enumerate(clients)))) > 0
    for client in clients:
        await client.close()
    counts = store.ask("counts")
    assert counts["free"] + counts["sealed"] == 6
    assert counts["reserved"] == counts["quarantined"] == counts["leases"] == 0


async def test_nobody_there_is_one_clear_error():
    with pytest.raises(NodeUnavailable):
        await connect_store("127.0.0.1:1", timeout_s=2.0)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["node.conductor=127.0.0.1:1"], id="its conductor is away"),
        pytest.param(["store.join=false", "store.block_bytes=1000000"], id="it needs none, nor a model"),
    ],
)
def test_the_process_starts_alone_and_stops_on_a_signal(settings: list[str]):
    command = [sys.executable, "-m", "kvstore", "--set", "store.dram_gb=0.05"]
    for setting in settings:
        command += ["--set", setting]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True) as process:
        assert process.stderr is not None
        while "serves on" not in (line := process.stderr.readline()):
            assert line, "it ended without serving"
        process.terminate()
        assert process.wait(10) == 0


async def test_more_blocks_than_one_message_holds_the_checksums_of_are_sealed_and_leased(
    start_actor: Callable[..., Any],
):
    num_blocks, num_ranges, size = 2200, 1000, 1000
    store = start_actor("store", block_bytes=size, settings=[f"store.dram_gb={num_blocks * 4096 / 1e9}"])
    block = data(0, size)
    sums = range_checksums(block, num_ranges)
    assert num_blocks * sums.nbytes > MAX_MESSAGE_BYTES
    names = [(name(i), name(i - 1) if i else b"") for i in range(num_blocks)]
    async with await join(store) as client:
        slots = await client.ranges.reserve(names, size, num_ranges)
        ranges = [WriteRange(slot.index, 0, block, slot.epoch) for slot in slots]
        await client.ranges.write_ranges(slots[0].segment, ranges)
        assert all(await client.ranges.seal([(slot, sums) for slot in slots], timeout_s=30))
        lease = await client.ranges.acquire_all([name(i) for i in range(num_blocks)], timeout_s=30)
        assert [found.slot for found in lease.blocks] == [slot.index for slot in slots]
        assert all(np.array_equal(found.checksums, sums) for found in lease.blocks)
        assert store.ask("counts")["leases"] == len(lease.lease_ids) > 1
        await client.ranges.release([lease])
        with pytest.raises(KVLoadFailed, match=f"not all of {num_blocks + 1}"):
            await client.ranges.acquire_all([name(i) for i in range(num_blocks + 1)], timeout_s=30)
        async with asyncio.timeout(5):
            while store.ask("counts")["leases"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_calls_take_more_keys_than_a_message_may(keep, transport):
    """A message may name 65,536 keys."""
    num_keys, size = 70_000, 512
    keys = [name(i) for i in range(num_keys)]
    names = [(key, b"") for key in keys]
    stored = range(0, num_keys, 10_000)
    is_here = [i in stored for i in range(num_keys)]
    store = keep(num_blocks=16)
    async with await join(store, transport) as client:
        for i in stored:
            assert await client.put(name(i), data(i, size))
        assert await client.exists(keys, timeout_s=60) == is_here
        into = {i: bytearray(size) for i in stored}
        lengths = await client.get_all(keys, lambda index, length: memoryview(into[index])[:length], timeout_s=60)
        assert lengths == [size if here else None for here in is_here]
        assert all(into[i] == data(i, size) for i in stored)
        assert await client.pin(keys, timeout_s=60) == await client.unpin(keys, timeout_s=60) == len(stored)

        lease = await client.ranges.acquire(keys, scattered=True, timeout_s=60)
        assert [block.length > 0 for block in lease.blocks] == is_here
        run = await client.ranges.acquire(keys, timeout_s=60)
        assert len(run.blocks) == 1 and store.ask("counts")["leases"] == len(stored) + 1
        await client.ranges.release([lease, run])

        assert await client.pin(keys, hard=True, timeout_s=60) == len(stored)
        slots = await client.ranges.reserve(names, size, 1, timeout_s=60)
        assert [i for i, slot in enumerate(slots) if slot] == list(range(1, 10))  # in the nine slots that are left
        await client.ranges.abort([slot for slot in slots if slot] * 10_000, timeout_s=60)
        assert (store.ask("counts")["reserved"], store.ask("counts")["free"]) == (0, 9)

        block = memoryview(data(1, size))
        put = await client.put_all(names, [block] * num_keys, [range_checksums(block, 1)] * num_keys, timeout_s=60)
        left = [i for i, here in enumerate(await client.exists(keys, timeout_s=60)) if here]
        assert len(left) == 16 and set(stored) < set(left) and all(put[i] for i in left)
        assert await client.unpin(keys, timeout_s=60) == len(stored)
        many = replace(lease, lease_ids=tuple(range(1, num_keys)))
        await client.ranges.release([many], corrupt_keys=keys[1:], timeout_s=60)
        assert await client.remove(keys, timeout_s=60) == 1
    counts = store.ask("counts")
    assert (counts["free"], counts["reserved"], counts["leases"]) == (16, 0, 0)
