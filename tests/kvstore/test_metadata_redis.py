"""The directory in Redis against a real server that restarts, stops, fills up and loses everything."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis_process import RedisProcess

from conductor.prefixes.index import PrefixIndex
from kvstore.metadata.records import RECORD_BYTES, Cursor
from kvstore.metadata.redis import MAX_NAMES_BYTES, MAX_NODES, MAX_STREAM, RedisDirectory
from mooncake.directory import RECORD_KEY_BYTES, KnownNode
from mooncake.errors import ConfigError
from mooncake.types import BlockEvent, BlockKey, Tier

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server on the PATH"),
]

PREFIX = "mooncake:test"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    server.start()
    yield server
    server.stop()


class Conductor:
    """As much of one as a directory sees: an index that takes events over and tells."""

    def __init__(self, url: str, ttl_s: float = 60.0) -> None:
        self.index = PrefixIndex()
        self.directory = RedisDirectory(url, PREFIX, ttl_s=ttl_s, timeout_s=0.3)
        self.sequence = 0

    def join(self, *names: str) -> None:
        for name in names:
            self.index.join(name, is_tiered=True)
            self.directory.joined(name, f"I am {name}".encode())

    def change(self, name: str, events: Iterable[BlockEvent], is_reset: bool = False) -> None:
        changes = list(events)
        if is_reset:
            self.index.clear(name)
        for event in changes:
            self.index.apply(name, [event], event.tier)
        self.sequence += len(changes)
        self.directory.changed(name, 7, self.sequence, changes, is_reset)

    def blocks(self, name: str) -> dict[Tier, set[bytes]]:
        found: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        for part in self.index.blocks_of(name):
            for key, tier in part:
                found[tier].add(key)
        return found


@pytest.fixture
async def conductor(server: RedisProcess) -> AsyncIterator[Conductor]:
    conductor = Conductor(server.url)
    assert await conductor.directory.load() == []
    conductor.directory.start(conductor.index.blocks_of)
    yield conductor
    await conductor.directory.close()


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "little") * 4)


def stored(*numbers: int, tier: Tier = Tier.DRAM) -> list[BlockEvent]:
    return [BlockEvent(True, key(number), tier=tier) for number in numbers]


def left(*numbers: int) -> list[BlockEvent]:
    return [BlockEvent(False, key(number)) for number in numbers]


def cut(*numbers: int) -> set[bytes]:
    return {key(number)[:RECORD_KEY_BYTES] for number in numbers}


async def restarted(url: str) -> dict[str, KnownNode]:
    """What a conductor that starts now would know."""
    directory = RedisDirectory(url, PREFIX)
    try:
        return {node.node_id: node for node in await directory.load()}
    finally:
        await directory.close()


async def until_kept(conductor: Conductor, url: str, name: str, within_s: float = 10.0) -> KnownNode:
    """Wait until Redis holds what the conductor knows of a node."""
    wanted = {tier: keys for tier, keys in conductor.blocks(name).items() if keys}
    async with asyncio.timeout(within_s):
        while True:
            known = (await restarted(url)).get(name)
            if known is not None and {tier: set(keys) for tier, keys in known.table.blocks.items()} == wanted:
                return known
            await asyncio.sleep(0.02)


async def until_state(conductor: Conductor, start: str, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not conductor.directory.state.startswith(start):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_conductor_that_starts_knows_nodes_blocks_and_where_their_events_go_on(
    server: RedisProcess, conductor: Conductor
) -> None:
    conductor.join("s1", "s2")
    conductor.change("s1", stored(1, 2, 3))
    conductor.change("s1", [*stored(2, tier=Tier.SSD), *left(3)])
    conductor.change("s2", stored(9))
    known = await until_kept(conductor, server.url, "s1")
    assert known.description == b"I am s1"
    assert (known.table.incarnation, known.table.next_sequence) == (7, 5) or known.table.next_sequence == 6
    assert {tier: set(keys) for tier, keys in known.table.blocks.items()} == {Tier.DRAM: cut(1), Tier.SSD: cut(2)}
    await until_kept(conductor, server.url, "s2")
    assert conductor.directory.state == "redis"
    conductor.directory.left("s2")
    async with asyncio.timeout(5):
        while "s2" in await restarted(server.url):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    redis = Redis.from_url(server.url)
    events = [(fields[b"kind"], fields[b"node"]) for _, fields in await redis.xrange(f"{PREFIX}:events")]
    assert events == [(b"joined", b"s1"), (b"joined", b"s2"), (b"left", b"s2")]
    assert not await redis.keys(f"{PREFIX}:*s2*")
    await redis.aclose()


async def test_events_cost_an_append_and_a_cache_that_forgets_costs_a_table(
    server: RedisProcess, conductor: Conductor
) -> None:
    conductor.join("s1")
    conductor.change("s1", stored(*range(100)))
    await until_kept(conductor, server.url, "s1")
    tables = conductor.directory.tables_written
    for number in range(100, 150):
        conductor.change("s1", [*stored(number), *left(number - 100)])
    await until_kept(conductor, server.url, "s1")
    assert conductor.directory.tables_written == tables
    conductor.change("s1", stored(500), is_reset=True)
    known = await until_kept(conductor, server.url, "s1")
    assert known.table.blocks == {Tier.DRAM: list(cut(500))}
    assert conductor.directory.tables_written == tables + 1


async def test_a_log_that_only_grows_is_written_anew(server: RedisProcess, conductor: Conductor) -> None:
    conductor.join("s1")
    conductor.change("s1", stored(0))
    await until_kept(conductor, server.url, "s1")
    redis = Redis.from_url(server.url)
    for number in range(60):  # 60 times 2048 records of 16 bytes: 1.9 MB of log for one block
        events = [
            event for each in range(1024) for event in (*stored(number * 1024 + each), *left(number * 1024 + each))
        ]
        conductor.change("s1", events)
        await asyncio.sleep(0.015)
    conductor.change("s1", stored(1))
    await until_kept(conductor, server.url, "s1")
    assert conductor.directory.tables_written > 1
    (log,) = await redis.keys(f"{PREFIX}:log:s1:*")
    assert await redis.strlen(log) < 1_500_000
    await redis.aclose()


async def test_a_redis_that_restarts_empty_is_filled_again(server: RedisProcess, conductor: Conductor) -> None:
    conductor.join("s1")
    conductor.change("s1", stored(*range(50)))
    await until_kept(conductor, server.url, "s1")
    server.stop()
    conductor.change("s1", stored(51))
    await until_state(conductor, "memory: Redis is away")
    for number in range(60, 90):
        conductor.change("s1", stored(number))  # costs nothing and fails nowhere
    server.start()
    await until_kept(conductor, server.url, "s1")
    await until_state(conductor, "redis")


async def test_a_redis_that_is_emptied_is_noticed(server: RedisProcess, conductor: Conductor) -> None:
    conductor.join("s1")
    conductor.change("s1", stored(*range(50)))
    await until_kept(conductor, server.url, "s1")
    redis = Redis.from_url(server.url)
    await redis.flushall()
    await redis.aclose()
    conductor.change("s1", stored(77))
    async with asyncio.timeout(5):
        while conductor.directory.tables_written < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("part", ["nodes", "events", "node", "cursor", "log"])
async def test_a_key_that_somebody_made_something_else_of_is_deleted_and_written_anew(
    server: RedisProcess, conductor: Conductor, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    conductor.join("s1")
    conductor.change("s1", stored(*range(50)))
    await until_kept(conductor, server.url, "s1")
    redis = Redis.from_url(server.url)
    [name] = [name async for name in redis.scan_iter(f"{PREFIX}:{part}*") if name.decode().split(":")[2] == part]

    await redis.delete(name)
    await redis.hset(name, "some", "hash")
    conductor.directory._refresh_at_s = 0.0  # as if a third of the expiry had passed
    conductor.change("s1", stored(77))
    conductor.join("s2")
    async with asyncio.timeout(10):
        while await redis.type(name) == b"hash":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await until_kept(conductor, server.url, "s1")
    assert "Redis is away" not in caplog.text
    if part in ("nodes", "events", "log"):  # the others are simply written
        assert f"the key {name.decode()} in Redis" in caplog.text
    await redis.aclose()


async def test_who_starts_with_keys_that_are_not_ours_deletes_them(
    server: RedisProcess, conductor: Conductor, caplog: pytest.LogCaptureFixture
) -> None:
    conductor.join("s1", "s2")
    conductor.change("s1", stored(1))
    conductor.change("s2", stored(2))
    await until_kept(conductor, server.url, "s1")
    await until_kept(conductor, server.url, "s2")
    redis = Redis.from_url(server.url)
    [name] = [name async for name in redis.scan_iter(f"{PREFIX}:log:s1:*")]
    await redis.delete(name)
    await redis.sadd(name, "x")
    known = await restarted(server.url)
    assert not known["s1"].table.blocks and known["s2"].table.blocks == {Tier.DRAM: list(cut(2))}
    assert f"the key {name.decode()} in Redis" in caplog.text and not await redis.exists(name)
    await redis.set(f"{PREFIX}:nodes", b"garbage")
    assert await restarted(server.url) == {} and not await redis.exists(f"{PREFIX}:nodes")
    assert "Redis is away" not in caplog.text
    await redis.aclose()


async def test_a_redis_that_hangs_delays_nobody(server: RedisProcess, conductor: Conductor) -> None:
    conductor.join("s1")
    conductor.change("s1", stored(1))
    await until_kept(conductor, server.url, "s1")
    server.signal(signal.SIGSTOP)
    before = time.perf_counter()
    for number in range(2000):
        conductor.change("s1", stored(number))
    assert time.perf_counter() - before < 1
    await until_state(conductor, "memory: Redis is away")
    cold = RedisDirectory(server.url, PREFIX, timeout_s=0.2)
    before = time.perf_counter()
    assert await cold.load() == []
    assert time.perf_counter() - before < 2
    await cold.close()
    server.signal(signal.SIGCONT)
    await until_kept(conductor, server.url, "s1")
    await until_state(conductor, "redis")


async def test_a_full_redis_is_as_good_as_none_until_there_is_room(server: RedisProcess, conductor: Conductor) -> None:
    redis = Redis.from_url(server.url)
    await redis.config_set("maxmemory", 1)
    conductor.join("s1")
    conductor.change("s1", stored(*range(5000)))
    await until_state(conductor, "memory: Redis is away")
    assert "maxmemory" in conductor.directory.state
    await redis.config_set("maxmemory", 0)
    await until_kept(conductor, server.url, "s1")
    await until_state(conductor, "redis")
    await redis.aclose()


async def test_a_node_that_nobody_vouches_for_is_forgotten(server: RedisProcess) -> None:
    conductor = Conductor(server.url, ttl_s=2.0)
    conductor.directory.start(conductor.index.blocks_of)
    conductor.join("s1")
    conductor.change("s1", stored(1))
    await until_kept(conductor, server.url, "s1")
    start = time.monotonic()
    while time.monotonic() - start < 2.5:  # longer than the time to live: it is vouched for
        assert "s1" in await restarted(server.url)
        await asyncio.sleep(0.1)
    await conductor.directory.close()
    async with asyncio.timeout(5):
        while await restarted(server.url):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    redis = Redis.from_url(server.url)
    async with asyncio.timeout(5):
        while {*await redis.keys(f"{PREFIX}:*")} - {f"{PREFIX}:events".encode()}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await redis.xlen(f"{PREFIX}:events") <= 2 * MAX_STREAM
    await redis.aclose()


async def test_a_torn_log_is_not_believed(server: RedisProcess, conductor: Conductor) -> None:
    conductor.join("s1")
    conductor.change("s1", stored(*range(10)))
    await until_kept(conductor, server.url, "s1")
    redis = Redis.from_url(server.url)
    (log,) = await redis.keys(f"{PREFIX}:log:s1:*")
    await redis.set(log, (await redis.get(log))[:-8])
    known = (await restarted(server.url))["s1"]
    assert known.description == b"I am s1" and len(known.table) == 0
    await redis.aclose()


async def test_a_cursor_to_more_than_a_redis_can_hold_is_not_followed(
    server: RedisProcess, conductor: Conductor
) -> None:
    conductor.join("s1", "s2")
    conductor.change("s1", stored(1, 2))
    conductor.change("s2", stored(3))
    await until_kept(conductor, server.url, "s2")
    await until_kept(conductor, server.url, "s1")
    redis = Redis.from_url(server.url)
    cursor = Cursor.unpack(await redis.get(f"{PREFIX}:cursor:s1"))
    assert cursor is not None
    await redis.set(f"{PREFIX}:cursor:s1", replace(cursor, length=1 << 42).pack())
    await redis.aclose()
    directory = RedisDirectory(server.url, PREFIX)
    known = {node.node_id: node for node in await directory.load()}
    assert directory.state == "redis"
    assert known["s1"].table.blocks == {} and known["s2"].table.blocks == {Tier.DRAM: list(cut(3))}
    await directory.close()


async def test_of_too_much_no_more_is_read_than_a_cluster_has(
    server: RedisProcess, conductor: Conductor, caplog: pytest.LogCaptureFixture
) -> None:
    conductor.join("s1", "s2", "s3")
    conductor.change("s1", stored(*range(100)))
    for number, name in enumerate(("s2", "s3")):
        conductor.change(name, stored(number))
    for name in ("s1", "s2", "s3"):
        await until_kept(conductor, server.url, name)
    redis = Redis.from_url(server.url)
    await redis.set(f"{PREFIX}:node:s3", bytes(64 << 20))
    directory = RedisDirectory(server.url, PREFIX, max_loaded_bytes=99 * RECORD_BYTES)
    known = {node.node_id: node for node in await directory.load()}
    assert directory.state == "redis"
    assert known.keys() == {"s1", "s2"}, "what describes a node is short"
    assert known["s1"].table.blocks == {} and known["s2"].table.blocks == {Tier.DRAM: list(cut(0))}
    assert "too long a block table of s1" in caplog.text
    await directory.close()

    names = [f"stranger-{number}" for number in range(MAX_NODES + 100)]
    await redis.mset({f"{PREFIX}:node:{name}": b"I am a stranger" for name in names})
    await redis.sadd(f"{PREFIX}:nodes", *names)
    assert 1 < len(await restarted(server.url)) <= MAX_NODES
    assert f"Redis holds {MAX_NODES} nodes or more" in caplog.text
    await redis.sadd(f"{PREFIX}:nodes", bytes(MAX_NAMES_BYTES))
    assert await restarted(server.url) == {}
    assert "they are not read" in caplog.text
    await redis.srem(f"{PREFIX}:nodes", bytes(MAX_NAMES_BYTES))
    await redis.acl_setuser("default", enabled=True, commands=["-memory"])
    assert await restarted(server.url)
    await redis.aclose()


async def test_two_conductors_keep_whole_tables_of_the_same_node(server: RedisProcess, conductor: Conductor) -> None:
    other = Conductor(server.url)
    other.directory.start(other.index.blocks_of)
    for each in (conductor, other):
        each.join("s1")
    for number in range(30):
        for each in (conductor, other):
            each.change("s1", stored(number))
        await asyncio.sleep(0.01)
    await until_kept(conductor, server.url, "s1")
    await other.directory.close()


async def test_a_million_blocks_are_warm_in_two_seconds(server: RedisProcess, conductor: Conductor) -> None:
    names = [f"s{number}" for number in range(4)]
    conductor.join(*names)
    for position, name in enumerate(names):
        start = position << 20
        keys = [(start + number).to_bytes(8, "little") * 2 for number in range(250_000)]
        conductor.index.load(name, [key[:RECORD_KEY_BYTES] for key in keys])
        conductor.directory.changed(name, 7, 250_000, [], True)
    async with asyncio.timeout(30):
        while conductor.directory.tables_written < len(names):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    best_s = 60.0
    for _ in range(3):  # a busy machine is not our subject
        before = time.perf_counter()
        index = PrefixIndex()
        for known in (await restarted(server.url)).values():
            for tier, keys in known.table.blocks.items():
                index.load(known.node_id, keys, tier)
        best_s = min(best_s, time.perf_counter() - before)
        assert len(index) == 1_000_000
    assert best_s < 2, f"{best_s:.2f} s"


async def test_a_redis_that_is_away_from_the_start_is_told_once_and_so_is_its_return(
    server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvstore.metadata.redis")
    conductor = Conductor(server.url)
    assert conductor.directory.state == "memory: Redis is away (not asked yet)"
    server.stop()
    assert await conductor.directory.load() == []
    conductor.directory.start(conductor.index.blocks_of)
    conductor.join("s1")
    await asyncio.sleep(0.5)  # it is tried several times
    assert [record.getMessage()[:17] for record in caplog.records] == ["Redis is away, go"]
    server.start()
    conductor.change("s1", stored(1))
    await until_kept(conductor, server.url, "s1")
    await until_state(conductor, "redis")
    assert [record.getMessage() for record in caplog.records[1:]] == ["the directory is in Redis again"]
    await conductor.directory.close()


async def test_what_only_answers_like_a_redis_is_as_good_as_none(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(b":1\r\n" * 8)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        conductor = Conductor(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert await conductor.directory.load() == []
        conductor.directory.start(conductor.index.blocks_of)
        for number in range(3):
            conductor.join(f"s{number}")
            await asyncio.sleep(0.15)
            assert conductor.directory.state.startswith("memory")
        await conductor.directory.close()
    assert caplog.text.count("is not understood") == 1 and "the task" not in caplog.text


async def test_a_url_that_is_none_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"directory\.redis"):
        RedisDirectory("http://somewhere", PREFIX)
