"""Stores a prompt's blocks in the pool. Best effort: storing never causes an error or a wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from kvstore.client.store_client import StoreClient
from kvstore.client.types import Reservation
from mooncake.engine.engine import Engine
from mooncake.errors import MooncakeError, as_ours, lacks_memory
from mooncake.page_groups import page_key, page_number
from mooncake.types import BlockKey
from prefill_node.deadline import CONTROL_TIMEOUT_S, Deadline
from prefill_node.kv_writer import Destination, WriteStream
from prefill_node.resources import NodeResources

log = logging.getLogger(__name__)


class PoolWrite:
    """Call ``open`` when the prompt's first step begins, ``seal`` when everything is computed, ``close`` in any
    case."""

    def __init__(
        self, node: NodeResources, store: StoreClient, request_id: str, keys: Sequence[BlockKey], deadline: Deadline
    ) -> None:
        """``keys``: of the prompt's full blocks."""
        self._node = node
        self._store = store
        self._request_id = request_id
        self._keys = keys
        self._deadline = deadline
        self._layout = node.host.cache_size.layout
        self._groups = node.host.cache_size.groups
        self._reserved: list[Reservation | None] = []
        self._reservations: dict[int, Reservation] = {}  # by page number
        self._is_sealed = False
        self._retained: list[int] = []  # blocks of a sequence that continues here, each with one reference of ours
        self.stream = WriteStream(f"pool write {request_id}", self._layout, deadline.at_s, node.pool_writer)

    async def open(self, first: int, end: int, first_pages: Sequence[int], into_dram: bool) -> None:
        """Reserve blocks ``first`` to ``end`` and start sending what is computed; a block without a slot is not stored.

        For each group of layers with a window: the pages from the group's ``first_pages`` on. ``into_dram``: store also
        what the pool has on its SSD, because reading it from there is too slow.
        """
        parents: list[bytes] = [b"", *self._keys]
        wanted = [(0, index) for index in range(first, end)]
        for group in range(1, self._groups.num_groups):  # evicted before their block, without which they are useless
            wanted += [(group, index) for index in range(max(first, first_pages[group]), end)]
        blocks = [(page_key(self._keys[i], group), self._keys[i] if group else parents[i]) for group, i in wanted]
        if not blocks:
            return
        try:
            self._reserved = await self._store.ranges.reserve(
                blocks,
                self._layout.block_bytes,
                self._layout.num_layers,
                into_dram=into_dram,
                timeout_s=CONTROL_TIMEOUT_S,
            )
            found = zip(wanted, self._reserved, strict=True)
            self._reservations = {page_number(*page): slot for page, slot in found if slot is not None}
            if not self._reservations:
                return
            segment = next(iter(self._reservations.values())).segment
            slots = {page: (slot.index, slot.epoch) for page, slot in self._reservations.items()}
            self.stream.open(Destination(segment, slots))
            self.stream.writer.kick(self.stream)
        except MooncakeError as error:
            log.info("%s: not stored: %s", self._request_id, error.message)
            self.stream.fail(error)
        except Exception as error:  # otherwise whoever seals would wait for the stream until the deadline
            log.exception("%s: not stored", self._request_id)
            self.stream.fail(as_ours(error, self.stream.name))

    async def seal(self) -> None:
        """Wait until every block has been written, then let others read them."""
        try:
            if self._reservations:
                await self._deadline.wait_for(asyncio.wrap_future(self.stream.done))
            self._node.host.thread.call(self.release_blocks)
            if not self._reservations:
                return
            sums = self.stream.checksums
            sealings = [(slot, sums[page]) for page, slot in self._reservations.items() if page in sums]
            await self._store.ranges.seal(sealings, timeout_s=CONTROL_TIMEOUT_S)
            self._is_sealed = True
            # Pages that a cached prefix lacks, because nothing after it sees them.
            not_there = [slot for page, slot in self._reservations.items() if page not in sums]
            if not_there:
                await self._store.ranges.abort(not_there)
        except MooncakeError as error:
            log.debug("%s: not stored: %s", self._request_id, error.message)
        except Exception as error:
            if not lacks_memory(error):
                raise
            log.info("%s: not stored: %r", self._request_id, error)  # ``close`` aborts

    async def close(self) -> None:
        """Abort reservations that were not sealed."""
        if not self._is_sealed and (slots := [slot for slot in self._reserved if slot is not None]):
            with contextlib.suppress(MooncakeError):
                await self._store.ranges.abort(slots)

    def retain_blocks(self, block_ids: list[int]) -> None:
        """On the engine's thread: keep the blocks until they are written, whatever happens to their sequence."""
        self._node.host.engine.block_pool.retain(block_ids)
        self._retained += block_ids

    def release_blocks(self, engine: Engine) -> None:
        """On the engine's thread, when the stream has stopped reading them. Idempotent."""
        retained, self._retained = self._retained, []
        engine.block_pool.release(retained)
