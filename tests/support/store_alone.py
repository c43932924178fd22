"""A client of one store, apart from any pool."""

from __future__ import annotations

from kvstore.client.calls import DEFAULT_TIMEOUT_S
from kvstore.client.shortcuts import allowed_shortcuts
from kvstore.client.store_client import StoreClient
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


async def connect_store(
    address: str,
    *,
    name: str = "client",
    transports: tuple[str, ...] = ("shm", "tcp"),
    max_mb_per_s: float = 0.0,
    tenant: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> StoreClient:
    """Once the store answers. Raises what ``StoreClient.knock`` does."""
    client = LoneStoreClient(address, name, transports, max_mb_per_s, tenant)
    try:
        await client.knock(timeout_s=timeout_s)
    except BaseException:
        await client.close()
        raise
    return client
