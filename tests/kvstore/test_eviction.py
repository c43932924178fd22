"""Every policy evicts only leaves and keeps its bookkeeping under random traffic, and evicts what its paper says."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction import POLICIES, Block, EvictionPolicy, make_policy
from kvstore.eviction.lru import FIFO, LRU
from kvstore.eviction.queues import ARC, S3FIFO, SIEVE
from kvstore.eviction.ranked import GDSF, LFU, Belady, LengthAware, reads_of
from kvstore.eviction.workload_aware import MOST_GHOSTS, NUM_BINS, WorkloadAware, gittins_index

CAPACITY = 12


class Pool:
    """The plainest owner of a policy: knows which blocks are here, what builds on what, and what is pinned."""

    def __init__(self, policy: EvictionPolicy, capacity: int = CAPACITY) -> None:
        self.policy = policy
        self.capacity = capacity
        self.here: dict[int, Block] = {}
        self.pins: Counter[int] = Counter()

    def may_go(self) -> set[int]:
        parents = {block.parent for block in self.here.values()}
        return {key for key in self.here if key not in parents and not self.pins[key]}

    def store(self, block: Block, now: float) -> None:
        if block.key not in self.here:
            self.here[int(str(block.key))] = block
        self.policy.insert(block, now)

    def evict(self, now: float) -> int | None:
        free = self.may_go()
        victim = self.policy.victim(now)
        if victim is None:
            assert not free, "something could have gone"
            return None
        assert victim in free, f"{victim} is pinned, built upon, or not here"
        del self.here[int(str(victim))]
        return int(str(victim))

    def check(self) -> None:
        assert len(self.policy) == len(self.here)
        assert all(key in self.policy for key in self.here)


# A tree of blocks: block n builds on n // 3, so that there are chains and branches.
def tree_block(number: int) -> Block:
    position, up = 0, number
    while up:
        position, up = position + 1, up // 3
    return Block(number, number // 3 if number else None, position, 1, position + 1)


steps = st.lists(
    st.tuples(st.sampled_from(["chain", "read", "remove", "pin", "unpin", "evict", "wait"]), st.integers(0, 80)),
    max_size=120,
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60)
@given(steps=steps)
def test_a_policy_evicts_leaves_that_nobody_holds_whatever_happens(name: str, steps: list[tuple[str, int]]) -> None:
    pool = Pool(make_policy(name, CAPACITY))
    now = 0.0
    for what, number in steps:
        if what == "chain":  # the whole path to a block, as a prompt stores it
            path = [number]
            while path[-1]:
                path.append(path[-1] // 3)
            for each in reversed(path):
                pool.store(tree_block(each), now)
            while len(pool.here) > pool.capacity and pool.evict(now) is not None:
                pass
        elif what == "read":
            pool.policy.hit(number, now)
        elif what == "remove":
            pool.policy.remove(number, now)
            pool.here.pop(number, None)
        elif what == "pin":
            pool.policy.pin(number)
            pool.pins[number] += 1
        elif what == "unpin" and pool.pins[number]:
            pool.policy.unpin(number)
            pool.pins[number] -= 1
        elif what == "evict":
            pool.evict(now)
        elif what == "wait":
            now += number
        pool.check()
    for key in list(pool.pins):
        while pool.pins[key]:
            pool.policy.unpin(key)
            pool.pins[key] -= 1
    while pool.here:
        assert pool.evict(now) is not None
    assert pool.policy.victim(now) is None
    pool.check()


def order(policy: EvictionPolicy) -> list[object]:
    victims = []
    while (victim := policy.victim(100.0)) is not None:
        victims.append(victim)
    return victims


def filled(policy: EvictionPolicy, keys: str, reads: str = "") -> EvictionPolicy:
    for now, key in enumerate(keys):
        policy.insert(Block(key), float(now))
    for now, key in enumerate(reads):
        policy.hit(key, 50.0 + now)
    return policy


def test_lru_drops_what_was_read_longest_ago() -> None:
    assert order(filled(LRU(), "abcd", "ca")) == ["b", "d", "c", "a"]


def test_fifo_drops_what_was_stored_first() -> None:
    assert order(filled(FIFO(), "abcd", "ca")) == ["a", "b", "c", "d"]


def test_lfu_drops_what_was_read_least() -> None:
    assert order(filled(LFU(), "abcd", "caac")) == ["b", "d", "a", "c"]


def test_lfu_forgets_what_it_dropped() -> None:
    policy = filled(LFU(), "ab", "aaab")
    assert policy.victim(60.0) == "b"
    policy.insert(Block("b"), 61.0)
    assert policy.victim(62.0) == "b"


def test_length_aware_drops_the_end_of_prompts_first() -> None:
    policy = LengthAware()
    for key, position in (("head", 0), ("tail", 9), ("middle", 5), ("read tail", 9)):
        policy.insert(Block(key, position=position), 0.0)
    policy.hit("read tail", 1.0)
    assert order(policy) == ["tail", "middle", "head", "read tail"]


def test_gdsf_weighs_reads_cost_and_size_and_ages() -> None:
    policy = GDSF(attention=0.5)
    policy.insert(Block("small", size=1), 0.0)
    policy.insert(Block("large", size=4), 0.0)
    policy.insert(Block("late", position=6, size=1), 0.0)  # costs four times as much to compute anew
    assert policy.victim(1.0) == "large"
    assert policy.victim(1.0) == "small"
    for number in range(8):  # what is never read again goes in the end, however dear
        policy.insert(Block(number), 2.0)
        policy.hit(number, 2.0)
        policy.victim(3.0)
    assert "late" not in policy


def test_s3_fifo_lets_blocks_prove_themselves() -> None:
    policy = S3FIFO(10)
    for number in range(10):
        policy.insert(Block(number), 0.0)
    policy.hit(0, 1.0)
    assert [policy.victim(1.0) for _ in range(3)] == [1, 2, 3]  # 0 was read and moved on
    policy.insert(Block(2), 2.0)  # dropped a moment ago: goes to the main queue at once
    assert [policy.victim(3.0) for _ in range(6)] == [4, 5, 6, 7, 8, 9]
    assert order(policy) == [0, 2]


def test_the_hand_of_sieve_begins_anew_though_newer_blocks_come_when_it_has_seen_all() -> None:
    policy = filled(SIEVE(), "abc", "ab")
    assert policy.victim(0.0) == "c"  # the newest; the hand is through
    policy.insert(Block("d", None, 0), 0.0)
    assert policy.victim(0.0) == "a"  # which nobody has read since


def test_sieve_spares_what_was_read_where_it_stands() -> None:
    policy = filled(SIEVE(), "abcd", "ac")
    assert policy.victim(60.0) == "b"  # the hand spared a and stands before c
    policy.insert(Block("e"), 61.0)
    assert [policy.victim(62.0), policy.victim(62.0)] == ["d", "e"]  # c spared; then a and c, with the hand anew
    assert order(policy) == ["a", "c"]


def test_arc_shifts_its_balance_to_the_side_that_is_missed() -> None:
    policy = ARC(4)
    for key in "abcd":
        policy.insert(Block(key), 0.0)
    for key in "ab":
        policy.hit(key, 1.0)  # a, b were seen twice
    assert policy.victim(2.0) == "c"
    policy.insert(Block("c"), 3.0)  # a ghost of those seen once: that side should be larger
    policy.insert(Block("e"), 3.0)
    assert policy.victim(4.0) == "d"
    assert policy.victim(4.0) == "a"


def test_belady_knows_the_future() -> None:
    requests = ["abc", "a", "b", "c", "a"]
    policy = Belady(reads_of(requests))
    for key in "abc":
        policy.insert(Block(key), 0)
    policy.hit("a", 1)
    assert policy.victim(1) == "a"
    policy.hit("b", 2)
    assert [policy.victim(2), policy.victim(2)] == ["b", "c"]


class Hoarder(LFU):
    """Keeps every entry that it ever made."""

    def _tidy(self) -> None:
        pass


def test_a_heap_is_not_much_longer_than_what_it_ranks_and_names_the_same_victims() -> None:
    policy, hoarder, generator = LFU(), Hoarder(), random.Random(6)
    for number in range(20_000):
        read, removed = generator.randrange(number + 1), generator.randrange(max(0, number - 50), number + 1)
        for each in (policy, hoarder):
            each.insert(Block(number), number)
            each.hit(read, number)
            each.remove(removed, number)
        if number % 100 == 0:
            assert policy.victim(number) == hoarder.victim(number)
        assert len(policy._heap) <= 2 * len(policy) + 1
    assert len(hoarder._heap) > 2 * len(policy) + 1 and order(policy) == order(hoarder)


def test_the_gittins_index_waits_through_a_dead_time_if_what_follows_is_worth_it() -> None:
    chances = [0.0] * NUM_BINS
    chances[3] = 0.9
    index = gittins_index(chances)
    assert index[0] < index[1] < index[2] < index[3]
    assert index[0] > 0 and index[4] == 0


class Chat:
    """Some keys are read again after half a minute, most never; both look the same at first."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.due: list[tuple[float, int]] = []
        self.keys = 0

    def next(self, now: float) -> int:
        if self.due and self.due[0][0] <= now:
            key = self.due.pop(0)[1]
        else:
            key = self.keys = self.keys + 1
        if key % 4 == 0:
            self.due.append((now + self.random.uniform(25, 35), key))
        return key


def hits(policy: EvictionPolicy, capacity: int, requests: int) -> int:
    chat, found = Chat(seed=3), 0
    for number in range(requests):
        now = number * 0.05
        key = chat.next(now)
        found += key in policy
        policy.insert(Block(key), now)
        while len(policy) > capacity:
            policy.victim(now)
    return found


def test_the_workload_aware_policy_learns_what_comes_back() -> None:
    """A cache for 20 s of traffic is no use to LRU when blocks come back after 30 s."""
    lru, aware = hits(LRU(), 400, 20_000), hits(WorkloadAware(), 400, 20_000)
    assert lru < 100
    assert aware > 3000


def test_before_it_knows_anything_it_is_lru() -> None:
    for policy in (LRU(), WorkloadAware()):
        generator = random.Random(5)
        victims = []
        for number in range(3000):
            policy.insert(Block(generator.randrange(2000)), number * 0.3)
            if len(policy) > 100:
                victims.append(policy.victim(number * 0.3))
        if isinstance(policy, LRU):
            expected = victims
    assert victims[:200] == expected[:200]


def test_what_it_remembers_is_bounded() -> None:
    policy = WorkloadAware()
    for number in range(MOST_GHOSTS + 5000):
        policy.insert(Block(number), number * 0.001)
        if len(policy) > 10:
            policy.victim(number * 0.001)
    assert len(policy._ghosts) == MOST_GHOSTS
    assert sum(map(len, policy._ghost_queues)) == MOST_GHOSTS
    assert sum(sum(curve.inside) for curve in policy._curves) == MOST_GHOSTS + 10


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_call_does_not_look_at_all_of_a_million_blocks(name: str) -> None:
    """Visiting each would take tens of milliseconds. The number of visits is tested, not the speed."""
    policy = make_policy(name, 1_000_000)
    for number in range(1_000_000):
        policy.insert(Block(number, number - 1 if number % 16 else None, number % 16, 1, 16), number * 1e-3)
    generator = random.Random(1)
    before = time.process_time()
    for number in range(10_000):
        now = 1000 + number * 1e-3
        policy.hit(generator.randrange(1_000_000), now)
        policy.insert(Block(2_000_000 + number), now)
        policy.victim(now)
    assert (time.process_time() - before) / 30_000 < 1e-3
