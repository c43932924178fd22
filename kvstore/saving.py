"""Copies from a store's DRAM to its SSD being made; which ones, and when, ``tiers`` decides.

Everything here happens on the store's event loop. This module must not know who reads or writes blocks, nor how they
come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice

from kvstore.index_types import BlockName, Held
from kvstore.ssd_record import BlockHeader
from kvstore.ssd_tier import SsdTier
from kvstore.tiers import REFUSED_PAUSE_S, Demotion
from mooncake.types import BlockKey


class Saving:
    """The copies that are being made."""

    def __init__(
        self,
        ssd: SsdTier | None,
        demotion: Demotion,
        pages: Callable[[int, int], memoryview],
        on_saved: Callable[[], object],
    ) -> None:
        """``pages`` gives the bytes of a slot and length. ``on_saved`` is called whenever something has been saved or
        could not be: its slot may be free now."""
        self._ssd = ssd
        self._demotion = demotion
        self._pages = pages
        self._on_saved = on_saved
        self._work: set[asyncio.Task[bool]] = set()

    @property
    def is_busy(self) -> bool:
        return self._demotion.is_busy

    def count_sights(self, keys: Iterable[BlockKey]) -> None:
        self._start_all(self._demotion.saw(keys))

    def copy_if_due(self, name: BlockName) -> None:
        self.write_through(name, False)

    def write_through(self, name: BlockName, durable: bool) -> asyncio.Future[bool] | None:
        """Start copying a block when it is asked for, or has been seen often enough. Who waits for that may leave: its
        slot is held until it is over."""
        if self._ssd is None:
            return None
        held = self._demotion.copy_if_due(name, must=durable)
        return None if held is None else asyncio.shield(self._start(held))

    def save_leaving(self) -> None:
        self._start_all(self._demotion.take_leaving())

    def prepare(self, now: float) -> None:
        """Save ahead what will have to go next."""
        self._start_all(self._demotion.prepare(now))

    async def finish(self, timeout_s: float) -> None:
        """Save what is only in DRAM and would have been saved when it left, as much at a time as the SSD lets wait.
        Ends when that takes nothing for so long."""
        assert self._ssd is not None
        rest = self._demotion.rest()
        while True:
            self._start_all(islice(rest, self._ssd.room))
            if not self._work:
                return
            done, _ = await asyncio.wait(self._work, timeout=timeout_s)
            if not done:
                return

    def _start_all(self, helds: Iterable[Held]) -> None:
        for held in helds:
            self._start(held)

    def _start(self, held: Held) -> asyncio.Task[bool]:
        """The index holds the slot meanwhile. Handed over at once, so that a removal from now on finds it there."""
        assert self._ssd is not None
        header = BlockHeader(held.name.key, held.name.parent, held.tenant, held.length, held.checksums)
        saving = self._ssd.save(header, self._pages(held.grant.slot, held.length))
        task = asyncio.get_running_loop().create_task(self._end(held, saving))
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _end(self, held: Held, saving: asyncio.Future[bool]) -> bool:
        try:
            is_saved = await asyncio.shield(saving)
        finally:
            self._demotion.ended(held)
        if not is_saved:
            await asyncio.sleep(REFUSED_PAUSE_S)
        self._on_saved()
        return is_saved
