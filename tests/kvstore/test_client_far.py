"""Whole blocks by key over TCP: one message, no lease, and never a wrong byte."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.board.board import Board
from kvstore.checksum import range_checksums
from kvstore.client.far import MAX_CONNECTIONS, FarStore
from kvstore.index.types import BlockName, Grant
from kvstore.node import StoreNode, hear_again_s
from kvstore.segment import Segment
from kvstore.slots_ahead import WIRE
from kvstore.store import Sealed, Store
from kvstore.transfer import protocol
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.keyed import Commit, KeyedWire, Put
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.protocol import Operation, ProtocolViolation, Status
from kvstore.transfer.sockets import PeerClosed
from kvstore.writing import Sealing, Wanted
from mooncake.config import load_config
from mooncake.errors import DeadlineExceeded, InvalidRequest, MooncakeError
from mooncake.rpc import store_pb2 as pb
from mooncake.types import BlockKey

SLOT_BYTES = 1 << 20
TCP = ("tcp",)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def keep(start_actor: Callable[..., Any]) -> Callable[..., Any]:
    def start(num_slots: int = 64, *settings: str) -> Any:
        size = f"store.dram_gb={num_slots * SLOT_BYTES / 1e9 + 1e-6}"
        return start_actor("store", block_bytes=SLOT_BYTES, settings=[size, "store.eviction=lru", *settings])

    return start


def data(seed: int, size: int = SLOT_BYTES) -> bytes:
    return np.random.default_rng(seed).bytes(size)


async def connect(actor: Any) -> kvstore.Client:
    return await kvstore.Client.connect(actor.greeting["control"], transports=TCP, tenant="somebody")


def far_of(pool: kvstore.Client) -> FarStore:
    [store] = pool._stores.values()
    assert store.shortcuts._far is not None and store.shortcuts._near.board is None
    return store.shortcuts._far


async def test_a_block_is_fetched_while_the_store_itself_is_busy(keep):
    actor = keep()
    async with await connect(actor) as pool:
        whole, parts, odd = data(1), data(2, 94 * 500), data(3, 777)
        assert await pool.put("whole", whole) and await pool.put("parts", parts, ranges=94)
        assert await pool.put("odd", odd, parent="parts") and await pool.put("short", b"too short to be listed")
        actor.ask("hang")
        assert await pool.get("whole") == whole and await pool.exists(["nothing", "whole"]) == [False, True]
        into = [bytearray(len(block)) for block in (odd, whole, parts)]
        assert await pool.get_batch_into(["odd", "whole", "parts"], into) == [777, SLOT_BYTES, 94 * 500]
        assert into == [odd, whole, parts]
        actor.tell("wake")
        [stats] = (await pool.stats()).values()
        assert stats.leases == 0
        assert await pool.get_batch(["nothing", "odd", "short"]) == [None, odd, b"too short to be listed"]
        keys = ["nothing", "short", *["odd"] * 600, "parts"]  # more than one message holds
        assert await pool.exists(keys) == [False, *[True] * 602]
        with pytest.raises(InvalidRequest, match="there is room for 776"):
            await pool.get_into("odd", bytearray(776))
        assert await pool.get("odd") == odd
        async with asyncio.timeout(10):  # what is fetched counts as used, as soon as it has been sent
            while (await pool.stats())[actor.greeting["control"]].counters["hits"] < 7:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_block_that_was_put_is_there_for_everybody(keep, eventually):
    actor = keep()
    address = actor.greeting["control"]
    async with await connect(actor) as far, await kvstore.Client.connect(address) as near:
        await asyncio.gather(*(far.put(f"{number}", data(number), ranges=4) for number in range(12)))
        for number in range(12):
            assert await far.put(f"more {number}", data(number))
            assert await near.exists([f"more {number}"]) == [True]
            assert await near.get(f"more {number}") == data(number)
        assert await near.get_range("7", 0, 100) == data(7)[:100]
        assert await far.put("7", data(8)) and await near.get("7") == data(7)  # it was there
        [writing] = near._stores.values()
        [slot] = await writing.ranges.reserve([(near._keys.wire("busy"), b"")], SLOT_BYTES, 1)
        assert slot is not None and not await far.put("busy", data(0))
        assert await far.exists(["busy", "7"]) == [False, True]
        await writing.ranges.abort([slot])
        assert await far.put("busy", data(0))
        assert actor.ask("counts")["reserved"] >= 1  # slots ahead,
        for slot in (None, pb.Slot(index=0, epoch=1)):  # which nobody else can ask for or fill
            with pytest.raises(InvalidRequest, match="the store's own"):
                request = pb.CommitRequest(writer_id=WIRE, slot=slot)
                await writing._calls.call(writing._calls.fast.Commit(request, timeout=5))
        for number in range(200):  # through all of the store, several times
            assert await far.put(f"last {number}", data(number % 3))
        assert await far.get("last 199") == data(199 % 3) and await far.get("0") is None
        [stats] = (await far.stats()).values()
        assert stats.tenant_bytes["somebody"] == stats.sealed * SLOT_BYTES
    eventually(lambda: actor.ask("counts")["reserved"] == 0)
    assert actor.ask("counts")["quarantined"] == 0


async def test_neither_kind_of_writer_takes_all_slots_ahead(keep):
    actor = keep(32)  # two of which are given ahead
    async with await connect(actor) as far, await kvstore.Client.connect(actor.greeting["control"]) as near:
        [sending], [writing] = far._stores.values(), near._stores.values()
        async with asyncio.timeout(10):  # the first block may find none yet
            while not await sending.shortcuts.put((b"far", b""), memoryview(data(1)), 1, 5.0):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await writing.shortcuts.put((b"near", b""), memoryview(data(2)), 1, 5.0) is True


async def test_bytes_that_rot_in_the_store_are_dropped(keep):
    actor = keep()
    async with await connect(actor) as pool:
        assert await pool.put("block", data(1))
        for slot in range(64):
            actor.ask("flip", slot, 17)
        assert await pool.get("block") is None and await pool.exists(["block"]) == [False]
        [stats] = (await pool.stats()).values()
        assert stats.counters["checksum_mismatches"] == 1
        assert await pool.put("block", data(2)) and await pool.get("block") == data(2)


async def test_blocks_that_leave_while_they_are_read_never_come_back_wrong(keep):
    """Three readers of blocks that a writer evicts: with few slots, most blocks are leaving or gone."""
    actor = keep(18)
    blocks = [data(seed) for seed in range(40)]
    async with await connect(actor) as writing, await connect(actor) as reading:
        ended = False

        async def write() -> None:
            nonlocal ended
            for turn in range(200):
                await writing.put(f"{turn}", blocks[turn % 40])
            ended = True

        async def read(seed: int) -> int:
            rng, hits = np.random.default_rng(seed), 0
            while not ended:
                key = int(rng.integers(0, 200))
                got = await reading.get(f"{key}")
                assert got is None or got == blocks[key % 40]
                hits += got is not None
                await asyncio.sleep(0)
            return hits

        await asyncio.gather(write(), *map(read, range(3)))
        assert await reading.get("199") == blocks[199 % 40]
    actor.ask("counts")  # and they add up


async def test_a_store_that_hangs_holds_up_nobody_else(keep):
    actor = keep()
    async with await connect(actor) as pool:
        await pool.put("block", data(1))
        assert await pool.get("block") == data(1)
        actor.freeze()
        turns, into = 0, bytearray(SLOT_BYTES)
        getting = asyncio.create_task(pool.get_into("block", into, timeout_s=1.0))
        while not getting.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(DeadlineExceeded):
            getting.result()
        assert turns > 5  # the event loop went on
        with pytest.raises(DeadlineExceeded):
            await pool.put("other", data(2), timeout_s=0.3)
        cancelled = asyncio.create_task(pool.get_into("block", into))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        into[:] = bytes(SLOT_BYTES)
        actor.thaw()
        assert await pool.get("block") == data(1)
        assert into == bytes(SLOT_BYTES)  # nobody writes into it any more
        assert await pool.put("other", data(2)) and await pool.get("other") == data(2)


LEAVING = """
import asyncio, sys, kvstore

async def main():
    pool = await kvstore.Client.connect(sys.argv[1], transports=("tcp",))
    assert await pool.get("block") is None
    print("ready", flush=True)
    sys.stdin.readline()
    calls = [asyncio.create_task(pool.get("block", timeout_s=60)) for _ in range(6)]  # more than it has connections
    await asyncio.sleep(0.2)

asyncio.run(main())
"""


def test_a_program_ends_though_it_has_calls_at_a_store_that_hangs(keep):
    actor = keep()
    command = [sys.executable, "-c", LEAVING, actor.greeting["control"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as program:
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        actor.freeze()
        program.stdin.write(b"\n")
        program.stdin.flush()
        try:
            assert program.wait(20) == 0
        finally:
            program.kill()


async def test_whoever_comes_behind_others_to_a_store_that_hangs_keeps_its_own_time(keep):
    actor = keep()
    async with await connect(actor) as pool:
        actor.freeze()
        calls = [asyncio.create_task(pool.exists(["block"], timeout_s=10.0)) for _ in range(3 * MAX_CONNECTIONS)]
        await asyncio.sleep(0.1)
        for call in calls[: MAX_CONNECTIONS // 2]:  # its thread goes on connecting
            call.cancel()
        await asyncio.sleep(0.1)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await pool.exists(["block"], timeout_s=0.2)
        assert time.monotonic() - started < 2.0
        actor.thaw()
        assert await asyncio.gather(*calls[MAX_CONNECTIONS // 2 :]) == [[False]] * len(calls[MAX_CONNECTIONS // 2 :])


async def test_a_store_that_hangs_takes_no_thread_from_anybody_else(keep):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    hanging, well = keep(), keep()
    async with await connect(hanging) as waiting, await connect(well) as pool:
        hanging.freeze()
        calls = [asyncio.create_task(waiting.exists(["block"], timeout_s=5.0)) for _ in range(MAX_CONNECTIONS)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(3.0):
            await asyncio.to_thread(time.monotonic)
            assert await pool.put("block", data(1)) and await pool.get("block") == data(1)
        assert not any(call.done() for call in calls)
        hanging.thaw()
        assert await asyncio.gather(*calls) == [[False]] * MAX_CONNECTIONS


async def test_a_store_that_restarts_is_a_miss_on_both_ways(keep):
    first = keep()
    async with await connect(first) as pool:
        assert await pool.put("block", data(1))
        first.kill()
        with pytest.raises(MooncakeError):
            await pool.get("block", timeout_s=1.0)


async def test_a_call_that_is_cut_short_costs_no_put_its_slots(keep, eventually, monkeypatch):
    """The store takes back what a client has reserved when its last connection ends. It may be another call's."""
    actor = keep()
    async with await connect(actor) as pool:
        [store] = pool._stores.values()
        ahead, write = actor.ask("counts")["reserved"], store.ranges.write_ranges

        async def write_after_that(*given: Any, **options: Any) -> object:
            monkeypatch.undo()
            assert actor.ask("counts")["reserved"] == ahead + 2
            with pytest.raises(DeadlineExceeded):
                async with far_of(pool)._exchange(soon()):
                    raise DeadlineExceeded("cut short")
            eventually(lambda: actor.ask("counts")["reserved"] == ahead)
            return await write(*given, **options)

        monkeypatch.setattr(store.ranges, "write_ranges", write_after_that)
        assert await pool.put_batch([("one", data(1)), ("two", data(2))]) == [True, True]
        assert await pool.get_batch(["one", "two"]) == [data(1), data(2)]


class Owner:
    """A data plane without a store behind it."""

    def __init__(self, is_native: bool) -> None:
        self.is_native = is_native
        self.segment = Segment.create("owner", SLOT_BYTES, 4)
        self.told: list[object] = []
        self.board = Board.create(self.segment)
        self.server = SegmentServer(
            self.segment, "owner", TCP, is_native=is_native, listing=self.board, on_put=self.told.append
        )
        self.server.start()
        self.engine = TransferEngine("client", TCP)

    def connect(self) -> KeyedWire:
        return self.engine.connect_keyed(self.server.address, soon())


@pytest.fixture(params=[True, False], ids=["C++", "Python"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    owner = Owner(request.param)
    yield owner
    owner.engine.close()
    owner.server.stop()
    owner.board.close()
    owner.segment.close()


def soon() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize("owner", [False], indirect=True)
def test_an_owner_that_knows_no_keys_says_so(owner):
    wire = owner.connect()
    fetch = wire.fetch([b"key", b"other"])
    fetch.ask(soon())
    with pytest.raises(ProtocolViolation, match="cannot be fetched by key"):
        fetch.found()
    ask = wire.ask([b"key", b"other"])
    ask.send(soon())
    with pytest.raises(ProtocolViolation, match="what is stored"):
        ask.known()
    put = wire.put(b"key", b"", "", memoryview(data(1)), 4)
    put.send(soon())
    assert put.status() is Status.NOT_OFFERED
    wire.close()


@pytest.mark.parametrize("owner", [True], indirect=True)
def test_half_a_block_lands_nowhere_and_its_slot_is_used_again(owner, eventually):
    owner.server.grant([2], 7)
    owner.server.give_ahead(2, 7)
    wire = owner.connect()
    block = data(1)
    wire.wire.send([protocol.pack_put(b"half", b"", "", len(block), 1, 0), block[: SLOT_BYTES // 2]], soon())
    eventually(lambda: any(each.landing == {2} for each in list(owner.server._connections)))
    wire.close()
    eventually(lambda: not owner.server._connections)
    assert owner.server.take_ahead() == (2, 7) and owner.told == []
    owner.server.give_ahead(2, 7)
    wire = owner.connect()
    wrong = [protocol.pack_put(b"wrong", b"", "", len(block), 1, 0), block, bytes(8)]
    wire.wire.send(wrong, soon())
    reply = protocol.unpack_reply(wire.wire.receive(protocol.REPLY_BYTES, soon()))
    assert reply.status is Status.CORRUPT and owner.told == []
    owner.server.revoke([2])  # the store wants it back, and nobody has told the pool
    put = wire.put(b"late", b"", "", memoryview(block), 1)
    put.send(soon())
    assert put.status() is Status.NO_SLOT
    assert owner.told == [] and owner.board.take_arrived() == []
    assert owner.segment.block(2) == block  # what the wrong one left: nothing has landed since
    wire.close()


@pytest.mark.parametrize("owner", [True], indirect=True)
def test_a_block_without_a_name_ends_its_connection_and_its_slot_is_used_again(owner, eventually):
    owner.server.grant([2], 7)
    owner.server.give_ahead(2, 7)
    wire, block, name = owner.connect(), data(1), b"\xff\xff\0\0\0\0"  # whose key is longer than it is
    payload = name + block + range_checksums(block, 1).tobytes()
    head = struct.pack(protocol.FRAME_1, Operation.PUT, 1, len(payload), 0, 1, len(name), len(block), 0)
    wire.wire.send([head, payload], soon())
    with pytest.raises(PeerClosed):
        wire.wire.receive(1, soon())
    wire.close()
    eventually(lambda: owner.server.stats().violations == 1)
    assert owner.told == [] and owner.server.take_ahead() == (2, 7)


@pytest.mark.parametrize("owner", [True], indirect=True)
def test_a_block_that_finds_no_slot_tells_the_store(owner):
    wire, block = owner.connect(), data(1)
    put = wire.put(b"early", b"", "", memoryview(block), 4)
    put.send(soon())
    assert put.status() is Status.NO_SLOT
    assert os.eventfd_read(owner.board.wake_fd) == 1 and owner.board.take_arrived() == []
    owner.board.expect(1, 5)
    owner.server.grant([1], 5)
    assert owner.server.give_ahead(1, 5)
    put = wire.put(b"late", b"", "", memoryview(block), 4)
    put.send(soon())
    assert put.status() is Status.OK and owner.told == []
    [came] = owner.board.take_arrived()
    assert (came.key, came.slot, came.epoch) == (b"late", 1, 5) and owner.segment.block(1) == block
    wire.close()


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[tuple[StoreNode, KeyedWire]]:
    """A store with an SSD that only takes in puts when asked to, and a connection to it."""
    size = f"store.dram_gb={64 * SLOT_BYTES / 1e9 + 1e-6}"
    ssd = [f"store.ssd_path={tmp_path}", "store.ssd_gb=0.5"]
    node = StoreNode(load_config(None, [size, "store.eviction=lru", *ssd]), SLOT_BYTES, join_cluster=False)
    await node.start()
    for task in asyncio.all_tasks():
        if task.get_name() in ("sweep", "hear readers"):
            task.cancel()
    assert node._puts is not None
    asyncio.get_running_loop().remove_reader(node._puts._wake_fd)
    node.store.give_ahead(WIRE, 4)
    engine = TransferEngine("client", TCP)
    wire = await asyncio.to_thread(engine.connect_keyed, node.segment_address, soon())
    yield node, wire
    wire.close()
    engine.close()
    await node.stop()


def send(message: Put | Commit) -> Status:
    """While the store's event loop stands still."""
    sending = threading.Thread(target=message.send, args=(soon(),))
    sending.start()
    sending.join()
    return message.status()


async def reserve(store: Store, key: BlockKey, block: bytes, into_dram: bool = False) -> Grant:
    [offer] = await store.reserve(Wanted([BlockName(key, b"")], "writer", len(block), 1, into_dram=into_dram))
    assert offer.grant is not None
    return offer.grant


async def test_nobody_names_a_block_in_a_slot_that_is_being_written_under_another_name(alone):
    node, wire = alone
    store, block = node.store, data(1)
    mine, theirs, honest = BlockKey(b"mine"), BlockKey(b"theirs"), BlockKey(b"honest")
    grant = await reserve(store, mine, block)
    node.segment.block(grant.slot)[:] = block
    sums = range_checksums(block, 1)
    naming = wire.commit(theirs, b"", "", grant.slot, grant.epoch, SLOT_BYTES, sums)
    await asyncio.to_thread(naming.send, soon())  # the store decides, and refuses
    assert naming.status() is Status.NO_SLOT and store.exists([theirs, mine]) == [False, False]
    nameless = wire.commit(b"k" * 300, b"", "", grant.slot, grant.epoch, SLOT_BYTES, sums)
    await asyncio.to_thread(nameless.send, soon())  # which ends nobody's reservation
    assert nameless.status() is Status.NO_SLOT and store.counts.reserved == 5
    assert send(wire.put(honest, b"", "", memoryview(block), 1)) is Status.OK
    assert await store.seal([Sealing(grant, sums)]) == [Sealed(True)]
    assert store.exists([mine, honest, theirs]) == [True, True, False]
    store.check()


async def test_one_block_that_is_listed_wrongly_costs_the_others_nothing(alone, caplog):
    node, wire = alone
    store, block = node.store, data(1)
    one, two = BlockKey(b"one"), BlockKey(b"two")
    for key in (one, two):
        assert send(wire.put(key, b"", "", memoryview(block), 1)) is Status.OK
    [grant] = store._index.reserve_ahead(1, "writer", SLOT_BYTES, 0.0)  # a bug: without a look at what has come
    assert store._index.adopt(grant, BlockName(one, b""), SLOT_BYTES, range_checksums(block, 1), 0.0)
    assert store.exists([one, two]) == [True, True] and "listed in slot" in caplog.text
    assert store.counters["refused_listings"] == 1 and (store.counts.sealed, store.counts.reserved) == (2, 2)
    store.check()
    assert await store.remove([one, two]) == 2
    fetch = wire.fetch([one, two])
    await asyncio.to_thread(fetch.ask, soon())
    assert fetch.found() == [(0, 0), (0, 0)]


async def test_a_block_that_is_put_while_it_is_being_made_anew_is_there_once(alone):
    """The SSD evicts it meanwhile, so the writer need not ask."""
    node, wire = alone
    store, block, key = node.store, data(1), BlockKey(b"key")
    sums = range_checksums(block, 1)
    grant = await reserve(store, key, block)
    node.segment.block(grant.slot)[:] = block
    assert await store.seal([Sealing(grant, sums)], durable=True) == [Sealed(True, True)]
    store._index.remove([key], 0.0)  # from DRAM
    grant = await reserve(store, key, block, into_dram=True)
    node.segment.block(grant.slot)[:] = block
    assert store.ssd is not None and store.ssd.drop([key]) == 1
    checking, checker = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(checker)
    checker.submit(checking.wait)
    sealing = asyncio.create_task(store.seal([Sealing(grant, sums)]))
    await asyncio.sleep(0)
    assert send(wire.put(key, b"", "", memoryview(block), 1)) is Status.OK
    checking.set()
    assert await sealing == [Sealed(True)]
    assert store.exists([key]) == [True] and store.counts.sealed == 1
    assert "refused_listings" not in store.counters
    store.check()


async def test_nearly_all_is_heard_of_that_is_read_in_a_store_that_is_asked_nothing_else():
    """Three times as many reads as readers can note between two sweeps."""
    num_keys, size = 128, 512
    config = load_config(None, [f"store.dram_gb={4 * num_keys * size / 1e9}", "store.eviction=lru"])
    node = StoreNode(config, size, join_cluster=False)
    await node.start()
    keys = [BlockKey(b"%d" % number) for number in range(num_keys)]
    for key in keys:
        grant = await reserve(node.store, key, block := data(1, size))
        node.segment.block(grant.slot)[:] = block
        await node.store.seal([Sealing(grant, range_checksums(block, 1))])
    counted: list[int] = []

    def read() -> None:
        engine = TransferEngine("client", TCP)
        wire, into = engine.connect_keyed(node.segment_address, soon()), memoryview(bytearray(size))
        for _ in range(100):
            fetch = wire.fetch(keys)
            fetch.ask(soon())
            fetch.receive([(into, ranges) for _, ranges in fetch.found()])(soon())
            counted.append(node.store.counters.get("hits", 0))
            time.sleep(0.01)
        wire.close()
        engine.close()

    await asyncio.to_thread(read)
    assert counted[-1] - counted[40] > 0.7 * 59 * num_keys
    await node.stop()


@pytest.mark.parametrize(
    ("pause_s", "num_heard", "took_s", "again_s"),
    [
        pytest.param(0.1, 0, 0.0, 0.25, id="nobody reads"),
        pytest.param(0.25, 100, 0.0, 0.25, id="few read"),
        pytest.param(0.25, 1024, 0.0, 0.125, id="all room was used, and perhaps not enough"),
        pytest.param(0.125, 640, 0.0, 0.1, id="half of it would be used in a while"),
        pytest.param(0.05, 256, 0.0, 0.1, id="it is getting less"),
        pytest.param(0.02, 100_000, 0.001, 0.02, id="no more often than an event may wait"),
        pytest.param(0.02, 100_000, 0.03, 0.3, id="many readers are not all that a store lives for"),
    ],
)
def test_the_more_is_read_the_sooner_somebody_looks_again(pause_s, num_heard, took_s, again_s):
    assert hear_again_s(pause_s, num_heard, took_s) == pytest.approx(again_s)


async def test_slots_ahead_are_refilled_at_once_after_a_block_found_none():
    size = f"store.dram_gb={64 * SLOT_BYTES / 1e9 + 1e-6}"
    node = StoreNode(load_config(None, [size, "store.eviction=lru"]), SLOT_BYTES, join_cluster=False)
    await node.start()
    [sweeping] = [task for task in asyncio.all_tasks() if task.get_name() == "sweep"]
    sweeping.cancel()  # which would refill them too, in time
    server, ahead = node._segment_server, node.store.ahead
    engine = TransferEngine("client", TCP)
    wire = await asyncio.to_thread(engine.connect_keyed, server.address, soon())
    for number in range(4):
        node.store.abort(Grant(*slot) for slot in iter(server.take_ahead, None))
        assert ahead.num_held(WIRE) == 0
        put = wire.put(b"%d" % number, b"", "", memoryview(data(1)), 1)
        await asyncio.to_thread(put.send, soon())
        assert put.status() in (Status.OK, Status.NO_SLOT)  # as this machine is quick or slow
        async with asyncio.timeout(10):
            while ahead.num_held(WIRE) < ahead.wire_slots:  # noqa: ASYNC110
                await asyncio.sleep(0)
    wire.close()
    engine.close()
    await node.stop()
