"""Loads blocks from a store's SSD back into its DRAM because somebody is about to read them.

Everything here runs on the store's event loop, except the disk. ``tiers`` decides which blocks are worth it. It knows
neither who reads them nor under which lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from kvstore.ahead import SlotsAhead
from kvstore.index.store_index import StoreIndex
from kvstore.index.types import OWN, BlockName, Grant
from kvstore.saving import Saving
from kvstore.ssd.stall import RECHECK_S
from kvstore.ssd.tier import SsdTier
from kvstore.tiers import promotion
from mooncake.errors import KVLoadFailed, OutOfBlocks
from mooncake.types import BlockKey

PROMOTER = f"{OWN}ssd"  # the writer of blocks loaded from the SSD


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
        self._loading: dict[BlockKey, asyncio.Future[bool]] = {}

    async def bring(
        self, keys: Sequence[BlockKey], recompute_ms: float, scattered: bool, held: contextlib.ExitStack
    ) -> None:
        """Load what DRAM lacks of ``keys`` (of their leading run), as far as that is worthwhile. What is there then
        stays in place until ``held`` is closed."""
        for key in self._worth_loading(keys, recompute_ms, scattered):
            if not await self._have(key):
                if scattered:
                    continue
                break
            if (block := self._index.hold(key)) is not None:  # so that the next ones do not evict it
                held.callback(self._index.let_go, block)

    def _worth_loading(self, keys: Sequence[BlockKey], recompute_ms: float, scattered: bool) -> list[BlockKey]:
        """The stored part of ``keys`` (of their leading run), as far as loading is worthwhile."""
        found = promotion(keys, self._index.exists(keys), self._ssd.length, self._ssd.load_s, recompute_ms, scattered)
        self._index.counters["promotions_not_worth_it"] += found.was_cut
        return found.run if found.lacking and self._ssd.is_readable else []

    async def _have(self, key: BlockKey) -> bool:
        """Whether the block is in DRAM, after loading it if necessary."""
        if self._index.exists([key])[0]:
            return True
        waiting = self._loading.get(key)
        if waiting is None:
            waiting = asyncio.ensure_future(self._promote(key))
            self._loading[key] = waiting
            waiting.add_done_callback(lambda _: self._loading.pop(key, None))
        while not (await asyncio.wait((waiting,), timeout=RECHECK_S))[0]:
            if not self._ssd.is_readable:  # what memory has need not wait for it
                return False
        return waiting.result()

    async def _promote(self, key: BlockKey) -> bool:
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
                if not await self._saving.wait_for_room(deadline):
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
