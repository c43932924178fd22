"""Copies hot prefixes between stores: the store that should have a prefix reads it from one that has it.

In the background, a few blocks at a time, verified like any other put. It knows keys and addresses; the conductor
decides which prefix is worth a copy and when to drop it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from kvstore.block_names import checked_key
from kvstore.client.store_client import StoreClient
from kvstore.client.types import Lease, StoredBlock
from kvstore.index.types import OWN, BlockName
from kvstore.segment import Segment
from kvstore.store import Store
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.requests import ReadRange
from kvstore.transfer.transport import Priority
from kvstore.writing import Sealing, Wanted
from mooncake.addresses import check_address
from mooncake.config import Config, transfer_secret
from mooncake.errors import InvalidRequest, KVLoadFailed, MooncakeError, OutOfBlocks
from mooncake.rpc import replica_pb2 as pb
from mooncake.rpc import replica_pb2_grpc
from mooncake.rpc.server import Channels, remaining_s
from mooncake.types import BlockKey

COPIER = f"{OWN}copies"  # the writer of blocks copied from other stores
MAX_BLOCKS = 32768  # of one prefix
BLOCKS_A_TURN = 16  # leased, read and sealed together
MAX_FETCHES = 2  # at once
DEFAULT_TIMEOUT_S = 30.0


class ReplicaServicer(replica_pb2_grpc.ReplicaServicer):
    """Runs on the store's event loop. ``close`` ends what it opened. Raises ConfigError without a usable transport."""

    def __init__(self, node_id: str, config: Config, segment: Segment, store: Store) -> None:
        transfer = config.transfer
        self._transfer = TransferEngine(
            f"{node_id}/copies", transfer.transports, transfer.streams, transfer.max_mb_per_s, transfer_secret(config)
        )
        self._transfer.check_usable()
        self._channels = Channels()
        self._segment = segment
        self._store = store
        self._turns = asyncio.Semaphore(MAX_FETCHES)

    async def close(self) -> None:
        await self._channels.close()
        self._transfer.close()

    async def GiveUp(self, request: pb.GiveUpRequest, context: Any) -> pb.GiveUpResponse:  # noqa: N802
        return pb.GiveUpResponse(given_up=self._store.give_up(_checked_keys(request.keys)))

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> pb.FetchResponse:  # noqa: N802
        keys = _checked_keys(request.keys)
        deadline = time.monotonic() + remaining_s(context, DEFAULT_TIMEOUT_S)
        copied = 0
        async with StoreClient(check_address(request.source), self._transfer, self._channels) as source, self._turns:
            for first in range(0, len(keys), BLOCKS_A_TURN):
                turn = keys[first : first + BLOCKS_A_TURN]
                copied += await self._copy(source, turn, keys[first - 1] if first else b"", deadline)
                if not all(self._store.exists(turn)):
                    break
        held = next((at for at, there in enumerate(self._store.exists(keys)) if not there), len(keys))
        return pb.FetchResponse(held=held, copied=copied)

    async def _copy(self, source: StoreClient, keys: list[BlockKey], parent: bytes, deadline: float) -> int:
        """Copy what is missing here of a run of blocks. Returns how many were copied."""
        if all(self._store.exists(keys)):
            return 0
        lease = await source.ranges.acquire(keys, timeout_s=max(deadline - time.monotonic(), 0.0))
        try:
            return await self._copy_leased(lease, keys, parent, min(deadline, lease.expires_s))
        finally:
            await source.ranges.finish(lease)

    async def _copy_leased(self, lease: Lease, keys: list[BlockKey], parent: bytes, deadline: float) -> int:
        if not lease.blocks:
            return 0
        _check_alike(lease.blocks, len(keys))
        parents = [parent, *keys]
        names = [BlockName(key, parents[at]) for at, key in enumerate(keys[: len(lease.blocks)])]
        block = lease.blocks[0]
        try:
            offers = await self._store.reserve(Wanted(names, COPIER, block.length, len(block.checksums)))
        except OutOfBlocks:
            return 0
        wanted = [(leased, offer.grant) for leased, offer in zip(lease.blocks, offers, strict=True) if offer.grant]
        ranges = [
            ReadRange(leased.slot, 0, self._segment.range(grant.slot, 0, block.length)) for leased, grant in wanted
        ]
        try:
            await self._transfer.read_async(lease.segment, ranges, deadline, Priority.BACKGROUND)
            with contextlib.suppress(MooncakeError):
                sealed = await self._store.seal([Sealing(grant, leased.checksums) for leased, grant in wanted])
                return sum(one.is_sealed for one in sealed)
            return 0
        finally:  # no effect on those that have been sealed
            self._store.abort(grant for _, grant in wanted)


def _checked_keys(keys: Sequence[bytes]) -> list[BlockKey]:
    """Raises InvalidRequest unless the keys are a prefix."""
    if not 1 <= len(keys) <= MAX_BLOCKS:
        raise InvalidRequest(f"a prefix has 1 to {MAX_BLOCKS} blocks, got {len(keys)}", "keys")
    return [checked_key(key) for key in keys]


def _check_alike(blocks: Sequence[StoredBlock], num_keys: int) -> None:
    """Raises KVLoadFailed unless the source's answer is valid: no more blocks than requested, all of one model, with
    one length and number of checksums. The source may be anybody."""
    if len(blocks) > num_keys or len({(block.length, len(block.checksums)) for block in blocks}) > 1:
        raise KVLoadFailed("the store to copy from answers with blocks that are not what was asked for")
