"""The directory in Redis: what a conductor knows is written in the background, and read once when it starts.

    PREFIX:nodes                 set of node ids
    PREFIX:node:ID               a node's description; expires unless it is refreshed
    PREFIX:log:ID:GENERATION     packed records of its blocks, appended to (see ``records``)
    PREFIX:cursor:ID             which log is valid, how far, and where the node's events continue
    PREFIX:events                stream of nodes that joined and left, of bounded length

A log has one writer: each conductor writes its own generations, each complete by itself, and the cursor points to one.
Whatever goes wrong (Redis is gone, slow, full, emptied, restarted), the writer drops its queue, retries after a pause,
and then writes whole tables. A key of ours with a foreign type is deleted. So Redis is optional and memory here is
bounded. The only module that imports redis; it does not know what a description contains.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from kvstore.metadata.records import RECORD_BYTES, Cursor, pack_blocks, pack_events, unpack_log
from mooncake.directory import BlocksOf, BlockTable, KnownNode
from mooncake.errors import ConfigError
from mooncake.types import BlockEvent
from mooncake.vital import vital

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 3.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
GATHER_S = 0.01  # events within this time are written together
PIECE_BYTES = 4 << 20  # of a log, in one command
MAX_PENDING_BYTES = 8 << 20  # over all nodes; beyond that, the whole table is written later
MAX_LOG_BYTES = 256 << 20
MAX_LOADED_BYTES = 256 << 20  # of all logs: as many blocks as a conductor's index takes
MAX_NODES = 4096  # that are read: no cluster has more
MAX_NAMES_BYTES = 64 << 20  # that the nodes' ids take in Redis
MAX_DESCRIPTION_BYTES = 1 << 14
COMPACT_RATIO, COMPACT_SLACK_BYTES = 3, 1 << 20
MAX_STREAM = 10_000

FAILURES = (RedisError, OSError, TimeoutError)


@dataclass(slots=True)
class _Node:
    """A node as it should be in Redis."""

    description: bytes
    generation: int = 0
    length: int = 0  # bytes of the log that Redis has acknowledged
    blocks: int = 0  # in the last whole table
    pending: bytearray | None = None  # events after that; None when the whole table must be written
    incarnation: int = 0
    next_sequence: int = 0
    is_announced: bool = False  # in Redis, as far as we know

    @property
    def is_too_long(self) -> bool:
        limit = min(COMPACT_RATIO * self.blocks * RECORD_BYTES + COMPACT_SLACK_BYTES, MAX_LOG_BYTES)
        return self.length > max(limit, self.blocks * RECORD_BYTES + COMPACT_SLACK_BYTES)


class RedisDirectory:
    """``prefix`` separates clusters of different models. Raises ConfigError for an invalid URL."""

    def __init__(
        self,
        url: str,
        prefix: str,
        ttl_s: float = 60.0,
        timeout_s: float = 1.0,
        max_loaded_bytes: int = MAX_LOADED_BYTES,
    ) -> None:
        try:
            self._redis: Redis = Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:
            raise ConfigError(f"directory.redis: {error}") from None
        self._prefix = prefix
        self._max_loaded_bytes = max_loaded_bytes
        self._ttl_ms = round(ttl_s * 1000)
        self._refresh_s = ttl_s / 3
        self._nodes: dict[str, _Node] = {}
        self._gone: dict[str, int] = {}  # node ids to remove, with the generation of their log
        self._blocks_of: BlocksOf = lambda node_id: iter(())
        self._work = asyncio.Event()
        self._refresh_at_s = 0.0
        self._writer: asyncio.Task[None] | None = None
        self._is_closing = False
        self._trouble: str | None = None  # of the last access to Redis; "": none, None: before the first access
        self.tables_written = 0

    # Called by the conductor

    @property
    def state(self) -> str:
        return "redis" if self._trouble == "" else f"memory: Redis is away ({self._trouble or 'not asked yet'})"

    async def load(self) -> list[KnownNode]:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                try:
                    nodes = await self._load()
                except ResponseError as error:
                    if not _is_of_wrong_type(error):
                        raise
                    await self._delete_strangers()
                    nodes = []
        except FAILURES as error:
            self._fail(error)
            return []
        except Exception as error:
            self._fail_strangely(error)
            return []
        self._trouble = ""
        return nodes

    def start(self, blocks_of: BlocksOf) -> None:
        self._blocks_of = blocks_of
        self._writer = vital(self._write_for_ever(), "directory in Redis")

    def joined(self, node_id: str, description: bytes, table: BlockTable | None = None) -> None:
        node = self._nodes[node_id] = _Node(description)
        if table is not None:
            node.incarnation, node.next_sequence = table.incarnation, table.next_sequence
        self._gone.pop(node_id, None)
        self._work.set()

    def left(self, node_id: str) -> None:
        node = self._nodes.pop(node_id, None)
        if node is not None:
            self._gone[node_id] = node.generation
            self._work.set()

    def forget(self, node_id: str) -> None:
        self._nodes.pop(node_id, None)

    def changed(
        self, node_id: str, incarnation: int, next_sequence: int, events: Sequence[BlockEvent], is_reset: bool
    ) -> None:
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.incarnation, node.next_sequence = incarnation, next_sequence
        if is_reset:
            node.pending = None
        elif node.pending is not None:
            node.pending += pack_events(events)
            if len(node.pending) > MAX_PENDING_BYTES // len(self._nodes):
                node.pending = None
        self._work.set()

    async def close(self) -> None:
        """Writes what is left, in bounded time; an unreachable Redis is left alone."""
        if self._writer is not None:
            self._is_closing = True
            self._work.set()
            if self._trouble != "":
                self._writer.cancel()
            await asyncio.wait([self._writer], timeout=CLOSE_TIMEOUT_S)
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        with suppress(*FAILURES):
            await self._redis.aclose()

    # Reading

    async def _load(self) -> list[KnownNode]:
        """However much is there, no more is read than a cluster has."""
        names = await self._some_names()
        if not names:
            return []
        descriptions = await self._beginnings([self._key("node", name) for name in names], MAX_DESCRIPTION_BYTES)
        cursors = await self._beginnings([self._key("cursor", name) for name in names], Cursor.NUM_BYTES)
        expired = [name for name, description in zip(names, descriptions, strict=True) if not description]
        if expired:
            await _answer(self._redis.srem(self._key("nodes"), *expired))
        nodes, left = list[KnownNode](), self._max_loaded_bytes
        for name, description, packed in zip(names, descriptions, cursors, strict=True):
            if not description:
                continue
            cursor = Cursor.unpack(packed)
            if cursor is not None and cursor.length > left:
                log.warning("Redis holds too long a block table of %s; asking the node instead", name)
                cursor = None
            if cursor is not None:
                left -= cursor.length
            nodes.append(KnownNode(name, description, await self._load_table(name, cursor)))
        return nodes

    async def _some_names(self) -> list[str]:
        """All nodes, unless there are too many; none if their ids are not those of a cluster."""
        with suppress(ResponseError):  # some servers do not tell it
            taken = await _answer(self._redis.memory_usage(self._key("nodes"), samples=0)) or 0
            if taken > MAX_NAMES_BYTES:
                log.warning("the ids of nodes take %d bytes in Redis: they are not read", taken)
                return []
        ids: list[bytes] = await _answer(self._redis.srandmember(self._key("nodes"), MAX_NODES))
        if len(ids) == MAX_NODES:
            log.warning("Redis holds %d nodes or more; others are not read", MAX_NODES)
        return sorted(node_id.decode(errors="replace") for node_id in ids)

    async def _beginnings(self, keys: list[str], most: int) -> list[bytes]:
        """The values; b"" for one that is missing, of another type, or of more than ``most`` bytes."""
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.getrange(key, 0, most)
        values = list[bytes]()
        for value in await pipeline.execute(raise_on_error=False):
            if isinstance(value, Exception) and not (isinstance(value, ResponseError) and _is_of_wrong_type(value)):
                raise value
            values.append(value if isinstance(value, bytes) and len(value) <= most else b"")
        return values

    async def _load_table(self, name: str, cursor: Cursor | None) -> BlockTable:
        """An empty table when the log is not what the cursor says."""
        if cursor is None:
            return BlockTable()
        key, length = self._key("log", name, cursor.generation), cursor.length
        pipeline = self._redis.pipeline(transaction=True)
        for start in range(0, length, PIECE_BYTES):
            pipeline.getrange(key, start, min(start + PIECE_BYTES, length) - 1)
        try:
            records = b"".join(await pipeline.execute()) if length else b""
        except ResponseError as error:
            if not _is_of_wrong_type(error):
                raise
            await self._delete_stranger(key)
            records = b""
        if len(records) != length:
            log.warning("the block table of %s in Redis is torn; asking the node instead", name)
            return BlockTable()
        return BlockTable(cursor.incarnation, cursor.next_sequence, unpack_log(records))

    # Writing

    async def _write_for_ever(self) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            was_closing = self._is_closing  # then nothing changes any more: this write is the last
            try:
                await self._write_and_mend()
            except Exception as error:
                if isinstance(error, FAILURES):
                    self._fail(error)
                else:
                    self._fail_strangely(error)
                if was_closing:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            if self._trouble:
                log.info("the directory is in Redis again")
            self._trouble, pause_s = "", MIN_PAUSE_S
            if was_closing:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._refresh_at_s - time.monotonic())):
                    await self._work.wait()
            await asyncio.sleep(GATHER_S)

    def _fail(self, error: BaseException) -> None:
        """From here on only memory counts; everything is written again once Redis is back."""
        trouble = str(error) or type(error).__name__
        if not self._trouble:
            log.warning("Redis is away, going on with memory alone: %s", trouble)
        self._trouble = trouble
        self._forget_written()

    def _fail_strangely(self, error: Exception) -> None:
        """A bug, or what answers is no Redis."""
        if not self._trouble:
            log.error("the answer of Redis is not understood", exc_info=error)
        self._fail(error)

    def _forget_written(self) -> None:
        for node in self._nodes.values():
            node.pending, node.is_announced = None, False

    async def _write_and_mend(self) -> None:
        try:
            await self._write()
        except ResponseError as error:
            if not _is_of_wrong_type(error):
                raise
            await self._delete_strangers()
            self._forget_written()
            await self._write()

    async def _delete_strangers(self) -> None:
        """Delete our keys that have another type than ours. The others are rewritten completely anyway."""
        types = {self._key("nodes"): b"set", self._key("events"): b"stream"}
        types |= {self._key("log", name, node.generation): b"string" for name, node in self._nodes.items()}
        pipeline = self._redis.pipeline(transaction=False)
        for key in types:
            pipeline.type(key)
        found = zip(types.items(), await pipeline.execute(), strict=True)
        for (key, ours), there in found:
            if there not in (ours, b"none"):
                await self._delete_stranger(key)

    async def _delete_stranger(self, key: str) -> None:
        log.warning("the key %s in Redis is of another type than ours: it is deleted and rewritten", key)
        await self._redis.unlink(key)

    async def _write(self) -> None:
        """Bring Redis up to date."""
        self._work.clear()
        await self._take_out()
        if time.monotonic() >= self._refresh_at_s:
            await self._refresh()
            self._refresh_at_s = time.monotonic() + self._refresh_s
        for name, node in list(self._nodes.items()):
            if not node.is_announced:
                await self._announce(name, node)
            if node.pending is None or node.is_too_long:
                await self._write_table(name, node)
            if node.pending:
                await self._append(name, node)

    async def _take_out(self) -> None:
        gone, self._gone = self._gone, {}
        for name, generation in gone.items():
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.srem(self._key("nodes"), name)
            pipeline.unlink(
                *(self._key(*parts) for parts in (("node", name), ("cursor", name), ("log", name, generation)))
            )
            self._tell(pipeline, "left", name)
            await pipeline.execute()

    async def _announce(self, name: str, node: _Node) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.sadd(self._key("nodes"), name)
        pipeline.set(self._key("node", name), node.description, px=self._ttl_ms)
        self._tell(pipeline, "joined", name)
        await pipeline.execute()
        node.is_announced = True

    async def _refresh(self) -> None:
        """Keep what we wrote from expiring, and notice when it has disappeared."""
        for name, node in list(self._nodes.items()):
            if not node.is_announced:
                continue
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.set(self._key("node", name), node.description, px=self._ttl_ms, xx=True)
            pipeline.pexpire(self._key("cursor", name), self._ttl_ms)
            pipeline.pexpire(self._key("log", name, node.generation), self._ttl_ms)
            *lease, held = await pipeline.execute()
            if not all(lease):
                node.is_announced = False
            if not (all(lease) and held) and node.length:
                node.pending = None

    async def _write_table(self, name: str, node: _Node) -> None:
        """Write the whole table to a log of a new generation. Changes made meanwhile are appended to it."""
        old, generation = node.generation, secrets.randbits(64)
        cursor_incarnation, cursor_sequence = node.incarnation, node.next_sequence
        node.pending = bytearray()
        key, length, blocks = self._key("log", name, generation), 0, bytearray()
        try:
            for part in self._blocks_of(name):
                blocks += pack_blocks(part)
                if len(blocks) >= PIECE_BYTES:
                    length = await self._grow(key, length, blocks)
                    blocks = bytearray()
                else:
                    await asyncio.sleep(0)
            if blocks:
                length = await self._grow(key, length, blocks)
        except FAILURES:
            with suppress(*FAILURES):  # otherwise it expires by itself
                await self._redis.unlink(key)
            raise
        cursor = Cursor(generation, length, cursor_incarnation, cursor_sequence)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.set(self._key("cursor", name), cursor.pack(), px=self._ttl_ms)
        pipeline.unlink(self._key("log", name, old))
        await pipeline.execute()
        node.generation, node.length, node.blocks = generation, length, length // RECORD_BYTES
        self.tables_written += 1

    async def _grow(self, key: str, length: int, records: bytearray) -> int:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.append(key, bytes(records))
        pipeline.pexpire(key, self._ttl_ms)
        new_length, _ = await pipeline.execute()
        if new_length != length + len(records):
            raise RedisError("a log has lost its beginning")
        return length + len(records)

    async def _append(self, name: str, node: _Node) -> None:
        """Write events in one transaction with the cursor that makes them valid."""
        records, node.pending = bytes(node.pending or b""), bytearray()
        length = node.length + len(records)
        cursor = Cursor(node.generation, length, node.incarnation, node.next_sequence)
        key = self._key("log", name, node.generation)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.append(key, records)
        pipeline.pexpire(key, self._ttl_ms)
        pipeline.set(self._key("cursor", name), cursor.pack(), px=self._ttl_ms)
        try:
            new_length = (await pipeline.execute())[0]
        except BaseException:  # even when cancelled: it is unknown whether it was written
            node.pending = None
            raise
        if new_length == length:
            node.length = length
        else:  # emptied by someone else
            await self._write_table(name, node)

    def _tell(self, pipeline: Any, kind: str, name: str) -> None:
        fields = {"kind": kind, "node": name}
        pipeline.xadd(self._key("events"), fields, maxlen=MAX_STREAM, approximate=True)

    def _key(self, *parts: object) -> str:
        return ":".join((self._prefix, *map(str, parts)))


def _is_of_wrong_type(error: ResponseError) -> bool:
    """Whether some command found a key of another type; a pipeline prefixes the message with the command."""
    return "WRONGTYPE" in str(error)


async def _answer(reply: object) -> Any:
    """redis-py types the replies of its two clients as one, and does not know their content."""
    return await cast("Awaitable[Any]", reply)
