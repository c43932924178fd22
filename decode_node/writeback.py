"""Writes generated blocks to the pool as they fill, so that the next turn, or a node that takes over, finds them.

Best effort and bounded: when the pool is slow or full, blocks are not stored, and nothing else is affected. A pool that
does not answer is offered nothing for a while, because blocks waiting for it occupy the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.checksum import Checksums, range_checksums
from kvstore.client.store_client import StoreClient
from mooncake.engine.cache.kv_cache import Mirror
from mooncake.errors import DeadlineExceeded, MooncakeError, NodeUnavailable
from mooncake.types import BlockKey, KVLayout
from mooncake.vital import vital

log = logging.getLogger(__name__)

MAX_WAITING = 256  # blocks; each is held in the cache until it is written
WAITING_SHARE = 1 / 8  # at most this fraction of the cache, or one batch
BATCH_BLOCKS = 8  # stored with one call
WRITE_TIMEOUT_S = 5.0
BACKOFF_S = 10.0  # for which a pool that did not answer is offered nothing


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

    def __init__(
        self,
        clients: Callable[[str], StoreClient],
        layout: KVLayout,
        mirror: Mirror,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self._clients = clients
        self._layout = layout
        self._mirror = mirror
        self._write_timeout_s = write_timeout_s
        self._backoff_s = backoff_s
        self._queue: asyncio.Queue[FilledBlock] = asyncio.Queue()
        self._max_waiting = min(MAX_WAITING, max(BATCH_BLOCKS, int(len(mirror.memory) * WAITING_SHARE)))
        self._backoff_until: dict[str, float] = {}  # by pool address
        self._task: asyncio.Task[None] | None = None
        self.stored = 0
        self.skipped = 0

    def start(self) -> None:
        self._task = vital(self._run(), "write-back")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        while not self._queue.empty():
            self._queue.get_nowait().done()

    def offer(self, block: FilledBlock) -> None:
        """Store it soon, or never if too many wait already or its pool has just not answered."""
        if self._queue.qsize() >= self._max_waiting or self._is_backing_off(block.pool_address):
            self._skip(block)
        else:
            self._queue.put_nowait(block)

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
            checksums = await asyncio.to_thread(self._copy_out, [block.block_id for block in blocks])
            self.stored += await self._clients(address).put_blocks(
                [(block.key, block.parent) for block in blocks],
                [self._mirror.memory[block.block_id] for block in blocks],
                checksums,
                timeout_s=self._write_timeout_s,
            )
        except (DeadlineExceeded, NodeUnavailable) as error:
            self.skipped += len(blocks)
            log.info(
                "%d blocks were not written back, and none for %g s: %s", len(blocks), self._backoff_s, error.message
            )
            self._back_off(address)
        except MooncakeError as error:
            self.skipped += len(blocks)
            log.info("%d blocks were not written back: %s", len(blocks), error.message)
        except Exception:  # a bug must cost these blocks, not all that come after them
            self.skipped += len(blocks)
            log.exception("%d blocks were not written back", len(blocks))

    def _is_backing_off(self, address: str) -> bool:
        return time.monotonic() < self._backoff_until.get(address, 0.0)

    def _back_off(self, address: str) -> None:
        """Offer this pool nothing for a while, and drop what waits for it."""
        now = time.monotonic()
        self._backoff_until = {other: until for other, until in self._backoff_until.items() if until > now}
        self._backoff_until[address] = now + self._backoff_s
        for _ in range(self._queue.qsize()):
            block = self._queue.get_nowait()
            if block.pool_address == address:
                self._skip(block)
            else:
                self._queue.put_nowait(block)

    def _skip(self, block: FilledBlock) -> None:
        self.skipped += 1
        block.done()

    def _copy_out(self, block_ids: list[int]) -> list[Checksums]:
        """On a thread: copy the blocks to host memory. Returns their checksums."""
        self._mirror.to_host(block_ids).wait()
        memory, num_layers = self._mirror.memory, self._layout.num_layers
        return [range_checksums(memory[block_id].data, num_layers) for block_id in block_ids]
