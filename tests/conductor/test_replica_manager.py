"""A burst on one prefix: real stores, a real conductor. A replica appears, and is dropped when the burst is over."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from nonsense import Garbler
from store_alone import connect_store
from waiting import until

from conductor.core import Core
from conductor.model_facts import ModelFacts
from conductor.placement.view import RequestFacts, Shape
from conductor.registry import NodeInfo
from kvstore.checksum import range_checksums
from kvstore.client.store_client import StoreClient
from kvstore.metadata.memory import MemoryDirectory
from kvstore.node import StoreNode
from mooncake.config import load_config
from mooncake.types import BlockKey, Role

BLOCK_BYTES = 1024
FACTS = ModelFacts(kv_fingerprint="kv", shape=Shape(block_tokens=4, block_bytes=BLOCK_BYTES, num_layers=2), eos_ids=())
KEYS = [BlockKey(bytes([k]) * 32) for k in range(8)]
SETTINGS = [
    "conductor.node_timeout_s=600",  # the stores are registered for them, and do not heartbeat
    "health.watch=false",
    "conductor.replica_ttl_s=0.5",
    "store.dram_gb=0.001",
]


@dataclass
class Pool:
    """Two hosts, each with a store and a prefill node; the first store has the prefix."""

    core: Core
    stores: list[StoreNode]
    clients: list[StoreClient]
    blocks: list[bytes]

    def burst(self, requests: int) -> None:
        for number in range(requests):
            facts = RequestFacts(40, KEYS, needs_decode=False, number=number)
            now = self.core.clock()
            query = self.core.dispatcher.placer.scheduler.query(facts, now)
            placement = self.core.dispatcher.placer.scheduler.answer(query)
            self.core.replica_manager.arrived(query, placement, now)
        self.core.tick()

    async def holds(self, number: int) -> int:
        return sum(await self.clients[number].exists(KEYS))


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    config = load_config(overrides=SETTINGS)
    stores = [StoreNode(config, BLOCK_BYTES, join_cluster=False) for _ in range(2)]
    for store in stores:
        await store.start()
    clients = [await connect_store(store.control_address) for store in stores]
    rng = np.random.default_rng(0)
    blocks = [rng.bytes(BLOCK_BYTES) for _ in KEYS]
    names = list(zip(KEYS, [b"", *KEYS], strict=False))
    sums = [range_checksums(block, 2) for block in blocks]
    assert await clients[0].put_blocks(names, blocks, sums) == len(KEYS)

    core = Core(config, FACTS, MemoryDirectory())
    await core.start()
    for number, store in enumerate(stores):
        segment = replace(store.segment_address, host_id=f"h{number}")
        core.register(NodeInfo(f"s{number}", Role.STORE, 10 + number, store.control_address, segment))
        core.register(NodeInfo(f"p{number}", Role.PREFILL, 20 + number, f"127.0.0.1:{number + 1}", segment, "kv", 4))
        core.costs.observe_prefill(f"p{number}", 40, 0, 500.0)
    await until(lambda: core.index.num_blocks("s0") == len(KEYS))
    try:
        yield Pool(core, stores, clients, blocks)
    finally:
        await core.stop()
        for client, store in zip(clients, stores, strict=True):
            await client.close()
            await store.stop()


async def test_the_prefix_of_a_burst_is_replicated_and_dropped_when_it_is_no_longer_requested(pool: Pool) -> None:
    pool.burst(2)
    await asyncio.sleep(0)
    assert await pool.holds(1) == 0, "two requests are no burst"

    pool.burst(30)
    await until(lambda: pool.core.index.num_blocks("s1") == len(KEYS))
    assert [await pool.clients[1].get(key) for key in KEYS] == pool.blocks
    assert pool.core.replica_manager.copied >= 1

    await until(lambda: pool.core.index.num_blocks("s1") == 0)
    assert (await pool.holds(0), await pool.holds(1)) == (len(KEYS), 0)


async def test_a_copy_from_a_source_that_is_gone_is_harmless(pool: Pool) -> None:
    await pool.stores[0].stop()
    pool.burst(30)
    await until(lambda: not pool.core.replica_manager._tasks)
    assert (pool.core.replica_manager.copied, await pool.holds(1)) == (0, 0)


async def test_a_store_that_answers_with_bytes_that_are_no_message_is_harmless(pool: Pool) -> None:
    garbler = Garbler()
    try:
        info = pool.core.registry.get("s1").info
        pool.core.register(replace(info, control_address=f"127.0.0.1:{await garbler.start()}"), [])
        pool.burst(30)
        [copying] = pool.core.replica_manager._tasks
        await copying
        assert (garbler.calls["Fetch"], pool.core.replica_manager.copied) == (1, 0)
    finally:
        await garbler.stop()
