"""One host's KV in two tiers: the real store's index of DRAM over an SSD, and the real decisions about what moves
between them (``kvstore.tiers.decisions``), used by whole prompts.

It takes the place of ``HostCache`` for hosts with an SSD. Blocks that find no slot, because all evictable ones are
still being written to the SSD, wait for one as on a prefill node.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from kvstore.eviction import make_policy
from kvstore.index.store_index import StoreIndex
from kvstore.index.types import BlockName, Grant, Held
from kvstore.tiers.decisions import Demotion, TierRules, Worth, promotion, tier_events
from mooncake.app.sim.cluster import Model, Ssd
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.machines.disk import Disk
from mooncake.errors import OutOfBlocks
from mooncake.types import BlockEvent, BlockKey, Tier

WRITER, PROMOTER = "prefill", "ssd"
WAIT_S = 4.0  # for space, as prefill nodes do
LEASE_S = 10.0  # how long a promotion waits
_CHECKSUMS = np.zeros(1, dtype=np.uint64)  # of empty contents

Keys = Sequence[BlockKey]


@dataclass(eq=False, slots=True)
class Loading:
    """A run being read from the SSD. ``on_end`` is told how many blocks arrived; None: nobody is waiting."""

    on_end: Callable[[int], None] | None
    names: deque[BlockName]  # still to come, in order
    held: list[Held]  # blocks of the run that are in DRAM
    until: float  # for room
    num_blocks: int = 0

    def cancel(self) -> None:
        self.on_end = None


class TieredCache:
    """``tokens`` of KV in DRAM, the rest on the disk. What is held must be released once with ``release``.
    ``on_change`` is called after changes that no caller has asked for."""

    def __init__(
        self, tokens: int, ssd: Ssd, model: Model, agenda: Agenda, disk: Disk, on_change: Callable[[], None]
    ) -> None:
        num_slots = tokens // model.block_tokens
        self.disk = disk
        self._on_change = on_change
        self._waiting: deque[tuple[float, list[BlockName]]] = deque()  # for a slot, until when
        self._agenda = agenda
        self._block_bytes = model.block_tokens * model.token_bytes
        worth = Worth(disk, TierRules(ssd.write_through_sights, ssd.demote_sights), num_slots)
        self.index = StoreIndex(
            num_slots,
            math.inf,
            math.inf,
            policy=make_policy(ssd.eviction, num_slots, model.block_tokens),
            must_save=worth.must_save,
            is_elsewhere=worth.is_saved,
        )
        disk.index.lie_under(self.index.is_built_on)
        self._demotion = Demotion(worth, self.index, num_slots)
        self._loading: dict[BlockKey, float] = {}  # when each block being read will be here
        self._promoting: list[Loading] = []  # waiting for space
        self._found = [BlockEvent(True, b.header.key, b.header.parent, Tier.SSD) for b in disk.index.blocks()]
        self._is_dead = False

    def match(self, keys: Keys) -> int:
        """Number of leading blocks in DRAM."""
        return sum(takewhile(bool, self.index.exists(keys)))

    def stored(self, keys: Keys) -> int:
        """Number of leading blocks here, in either tier."""
        here = zip(keys, self.index.exists(keys), strict=True)
        return sum(1 for _ in takewhile(lambda found: found[1] or found[0] in self.disk, here))

    def hold(self, keys: Keys, count: int) -> list[int]:
        """Keep the first ``count`` blocks, which are in DRAM, from being evicted."""
        self.disk.index.touch(reversed(keys[:count]), self._agenda.now)
        lease = self.index.acquire(keys[:count], self._agenda.now)
        return [lease.lease_id] if lease.blocks else []

    def release(self, held: list[int]) -> None:
        for lease_id in held:
            self.index.release(lease_id)

    def saw(self, keys: Keys) -> None:
        """Count a request for these blocks from another host."""
        self._save(self._demotion.saw(keys))

    def add(self, keys: Keys, held: list[int], into_dram: bool = False) -> None:
        """Store the chain in DRAM as far as there is room, with ``into_dram`` also what the SSD has of it. Blocks
        already here, in either tier, count as used."""
        index, now = self.index, self._agenda.now
        index.sweep(now)
        self.saw(keys)
        lacking: list[BlockName] = []
        for at, (key, is_here) in enumerate(zip(keys, index.exists(keys), strict=True)):
            if not is_here and (into_dram or key not in self.disk):
                lacking.append(BlockName(key, keys[at - 1] if at else b""))
        self.disk.index.touch(reversed(keys), now)
        for key in reversed(keys):
            index.touch(key, now)
        self.release(held)
        if lacking:
            self._waiting.append((now + WAIT_S, lacking))
            self._store_waiting()
        self._save(self._demotion.prepare(now))

    def give_up(self, keys: Keys) -> int:
        """Free DRAM of a chain from its last block on, as far as nothing builds on it and nobody holds it. Returns the
        number of blocks."""
        return self.index.give_up(keys, self._agenda.now)

    def load(self, keys: Keys, on_end: Callable[[int], None]) -> Loading | None:
        """Read blocks of the leading run of ``keys`` that only the SSD has into DRAM. None if there are none."""
        index, now, disk = self.index, self._agenda.now, self.disk
        disk.index.touch(reversed(keys), now)
        found = promotion(keys, index.exists(keys), disk.length, disk.load_s)
        if not found.lacking:
            return None
        headers = [block.header for block in map(disk.index.get, found.lacking) if block is not None]
        kept = [index.keep(key, now) for key in found.run]
        names = deque(BlockName(header.key, header.parent) for header in headers)
        loading = Loading(on_end, names, [held for held in kept if held is not None], now + LEASE_S)
        self._agenda.at(now, self._advance, loading)
        return loading

    def take_events(self) -> list[BlockEvent]:
        found, self._found = self._found, []
        return found + tier_events(self.index, self.disk.index.take_left(), self.disk.index.__contains__)

    def die(self) -> None:
        """The host's processes are gone, and so is DRAM."""
        self._is_dead = True
        self.disk.lose_power()

    def check(self) -> None:
        """Raises AssertionError if the accounts do not add up."""
        self.index.check()
        self.disk.index.check()

    @property
    def num_in_use(self) -> int:
        counts = self.index.counts
        return counts.leases + counts.reserved + len(self._loading) + len(self._promoting) + len(self._waiting)

    def _advance(self, loading: Loading) -> None:
        """Read what there is room for now. Reads already started by others are waited for."""
        now, names = self._agenda.now, loading.names
        if self._is_dead:
            return
        while names and (held := self.index.keep(names[0].key, now)) is not None:
            names.popleft()
            loading.held.append(held)
            loading.num_blocks += 1
        if loading.on_end is None or not names:
            self._end(loading)
        elif names[0].key in self._loading:
            self._agenda.at(self._loading[names[0].key], self._advance, loading)
        elif grants := self._reserve(list(takewhile(lambda name: name.key not in self._loading, names)), PROMOTER):
            ends_s = self.disk.read(len(grants) * self._block_bytes)
            self._loading.update(dict.fromkeys((name.key for name in grants), ends_s))
            self._agenda.at(ends_s, self._loaded, loading, grants)
        elif self._demotion.is_busy and now < loading.until:
            self._promoting.append(loading)
        else:
            self._end(loading)

    def _loaded(self, loading: Loading, grants: dict[BlockName, Grant]) -> None:
        if self._is_dead:
            return
        for name, grant in grants.items():
            del self._loading[name.key]
            if name.key not in self.disk or not self.index.seal(grant, _CHECKSUMS, self._agenda.now):
                self.index.reservations.abort(grant)  # the SSD gave it up meanwhile
                loading.names.clear()
        self._advance(loading)

    def _end(self, loading: Loading) -> None:
        if loading.on_end is not None:
            loading.on_end(loading.num_blocks)
        for held in loading.held:
            self.index.let_go(held)
        self._save(self._demotion.prepare(self._agenda.now))

    def _store_waiting(self) -> None:
        """In order of arrival, as far as there is room."""
        index, now, waiting = self.index, self._agenda.now, self._waiting
        while waiting:
            until, names = waiting.popleft()
            for name, grant in self._reserve(names, WRITER).items():
                index.seal(grant, _CHECKSUMS, now)
                if (due := self._demotion.copy_if_due(name)) is not None:
                    self._save([due])
            stored = index.exists([name.key for name in names])
            left = [name for name, is_stored in zip(names, stored, strict=True) if not is_stored]
            if left and now < until and self._demotion.is_busy:
                waiting.appendleft((until, left))
                return

    def _reserve(self, names: Sequence[BlockName], writer: str) -> dict[BlockName, Grant]:
        """Slots for the leading ones of ``names``."""
        try:
            offers = self.index.reserve(names, writer, self._block_bytes, 1, self._agenda.now)
        except OutOfBlocks:
            offers = []
        self._save(self._demotion.take_leaving())
        return {name: offer.grant for name, offer in zip(names, offers, strict=False) if offer.grant is not None}

    def _save(self, helds: Iterable[Held]) -> None:
        for held in helds:
            self.disk.save(held, self._saved)

    def _saved(self, held: Held) -> None:
        if self._is_dead:
            return
        self._demotion.ended(held)
        if not (self._promoting or self._waiting):
            return
        promoting, self._promoting = self._promoting, []
        for loading in promoting:
            self._advance(loading)
        self._store_waiting()
        self._save(self._demotion.prepare(self._agenda.now))
        self._on_change()
