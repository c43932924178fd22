"""Hot prefixes: copied to as many hosts as a burst needs, and dropped when it is over."""

from collections import Counter

from placing import Cluster

from conductor.control.replication import MAX_REPLICATED, CopyPrefix, DropReplica, ReplicationLimits, Replicator
from conductor.placement.view import RequestFacts
from mooncake.types import BlockEvent, BlockKey

HOT = [BlockKey(bytes([7, block]) * 16) for block in range(64)]


class Burst:
    """Requests for one long prefix, held by one host of eight; copies take a second."""

    def __init__(self) -> None:
        self.cluster = Cluster(prefill=8, decode=8, stores=8, hosts=True)
        self.replicator = Replicator()
        self.dropped: list[DropReplica] = []
        self.copies = 0
        self.cluster.fleet.index.apply("s0", [BlockEvent(True, key) for key in HOT])

    def run(self, seconds: float, a_second: int, prefill_ms: float = 100.0) -> None:
        cluster, replicator = self.cluster, self.replicator
        coming: list[tuple[float, CopyPrefix]] = []
        for tick in range(int(seconds * 10)):
            cluster.now += 0.1
            if a_second and tick % max(10 // a_second, 1) == 0:
                for _ in range(max(a_second // 10, 1)):
                    facts = RequestFacts(64 * 64, HOT)
                    replicator.observe(cluster.scheduler.query(facts, cluster.now), prefill_ms, cluster.now)
            view = cluster.fleet.view(cluster.now)
            for action in replicator.tick(view, cluster.fleet.index, cluster.now):
                if isinstance(action, CopyPrefix):
                    coming.append((cluster.now + 1.0, action))
                    self.copies += 1
                else:
                    self.dropped.append(action)
                    self.tell(action.node_id, action.keys, stored=False)
            for ready_at, copy in list(coming):
                if ready_at <= cluster.now:
                    coming.remove((ready_at, copy))
                    self.tell(copy.target, copy.keys, stored=True)
                    replicator.copied(copy, ok=True)

    def tell(self, node_id: str, keys: tuple[bytes, ...], stored: bool) -> None:
        order = keys if stored else tuple(reversed(keys))
        self.cluster.fleet.index.apply(node_id, [BlockEvent(stored, BlockKey(key)) for key in order])

    @property
    def holders(self) -> Counter[str]:
        return Counter(name for name, run in self.cluster.fleet.index.match(HOT).items() if run == len(HOT))


def test_a_burst_is_replicated_within_two_transfers() -> None:
    burst = Burst()
    burst.run(20, a_second=1)
    assert len(burst.holders) == 1, "a tenth of one node needs no copy"
    burst.run(3, a_second=100)
    assert len(burst.holders) >= 5


def test_replicas_are_dropped_when_the_burst_is_over() -> None:
    burst = Burst()
    burst.run(6, a_second=30)
    assert len(burst.holders) > 2
    burst.run(115, a_second=0)
    assert burst.dropped == []
    burst.run(15, a_second=0)
    assert burst.holders == {"s0": 1}, "what was there by itself stays"
    dropped = len(burst.dropped)
    burst.run(200, a_second=0)
    assert len(burst.dropped) == dropped, "once"


def test_no_host_is_sent_a_prefix_twice_and_copies_in_flight_are_bounded() -> None:
    burst = Burst()
    limits = ReplicationLimits(max_in_flight=2)
    burst.replicator = Replicator(limits)
    for _ in range(300):
        facts = RequestFacts(64 * 64, HOT)
        burst.replicator.observe(burst.cluster.scheduler.query(facts, 100.0), 100.0, 100.0)
    view = burst.cluster.fleet.view(100.0)
    copies = burst.replicator.tick(view, burst.cluster.fleet.index, 100.0)
    assert len(copies) == 2
    assert burst.replicator.tick(view, burst.cluster.fleet.index, 100.0) == []
    again = burst.replicator.tick(view, burst.cluster.fleet.index, 200.0)
    assert len(again) <= 2, "copies of which nothing was heard are tried again"


def test_a_failed_copy_is_tried_again_and_a_dead_node_forgotten() -> None:
    burst = Burst()
    for _ in range(50):
        burst.replicator.observe(burst.cluster.scheduler.query(RequestFacts(4096, HOT), 100.0), 100.0, 100.0)
    view = burst.cluster.fleet.view(100.0)
    copies = burst.replicator.tick(view, burst.cluster.fleet.index, 100.0)
    assert copies
    for copy in copies:
        assert isinstance(copy, CopyPrefix)
        burst.replicator.copied(copy, ok=False)
    assert burst.replicator.tick(view, burst.cluster.fleet.index, 100.0) == copies
    for copy in copies:
        assert isinstance(copy, CopyPrefix)
        burst.replicator.copied(copy, ok=True)
        burst.replicator.node_gone(copy.target)
    assert burst.replicator.tick(view, burst.cluster.fleet.index, 100.0) == copies, "none of them has it any more"


def test_the_common_prefix_of_recent_requests_is_copied() -> None:
    burst = Burst()
    burst.cluster.fleet.index.apply("s0", [BlockEvent(True, key) for key in HOT])
    for number in range(50):
        own = [BlockKey(bytes([8, number, block]) * 16) for block in range(20)]
        facts = RequestFacts(4096, [*HOT[:41], *own])
        burst.replicator.observe(burst.cluster.scheduler.query(facts, 100.0), 100.0, 100.0)
    copies = burst.replicator.tick(burst.cluster.fleet.view(100.0), burst.cluster.fleet.index, 100.0)
    assert {copy.keys for copy in copies if isinstance(copy, CopyPrefix)} == {tuple(HOT[:41])}
    targets = [copy.target for copy in copies if isinstance(copy, CopyPrefix)]
    assert len(set(targets)) == len(targets), "its beginnings, which are watched as well, come along"


def test_a_prefix_fetched_in_a_burst_is_dropped_like_a_copy() -> None:
    burst = Burst()
    burst.replicator = Replicator(ReplicationLimits(max_copies=0))
    burst.run(1, a_second=30)
    for name in ("s3", "s5"):
        burst.tell(name, tuple(HOT), stored=True)
    burst.run(1, a_second=30)
    assert len(burst.holders) == 3
    burst.run(130, a_second=0)
    assert burst.holders == {"s0": 1}
    assert {drop.node_id for drop in burst.dropped} == {"s3", "s5"}


def test_a_shorter_prefix_that_is_still_requested_is_kept() -> None:
    burst = Burst()
    burst.run(6, a_second=30)
    shared = RequestFacts(8 * 64, HOT[:8])
    for _ in range(130):
        burst.run(1, a_second=0)
        burst.replicator.observe(burst.cluster.scheduler.query(shared, burst.cluster.now), 1.0, burst.cluster.now)
    assert burst.dropped and all(drop.keys == tuple(HOT[8:]) for drop in burst.dropped)


def test_the_number_of_remembered_prefixes_is_bounded() -> None:
    """Bursts with pauses: each has a longer common prefix than the one before, and all share one."""
    burst = Burst()
    for number in range(MAX_REPLICATED + 20):
        burst.cluster.now += 30.0
        own = BlockKey(number.to_bytes(2, "big") * 16)
        burst.cluster.fleet.index.apply("s0", [BlockEvent(True, own, HOT[31])])
        for _ in range(60):
            facts = RequestFacts(4096, [*HOT[:32], own])
            burst.replicator.observe(burst.cluster.scheduler.query(facts, burst.cluster.now), 100.0, burst.cluster.now)
        view = burst.cluster.fleet.view(burst.cluster.now)
        for action in burst.replicator.tick(view, burst.cluster.fleet.index, burst.cluster.now):
            assert isinstance(action, CopyPrefix)
            burst.replicator.copied(action, ok=False)
    assert len(burst.replicator._replicated) == MAX_REPLICATED


def test_the_last_holder_of_a_prefix_keeps_it() -> None:
    """The node that had it before the burst has lost it meanwhile."""
    burst = Burst()
    burst.run(6, a_second=30)
    burst.tell("s0", tuple(HOT), stored=False)
    assert len(burst.holders) > 1
    burst.run(130, a_second=0)
    assert len(burst.holders) == 1
