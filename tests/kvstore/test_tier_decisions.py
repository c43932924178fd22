"""Decisions about what is saved to the SSD and what is loaded back: no disk, no clock."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.index.store_index import StoreIndex
from kvstore.index.types import BlockName, Held
from kvstore.ssd.record import BlockHeader
from kvstore.tiers.decisions import Demotion, TierRules, Worth, promotion, tier_events
from mooncake.errors import OutOfBlocks
from mooncake.types import BlockEvent, BlockKey, Tier

NUM_SLOTS, LENGTH = 8, 1000
CHECKSUMS = np.zeros(1, dtype=np.uint64)


class Ssd(set[BlockKey]):
    is_writable = True


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


class Decisions:
    """An index of eight slots over an SSD that takes what it is given at once."""

    def __init__(self, rules: TierRules = TierRules()) -> None:
        self.ssd = Ssd()
        self.worth = Worth(self.ssd, rules, NUM_SLOTS)
        self.index = StoreIndex(NUM_SLOTS, 10.0, 10.0, must_save=self.worth.must_save, is_elsewhere=self.worth.is_saved)
        self.demotion = Demotion(self.worth, self.index, NUM_SLOTS)

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.demotion.saw([key(number)])
            [offer] = self.index.reserve([BlockName(key(number))], "me", LENGTH, 1, 0.0)
            assert offer.grant is not None
            self.index.seal(offer.grant, CHECKSUMS, 0.0)

    def save(self, helds: list[Held]) -> list[BlockKey]:
        for held in helds:
            self.ssd.add(held.name.key)
            self.demotion.ended(held)
        self.index.check()
        return [held.name.key for held in helds]


def test_the_oldest_blocks_are_saved_ahead_and_leave_as_soon_as_room_is_wanted() -> None:
    store = Decisions()
    store.put(*range(6))
    assert store.save(store.demotion.prepare(0.0)) == [key(0), key(1)]  # four slots are free, saved or being saved
    assert store.index.exists([key(0)]) == [True]
    store.put(6, 7, 8)
    assert store.index.exists([key(0)]) == [False] and not store.demotion.is_busy
    assert BlockEvent(True, key(0), b"", Tier.SSD) in tier_events(store.index, (), lambda _: True)


def test_a_chain_that_fills_the_store_does_not_give_up_the_block_that_its_next_one_builds_on() -> None:
    """A writer that waits for room would keep and evict that block forever."""
    store = Decisions()
    store.put(*range(7))
    held = [store.index.hold(key(number)) for number in range(7)]
    store.put(7)
    with pytest.raises(OutOfBlocks):
        store.index.reserve([BlockName(key(8), key(7))], "me", LENGTH, 1, 0.0)
    assert store.demotion.take_leaving() == []
    for one in held:
        assert one is not None
        store.index.let_go(one)
    store.index.check()


def test_an_ssd_that_takes_nothing_is_given_nothing_and_blocks_are_dropped() -> None:
    store = Decisions()
    store.ssd.is_writable = False
    store.put(*range(8))
    assert store.demotion.prepare(0.0) == []
    store.put(8)
    assert BlockEvent(False, key(0)) in store.index.take_events()


@pytest.mark.parametrize(("sights", "copied"), [(0, []), (1, []), (2, [key(0)]), (3, [])])
def test_the_second_sight_of_a_block_copies_it_when_the_rules_say_two(sights: int, copied: list[BlockKey]) -> None:
    store = Decisions(TierRules(write_through_sights=sights))
    store.put(0)
    assert store.save(store.demotion.saw([key(0)])) == copied
    assert store.save(store.demotion.saw([key(0)])) == ([key(0)] if sights == 3 else [])


def test_what_is_copied_stays_in_place_until_the_copy_is_over() -> None:
    store = Decisions()
    store.put(0)
    [held] = store.demotion.saw([key(0)])
    assert store.demotion.is_busy
    store.index.remove([key(0)], 0.0)
    assert store.index.counts.sealed == 1  # hidden, its bytes in place
    store.demotion.ended(held)
    assert not store.demotion.is_busy and store.index.counts.free == NUM_SLOTS


def test_the_rest_is_what_would_have_been_saved_later() -> None:
    store = Decisions(TierRules(write_through_sights=0, demote_sights=2))
    store.put(0, 1)
    store.demotion.saw([key(1)])
    assert store.save(list(store.demotion.rest())) == [key(1)]


def seconds(nbytes: int) -> float:
    return nbytes / 1e6


KEYS = [key(number) for number in range(6)]
ON_SSD = {key(1): LENGTH, key(2): LENGTH, key(4): LENGTH}


@pytest.mark.parametrize(
    ("recompute_ms", "scattered", "run", "was_cut"),
    [
        (0.0, False, [0, 1, 2], False),  # a hole ends the run
        (0.0, True, [0, 1, 2, 4, 5], False),  # whatever is there
        (0.7, False, [0, 1, 2], False),  # 1 ms against 1.4, then 2 against 2.1
        (0.6, False, [0, 1], True),  # … against 1.8
        (0.4, False, [0], True),
    ],
)
def test_blocks_come_back_as_far_as_reading_beats_computing(
    recompute_ms: float, scattered: bool, run: list[int], was_cut: bool
) -> None:
    here = [True, False, False, False, False, True]
    found = promotion(KEYS, here, ON_SSD.get, seconds, recompute_ms, scattered)
    assert found.run == [key(number) for number in run] and found.was_cut is was_cut
    assert found.lacking == [block for block in found.run if block in ON_SSD]


def test_a_block_that_the_ssd_lost_is_gone_only_where_memory_lacks_it() -> None:
    store = Decisions()
    store.put(0)
    store.index.take_events()
    lost = [BlockHeader(key(number), b"", "", LENGTH, CHECKSUMS) for number in (0, 1)]
    assert tier_events(store.index, lost, lambda _: False) == [BlockEvent(False, key(1))]
    assert tier_events(store.index, lost, lambda _: True) == [], "it was saved anew"
