"""The pool's client: blocks of bytes by key over any number of store nodes, usable without the rest of the cluster.

    import kvstore

    async with await kvstore.Client.connect(["10.0.0.1:50060", "10.0.0.2:50060"], namespace=fingerprint) as pool:
        await pool.put("chunk-17", array)             # anything contiguous: bytes, numpy, a torch CPU tensor
        n = await pool.get_into("chunk-17", tensor)   # straight into the tensor's memory; None when it is not there

Blocks are immutable: putting other bytes under a stored key changes nothing; ``remove`` it first. What is not stored is
None or False, never an error; what is returned is exactly what was put. ``pool_keys`` decides which stores hold which
keys, ``pool_answers`` combines their answers. This module knows neither what the bytes mean nor how they travel.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from kvstore.block_names import checked_tenant
from kvstore.checksum import range_checksums
from kvstore.client.calls import DEFAULT_TIMEOUT_S, left_s
from kvstore.client.memory import Memory, readable, writable
from kvstore.client.pool_answers import OUTAGES, Answered, answers_of, grouped, share_s, true_anywhere
from kvstore.client.pool_keys import Key, PoolKeys
from kvstore.client.shortcuts import allowed_shortcuts
from kvstore.client.store_client import StoreClient
from kvstore.client.types import MAX_BATCH, StoreStats, renumbered, room_in
from kvstore.segment import MAX_BLOCK_BYTES
from kvstore.transfer.engine import TransferEngine
from mooncake.errors import (
    ChecksumMismatch,
    InvalidRequest,
    MooncakeError,
    NodeUnavailable,
    OutOfBlocks,
)
from mooncake.rpc.server import Channels

MAX_TIMEOUT_S = 86400.0
MAX_NAME_CHARS = 128

T = TypeVar("T")


class Client:
    """Belongs to one event loop; any number of calls may run at once.

    Every call takes ``timeout_s``, ends within it and raises nothing but ``mooncake.errors``: InvalidRequest for the
    caller's mistakes, NodeUnavailable when no store that should know answers, DeadlineExceeded, and what each method
    lists. Blocks of a store that is gone or hangs become misses unless another holds a replica: reads give each replica
    a share of the time left. A call for many keys raises when nobody answers for one of them; what it has done for the
    others stands, and repeating it is harmless.
    """

    def __init__(
        self, stores: Mapping[str, StoreClient], keys: PoolKeys, replicas: int, owned: contextlib.AsyncExitStack
    ) -> None:
        """Use ``connect`` to get one."""
        self._stores = stores
        self._keys = keys
        self._replicas = replicas
        self._owned = owned
        self._is_closed = False

    @classmethod
    async def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        namespace: str = "",
        salt: str = "",
        tenant: str = "",
        replicas: int = 1,
        secret: str = "",
        name: str = "client",
        transports: tuple[str, ...] = ("shm", "tcp"),
        streams: int = 2,
        max_mb_per_s: float = 0.0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Client:
        """A client of the stores at these gRPC addresses, once they have answered. With several ``replicas`` one store
        needs to answer within ``timeout_s``; the others are used as soon as they do. Which stores hold a block follows
        from the addresses as they are spelled: all clients must spell them alike, in any order.

        ``namespace`` is part of every key. For KV caches it is ``mooncake.hashing.kv_fingerprint(…)``: weights, dtype,
        layout, block size and adapter, so that bytes of another configuration can never be mistaken for these. ``salt``
        is part of every key too: nobody without it can ask what this tenant has stored. Puts count against the quota of
        ``tenant``. ``replicas`` is how many stores should hold each block. ``secret`` is the content of the stores'
        ``transfer.secret_file``, ``name`` what stores call this client. Raises NodeUnavailable, and InvalidRequest
        when a store requires another secret, and for names that are too long.
        """
        _check_texts(namespace=namespace, salt=salt, tenant=tenant, secret=secret, name=name)
        if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(f"a client's name has 1 to {MAX_NAME_CHARS} printable characters", "name")
        checked_tenant(tenant)
        listed = [addresses] if isinstance(addresses, str) else list(dict.fromkeys(addresses))
        keys = PoolKeys(listed, replicas, namespace, salt)
        deadline = _deadline(timeout_s)
        async with contextlib.AsyncExitStack() as opened:
            channels = Channels()
            opened.push_async_callback(channels.close)
            transfer = TransferEngine(name, transports, streams, max_mb_per_s, secret.strip())
            opened.callback(transfer.close)
            shortcuts = allowed_shortcuts(transports, max_mb_per_s)
            stores = {address: StoreClient(address, transfer, channels, tenant, *shortcuts) for address in listed}
            opened.push_async_callback(lambda: asyncio.gather(*(store.close() for store in stores.values())))
            answers = await answers_of([store.knock(timeout_s=left_s(deadline)) for store in stores.values()])
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            for error in errors:
                if replicas == 1 or len(errors) == len(stores) or not isinstance(error, OUTAGES):
                    raise error
            return cls(stores, keys, replicas, opened.pop_all())

    async def close(self) -> None:
        """Waits briefly for background work (the ends of leases), then closes all connections. Later calls raise
        NodeUnavailable."""
        self._is_closed = True
        await self._owned.aclose()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # One block

    async def put(
        self,
        key: Key,
        data: Memory,
        *,
        ranges: int = 1,
        parent: Key = b"",
        durable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> bool:
        """Store ``data``. True when it is stored afterwards, even if it was before.

        ``ranges`` is the number of equal parts (layers) with a checksum each, so that they can be read individually.
        With ``parent``, stores evict this block before that one. With ``durable`` it has reached an SSD when this
        returns. Raises OutOfBlocks when no store has room, or not durably, or the tenant's quota is used up.
        """
        deadline = self._begin(timeout_s)
        if self._replicas == 1 and not durable:
            wire, view = self._keys.wire(key), readable(data)
            above = self._keys.wire(parent) if parent else b""
            home = self._stores[self._keys.homes(wire)[0]]
            placed = await home.shortcuts.put((wire, above), view, ranges, timeout_s)
            if placed is not None:
                return placed
        [stored] = await self.put_batch(
            [(key, data)], ranges=ranges, parents=[parent], durable=durable, timeout_s=left_s(deadline)
        )
        return stored

    async def get(self, key: Key, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytearray | None:
        """The bytes stored under ``key``, or None. The caller owns them."""
        [data] = await self.get_batch([key], timeout_s=timeout_s)
        return data

    async def get_into(self, key: Key, into: Memory, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | None:
        """Like ``get``, but into the caller's memory: writable, contiguous, at least as long as the block.

        Returns the block's length in bytes, or None. After None or an error the content of ``into`` is undefined.
        Raises InvalidRequest when the block is longer.
        """
        self._begin(timeout_s)
        if self._replicas == 1:
            wire = self._keys.wire(key)
            home = self._stores[self._keys.homes(wire)[0]]
            length = home.shortcuts.get_here(wire, into)
            return length if length is not None else await home.get_one(wire, writable(into), timeout_s=timeout_s)
        [length] = await self.get_batch_into([key], [into], timeout_s=timeout_s)
        return length

    async def get_range(
        self, key: Key, offset: int, length: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bytearray | None:
        """``length`` bytes from ``offset`` on, or None. Raises InvalidRequest when the block is not as long.

        Verified like whole blocks: the store reads the run of checksummed ranges around it (see ``put``), so reading a
        layer of a block that was put with one range per layer moves only that layer.
        """
        if not 1 <= length <= MAX_BLOCK_BYTES:
            raise InvalidRequest(f"a range has 1 to {MAX_BLOCK_BYTES} bytes, got {length}", "length")
        into = bytearray(length)
        return into if await self.get_range_into(key, offset, into, timeout_s=timeout_s) else None

    async def get_range_into(
        self, key: Key, offset: int, into: Memory, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bool:
        """Like ``get_range``, but into the caller's memory, directly where it covers whole ranges."""
        deadline = self._begin(timeout_s)
        wire, view = self._keys.wire(key), writable(into)
        if offset < 0 or view.nbytes < 1:
            raise InvalidRequest("a range begins at 0 or later and has at least one byte", "offset")
        return await self._read_range(wire, offset, view, deadline)

    # Many blocks

    async def put_batch(
        self,
        items: Iterable[tuple[Key, Memory]],
        *,
        ranges: int = 1,
        parents: Sequence[Key] | None = None,
        durable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[bool]:
        """``put`` for each (key, data), in few messages. Returns for each whether it is stored afterwards. Of several
        items with the same key the first is put.

        Raises OutOfBlocks when there was room for none of those that were not stored already.
        """
        deadline = self._begin(timeout_s)
        listed = list(items)
        views = _checked_views([data for _, data in listed])
        names = self._names([key for key, _ in listed], parents)
        sums = await _off_loop(lambda: [range_checksums(view, ranges) for view in views], sum(v.nbytes for v in views))
        first: dict[bytes, int] = {}
        for index, (wire, _) in enumerate(names):
            first.setdefault(wire, index)
        groups = grouped(((home, views[i].nbytes), i) for wire, i in first.items() for home in self._keys.homes(wire))
        left = left_s(deadline)
        calls = [
            self._stores[address].put_all(
                [names[i] for i in mine],
                [views[i] for i in mine],
                [sums[i] for i in mine],
                durable=durable,
                timeout_s=left,
            )
            for (address, _), mine in groups
        ]
        answers = await answers_of(calls)
        full = [answer for answer in answers if isinstance(answer, OutOfBlocks)]
        taken = [
            [False] * len(mine) if isinstance(answer, OutOfBlocks) else answer
            for (_, mine), answer in zip(groups, answers, strict=True)
        ]
        stored = true_anywhere(groups, taken, len(listed))
        if full and not any(stored):
            raise full[0]
        return [stored[first[wire]] for wire, _ in names]

    async def get_batch(self, keys: Sequence[Key], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bytearray | None]:
        """``get`` for each key, in few messages and transfers."""
        buffers: list[bytearray | None] = [None] * len(keys)

        def room(index: int, length: int) -> memoryview:
            buffers[index] = buffer = bytearray(length)
            return memoryview(buffer)

        lengths = await self._get(keys, room, self._begin(timeout_s))
        return [buffer if length is not None else None for buffer, length in zip(buffers, lengths, strict=True)]

    async def get_batch_into(
        self, keys: Sequence[Key], into: Sequence[Memory], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[int | None]:
        """``get_into`` for each key and its memory, in few messages and transfers."""
        if len(keys) != len(into):
            raise InvalidRequest("get_batch_into needs memory for each key")
        views = [writable(memory) for memory in into]

        def room(index: int, length: int) -> memoryview:
            return room_in(views[index], length)

        return await self._get(keys, room, self._begin(timeout_s))

    async def exists(self, keys: Sequence[Key], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Whether each is stored anywhere now. Protects and renews nothing: it may be gone by the time you ask for
        it."""
        self._begin(timeout_s)
        wires = self._keys.wires(keys)
        if len(self._stores) == 1 and len(wires) <= MAX_BATCH:
            [store] = self._stores.values()
            return await store.exists(wires, timeout_s=timeout_s)
        groups = grouped((home, index) for index, wire in enumerate(wires) for home in self._keys.homes(wire))
        calls = [self._stores[a].exists([wires[i] for i in mine], timeout_s=timeout_s) for a, mine in groups]
        return true_anywhere(groups, await answers_of(calls), len(wires))

    async def remove(self, keys: Sequence[Key], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Make blocks unreadable in every store, also after a restart. Returns how many replicas there were.

        Raises NodeUnavailable when a store did not answer: it may have kept its replicas; or when its SSD refuses to
        record it: after a restart it may find them again.
        """
        self._begin(timeout_s)
        wires = self._keys.wires(keys)
        groups = grouped((address, index) for index in range(len(wires)) for address in self._stores)
        calls = [self._stores[a].remove([wires[i] for i in mine], timeout_s=timeout_s) for a, mine in groups]
        return sum(await asyncio.gather(*calls))

    async def pin(
        self, keys: Sequence[Key], *, hard: bool = False, ttl_s: float = 600.0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        """Keep blocks in DRAM for ``ttl_s``: a soft pin while anything else can be evicted, a hard one without
        exception.

        Returns how many replicas are pinned. Raises OutOfBlocks when hard pins would take more than half of a store.
        """
        self._begin(timeout_s)
        return await self._on_replicas(keys, lambda s, mine: s.pin(mine, hard=hard, ttl_s=ttl_s, timeout_s=timeout_s))

    async def unpin(self, keys: Sequence[Key], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Returns how many replicas were pinned."""
        self._begin(timeout_s)
        return await self._on_replicas(keys, lambda s, mine: s.unpin(mine, timeout_s=timeout_s))

    async def stats(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, StoreStats]:
        """The accounts of each store, by address. Raises NodeUnavailable when one does not answer."""
        self._begin(timeout_s)
        answers = await asyncio.gather(*(store.stats(timeout_s=timeout_s) for store in self._stores.values()))
        return dict(zip(self._stores, answers, strict=True))

    def _names(self, keys: Sequence[Key], parents: Sequence[Key] | None) -> list[tuple[bytes, bytes]]:
        """(key, parent) of each block, as stores know them. Raises InvalidRequest."""
        if parents is None:
            parents = [b""] * len(keys)
        elif len(parents) != len(keys):
            raise InvalidRequest(f"{len(keys)} blocks need as many parents, got {len(parents)}", "parents")
        above = [self._keys.wire(parent) if parent else b"" for parent in parents]
        return list(zip(self._keys.wires(keys), above, strict=True))

    def _begin(self, timeout_s: float) -> float:
        """The deadline of a call that starts now. Raises InvalidRequest, or NodeUnavailable after ``close``."""
        if self._is_closed:
            raise NodeUnavailable("this client of the pool has been closed")
        return _deadline(timeout_s)

    async def _on_replicas(
        self, keys: Sequence[Key], call: Callable[[StoreClient, list[bytes]], Awaitable[int]]
    ) -> int:
        wires = self._keys.wires(keys)
        groups = grouped((home, index) for index, wire in enumerate(wires) for home in self._keys.homes(wire))
        return sum(await asyncio.gather(*(call(self._stores[a], [wires[i] for i in mine]) for a, mine in groups)))

    async def _read_range(self, wire: bytes, offset: int, view: memoryview, deadline: float) -> bool:
        """From the first store that has it. Raises what went wrong when no store could answer."""
        failure: MooncakeError | None = None
        has_answer = False
        for turn, address in enumerate(self._keys.homes(wire)):
            try:
                left = share_s(deadline, self._replicas - turn)
                if await self._stores[address].ranges.get_range_into(wire, offset, view, timeout_s=left):
                    return True
                has_answer = True
            except ChecksumMismatch:  # that store has dropped it
                has_answer = True
            except OUTAGES as error:
                failure = failure or error
        if failure is not None and not has_answer:
            raise failure
        return False

    # Batches

    async def _get(
        self, keys: Sequence[Key], room: Callable[[int, int], memoryview], deadline: float
    ) -> list[int | None]:
        """Read blocks into the memory that ``room(index, length)`` returns; those a store lacks, from the next one."""
        wires = self._keys.wires(keys)
        homes = [self._keys.homes(wire) for wire in wires]
        lengths: list[int | None] = [None] * len(wires)
        answered = Answered()
        for turn in range(self._replicas):
            groups = grouped((homes[index][turn], index) for index, length in enumerate(lengths) if length is None)
            left = share_s(deadline, self._replicas - turn)
            calls = [
                self._stores[address].get_all([wires[i] for i in mine], renumbered(room, mine), timeout_s=left)
                for address, mine in groups
            ]
            for (_, mine), answer in zip(groups, await answers_of(calls), strict=True):
                for index, length in answered.of(mine, answer):
                    lengths[index] = length
            if None not in lengths:
                break
        answered.check()
        return lengths


def _deadline(timeout_s: float) -> float:
    """Raises InvalidRequest."""
    if not abs(timeout_s) <= MAX_TIMEOUT_S:  # also false for NaN
        raise InvalidRequest(f"a call may take {MAX_TIMEOUT_S:g} seconds at most, not {timeout_s}", "timeout_s")
    return time.monotonic() + timeout_s


def _check_texts(**texts: str) -> None:
    """Raises InvalidRequest."""
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} must be text that UTF-8 can encode", name) from None


def _checked_views(data: Sequence[Memory]) -> list[memoryview]:
    """Raises InvalidRequest."""
    views = [readable(each) for each in data]
    if (longest := max((view.nbytes for view in views), default=0)) > MAX_BLOCK_BYTES:
        raise InvalidRequest(f"a block has {MAX_BLOCK_BYTES} bytes at most, got {longest}", "data")
    return views


async def _off_loop(work: Callable[[], T], nbytes: int) -> T:
    """In a thread if it takes long enough for others to notice."""
    return await asyncio.to_thread(work) if nbytes > 1 << 20 else work()
