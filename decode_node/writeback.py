"""Generated blocks go to the pool as they fill, so that the next turn, or a node that takes over, finds them.

Best effort and bounded: when the pool is slow or full, blocks are not stored, and nothing else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.checksum import Checksums, range_checksums
from kvstore.client import StoreClient
from mooncake.engine.kv_cache import Mirror
from mooncake.errors import MooncakeError
from mooncake.types import BlockKey, KVLayout

log = logging.getLogger(__name__)

MAX_WAITING = 256  # blocks; each is held in the cache until it is written
BATCH_BLOCKS = 8
WRITE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A block of the cache to store under ``key``. Its owner keeps it unchanged until ``done`` is called."""

    pool_address: str
    block_id: int
    key: BlockKey
    parent: bytes
    done: Callable[[], None]


class WriteBack:
    """One background task that stores filled blocks, a few at a time."""

    def __init__(self, clients: Callable[[str], StoreClient], layout: KVLayout) -> None:
        self._clients = clients
        self._layout = layout
        self._queue: asyncio.Queue[FilledBlock] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None
        self.stored = 0
        self.skipped = 0

    def start(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        while not self._queue.empty():
            self._queue.get_nowait().done()

    def offer(self, block: FilledBlock) -> None:
        """Store it soon, or never when too much waits already."""
        try:
            self._queue.put_nowait(block)
        except asyncio.QueueFull:
            self.skipped += 1
            block.done()

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    async def _run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < BATCH_BLOCKS and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            try:
                for address in dict.fromkeys(block.pool_address for block in batch):
                    await self._store(address, [block for block in batch if block.pool_address == address])
            finally:
                for block in batch:
                    block.done()

    async def _store(self, address: str, blocks: list[FilledBlock]) -> None:
        try:
            checksums = await asyncio.to_thread(self._bring_out, [block.block_id for block in blocks])
            self.stored += await self._clients(address).put_blocks(
                [(block.key, block.parent) for block in blocks],
                [self._mirror.memory[block.block_id] for block in blocks],
                checksums,
                timeout_s=WRITE_TIMEOUT_S,
            )
        except MooncakeError as error:
            self.skipped += len(blocks)
            log.info("%d blocks were not written back: %s", len(blocks), error.message)
        except Exception:  # a bug must cost these blocks, not all that come after them
            self.skipped += len(blocks)
            log.exception("%d blocks were not written back", len(blocks))

    def _bring_out(self, block_ids: list[int]) -> list[Checksums]:
        """On a thread: have the blocks in host memory; their checksums."""
        self._mirror.to_host(block_ids).wait()
        memory, num_layers = self._mirror.memory, self._layout.num_layers
        return [range_checksums(memory[block_id].data, num_layers) for block_id in block_ids]
