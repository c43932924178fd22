"""Every policy, published or ours: what it chooses in the situations that tell them apart."""

from collections import Counter

import pytest
from placing import Cluster, incarnations, pair

from conductor.placement.policies import POLICIES
from conductor.placement.policies.algorithm_1 import algorithm_1_with
from mooncake.errors import NodeUnavailable

AWARE = sorted(set(POLICIES) - {"random", "round_robin", "least_loaded"})


def prefill_of(cluster: Cluster, **asked: object) -> str:
    return pair(cluster.place(**asked))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_uses_allowed_nodes_only_and_needs_no_prefix(policy: str) -> None:
    cluster = Cluster(prefill=4, decode=3, stores=4, hosts=True, policy=policy)
    excluded = incarnations("p0", "p1", "p3", "d0", "d2")
    for runs in ({}, {"p0": 5, "s1": 9}):
        assert pair(cluster.place(runs=runs, excluded=excluded)) == ("p2", "d1")
    assert cluster.place(needs_decode=False).decode is None


@pytest.mark.parametrize(("excluded", "role"), [(("p0", "d1"), "prefill"), (("d0", "d1"), "decode")])
def test_a_request_that_every_node_has_failed_hears_it(excluded: tuple[str, ...], role: str) -> None:
    cluster = Cluster(prefill=1, decode=2)
    with pytest.raises(NodeUnavailable, match=f"no {role} node is left for this request"):
        cluster.place(excluded=incarnations(*excluded))
    with pytest.raises(NodeUnavailable, match="no decode node is available"):
        Cluster(prefill=1, decode=0).place()


@pytest.mark.parametrize("policy", AWARE)
def test_a_long_local_match_attracts_when_all_are_idle(policy: str) -> None:
    assert prefill_of(Cluster(prefill=3, policy=policy), num_tokens=4096, runs={"p1": 60}) == "p1"


@pytest.mark.parametrize(
    "policy", sorted({*POLICIES} - {"random", "round_robin", "longest_prefix", "production_stack"})
)
def test_a_long_queue_repels(policy: str) -> None:
    cluster = Cluster(prefill=2, policy=policy)
    for _ in range(80):
        cluster.book(cluster.place(num_tokens=4096, excluded=incarnations("p1")), 4096)
    assert prefill_of(cluster, num_tokens=4096, runs={"p0": 32}) == "p1"


def test_round_robin_takes_turns_and_random_misses_nobody() -> None:
    turns = Cluster(prefill=3, policy="round_robin")
    assert [prefill_of(turns, number=number) for number in range(6)] == ["p0", "p1", "p2"] * 2
    chance = Cluster(prefill=3, policy="random")
    assert len(Counter(prefill_of(chance) for _ in range(60))) == 3


def test_the_longest_match_herds_and_ours_does_not() -> None:
    """Every conversation shares its first block: the trap of the open traces."""
    worst = {}
    for policy in ("longest_prefix", "milliseconds", "algorithm_1"):
        cluster = Cluster(prefill=5, decode=5, stores=5, hosts=True, policy=policy)
        chosen: Counter[str] = Counter()
        for _ in range(50):
            placement = cluster.place(num_tokens=2048, runs={"s3": 1})
            chosen[placement.prefill.node_id] += 1
            cluster.book(placement, 2048)
        worst[policy] = max(chosen.values())
    assert worst["longest_prefix"] == 50
    assert worst["milliseconds"] <= 12
    assert worst["algorithm_1"] <= 12


class TestAlgorithm1:
    """The published text, and the cases that it leaves open."""

    def cluster(self, threshold: float = 2.0) -> Cluster:
        cluster = Cluster(prefill=3, stores=3, hosts=True)
        cluster.scheduler.policy = algorithm_1_with(threshold)
        return cluster

    def test_a_prompt_that_nobody_holds_is_computed_whole(self) -> None:
        placement = self.cluster().place(num_tokens=1280)
        assert (placement.fetched_tokens, placement.new_tokens) == (0, 1280)

    def test_an_own_match_of_zero_is_an_infinite_ratio(self) -> None:
        cluster = self.cluster(threshold=1e9)
        placement = cluster.place(num_tokens=1280, runs={"s0": 10}, excluded=incarnations("p0"))
        assert placement.fetched_tokens == 640
        assert [store.node_id for store in placement.pools] == ["s0"]

    @pytest.mark.parametrize(("own", "fetched"), [(9, 0), (5, 0), (4, 384)])
    def test_the_threshold_decides_between_recomputing_and_fetching(self, own: int, fetched: int) -> None:
        cluster = self.cluster()
        placement = cluster.place(num_tokens=1280, runs={"s0": 10, "p1": own}, excluded=incarnations("p0", "p2"))
        assert placement.fetched_tokens == fetched

    def test_a_prompt_that_everybody_holds_costs_its_last_token(self) -> None:
        placement = self.cluster().place(num_tokens=640, runs={"s0": 10, "s1": 10, "s2": 10})
        assert placement.new_tokens == 1

    def test_decode_is_balanced_by_load(self) -> None:
        cluster = self.cluster()
        chosen: Counter[str] = Counter()
        for _ in range(10):
            placement = cluster.place()
            cluster.book(placement)
            chosen[pair(placement)[1]] += 1
        assert chosen == {"d0": 5, "d1": 5}


def test_the_fastest_holder_serves_not_the_first() -> None:
    """Of equal copies, the idle store is read from, so replicas relieve the first one."""
    cluster = Cluster(prefill=6, decode=4, stores=6, hosts=True)
    sources: Counter[str] = Counter()
    for _ in range(6):
        facts = cluster.facts(6400, {"s0": 90, "s1": 90}, excluded=incarnations("p0", "p1"))
        placement = cluster.scheduler.place(facts, cluster.now)
        assert placement.fetched_tokens == 90 * 64
        sources[placement.pools[0].node_id] += 1
        cluster.scheduler.book(facts, placement, cluster.now)
    assert sources == {"s0": 3, "s1": 3}


def test_a_prefix_that_is_slower_to_fetch_than_to_compute_is_computed() -> None:
    cluster = Cluster(prefill=1, stores=1, decode=1)
    for size in (1, 10, 100):
        for _ in range(30):
            cluster.fleet.costs.observe_transfer("p0", "s0", size << 20, 1000.0 * size)
    cluster.now += 10.0
    for _ in range(5):
        cluster.fleet.view(cluster.now)
        cluster.now += 1.0
    placement = cluster.place(runs={"s0": 9})
    assert (placement.fetched_tokens, placement.new_tokens) == (0, 640)
    assert placement.pool_tokens == 0, "and the node is told not to read it"
    assert cluster.place(runs={}).pool_tokens is None, "it may look: the index may be behind"


def test_a_session_stays_where_it_is_as_good_as_anywhere() -> None:
    cluster = Cluster(prefill=5, decode=5)
    facts = cluster.facts(session="a")
    first = cluster.scheduler.place(facts, cluster.now)
    booking = cluster.scheduler.book(facts, first, cluster.now)
    cluster.scheduler.close(booking, cluster.now)
    for _ in range(3):
        assert pair(cluster.place(session="a")) == pair(first)
