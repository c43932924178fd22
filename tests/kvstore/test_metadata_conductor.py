"""A conductor restarted with Redis knows its nodes and their blocks before any of them has reported."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis_process import RedisProcess

from conductor.core import Core
from conductor.model_facts import ModelFacts
from conductor.placement.view import Shape
from conductor.registry import NodeInfo, NodeLoad, NodeState
from kvstore.metadata.redis import RedisDirectory
from mooncake.config import load_config
from mooncake.events import CacheEventsServicer, EventLog
from mooncake.rpc import common_pb2_grpc
from mooncake.rpc.server import RpcServer
from mooncake.types import BlockEvent, BlockKey, Role

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server on the PATH"),
]

FACTS = ModelFacts(kv_fingerprint="kv", shape=Shape(block_tokens=4, block_bytes=1024, num_layers=2), eos_ids=(1,))
KEYS = [BlockKey(bytes([number]) * 32) for number in range(20)]


@dataclass
class Cache:
    """A store node as far as a conductor's index is concerned."""

    log: EventLog = field(default_factory=lambda: EventLog(incarnation=11))
    server: RpcServer = field(default_factory=RpcServer)
    address: str = ""

    async def start(self) -> None:
        self.server.add(common_pb2_grpc.add_CacheEventsServicer_to_server, CacheEventsServicer(self.log), "events")
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"

    @property
    def info(self) -> NodeInfo:
        return NodeInfo("store", Role.STORE, incarnation=3, control_address=self.address)


@pytest.fixture
async def cache() -> AsyncIterator[Cache]:
    cache = Cache()
    await cache.start()
    yield cache
    await cache.server.stop(0.1)


async def started(url: str) -> Core:
    core = Core(load_config(), FACTS, RedisDirectory(url, "mooncake:kv", timeout_s=3.0))
    await core.start()
    return core


async def num_kept(url: str) -> int:
    """How many blocks a conductor that starts now would know."""
    directory = RedisDirectory(url, "mooncake:kv", timeout_s=3.0)
    try:
        return sum(len(keys) for node in await directory.load() for keys in node.table.blocks.values())
    finally:
        await directory.close()


async def until_known(core: Core, count: int) -> None:
    async with asyncio.timeout(5):
        while core.index.num_blocks("store") != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_written(core: Core) -> None:
    async with asyncio.timeout(5):
        while core.directory.state != "redis":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_restart_is_warm_and_goes_on_where_the_events_stood(tmp_path: Path, cache: Cache) -> None:
    redis = RedisProcess(tmp_path)
    redis.start()
    first = await started(redis.url)
    first.register(cache.info)
    cache.log.append(BlockEvent(True, key) for key in KEYS[:10])
    await until_known(first, 10)
    await first.stop()  # which writes what was not written yet

    cache.log.append([BlockEvent(True, KEYS[10]), BlockEvent(False, KEYS[9])])  # while no conductor listens
    second = await started(redis.url)
    node = second.registry.get("store")
    assert node is not None and node.info == cache.info
    assert node.state is NodeState.SUSPECT  # until it is heard
    assert second.index.num_blocks("store") == 10  # at once, without a word from the node
    async with asyncio.timeout(5):
        while second.index.match([KEYS[9]]) or not second.index.match([KEYS[10]]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert second.heartbeat("store", 3, NodeLoad(), False)
    await second.stop()
    redis.stop()


async def test_without_redis_a_conductor_starts_cold_and_is_not_held_up(tmp_path: Path, cache: Cache) -> None:
    redis = RedisProcess(tmp_path)  # never started
    core = await started(redis.url)
    core.register(cache.info)
    cache.log.append(BlockEvent(True, key) for key in KEYS)
    await until_known(core, len(KEYS))
    assert core.directory.state.startswith("memory: Redis is away")
    redis.start()  # and when it comes, it is used
    await until_written(core)
    await core.stop()
    warm = await started(redis.url)
    assert warm.index.num_blocks("store") == len(KEYS)
    await warm.stop()
    redis.stop()


async def test_a_conductor_leaves_nodes_that_it_never_heard_to_the_one_that_does(tmp_path: Path, cache: Cache) -> None:
    redis = RedisProcess(tmp_path)
    redis.start()
    first = await started(redis.url)
    cache.log.append(BlockEvent(True, key) for key in KEYS)
    first.register(cache.info)
    await until_known(first, 20)
    async with asyncio.timeout(20):
        while await num_kept(redis.url) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    quick = load_config(None, ["conductor.heartbeat_interval_s=0.2", "conductor.node_timeout_s=0.6"])
    second = Core(quick, FACTS, RedisDirectory(redis.url, "mooncake:kv", timeout_s=3.0))
    await second.start()
    assert second.registry.get("store") is not None
    async with asyncio.timeout(5):
        while second.registry.get("store") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await second.stop()
    third = await started(redis.url)
    assert third.registry.get("store") is not None and third.index.num_blocks("store") == 20
    await third.stop()
    await first.stop()
    redis.stop()
