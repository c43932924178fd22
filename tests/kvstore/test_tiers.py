"""DRAM over SSD in one store node: nothing is lost while the SSD has room, and a restart finds what was saved."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from store_alone import LoneStoreClient, connect_store

import kvstore
from kvstore.checksum import checksum, range_checksums
from kvstore.eviction import make_policy
from kvstore.index.types import BlockName
from kvstore.node import StoreNode
from kvstore.segment import Segment
from kvstore.ssd.committing import MAX_QUEUE
from kvstore.ssd.index import SsdIndex
from kvstore.ssd.io import PlainIO, SsdIO
from kvstore.ssd.log import SsdLog
from kvstore.ssd.reads import SsdReads
from kvstore.ssd.tier import SsdTier
from kvstore.store import Sealed, Store
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.requests import WriteRange
from kvstore.writing import Sealing, Wanted
from mooncake.config import load_config
from mooncake.errors import ConfigError, OutOfBlocks
from mooncake.events import EventLog
from mooncake.rpc import common_pb2, common_pb2_grpc
from mooncake.types import BlockKey, Tier

BLOCK = 256 << 10
ROOT = Path(__file__).parents[2]


def data(seed: int, size: int = BLOCK) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def name(i: int) -> bytes:
    return f"block {i}".encode()


@asynccontextmanager
async def store(
    path: Path, num_blocks: int = 8, ssd_mb: float = 64, *settings: str, block: int = BLOCK
) -> AsyncIterator[StoreNode]:
    size = f"store.dram_gb={num_blocks * block / 1e9 + 1e-6}"
    tier = [f'store.ssd_path="{path}"', f"store.ssd_gb={ssd_mb / 1e3}"]
    node = StoreNode(load_config(None, ["node.id=store", size, *tier, *settings]), block, join_cluster=False)
    await node.start()
    try:
        yield node
        node.store.check()
    finally:
        await node.stop()


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\x55\xaa" * 50, offset)
        os.fsync(file.fileno())


async def join(node: StoreNode, **options: Any) -> LoneStoreClient:
    return await connect_store(node.control_address, **options)


async def test_more_than_fits_dram_is_kept_and_read_back(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(40):  # five times what DRAM holds, and never refused
            assert await client.put(name(i), data(i), name(i - 1) if i else b"")
        for i in range(40):
            assert await client.get(name(i)) == data(i), i
        assert await client.exists([name(i) for i in range(41)]) == [True] * 40 + [False]
        stats = await client.stats()
        assert stats.ssd_blocks >= 32 and stats.counters["promotions"] >= 32
        assert stats.free + stats.sealed + stats.reserved + stats.quarantined == stats.total


async def test_without_an_ssd_the_oldest_are_gone(tmp_path: Path) -> None:
    async with store(tmp_path, 8, 64, 'store.ssd_path=""') as node, await join(node) as client:
        for i in range(16):
            assert await client.put(name(i), data(i))
        assert await client.exists([name(i) for i in range(16)]) == [False] * 8 + [True] * 8


async def test_a_restart_finds_the_blocks_and_announces_them_with_their_tier(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(12):
            await client.put(name(i), data(i), name(i - 1) if i else b"")
        await client.remove([name(3)])
    async with store(tmp_path) as node, await join(node) as client:
        async with grpc.aio.insecure_channel(node.control_address) as channel:
            events = common_pb2_grpc.CacheEventsStub(channel).Subscribe(common_pb2.SubscribeRequest())
            snapshot = await asyncio.wait_for(events.read(), 5)
            told = {event.key: (event.parent, event.tier) for event in snapshot.events}
            kept = [i for i in range(12) if i != 3]
            assert told == {name(i): (name(i - 1) if i else b"", Tier.SSD) for i in kept}
            assert await client.get(name(5)) == data(5)
            news = await asyncio.wait_for(events.read(), 5)
            assert [(event.stored, event.key, event.tier) for event in news.events] == [(True, name(5), Tier.DRAM)]
            events.cancel()
        assert await client.get(name(3)) is None
        assert [await client.get(name(i)) for i in kept] == [data(i) for i in kept]


async def test_a_restart_with_smaller_slots_forgets_what_fits_none_of_them(tmp_path: Path) -> None:
    small = data(100, BLOCK // 4)
    async with store(tmp_path) as node, await join(node) as client:
        assert await client.put(name(0), data(0), durable=True)
        assert await client.put(name(1), small, durable=True)
    async with store(tmp_path, 32, block=BLOCK // 4) as node, await join(node) as client:
        assert await client.exists([name(0), name(1)]) == [False, True]
        assert await client.put(name(0), small)  # which it would not need if that block could be read
        assert await client.get(name(0)) == small
        assert await client.remove([name(0)]) == 1
        assert (await client.stats()).counters["ssd_too_large"] == 1
    async with store(tmp_path) as node, await join(node) as client:
        assert await client.get(name(0)) is None  # what was forgotten does not return with the old slots
        assert await client.get(name(1)) == small


async def test_a_block_that_moves_to_the_ssd_says_so(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(20):
            await client.put(name(i), data(i))
        held = {key: tier for key, (_, tier) in node.store._events._stored.items()}
        assert set(held) == {name(i) for i in range(20)}
        assert {tier for key, tier in held.items() if key == name(0)} == {Tier.SSD}
        assert held[name(19)] is Tier.DRAM


async def test_a_long_run_is_loaded_in_order_and_leased_as_a_whole(tmp_path: Path) -> None:
    async with store(tmp_path, 16) as node, await join(node) as client:
        for i in range(48):
            await client.put(name(i), data(i), name(i - 1) if i else b"")
        lease = await client.ranges.acquire([name(i) for i in range(12)])
        assert len(lease.blocks) == 12
        await client.ranges.release([lease])
        too_many = await client.ranges.acquire([name(i) for i in range(48)], timeout_s=20)
        assert 8 <= len(too_many.blocks) <= 16  # as many as DRAM can hold at once
        await client.ranges.release([too_many])


async def test_what_was_loaded_stays_until_its_readers_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with store(tmp_path, num_blocks=4) as node, await join(node) as client:
        assert await client.put(name(0), data(0), durable=True)
        assert node.store.give_up([BlockKey(name(0))]) == 1
        ssd = node.store.ssd
        assert ssd is not None
        loop, load = asyncio.get_running_loop(), ssd.load

        def take_all_slots() -> None:
            others = [BlockName(BlockKey(name(i))) for i in range(1, 5)]
            node.store._index.reserve(others, "another", BLOCK, 1, time.monotonic())

        async def load_before_others_come(key: BlockKey, into: memoryview) -> Any:
            header = await load(key, into)
            loop.call_soon(take_all_slots)  # before those who wait for the block are told that it is there
            return header

        monkeypatch.setattr(ssd, "load", load_before_others_come)
        leases = await asyncio.gather(*(node.store.acquire([BlockKey(name(0))]) for _ in range(2)))
        assert [[block.key for block in lease.blocks] for lease in leases] == [[name(0)]] * 2
        assert node.store.counts.reserved == 3
        node.store.release(lease.lease_id for lease in leases)
        assert node.store.give_up([BlockKey(name(0))]) == 1  # nobody holds it any more


async def test_what_memory_has_is_not_given_up_for_what_is_loaded_beside_it(tmp_path: Path) -> None:
    """Some blocks are always saved in advance, and might leave at once."""
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(24):
            assert await client.put(name(i), data(i), durable=True)
        rng = np.random.default_rng(1)
        for turn in range(50):
            keys = [name(i) for i in rng.permutation(24)[:5]]  # for which there is room in eight slots
            lease = await client.ranges.acquire(keys, scattered=True)
            assert all(block.length for block in lease.blocks), turn
            await client.ranges.release([lease])


async def test_what_memory_has_is_not_loaded_again_by_a_call_that_also_loads(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(16):
            assert await client.put(name(i), data(i), durable=True)
        keys = [name(i) for i in (0, 1, 2, 3, 8, 9, 10, 11)]  # memory has the last four, which would leave next
        lease = await client.ranges.acquire(keys, scattered=True)
        assert all(block.length for block in lease.blocks)
        assert (await client.stats()).counters["promotions"] == 4
        await client.ranges.release([lease])


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
async def test_a_call_for_more_than_memory_holds_gets_all_of_it(tmp_path: Path, transports: tuple[str, ...]) -> None:
    async with (
        store(tmp_path) as node,
        await kvstore.Client.connect(node.control_address, transports=transports) as pool,
    ):
        for i in range(20):
            assert await pool.put(name(i), data(i), durable=True)
        names = [name(i) for i in range(21)]
        assert await pool.get_batch(names) == [*(data(i) for i in range(20)), None]


async def test_what_the_ssd_has_is_waited_for_while_all_slots_are_being_read(tmp_path: Path) -> None:
    async with store(tmp_path, num_blocks=4) as node, await join(node) as client:
        for i in range(6):
            assert await client.put(name(i), data(i), durable=True)
        leases = [await client.ranges.acquire([name(i)]) for i in range(4)]
        getting = asyncio.create_task(client.get(name(4)))
        await asyncio.sleep(0.1)
        assert not getting.done()
        await client.ranges.release([leases[0]])
        assert await getting == data(4)
        full, asked_s = await client.ranges.acquire([name(4)]), time.monotonic()
        assert await client.get(name(5)) is None
        waited_s = time.monotonic() - asked_s
        assert 0.5 < waited_s < 5
        both = await client.ranges.acquire([name(4), name(5)], scattered=True)  # who has something does not wait
        assert [block.length for block in both.blocks] == [BLOCK, 0]
        assert time.monotonic() - asked_s - waited_s < 0.9
        await client.ranges.release([*leases[1:], full, both])


async def test_what_is_cheaper_to_compute_is_not_loaded(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(20):
            await client.put(name(i), data(i))
        assert len((await client.ranges.acquire([name(0)], recompute_ms=1e-6)).blocks) == 0
        lease = await client.ranges.acquire([name(0)], recompute_ms=1e6)
        assert len(lease.blocks) == 1
        await client.ranges.release([lease])
        assert (await client.stats()).counters["promotions_not_worth_it"] == 1


async def test_only_what_was_seen_twice_is_written(tmp_path: Path) -> None:
    async with store(tmp_path, 8, 64, "store.demote_sights=2") as node, await join(node) as client:
        for i in range(24):
            await client.put(name(i), data(i))
            if i % 4 == 0:
                assert await client.get(name(i)) == data(i)  # the second sight
        stored = await client.exists([name(i) for i in range(24)])
        assert stored[:16] == [i % 4 == 0 for i in range(16)]


async def test_a_durable_put_is_on_the_disk_when_it_returns(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        assert await client.put(name(0), data(0), durable=True)
        assert (await client.stats()).ssd_blocks == 1
    async with store(tmp_path, 8, 64, 'store.ssd_path=""') as node, await join(node) as client:
        with pytest.raises(OutOfBlocks, match="durable"):
            await client.put(name(0), data(0), durable=True)


async def test_a_flipped_bit_on_the_disk_is_a_miss_and_an_event(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(16):
            await client.put(name(i), data(i))
        assert node.store.ssd is not None
        block = node.store.ssd.index.get(BlockKey(name(0)))
        assert block is not None
        damage(tmp_path / f"{block.place.segment:016x}.kvlog", block.place.offset + block.place.header_bytes + 1000)
        assert await client.get(name(0)) is None
        assert await client.exists([name(0)]) == [False]
        assert (await client.stats()).counters["checksum_mismatches"] == 1
        assert name(0) not in node.store._events._stored
        assert await client.put(name(0), data(0)) and await client.get(name(0)) == data(0)


async def test_a_disk_that_is_full_costs_hits_and_no_more(tmp_path: Path) -> None:
    """The SSD evicts its oldest when its share is used up."""
    async with store(tmp_path, 8, 12) as node, await join(node) as client:
        for i in range(100):
            assert await client.put(name(i), data(i))
        stored = await client.exists([name(i) for i in range(100)])
        assert 20 < sum(stored) < 60 and all(stored[-8:])
        found = [await client.get(name(i)) for i in range(100)]  # which makes others leave
        assert all(block in (None, data(i)) for i, block in enumerate(found)) and sum(map(bool, found)) > 15


async def test_pins_hold_what_they_promise(tmp_path: Path) -> None:
    async with store(tmp_path, 8, 64, 'store.ssd_path=""') as node, await join(node) as client:
        for i in range(4):
            await client.put(name(i), data(i))
        assert await client.pin([name(0), name(9)], hard=True, ttl_s=60) == 1
        assert await client.pin([name(1)], ttl_s=60) == 1
        with pytest.raises(OutOfBlocks, match="hard pins"):
            for i in range(4, 8):
                await client.put(name(i), data(i))
                await client.pin([name(i)], hard=True, ttl_s=60)
        await client.unpin([name(i) for i in range(4, 8)])
        for i in range(10, 17):
            assert await client.put(name(i), data(i))
        assert await client.exists([name(0), name(1), name(2)]) == [True, True, False]
        leases = [await client.ranges.acquire([name(i)]) for i in range(11, 17)]  # now there is nothing else to take
        assert await client.put(name(20), data(20))
        assert await client.exists([name(0), name(1)]) == [True, False]
        await client.ranges.release(leases)
        assert await client.unpin([name(0)]) == 1
        assert (await client.stats()).pins == 0


async def test_what_the_ssd_alone_has_is_pinned_behind_what_nobody_has(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(20):
            await client.put(name(i), data(i))
        assert node.store._index.exists([BlockKey(name(i)) for i in (0, 1)]) == [False, False]
        assert await client.pin([name(99), name(0), name(98), name(1)], ttl_s=60) == 2
        for i in range(30, 50):
            await client.put(name(i), data(i))
        assert node.store._index.exists([BlockKey(name(i)) for i in (0, 1)]) == [True, True]


async def test_a_pin_ends_with_its_time(tmp_path: Path) -> None:
    async with store(tmp_path, 8, 64, 'store.ssd_path=""') as node, await join(node) as client:
        await client.put(name(0), data(0))
        await client.pin([name(0)], hard=True, ttl_s=2.0)
        assert node.store.num_pinned == 1
        async with asyncio.timeout(10):
            while node.store.num_pinned:
                await asyncio.sleep(0.1)
                node.store.sweep()


async def test_a_tenant_cannot_push_others_out(tmp_path: Path) -> None:
    settings = ('store.ssd_path=""', f"store.tenant_dram_gb={3 * BLOCK / 1e9}")
    async with store(tmp_path, 8, 64, *settings) as node:
        quiet, greedy = await join(node, tenant="quiet"), await join(node, tenant="greedy")
        async with quiet, greedy:
            for i in range(3):
                await quiet.put(name(i), data(i))
            for i in range(100, 120):
                await greedy.put(name(i), data(i))
            assert await quiet.exists([name(i) for i in range(3)]) == [True] * 3
            assert await greedy.exists([name(i) for i in range(100, 120)]) == [False] * 17 + [True] * 3
            assert (await quiet.stats()).tenant_bytes == {"quiet": 3 * BLOCK, "greedy": 3 * BLOCK}
            held = await greedy.ranges.acquire([name(117), name(118), name(119)])  # a lease for each stored run
            with pytest.raises(OutOfBlocks, match="greedy"):
                await greedy.put(name(200), data(200))
            await greedy.ranges.release([held])


async def test_a_late_writer_is_fenced_though_its_block_went_to_the_ssd(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        [slot] = await client.ranges.reserve([(name(0), b"")], BLOCK, 1)
        assert slot is not None
        await client.ranges.abort([slot])
        for i in range(20):
            await client.put(name(i), data(i))
        assert await client.ranges.seal([(slot, range_checksums(data(0), 1))]) == [False]
        assert await client.get(name(0)) == data(0)


async def test_readers_and_writers_over_both_tiers_at_once(tmp_path: Path) -> None:
    async with store(tmp_path, 12, 64) as node:
        clients = [await join(node, name=f"c{i}", transports=("shm" if i % 2 else "tcp",)) for i in range(4)]

        async def use(client: LoneStoreClient, seed: int) -> int:
            hits = 0
            for i in map(int, np.random.default_rng(seed).integers(0, 60, 60)):
                found = await client.get(name(i), timeout_s=20)
                if found is None:
                    await client.put(name(i), data(i), timeout_s=20)
                else:
                    assert found == data(i)
                    hits += 1
            return hits

        assert sum(await asyncio.gather(*(use(client, i) for i, client in enumerate(clients)))) > 60
        for client in clients:
            await client.close()
        counts = node.store.counts
        assert counts.reserved == counts.quarantined == counts.leases == 0


async def test_a_directory_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="ssd_path"):
        async with store(tmp_path / "file"):
            pass
    with pytest.raises(ConfigError, match="eviction"):
        async with store(tmp_path, 8, 64, "store.eviction=oldest"):
            pass


@pytest.mark.parametrize(("soft", "hard", "is_served"), [(200, 5000, True), (200, 200, False)])
def test_an_ssd_of_many_segments_is_refused_where_so_many_files_cannot_be_open(
    tmp_path: Path, soft: int, hard: int, is_served: bool
) -> None:
    """As under systemd, where processes may open 1024 files unless they ask for more."""
    settings = ["store.dram_gb=0.05", f'store.ssd_path="{tmp_path}"', "store.ssd_gb=16"]  # 238 segments
    arguments = [part for setting in settings for part in ("--set", setting)]
    program = (
        "import resource\nfrom kvstore.__main__ import build\nfrom mooncake.app.cluster.role_main import run_role\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\nrun_role('store', build)"
    )
    command = [
        sys.executable,
        "-c",
        program,
        *arguments,
        "--set",
        "store.join=false",
        "--set",
        "store.block_bytes=65536",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) and "serves on" not in line and "ulimit" not in line:
            pass
        assert ("serves on" in line) == is_served, line
        if is_served:
            process.terminate()
            assert process.wait(10) == 0
        else:
            assert process.wait(10) == 2
            assert "store.ssd_gb = 16 takes 366 open files, and this process may open 200 (ulimit -n)" in line


async def test_a_clean_stop_saves_more_blocks_than_may_wait_for_the_disk_at_once(tmp_path: Path) -> None:
    size, count = 512, MAX_QUEUE + 700
    keys = [f"block {i}" for i in range(count)]
    settings = [f"store.dram_gb={(count + 64) * size / 1e9}", f'store.ssd_path="{tmp_path}"', "store.ssd_gb=0.2"]
    for life in range(2):
        node = StoreNode(load_config(None, ["node.id=store", *settings]), size, join_cluster=False)
        await node.start()
        async with await kvstore.Client.connect(node.control_address) as pool:
            if life == 0:
                for start in range(0, count, 1000):
                    await pool.put_batch([(key, b"x" * size) for key in keys[start : start + 1000]])
            assert sum(await pool.exists(keys)) == count
        await node.stop()
        assert node.store.counters.get("ssd_refused", 0) == 0


class HangingDisk(PlainIO):
    """Takes no write for as long as it is not well."""

    def __init__(self) -> None:
        self.is_well = threading.Event()
        self.writes = 0

    def write_and_sync(self, fd: int, offset: int, parts: Sequence[memoryview]) -> None:
        self.writes += 1
        self.is_well.wait(20)
        super().write_and_sync(fd, offset, parts)


@contextmanager
def store_on(disk: SsdIO, path: Path) -> Iterator[tuple[Store, Segment, SsdTier]]:
    """A store of four slots, without a node around it."""
    segment = Segment.create("store", BLOCK, 4)
    ssd = SsdTier(SsdLog(path, 2 << 20, io=disk), SsdIndex(64 << 20, 2 << 20, make_policy("lru", 100)), 1)
    yield Store(segment, SegmentServer(segment, "store"), EventLog(1), 10.0, 10.0, ssd=ssd), segment, ssd
    segment.close()


async def write(to: Store, segment: Segment, i: int, durable: bool = False) -> list[Sealed]:
    [offer] = await to.reserve(Wanted([BlockName(BlockKey(name(i)))], "me", BLOCK, 1))
    assert offer.grant is not None
    segment.block(offer.grant.slot)[:] = data(i)
    return await to.seal([Sealing(offer.grant, range_checksums(data(i), 1))], durable)


async def test_a_stop_ends_loads_that_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with store(tmp_path, 40) as node, await join(node) as client:
        for i in range(70):
            assert await client.put(name(i), data(i), durable=True)
        read, close, is_closed = SsdLog.read_blocks, SsdReads.close, threading.Event()

        def read_when_closed(log: SsdLog, reads: Any) -> Any:
            assert is_closed.wait(10)
            return read(log, reads)

        def tell_closed(reads: SsdReads) -> None:
            close(reads)
            is_closed.set()

        monkeypatch.setattr(SsdLog, "read_blocks", read_when_closed)
        monkeypatch.setattr(SsdReads, "close", tell_closed)
        keys = [BlockKey(name(i)) for i in range(70)]
        lacking = [key for key, is_here in zip(keys, node.store._index.exists(keys), strict=True) if not is_here]
        acquiring = [asyncio.create_task(node.store.acquire([key])) for key in lacking[:30]]
        await asyncio.sleep(0.05)
    leases = await asyncio.wait_for(asyncio.gather(*acquiring), 10)
    assert sum(len(lease.blocks) for lease in leases) < 30
    assert not [record for record in caplog.records if record.name == "asyncio"], caplog.text


async def test_a_writer_that_is_connected_again_before_its_end_was_heard_keeps_its_slots(tmp_path: Path) -> None:
    """The event loop is busy meanwhile. Over its new connection it may be in the middle of a copy."""
    async with store(tmp_path) as node, await join(node) as client:
        [slot] = await client.ranges.reserve([(name(0), b"")], BLOCK, 1)
        assert slot is not None
        halves = [data(0)[: BLOCK // 2], data(0)[BLOCK // 2 :]]
        for part, half in enumerate(halves):
            write = WriteRange(slot.index, part * BLOCK // 2, half, slot.epoch)
            client.ranges._transfer.write(slot.segment, [write], time.monotonic() + 10)
            if part == 0:
                client.ranges._transfer.forget(slot.segment.node_id)
                while node._segment_server.is_connected(client.ranges._writer_id):
                    time.sleep(0.001)  # noqa: ASYNC251
        await asyncio.sleep(0.05)
        assert await client.ranges.seal([(slot, range_checksums(data(0), 1))]) == [True]
        [slot] = await client.ranges.reserve([(name(1), b"")], BLOCK, 1)
        client.ranges._transfer.forget(node.segment_address.node_id)
        async with asyncio.timeout(10):
            while node.store.counts.reserved:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_what_the_data_plane_says_after_a_stop_is_not_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with store(tmp_path) as node:
        [offer] = await node.store.reserve(Wanted([BlockName(BlockKey(name(0)))], "writer", BLOCK, 1))
        assert offer.grant is not None
    told = node._segment_server.on_peer_gone
    assert told is not None
    told("writer")
    await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.name == "asyncio"], caplog.text


async def test_a_disk_that_hangs_holds_up_a_stop_for_a_bounded_time(tmp_path: Path) -> None:
    disk = HangingDisk()
    with store_on(disk, tmp_path) as (store_, segment, ssd):
        for i in range(2):
            assert await write(store_, segment, i) == [Sealed(True)]
        before = time.monotonic()
        await store_.close(timeout_s=0.2)
        assert 0.2 < time.monotonic() - before < 10
        assert disk.writes == 1 and len(ssd.index) == 0
        with pytest.raises(ConfigError, match="in use"):  # as long as a thread may still write there
            SsdLog(tmp_path, 2 << 20)
        disk.is_well.set()


async def test_a_block_that_left_dram_and_then_the_ssd_is_told_to_be_gone(tmp_path: Path) -> None:
    """It leaves DRAM for a promoted block, and is removed before that was published."""
    with store_on(PlainIO(), tmp_path) as (store_, segment, ssd):
        for i in range(8):
            await write(store_, segment, i, durable=True)
        here = [key for key in (BlockKey(name(i)) for i in range(8)) if store_._index.exists([key])[0]]
        may_load, load = asyncio.Event(), ssd.load

        async def load_late(key: BlockKey, into: memoryview) -> None:
            await may_load.wait()
            await load(key, into)

        ssd.load = load_late  # type: ignore[method-assign]
        [asked] = [key for key in (BlockKey(name(i)) for i in range(8)) if key not in here][:1]
        promoting = asyncio.create_task(store_.acquire([asked]))
        async with asyncio.timeout(10):
            while all(store_._index.exists(here)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        [gone] = [key for key in here if not store_._index.exists([key])[0]]
        assert await store_.remove([gone]) == 1
        may_load.set()
        await promoting
        store_.sweep()
        assert not any(store_.exists([gone]))
        assert gone not in {event.key for event in store_._events.snapshot()}
        await store_.close()


async def test_a_slot_is_not_used_again_while_it_is_being_saved_for_somebody_who_has_left(tmp_path: Path) -> None:
    disk = HangingDisk()
    with store_on(disk, tmp_path) as (store_, segment, ssd):
        durable = asyncio.create_task(write(store_, segment, 0, durable=True))
        async with asyncio.timeout(10):
            while not disk.writes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        durable.cancel()
        await asyncio.gather(durable, return_exceptions=True)
        removing = asyncio.create_task(store_.remove([BlockKey(name(0))]))
        await asyncio.sleep(0.05)
        assert not any(store_.exists([BlockKey(name(0))])) and store_.counts.free == 3
        disk.is_well.set()
        assert await removing == 1
        await store_.close()
        assert store_.counts.free == 4 and len(ssd.index) == 0


@pytest.mark.slow
async def test_one_and_a_half_gib_through_half_a_gib_of_dram(tmp_path: Path) -> None:
    """Nothing is refused, nothing is lost, every byte is right: read at random, and again after a restart."""
    size, dram_blocks, count = 1 << 20, 512, 1536
    config = [f"store.dram_gb={dram_blocks * size / 1e9 + 1e-6}", f'store.ssd_path="{tmp_path}"', "store.ssd_gb=3"]
    sums = [checksum(data(i, size)) for i in range(count)]
    into = bytearray(size)
    for life in range(2):
        node = StoreNode(load_config(None, config), size, join_cluster=False)
        await node.start()
        async with await join(node) as client:
            if life == 0:
                for i in range(count):
                    assert await client.put(name(i), data(i, size), name(i - 1) if i % 64 else b"", timeout_s=30), i
            for i in np.random.default_rng(life).permutation(count):
                assert await client.get_into(name(int(i)), into, timeout_s=30) == size, i
                assert checksum(into) == sums[int(i)]
            stats = await client.stats()
            assert stats.counters.get("refused_full", 0) == stats.counters.get("checksum_mismatches", 0) == 0
            node.store.check()
        await node.stop()


async def test_what_only_the_ssd_has_comes_back_to_memory_when_a_writer_has_it_anew(tmp_path: Path) -> None:
    async with store(tmp_path) as node, await join(node) as client:
        for i in range(20):
            await client.put(name(i), data(i))
        assert await client.ranges.reserve([(name(0), b"")], BLOCK, 1) == [None], "it is stored"
        [slot] = await client.ranges.reserve([(name(0), b"")], BLOCK, 1, into_dram=True)
        assert slot is not None
        assert await client.get(name(0)) == data(0), "the SSD has it, whatever the writer does"
        for i in range(20):  # which has brought it to memory: out again
            await client.put(name(40 + i), data(40 + i))
        await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, memoryview(data(0)), slot.epoch)])
        assert await client.ranges.seal([(slot, range_checksums(data(0), 1))]) == [True]
        read = (await client.stats()).counters.get("promotions", 0)
        lease = await client.ranges.acquire([name(0)], recompute_ms=1e-9)
        assert len(lease.blocks) == 1, "it is in memory"
        await client.ranges.release([lease])
        assert await client.get(name(0)) == data(0)
        stats = await client.stats()
        assert stats.counters.get("promotions", 0) == read and stats.ssd_blocks >= 12
        slots = await client.ranges.reserve([(name(i), name(i - 1)) for i in range(1, 6)], BLOCK, 1, into_dram=True)
        assert all(slots), "it is waited for while others leave"
        await client.ranges.abort([slot for slot in slots if slot is not None])
        for i in range(20, 40):  # and leaves it again without being written twice
            await client.put(name(i), data(i))
        assert await client.get(name(0)) == data(0)


async def test_a_writer_that_is_late_with_what_it_has_anew_holds_its_slot_no_longer(tmp_path: Path) -> None:
    async with store(tmp_path, 8, 64, "store.reserve_timeout_s=0.2") as node, await join(node) as client:
        for i in range(20):
            await client.put(name(i), data(i))
        [slot] = await client.ranges.reserve([(name(0), b"")], BLOCK, 1, into_dram=True)
        assert slot is not None
        await client.ranges.write_ranges(slot.segment, [WriteRange(slot.index, 0, memoryview(data(0)), slot.epoch)])
        async with asyncio.timeout(10):
            while not node.store.counts.quarantined:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await client.ranges.seal([(slot, range_checksums(data(0), 1))]) == [False]
        assert node.store.counts.quarantined == 0
