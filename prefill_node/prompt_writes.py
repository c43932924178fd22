"""The writes of one prompt's KV: to the decode node that continues it, and to the pool.

Neither begins before the prompt's first step: a decode node's blocks are not held while a request queues here, and a
reservation in the pool would expire. Everything runs on the event loop; the engine's hook fills the streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.client.store_client import StoreClient
from mooncake.engine.engine import Engine
from mooncake.rpc import prefill_pb2 as pb
from mooncake.types import BlockKey, SampledToken
from prefill_node.deadline import CONTROL_TIMEOUT_S, Deadline
from prefill_node.handoff import HandoffSender
from prefill_node.kv_writer import WriteStream
from prefill_node.pool_write import PoolWrite
from prefill_node.resources import NodeResources


class PromptWrites:
    """``to_decode`` and ``to_pool`` once each; then ``stop``, ``close_streams`` and ``close``, whatever happened."""

    def __init__(
        self, node: NodeResources, request: pb.PrefillRequest, keys: Sequence[BlockKey], deadline: Deadline
    ) -> None:
        """``keys``: of the prompt's full blocks."""
        self._node = node
        self._request = request
        self._keys = keys
        self._deadline = deadline
        self._has_started = asyncio.Event()
        self._opening: dict[WriteStream, asyncio.Task[None]] = {}
        self._sealing: asyncio.Task[None] | None = None
        self.handoff: HandoffSender | None = None
        self.pool: PoolWrite | None = None

    def to_decode(self, num_tokens: int) -> None:
        self.handoff = HandoffSender(self._node, self._request, num_tokens, self._deadline)
        self._opening[self.handoff.stream] = asyncio.create_task(self._open_handoff(self.handoff))

    def to_pool(self, store: StoreClient, name: str, first: int, num_exact: Callable[[], int | None]) -> None:
        """Store the prompt's full blocks from ``first`` on. ``num_exact`` is asked when the prompt's first step begins:
        how many leading tokens may be stored; None: all."""
        self.pool = PoolWrite(self._node, store, name, self._keys, self._deadline)
        self._opening[self.pool.stream] = asyncio.create_task(self._open_pool(self.pool, first, num_exact))

    @property
    def streams(self) -> list[WriteStream]:
        return [write.stream for write in (self.handoff, self.pool) if write is not None]

    @property
    def retain_blocks(self) -> Callable[[list[int]], None] | None:
        """For a sequence that continues here: keeps its blocks unchanged until they are stored."""
        return self.pool.retain_blocks if self.pool is not None and self.handoff is None else None

    @property
    def last_full_token(self) -> int:
        """The last token of the last full block: what follows it needs the windows it sees."""
        return len(self._keys) * self._node.host.cache_size.layout.block_tokens - 1

    @property
    def first_pages(self) -> tuple[int, ...]:
        """For each group of layers, the first block whose page is needed elsewhere: windows are handed over, and
        stored, only at the prompt's end."""
        groups, block_tokens = self._node.host.cache_size.groups, self._node.host.cache_size.layout.block_tokens
        return tuple(groups.first_page(g, self.last_full_token, block_tokens) for g in range(groups.num_groups))

    def start(self) -> None:
        """The prompt's first step begins: open everything."""
        self._has_started.set()

    def start_sealing(self) -> None:
        """The prompt is computed: seal the pool's blocks in the background."""
        self._sealing = asyncio.create_task(self._seal())

    async def commit(self, first_tokens: list[SampledToken], num_exact: int | None) -> None:
        """Let the decode node continue, if there is one. Raises MooncakeError."""
        if self.handoff is not None:
            await self.handoff.commit(first_tokens, num_exact)

    async def wait_sealed(self, timeout_s: float) -> None:
        if self._sealing is not None:
            await asyncio.wait([self._sealing], timeout=timeout_s)

    async def stop(self) -> None:
        """Store what has been computed, for a while; then start nothing more."""
        await self.wait_sealed(CONTROL_TIMEOUT_S)
        if self._sealing is not None:
            self._sealing.cancel()
        for task in self._opening.values():
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)

    async def close_streams(self) -> None:
        """Return once no write is in progress."""
        for stream in self.streams:
            if stream.is_written:  # as nearly always
                stream.close()
            else:
                await asyncio.to_thread(stream.close)

    def release_blocks(self, engine: Engine) -> None:
        """On the engine's thread, after ``close_streams``. Idempotent."""
        if self.pool is not None:
            self.pool.release_blocks(engine)

    async def close(self) -> None:
        """Tell the peers, who may be slow: neither waits for the other to be told."""
        await asyncio.gather(*(write.close() for write in (self.handoff, self.pool) if write is not None))

    async def _open_handoff(self, handoff: HandoffSender) -> None:
        await self._has_started.wait()
        await handoff.open()

    async def _open_pool(self, pool: PoolWrite, first: int, num_exact: Callable[[], int | None]) -> None:
        await self._has_started.wait()
        exact, block_tokens = num_exact(), self._node.host.cache_size.layout.block_tokens
        end = len(self._keys) if exact is None else exact // block_tokens
        await pool.open(first, end, self.first_pages, into_dram=self._request.HasField("pool_tokens"))

    async def _seal(self) -> None:
        if self.pool is not None:
            await self._opening[self.pool.stream]
            await self.pool.seal()
