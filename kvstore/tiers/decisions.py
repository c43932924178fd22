"""The decisions between a store's two tiers: which blocks are copied from DRAM to the SSD and when, which are loaded
back on demand, and which events are published.

Pure: no clock, no disk, no event loop. It is used by the store, and by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.index.store_index import StoreIndex
from kvstore.index.types import BlockName, Held
from kvstore.ssd.record import BlockHeader
from kvstore.tiers.sights import Sights
from mooncake.types import BlockEvent, BlockKey

AHEAD_SHARE = 1 / 16  # of the slots, kept free or saved already, so that a put finds room at once
MIN_AHEAD = 4
MIN_REMEMBERED = 65536
# Pause after a refused save before waiting writers look again: two writers whose blocks are in each other's way would
# otherwise keep each other, and the disk, busy forever.
REFUSED_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class TierRules:
    """What goes to the SSD: a block seen for the ``write_through_sights``-th time, at once; and a block that leaves
    DRAM, if it was seen ``demote_sights`` times by then. 0 means never."""

    write_through_sights: int = 2
    demote_sights: int = 1


class SecondTier(Protocol):
    """The SSD as these decisions see it."""

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the block can be read from there."""
        ...

    @property
    def is_writable(self) -> bool:
        """Whether saving is worth trying now."""
        ...


class Worth:
    """Which blocks belong on the SSD; none if there is no SSD."""

    def __init__(self, ssd: SecondTier | None, rules: TierRules, num_slots: int) -> None:
        """Remembers sights of at least four times as many blocks as DRAM has slots."""
        self._ssd = ssd
        self._rules = rules
        self._sights = Sights(max(MIN_REMEMBERED, 4 * num_slots))

    @property
    def can_save(self) -> bool:
        return self._ssd is not None and self._ssd.is_writable

    def saw(self, key: BlockKey) -> bool:
        """Count a sight. Returns whether the block is now worth a copy."""
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


class Demotion:
    """Which copies to make now. The index keeps the bytes of returned blocks in place until ``ended``, which must be
    called once for each, whatever the outcome."""

    def __init__(self, worth: Worth, index: StoreIndex, num_slots: int) -> None:
        self._worth = worth
        self._index = index
        self._num_ahead = max(MIN_AHEAD, int(num_slots * AHEAD_SHARE))
        self._num_open = 0

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being copied that cannot leave before that is done."""
        return self._num_open > 0 or self._index.num_saving > 0

    def saw(self, keys: Iterable[BlockKey]) -> list[Held]:
        """These were asked for: copy those that have now been seen often enough."""
        found = [self.copy_if_due(BlockName(key)) for key in keys if self._worth.saw(key)]
        return [held for held in found if held is not None]

    def copy_if_due(self, name: BlockName, must: bool = False) -> Held | None:
        """A block to copy, if it has been seen often enough or ``must`` be. None also when it is not in DRAM."""
        if not must and not self._worth.is_due(name):
            return None
        held = self._index.hold(name.key)
        self._num_open += held is not None
        return held

    def take_leaving(self) -> list[Held]:
        """What has to be saved before its slot is used again."""
        leaving = self._index.take_leaving()
        self._num_open += len(leaving)
        return leaving

    def prepare(self, now: float) -> list[Held]:
        """The blocks that will leave next, to be saved in advance."""
        if not self._worth.can_save:
            return []
        self._index.prepare(self._num_ahead, now)
        return self.take_leaving()

    def rest(self) -> Iterator[Held]:
        """Blocks only in DRAM that would have been saved on leaving; each is checked when its turn comes."""
        for name in map(BlockName, self._index.stored_keys()):
            if self._worth.must_save(name) and (held := self.copy_if_due(name, must=True)) is not None:
                yield held

    def ended(self, held: Held) -> None:
        self._num_open -= 1
        self._index.let_go(held)


class Promotion(NamedTuple):
    """``run`` is the part of the requested blocks to read, ``lacking`` those of it that are only on the SSD.
    ``was_cut``: the rest is stored too, but computing it is faster than loading it."""

    run: list[BlockKey]
    lacking: list[BlockKey]
    was_cut: bool


def promotion(
    keys: Sequence[BlockKey],
    is_here: Iterable[bool],
    ssd_bytes: Callable[[BlockKey], int | None],
    load_s: Callable[[int], float],
    recompute_ms: float = 0.0,
    scattered: bool = False,
) -> Promotion:
    """The stored leading run of ``keys`` (``scattered``: all stored ones), as far as loading what DRAM lacks is
    faster than computing the run at ``recompute_ms`` per block (0: impossible). ``ssd_bytes`` returns the length of
    a block on the SSD, None if it is not there; ``load_s`` the predicted time to read that many bytes."""
    run: list[BlockKey] = []
    lacking: list[BlockKey] = []
    waiting = 0
    for key, here in zip(keys, is_here, strict=True):
        if not here:
            nbytes = ssd_bytes(key)
            if nbytes is None:
                if scattered:
                    continue
                break
            waiting += nbytes
            if recompute_ms and load_s(waiting) * 1e3 > recompute_ms * (len(run) + 1):
                return Promotion(run, lacking, True)
            lacking.append(key)
        run.append(key)
    return Promotion(run, lacking, False)


def tier_events(
    index: StoreIndex, lost: Iterable[BlockHeader], is_on_ssd: Callable[[BlockKey], bool]
) -> list[BlockEvent]:
    """The events to publish: what changed in DRAM, then what the SSD has ``lost`` and no tier has now.

    In this order, because a block that left DRAM for the SSD, which then lost it, is gone.
    """
    changed = index.take_events()
    lost = [header for header in lost if not is_on_ssd(header.key)]  # it may have been saved again
    here = index.exists([header.key for header in lost])
    return changed + [BlockEvent(False, h.key, h.parent) for h, is_here in zip(lost, here, strict=True) if not is_here]
