"""Where one prompt's KV goes: to the decode node that continues it, and to the pool.

Neither is opened before the request's turn has come: a decode node's blocks are not held while a request queues here,
and a reservation in the pool would expire. Everything runs on the event loop; the engine's hook fills the sinks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.client import StoreClient
from mooncake.engine.engine import Engine
from mooncake.rpc import prefill_pb2 as pb
from mooncake.types import BlockKey, SampledToken
from prefill_node.deadline import Deadline
from prefill_node.handoff import Handoff
from prefill_node.leases import CONTROL_TIMEOUT_S
from prefill_node.outbox import Outbox, Sink
from prefill_node.pool_write import PoolWrite
from prefill_node.workshop import Workshop


class Outlets:
    """``to_decode`` and ``to_pool`` once each; then ``stop``, ``close_sinks`` and ``close``, whatever happened."""

    def __init__(
        self, shop: Workshop, request: pb.PrefillRequest, keys: Sequence[BlockKey], deadline: Deadline
    ) -> None:
        """``keys``: of the prompt's full blocks."""
        self._shop = shop
        self._request = request
        self._keys = keys
        self._deadline = deadline
        self._has_started = asyncio.Event()
        self._opening: dict[Sink, asyncio.Task[None]] = {}
        self._sealing: asyncio.Task[None] | None = None
        self.handoff: Handoff | None = None
        self.pool: PoolWrite | None = None

    def to_decode(self, num_tokens: int) -> None:
        self.handoff = Handoff(self._shop, self._request, num_tokens, self._deadline)
        self._opening[self.handoff.sink] = asyncio.create_task(self._open_handoff(self.handoff))

    def to_pool(self, store: StoreClient, name: str, first: int, num_exact: Callable[[], int | None]) -> None:
        """Store the prompt's full blocks from ``first`` on. ``num_exact`` is asked when the request's turn has come:
        how many leading tokens may be stored; None: all."""
        self.pool = PoolWrite(self._shop, store, name, self._keys, self._deadline)
        self._opening[self.pool.sink] = asyncio.create_task(self._open_pool(self.pool, first, num_exact))

    @property
    def sinks(self) -> list[tuple[Sink, Outbox]]:
        handoff = [] if self.handoff is None else [(self.handoff.sink, self._shop.handoffs)]
        return handoff if self.pool is None else [*handoff, (self.pool.sink, self._shop.stores)]

    @property
    def hold(self) -> Callable[[list[int]], None] | None:
        """What keeps blocks unchanged until they are stored, for a sequence that continues here."""
        return self.pool.hold if self.pool is not None and self.handoff is None else None

    @property
    def last_full_token(self) -> int:
        """The last token of the last full block: what follows it needs the windows it sees."""
        return len(self._keys) * self._shop.host.plan.layout.block_tokens - 1

    @property
    def first_pages(self) -> tuple[int, ...]:
        """For each group, the first block whose page is needed elsewhere: windows are handed on, and stored, only at
        the prompt's end."""
        groups, block_tokens = self._shop.host.plan.groups, self._shop.host.plan.layout.block_tokens
        return tuple(groups.first_page(g, self.last_full_token, block_tokens) for g in range(groups.num_groups))

    def start(self) -> None:
        """The request's turn has come: open everything."""
        self._has_started.set()

    def computed(self) -> None:
        """Everything has been computed: seal the pool's blocks in the background."""
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

    async def close_sinks(self) -> None:
        """Return once no write is in progress."""
        for sink, _ in self.sinks:
            await asyncio.to_thread(sink.close)

    def let_go(self, engine: Engine) -> None:
        """On the engine's thread, after ``close_sinks``. Idempotent."""
        if self.pool is not None:
            self.pool.let_go(engine)

    async def close(self) -> None:
        """Tell the peers, who may be slow."""
        if self.handoff is not None:
            await self.handoff.close()
        if self.pool is not None:
            await self.pool.close()

    async def _open_handoff(self, handoff: Handoff) -> None:
        await self._has_started.wait()
        await handoff.open()

    async def _open_pool(self, pool: PoolWrite, first: int, num_exact: Callable[[], int | None]) -> None:
        await self._has_started.wait()
        exact, block_tokens = num_exact(), self._shop.host.plan.layout.block_tokens
        end = len(self._keys) if exact is None else exact // block_tokens
        await pool.open(first, end, self.first_pages, into_dram=self._request.HasField("pool_tokens"))

    async def _seal(self) -> None:
        if self.pool is not None:
            await self._opening[self.pool.sink]
            await self.pool.seal()
