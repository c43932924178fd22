"""Copies blocks from a store's DRAM to its SSD, and wakes those who wait for the room that this makes; ``tiers``
decides which blocks are copied, and when.

Everything here runs on the store's event loop. It knows neither who reads or writes blocks, nor how they come back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import islice

from kvstore.index.types import BlockName, Held
from kvstore.ssd.record import BlockHeader
from kvstore.ssd.stall import RECHECK_S
from kvstore.ssd.tier import SsdTier
from kvstore.tiers.decisions import REFUSED_PAUSE_S, Demotion
from mooncake.types import BlockKey


class Saving:
    """The copies in progress."""

    def __init__(
        self,
        ssd: SsdTier | None,
        demotion: Demotion,
        pages: Callable[[int, int], memoryview],
        publish: Callable[[], object],
    ) -> None:
        """``pages`` returns the bytes of a slot and length. ``publish`` is called whenever something has been saved
        or could not be."""
        self._ssd = ssd
        self._demotion = demotion
        self._pages = pages
        self._publish = publish
        self._room = asyncio.Event()  # set whenever a slot may have become free
        self._work: set[asyncio.Task[bool]] = set()

    def room_came(self) -> None:
        """A slot may have become free."""
        self._room.set()

    async def wait_for_room(self, deadline: float, idle_deadline: float = 0.0) -> bool:
        """For a caller that found no room. Returns whether to try again: something that was being saved has left, or
        may leave now, or the disk has come to a halt, so that blocks may leave unsaved. While nothing is being saved,
        waits until ``idle_deadline`` at most."""
        if not self._demotion.is_busy:
            deadline = min(deadline, idle_deadline)
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        self._room.clear()
        try:
            await asyncio.wait_for(self._room.wait(), min(left, RECHECK_S))
        except TimeoutError:
            return time.monotonic() < deadline
        return True

    def count_sights(self, keys: Iterable[BlockKey]) -> None:
        self._start_all(self._demotion.saw(keys))

    def copy_if_due(self, name: BlockName) -> None:
        self.write_through(name, False)

    def write_through(self, name: BlockName, durable: bool) -> asyncio.Future[bool] | None:
        """Start copying a block if that was requested, or it has been seen often enough. The caller may leave while
        it waits: the slot is held until the copy ends."""
        if self._ssd is None:
            return None
        held = self._demotion.copy_if_due(name, must=durable)
        return None if held is None else asyncio.shield(self._start(held))

    def save_leaving(self) -> None:
        self._start_all(self._demotion.take_leaving())

    def prepare(self, now: float) -> None:
        """Save in advance what will have to leave next."""
        self._start_all(self._demotion.prepare(now))

    async def finish(self, timeout_s: float) -> None:
        """Save what is only in DRAM and would have been saved on leaving, as fast as the SSD accepts it. Ends when
        it accepts nothing for this long."""
        assert self._ssd is not None
        self._ssd.be_patient()
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
        """The index holds the slot meanwhile. Submitted synchronously, so that a removal from now on finds it there."""
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
        self.room_came()
        self._publish()
        return is_saved
