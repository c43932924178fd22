"""A client of one store, apart from any pool."""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import Buffer

from kvstore.checksum import checksums_of
from kvstore.client.calls import DEFAULT_TIMEOUT_S
from kvstore.client.shortcuts import allowed_shortcuts
from kvstore.client.store_client import StoreClient
from kvstore.client.types import room_in
from kvstore.transfer.engine import TransferEngine
from mooncake.rpc.server import Channels


class LoneStoreClient(StoreClient):
    """With an engine and channels of its own, which ``close`` closes too."""

    def __init__(self, address: str, name: str, transports: tuple[str, ...], max_mb_per_s: float, tenant: str) -> None:
        self._engine = TransferEngine(name, transports, max_mb_per_s=max_mb_per_s)
        self._channels = Channels()
        super().__init__(address, self._engine, self._channels, tenant, *allowed_shortcuts(transports, max_mb_per_s))

    async def close(self) -> None:
        await super().close()
        await self._channels.close()
        self._engine.close()

    async def put(
        self,
        key: bytes,
        data: Buffer,
        parent: bytes = b"",
        *,
        durable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> bool:
        """``put_all`` for one block with one checksum."""
        view = memoryview(data).cast("B")
        sums = [checksums_of([view])]
        [stored] = await self.put_all([(key, parent)], [view], sums, durable=durable, timeout_s=timeout_s)
        return stored

    async def get(self, key: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """The bytes of a block, read under a lease: not from the store's board, nor by key. None for a corrupt one."""
        data = bytearray()

        def room(_: int, length: int) -> memoryview:
            nonlocal data
            data = bytearray(length)
            return memoryview(data)

        return None if await self._get(key, room, timeout_s) is None else bytes(data)

    async def get_into(self, key: bytes, into: Buffer, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | None:
        """Likewise; the length."""
        view = memoryview(into).cast("B")
        return await self._get(key, lambda _, length: room_in(view, length), timeout_s)

    async def _get(self, key: bytes, room: Callable[[int, int], memoryview], timeout_s: float) -> int | None:
        [length] = await self._get_leased([key], room, time.monotonic() + timeout_s)
        return length


async def connect_store(
    address: str,
    *,
    name: str = "client",
    transports: tuple[str, ...] = ("shm", "tcp"),
    max_mb_per_s: float = 0.0,
    tenant: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> LoneStoreClient:
    """Once the store answers. Raises what ``StoreClient.knock`` does."""
    client = LoneStoreClient(address, name, transports, max_mb_per_s, tenant)
    try:
        await client.knock(timeout_s=timeout_s)
    except BaseException:
        await client.close()
        raise
    return client
