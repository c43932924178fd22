"""The store's index: one test for each rule, then random operations compared with a simple model."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.eviction import make_policy
from kvstore.index.store_index import StoreIndex
from kvstore.index.types import BlockName, Grant
from mooncake.errors import OutOfBlocks
from mooncake.types import BlockKey

SUMS = np.array([7], dtype=np.uint64)


def key(name: object) -> BlockKey:
    return BlockKey(str(name).encode().rjust(32, b"."))


def chain(*names: object) -> list[BlockName]:
    keys = [key(name) for name in names]
    return [BlockName(k, parent) for k, parent in zip(keys, [b"", *keys[:-1]], strict=True)]


def make(num_slots: int = 4, lease_s: float = 10.0) -> StoreIndex:
    return StoreIndex(num_slots, lease_s=lease_s, reserve_timeout_s=30.0)


def store(index: StoreIndex, names: list[BlockName], now: float = 0.0, writer: str = "w") -> list[Grant]:
    grants = [offer.grant for offer in index.reserve(names, writer, 100, 1, now) if offer.grant]
    assert all(index.seal(grant, SUMS, now) for grant in grants)
    index.check()
    return grants


def stored(index: StoreIndex, *names: object) -> list[bool]:
    return index.exists([key(name) for name in names])


def test_a_block_is_readable_once_it_is_sealed() -> None:
    index = make()
    [offer] = index.reserve(chain("a"), "w", 100, 1, 0.0)
    assert offer.grant is not None
    assert stored(index, "a") == [False]
    assert index.acquire([key("a")], 0.0).blocks == ()
    assert index.seal(offer.grant, SUMS, 0.0)
    [block] = index.acquire([key("a")], 0.0).blocks
    assert (block.slot, block.length, list(block.checksums)) == (offer.grant.slot, 100, [7])
    [event] = index.take_events()
    assert (event.stored, event.key, event.parent) == (True, key("a"), b"")


def test_a_stored_block_and_one_being_written_get_no_slot() -> None:
    index = make()
    store(index, chain("a"))
    index.reserve([BlockName(key("b"))], "w", 100, 1, 0.0)
    first, second, third, twice = index.reserve(
        [BlockName(key("a")), BlockName(key("b")), BlockName(key("c")), BlockName(key("c"))], "v", 100, 1, 0.0
    )
    assert (first.grant, first.is_stored) == (None, True)
    assert (second.grant, second.is_stored) == (None, False)
    assert third.grant is not None and twice.grant is None
    index.check()


def test_the_policy_it_is_given_says_who_goes() -> None:
    fifo = StoreIndex(2, lease_s=1.0, reserve_timeout_s=30.0, policy=make_policy("fifo", 2))
    store(fifo, [BlockName(key("first"))], now=0.0)
    store(fifo, [BlockName(key("second"))], now=1.0)
    fifo.release(fifo.acquire([key("first")], 2.0).lease_id)  # to LRU the second would now be the older one
    store(fifo, [BlockName(key("third"))], now=3.0)
    assert stored(fifo, "first", "second", "third") == [False, True, True]


def test_leaves_go_before_their_parents_oldest_first() -> None:
    index = make(4)
    store(index, chain("root", "mid", "leaf"))
    store(index, [BlockName(key("other"))])
    store(index, [BlockName(key("new"))])  # the leaf is the oldest of the evictable ones: root and mid have children
    assert stored(index, "root", "mid", "leaf", "other", "new") == [True, True, False, True, True]
    store(index, [BlockName(key("newer"))])
    assert stored(index, "root", "mid", "other", "new", "newer") == [True, False, True, True, True]


def test_reading_a_block_makes_it_young_but_asking_for_it_does_not() -> None:
    index = make(2)
    for name in "ab":
        store(index, [BlockName(key(name))])
    index.release(index.acquire([key("a")], 0.0).lease_id)
    index.exists([key("b")])
    store(index, [BlockName(key("c"))])
    assert stored(index, "a", "b", "c") == [True, False, True]


def test_a_leased_block_stays_until_its_lease_ends() -> None:
    index = make(1)
    store(index, chain("a"))
    lease = index.acquire([key("a")], 0.0)
    with pytest.raises(OutOfBlocks):
        index.reserve(chain("b"), "w", 100, 1, 9.9)
    assert stored(index, "a") == [True]
    store(index, chain("b"), now=10.0)  # the lease has run out
    assert stored(index, "a", "b") == [False, True]
    index.release(lease.lease_id)  # harmless, and does not touch the block that is in the slot now
    index.check()


def test_acquire_leases_the_leading_run_only() -> None:
    index = make()
    store(index, [BlockName(key(name)) for name in "abd"])
    assert len(index.acquire([key(name) for name in "abcd"], 0.0).blocks) == 2
    assert index.acquire([key("c"), key("a")], 0.0).lease_id == 0
    assert index.counters["hits"] == 2 and index.counters["misses"] == 4


def test_a_chain_does_not_evict_its_own_beginning() -> None:
    index = make(2)
    store(index, chain("a", "b"))
    index.remove([key("a")], 0.0)
    first, second = index.reserve([BlockName(key("c"), key("b")), BlockName(key("d"), key("c"))], "w", 1, 1, 0.0)
    assert first.grant is not None
    assert second.grant is None  # only the parent could have made room
    assert stored(index, "b") == [True]
    index.check()


def test_what_a_call_reserved_is_found_by_its_number() -> None:
    index = make()
    for number, name in ((5, "a"), (6, "b"), (0, "c")):
        index.reservations.note_number([offer.grant for offer in index.reserve(chain(name), "w", 100, 1, 0.0)], number)
    [other] = [offer.grant for offer in index.reserve(chain("d"), "other", 100, 1, 0.0)]
    index.reservations.note_number([other], 5)
    [grant] = index.reservations.numbered("w", [5, 7, 0])
    assert grant.slot != other.slot and index.reservations.name_of(grant).key == key("a")
    index.sweep(40.0)
    assert index.reservations.numbered("w", [5]) == [grant], "it is quarantined until its writer says that it is done"
    assert index.reservations.abort(grant) and index.reservations.numbered("w", [5]) == []
    [again] = [offer.grant for offer in index.reserve(chain("e"), "w", 100, 1, 41.0)]
    assert again.slot == grant.slot and index.reservations.numbered("w", [5]) == []


def test_a_reservation_that_takes_too_long_is_quarantined_until_its_writer_is_done() -> None:
    index = make(1)
    [offer] = index.reserve(chain("a"), "slow", 100, 1, 0.0)
    assert index.sweep(29.9) == []
    [expired] = index.sweep(30.0)
    assert (expired.grant, expired.writer) == (offer.grant, "slow")
    assert offer.grant is not None
    with pytest.raises(OutOfBlocks):
        index.reserve(chain("b"), "w", 100, 1, 31.0)
    assert not index.seal(offer.grant, SUMS, 31.0)
    assert index.reservations.abort(offer.grant)
    store(index, chain("a"), now=32.0)
    assert not index.reservations.abort(offer.grant)
    assert stored(index, "a") == [True]


def test_a_writer_that_is_gone_leaves_nothing_behind() -> None:
    index = make(3)
    index.reserve(chain("a"), "w", 100, 1, 0.0)
    index.sweep(40.0)
    index.reserve(chain("b"), "w", 100, 1, 40.0)
    index.reserve(chain("c"), "other", 100, 1, 40.0)
    assert len(index.reservations.writer_gone("w")) == 2
    counts = index.counts
    assert (counts.free, counts.reserved, counts.quarantined) == (2, 1, 0)
    assert index.reservations.writer_gone("w") == []


def test_a_seal_with_another_epoch_is_refused() -> None:
    index = make(1)
    [old] = index.reserve(chain("a"), "w", 100, 1, 0.0)
    assert old.grant is not None and index.reservations.abort(old.grant)
    [new] = index.reserve(chain("a"), "w", 100, 1, 0.0)
    assert new.grant is not None and new.grant.slot == old.grant.slot
    assert not index.seal(old.grant, SUMS, 0.0)
    assert not index.seal(Grant(99, 1), SUMS, 0.0)
    assert index.seal(new.grant, SUMS, 0.0)
    assert index.counters["refused_seals"] == 2


def test_removing_a_leased_block_hides_it_at_once_and_frees_it_later() -> None:
    index = make(1)
    store(index, chain("a"))
    lease = index.acquire([key("a")], 0.0)
    assert index.remove([key("a"), key("a"), key("x")], 1.0) == 1
    assert stored(index, "a") == [False]
    assert index.counts.free == 0
    index.release(lease.lease_id)
    assert index.counts.free == 1
    assert [event.stored for event in index.take_events()] == [True, False]


def test_a_chain_is_given_up_from_its_end_as_far_as_nobody_needs_it() -> None:
    def given_up(index: StoreIndex, *names: object) -> int:
        count = index.give_up([key(name) for name in names], 1.0)
        index.check()
        return count

    index = make(8)
    store(index, chain("a", "b", "c", "d"))
    assert given_up(index, "a", "b", "c", "d", "gone") == 4
    assert index.counts.free == 8

    store(index, chain("a", "b", "c", "d"))
    store(index, [BlockName(key("other"), key("b"))])
    assert given_up(index, "a", "b", "c", "d") == 2
    assert stored(index, "a", "b", "c", "d", "other") == [True, True, False, False, True]

    lease = index.acquire([key("a"), key("b"), key("other")], 1.0)
    assert given_up(index, "a", "b", "other") == 0, "somebody reads it"
    index.release(lease.lease_id)
    index.pin([key("b")], True, 60.0, 1.0)
    assert given_up(index, "a", "b", "other") == 1, "a client keeps the rest"
    index.unpin([key("b")])
    index.reserve([BlockName(key("new"), key("b"))], "w", 100, 1, 1.0)
    assert given_up(index, "a", "b") == 0, "somebody is writing what comes after it"

    index = make(8)
    index.reserve([BlockName(key("late"), key("c"))], "w", 100, 1, 1.0)
    store(index, chain("a", "b", "c"))
    assert given_up(index, "a", "b", "c") == 3, "what was begun without its parent builds on nothing"


def test_a_corrupt_block_goes_at_once_though_it_is_leased() -> None:
    index = make(1)
    store(index, chain("a"))
    lease = index.acquire([key("a")], 0.0)
    assert index.drop_corrupt([key("a")], 0.0) == 1
    store(index, chain("b"))
    again = index.acquire([key("b")], 0.0)
    index.release(lease.lease_id)
    index.check()
    with pytest.raises(OutOfBlocks):  # the second lease still protects
        index.reserve(chain("c"), "w", 100, 1, 0.0)
    index.release(again.lease_id)


def test_a_block_about_to_leave_stays_for_somebody_who_is_about_to_read_it() -> None:
    index = make(2)
    store(index, chain("a")), store(index, chain("b"))
    index.prepare(2, 0.0)  # both may go at once
    kept = index.keep(key("a"), 0.0)
    assert kept is not None
    store(index, chain("c"))
    assert stored(index, "a", "b", "c") == [True, False, True]
    index.let_go(kept)
    store(index, chain("d")), store(index, chain("e"))
    assert stored(index, "a", "c") == [False, False]
    index.check()


def test_blocks_that_claim_each_other_as_parents_can_still_be_evicted() -> None:
    index = make(2)
    store(index, [BlockName(key("a"), key("b")), BlockName(key("b"), key("a"))])
    store(index, [BlockName(key("x"), key("x"))])
    store(index, [BlockName(key("y"))])
    assert stored(index, "x", "y") == [True, True]


def test_a_full_store_gives_slots_to_the_leading_blocks() -> None:
    index = make(2)
    offers = index.reserve(chain("a", "b", "c"), "w", 100, 1, 0.0)
    assert [offer.grant is not None for offer in offers] == [True, True, False]
    index.check()


NUM_SLOTS = 6
NAMES = [BlockName(key(i), b"" if i < 4 else key(i - 4)) for i in range(16)]
WRITERS = ("w1", "w2")


class Life(RuleBasedStateMachine):
    """An index compared with a dict: nothing leaks, and only sealed blocks are read."""

    def __init__(self) -> None:
        super().__init__()
        self.index = StoreIndex(NUM_SLOTS, lease_s=5.0, reserve_timeout_s=8.0)
        self.now = 0.0
        self.open: dict[Grant, tuple[BlockName, str]] = {}  # reserved, as far as the model knows
        self.late: dict[Grant, str] = {}  # quarantined
        self.content: dict[BlockKey, Grant] = {}  # sealed and not seen to leave
        self.leases: dict[int, tuple[float, list[tuple[BlockKey, int]]]] = {}
        self.parents: dict[BlockKey, bytes] = {}  # that were here when somebody began to write what comes after them

    def follow_events(self) -> None:
        for event in self.index.take_events():
            if not event.stored:
                grant = self.content.pop(event.key)
                for expires, blocks in self.leases.values():
                    if expires > self.now and not self.dropping:
                        assert (event.key, grant.slot) not in blocks, "a leased block was evicted"
        self.dropping = False

    dropping = False

    @rule(picks=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), writer=st.sampled_from(WRITERS))
    def reserve(self, picks: list[BlockName], writer: str) -> None:
        writing = {name.key for name, _ in self.open.values()}
        before = dict(self.content)
        try:
            offers = self.index.reserve(picks, writer, 10, 1, self.now)
        except OutOfBlocks:
            assert any(name.key not in before and name.key not in writing for name in picks)
            self.follow_events()
            return
        new: list[BlockName] = []
        for name, offer in zip(picks, offers, strict=True):
            assert offer.is_stored == (name.key in before)
            if offer.grant is not None:
                assert name.key not in before and name.key not in writing
                self.parents[name.key] = name.parent if name.parent in {*writing, *before} else b""
                writing.add(name.key)
                self.open[offer.grant] = (name, writer)
                new.append(name)
        self.follow_events()
        for name in new:  # some made room for what comes after them
            if self.parents[name.key] not in {*writing, *self.content}:
                self.parents[name.key] = b""

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        grants = [*self.open, *self.late, Grant(0, 10**9), Grant(-1, 1)]
        grant = data.draw(st.sampled_from(grants))
        assert self.index.seal(grant, SUMS, self.now) == (grant in self.open)
        if grant in self.open:
            name, _ = self.open.pop(grant)
            self.content[name.key] = grant
        self.follow_events()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        grants = [*self.open, *self.late, *self.content.values(), Grant(0, 10**9)]
        grant = data.draw(st.sampled_from(grants))
        assert self.index.reservations.abort(grant) == (grant in self.open or grant in self.late)
        self.open.pop(grant, None)
        self.late.pop(grant, None)

    @rule(picks=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
    def acquire(self, picks: list[BlockName]) -> None:
        lease = self.index.acquire([name.key for name in picks], self.now)
        run = 0
        while run < len(picks) and picks[run].key in self.content:
            run += 1
        assert [block.slot for block in lease.blocks] == [self.content[name.key].slot for name in picks[:run]]
        if run:
            blocks = [(name.key, block.slot) for name, block in zip(picks, lease.blocks, strict=False)]
            self.leases[lease.lease_id] = (lease.expires_s, blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from([*self.leases, 10**9]))
        self.index.release(lease_id)
        self.leases.pop(lease_id, None)

    @rule(picks=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), corrupt=st.booleans())
    def drop(self, picks: list[BlockName], corrupt: bool) -> None:
        keys = {name.key for name in picks}
        expected = len(keys & self.content.keys())
        dropped = self.index.drop_corrupt(keys, self.now) if corrupt else self.index.remove(keys, self.now)
        assert dropped == expected
        self.dropping = True
        self.follow_events()

    @rule(end=st.sampled_from(range(12, 16)))
    def give_up(self, end: int) -> None:
        """A whole chain, one of four."""
        keys = [key(number) for number in range(end % 4, end + 1, 4)]
        here = {*self.content, *(name.key for name, _ in self.open.values())}
        leased = {block for expires, blocks in self.leases.values() if expires > self.now for block in blocks}
        gone: list[BlockKey] = []
        for each in reversed(keys):
            if each in self.content:
                if any(self.parents[other] == each for other in here):
                    break
                if (each, self.content[each].slot) in leased:
                    break
                here.discard(each)
                gone.append(each)
        assert self.index.give_up(keys, self.now) == len(gone)
        assert not any(self.index.exists(gone))
        self.follow_events()

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.0]))
    def wait_and_sweep(self, seconds: float) -> None:
        self.now += seconds
        for expired in self.index.sweep(self.now):
            _, writer = self.open.pop(expired.grant)
            assert writer == expired.writer
            self.late[expired.grant] = writer
        self.leases = {i: lease for i, lease in self.leases.items() if lease[0] > self.now}

    @rule(writer=st.sampled_from(WRITERS))
    def writer_gone(self, writer: str) -> None:
        expected = {grant for grant, (_, who) in self.open.items() if who == writer}
        expected |= {grant for grant, who in self.late.items() if who == writer}
        assert set(self.index.reservations.writer_gone(writer)) == expected
        for grant in expected:
            self.open.pop(grant, None)
            self.late.pop(grant, None)

    @invariant()
    def accounts_agree(self) -> None:
        self.index.check()
        counts = self.index.counts
        assert counts.free + counts.reserved + counts.sealed + counts.quarantined == NUM_SLOTS
        assert (counts.reserved, counts.quarantined) == (len(self.open), len(self.late))
        assert self.index.exists([name.key for name in NAMES]) == [name.key in self.content for name in NAMES]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=50)
