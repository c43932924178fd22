"""What lies in which of a store's two tiers, decided: which blocks are copied from DRAM to the SSD and when, which come
back when they are asked for, and what others are told of it.

Pure: no clock, no disk, no event loop. Whoever moves the bytes asks here; the store does, and so does the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.index import StoreIndex
from kvstore.index_types import BlockName, Held
from kvstore.sights import Sights
from kvstore.ssd_record import BlockHeader
from mooncake.types import BlockEvent, BlockKey

AHEAD_SHARE = 1 / 16  # of the slots that are kept free or saved already, so that a put finds room at once
MIN_AHEAD = 4
MIN_REMEMBERED = 65536
REFUSED_PAUSE_S = 0.01  # after a refused save, before those who wait for room look again: two whose blocks lie in each
# other's way would otherwise keep each other, and the disk, busy without end


@dataclass(frozen=True, slots=True)
class TierRules:
    """What goes to the SSD: a block that is seen for the ``write_through_sights``-th time, at once; and one that has to
    leave DRAM, when it was seen ``demote_sights`` times by then. 0 is never."""

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
    """Which blocks belong on the SSD. Where there is none, none does."""

    def __init__(self, ssd: SecondTier | None, rules: TierRules, num_slots: int) -> None:
        """Sights of at least four times as many blocks as DRAM has slots are remembered."""
        self._ssd = ssd
        self._rules = rules
        self._sights = Sights(max(MIN_REMEMBERED, 4 * num_slots))

    @property
    def can_save(self) -> bool:
        return self._ssd is not None and self._ssd.is_writable

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


class Demotion:
    """Which copies are to be made now. The index keeps the bytes of what is handed out in place until ``ended``, which
    has to follow once for each, whatever came of it."""

    def __init__(self, worth: Worth, index: StoreIndex, num_slots: int) -> None:
        self._worth = worth
        self._index = index
        self._num_ahead = max(MIN_AHEAD, int(num_slots * AHEAD_SHARE))
        self._num_open = 0

    @property
    def is_busy(self) -> bool:
        """Whether blocks are on their way that cannot go before they are there."""
        return self._num_open > 0 or self._index.num_saving > 0

    def saw(self, keys: Iterable[BlockKey]) -> list[Held]:
        """These were asked for: copy those that have now been seen often enough."""
        found = [self.copy_if_due(BlockName(key)) for key in keys if self._worth.saw(key)]
        return [held for held in found if held is not None]

    def copy_if_due(self, name: BlockName, must: bool = False) -> Held | None:
        """To be copied when it has been seen often enough, or has to be. None also when it is not in DRAM."""
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
        """What will have to go next, to be saved ahead."""
        if not self._worth.can_save:
            return []
        self._index.prepare(self._num_ahead, now)
        return self.take_leaving()

    def rest(self) -> Iterator[Held]:
        """What is only in DRAM and would have been saved when it left: each is looked at when its turn comes."""
        for name in map(BlockName, self._index.stored_keys()):
            if self._worth.must_save(name) and (held := self.copy_if_due(name, must=True)) is not None:
                yield held

    def ended(self, held: Held) -> None:
        self._num_open -= 1
        self._index.let_go(held)


class Promotion(NamedTuple):
    """``run`` is what of the asked blocks is to be read, ``lacking`` those of it that the SSD alone has. ``was_cut``:
    the rest is there too, and computing it takes less time than loading it."""

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
    """What is stored of the leading run of ``keys`` (``scattered``: of all), as far as loading what DRAM lacks takes
    less time than computing the run, ``recompute_ms`` a block (0: it cannot be computed). ``ssd_bytes`` says how long a
    block on the SSD is, None where there is none; ``load_s`` how long reading so many bytes is going to take."""
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
    """What others are to be told: what changed in DRAM, then what the SSD has ``lost`` and nothing has now.

    In this order, because a block that left DRAM for the SSD, which then lost it, is gone.
    """
    changed = index.take_events()
    lost = [header for header in lost if not is_on_ssd(header.key)]  # it may have been saved anew
    here = index.exists([header.key for header in lost])
    return changed + [BlockEvent(False, h.key, h.parent) for h, is_here in zip(lost, here, strict=True) if not is_here]
