"""Loads blocks from a store's SSD back into its DRAM because somebody is about to read them.

Everything here runs on the store's event loop, except the disk. ``tiers`` decides which blocks are worth it. It knows
neither who reads them nor under which lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.index.store_index import StoreIndex
from kvstore.index.types import OWN, BlockName, Grant, Held
from kvstore.slots_ahead import SlotsAhead
from kvstore.ssd.stall import RECHECK_S
from kvstore.ssd.tier import SsdTier
from kvstore.tiers.decisions import promotion
from kvstore.tiers.saving import Saving
from mooncake.errors import KVLoadFailed, OutOfBlocks
from mooncake.types import BlockKey

PROMOTER = f"{OWN}ssd"  # the writer of blocks loaded from the SSD
READERS_WAIT_S = 1.0  # while all slots are being read


@dataclass(slots=True)
class _Load:
    """One block on its way, and how many wait for it. Once it is here it is held in place until each has had its turn:
    others would evict it in between."""

    task: asyncio.Task[bool] | None = None
    num_waiting: int = 0
    held: Held | None = None


class Promoting:
    """Each block is loaded once, however many ask for it."""

    def __init__(
        self,
        ssd: SsdTier,
        index: StoreIndex,
        ahead: SlotsAhead,
        saving: Saving,
        pages: Callable[[int, int], memoryview],
        publish: Callable[[], object],
        block_bytes: int,
        wait_s: float,
    ) -> None:
        """``pages`` returns the bytes of a slot and length. ``publish`` is called when the SSD may have lost a
        block. A load waits for a slot for at most ``wait_s``."""
        self._ssd = ssd
        self._index = index
        self._ahead = ahead
        self._saving = saving
        self._pages = pages
        self._publish = publish
        self._block_bytes = block_bytes
        self._wait_s = wait_s
        self._loading: dict[BlockKey, _Load] = {}

    async def bring(
        self, keys: Sequence[BlockKey], recompute_ms: float, scattered: bool, held: contextlib.ExitStack
    ) -> None:
        """Load what DRAM lacks of ``keys`` (of their leading run), as far as that is worthwhile. What is there then
        stays in place until ``held`` is closed. Who has nothing yet waits a moment for others to have read; who has
        something does not, because two such callers would wait for each other."""
        readers_deadline = time.monotonic() + READERS_WAIT_S
        for key in self._worth_loading(keys, recompute_ms, scattered):
            if await self._have(key, readers_deadline, held):
                readers_deadline = 0.0
            elif not scattered:
                break

    async def close(self) -> None:
        """Return once nothing is being loaded. Call after the SSD was closed: what it has not read by then hangs."""
        loads = [load.task for load in self._loading.values() if load.task is not None]
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    def _worth_loading(self, keys: Sequence[BlockKey], recompute_ms: float, scattered: bool) -> list[BlockKey]:
        """The stored part of ``keys`` (of their leading run), as far as loading is worthwhile, in the order in which it
        is to be kept."""
        found = promotion(keys, self._index.exists(keys), self._ssd.length, self._ssd.load_s, recompute_ms, scattered)
        self._index.counters["promotions_not_worth_it"] += found.was_cut
        if not (found.lacking and self._ssd.is_readable):
            return []
        if scattered:  # first what is here: loading the rest would push it out, and it would have to be loaded, too
            return sorted(found.run, key=set(found.lacking).__contains__)
        return found.run

    async def _have(self, key: BlockKey, readers_deadline: float, held: contextlib.ExitStack) -> bool:
        """Whether the block is in DRAM, after loading it if necessary."""
        if self._keep(key, held):
            return True
        load = self._loading.get(key)
        if load is None:
            load = self._loading[key] = _Load()
            load.task = asyncio.create_task(self._load(key, readers_deadline, load))
            load.task.add_done_callback(lambda _: self._loading.pop(key, None))
        assert load.task is not None
        load.num_waiting += 1
        try:
            while not (await asyncio.wait((load.task,), timeout=RECHECK_S))[0]:
                if not self._ssd.is_readable:  # what memory has need not wait for it
                    return False
            return not load.task.cancelled() and load.task.result() and self._keep(key, held)
        finally:
            load.num_waiting -= 1
            if load.held is not None and not load.num_waiting:
                self._index.let_go(load.held)
                load.held = None

    def _keep(self, key: BlockKey, held: contextlib.ExitStack) -> bool:
        """Keep a block in place until ``held`` is closed. False when it is not in DRAM."""
        if (block := self._index.keep(key, time.monotonic())) is None:
            return False
        held.callback(self._index.let_go, block)
        return True

    async def _load(self, key: BlockKey, readers_deadline: float, load: _Load) -> bool:
        is_here = await self._promote(key, readers_deadline)
        if is_here and load.num_waiting:
            load.held = self._index.hold(key)
        return is_here

    async def _promote(self, key: BlockKey, readers_deadline: float) -> bool:
        """Load a block from the SSD into a slot. False when that fails; the SSD may have lost it then."""
        header = self._ssd.get(key)
        if not self._ssd.is_readable or header is None or header.length > self._block_bytes:
            return False
        name = BlockName(key, header.parent)
        deadline = time.monotonic() + self._wait_s
        grant: Grant | None = None
        while grant is None:
            try:
                with self._ahead.alone():
                    [offer] = self._index.reserve(
                        [name], PROMOTER, header.length, len(header.checksums), time.monotonic(), header.tenant
                    )
                if offer.grant is None:
                    return offer.is_stored
                grant = offer.grant
            except OutOfBlocks:
                self._saving.save_leaving()
                is_read = self._index.counts.leases > 0
                if not await self._saving.wait_for_room(deadline, readers_deadline if is_read else 0.0):
                    return False
        self._saving.save_leaving()
        try:
            await self._ssd.load(key, self._pages(grant.slot, header.length))
        except KVLoadFailed:
            self._index.reservations.abort(grant)
            self._publish()
            return False
        except BaseException:
            self._index.reservations.abort(grant)
            raise
        is_wanted = self._ssd.get(key) is header  # it may have been removed meanwhile
        if not is_wanted or not self._index.seal(grant, header.checksums, time.monotonic()):
            self._index.reservations.abort(grant)  # … or the disk took so long that the reservation expired
            return False
        self._index.counters["promotions"] += 1
        return True
