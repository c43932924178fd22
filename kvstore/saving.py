"""What goes from a store's DRAM to its SSD, and when: blocks that were seen often enough or are to be durable, at once;
those that have to leave DRAM, before they do. Some are saved ahead, so that a put finds room.

Everything here happens on the store's event loop. This module must not know who reads or writes blocks, nor how they
come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.index import StoreIndex
from kvstore.index_types import BlockName, Held
from kvstore.sights import Sights
from kvstore.ssd_record import BlockHeader
from kvstore.ssd_tier import SsdTier
from mooncake.types import BlockKey


@dataclass(frozen=True, slots=True)
class TierRules:
    """What goes to the SSD: a block that is seen for the ``write_through_sights``-th time, at once; and one that has to
    leave DRAM, when it was seen ``demote_sights`` times by then. 0 is never."""

    write_through_sights: int = 2
    demote_sights: int = 1


class Worth:
    """Which blocks belong on the SSD. Where there is none, none does."""

    def __init__(self, ssd: SsdTier | None, rules: TierRules, remember: int) -> None:
        """Sights of at least ``remember`` blocks are remembered."""
        self._ssd = ssd
        self._rules = rules
        self._sights = Sights(remember)

    def saw(self, key: BlockKey) -> bool:
        """Count a sight; whether that makes it worth a copy."""
        return self._ssd is not None and self._sights.see(key) == self._rules.write_through_sights

    def is_saved(self, name: BlockName) -> bool:
        return self._ssd is not None and name.key in self._ssd

    def is_due(self, name: BlockName) -> bool:
        """Whether it is worth a copy, and has none."""
        return self._sights.count(name.key) >= self._rules.write_through_sights > 0 and not self.is_saved(name)

    def must_save(self, name: BlockName) -> bool:
        """Whether it has to be saved before it leaves DRAM."""
        ssd = self._ssd
        return (
            ssd is not None
            and name.key not in ssd
            and ssd.is_writable
            and 0 < self._rules.demote_sights <= self._sights.count(name.key)
        )


class Saving:
    """The copies that are being made."""

    def __init__(
        self,
        ssd: SsdTier | None,
        worth: Worth,
        index: StoreIndex,
        pages: Callable[[int, int], memoryview],
        num_ahead: int,
        on_saved: Callable[[], object],
    ) -> None:
        """``pages`` gives the bytes of a slot and length. ``num_ahead`` slots are kept free or saved already.
        ``on_saved`` is called whenever something has been saved or could not be: its slot may be free now."""
        self._ssd = ssd
        self._worth = worth
        self._index = index
        self._pages = pages
        self._num_ahead = num_ahead
        self._on_saved = on_saved
        self._work: set[asyncio.Task[bool]] = set()  # that nobody waits for
        self._num_saves = 0  # blocks that are on their way, and cannot go before they are there

    @property
    def is_busy(self) -> bool:
        return self._num_saves > 0 or self._index.num_saving > 0

    def count_sights(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            if self._worth.saw(key):
                self.copy_if_due(BlockName(key))

    def copy_if_due(self, name: BlockName) -> None:
        if (save := self.write_through(name, False)) is not None:
            self._keep(save)

    def write_through(self, name: BlockName, durable: bool) -> asyncio.Task[bool] | None:
        """Start copying a block when it is asked for, or has been seen often enough."""
        if self._ssd is None or not (durable or self._worth.is_due(name)):
            return None
        held = self._index.hold(name.key)
        return None if held is None else self._start(held)

    def save_leaving(self) -> None:
        for held in self._index.take_leaving():
            self._keep(self._start(held))

    def prepare(self, now: float) -> None:
        """Save ahead what will have to go next."""
        if self._num_ahead and self._ssd is not None and self._ssd.is_writable:
            self._index.prepare(self._num_ahead, now)
            self.save_leaving()

    async def finish(self) -> None:
        """Save what is only in DRAM and would have been saved when it left."""
        for name in map(BlockName, self._index.stored_keys()):
            if self._worth.must_save(name) and (save := self.write_through(name, True)) is not None:
                self._keep(save)
        await asyncio.gather(*self._work, return_exceptions=True)

    def _start(self, held: Held) -> asyncio.Task[bool]:
        """The index holds the slot meanwhile. Handed over at once, so that a removal from now on finds it there."""
        assert self._ssd is not None
        self._num_saves += 1
        header = BlockHeader(held.name.key, held.name.parent, held.tenant, held.length, held.checksums)
        saving = self._ssd.save(header, self._pages(held.grant.slot, held.length))
        return asyncio.get_running_loop().create_task(self._end(held, saving))

    async def _end(self, held: Held, saving: asyncio.Future[bool]) -> bool:
        try:
            return await asyncio.shield(saving)
        finally:
            self._num_saves -= 1
            self._index.let_go(held)
            self._on_saved()

    def _keep(self, task: asyncio.Task[bool]) -> None:
        self._work.add(task)
        task.add_done_callback(self._work.discard)
