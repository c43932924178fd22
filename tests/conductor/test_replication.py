"""Hot prefixes: copied to as many hosts as their crowd needs, and given up when the crowd has gone."""

from collections import Counter

from placing import Cluster

from conductor.replication import MAX_CROWDS, Copy, Reclaim, ReplicationLimits, Replicator
from conductor.view import RequestFacts
from mooncake.types import BlockEvent, BlockKey

HOT = [BlockKey(bytes([7, block]) * 16) for block in range(64)]


class Crowd:
    """Requests for one long prefix, held by one host of eight; copies take a second."""

    def __init__(self) -> None:
        self.cluster = Cluster(prefill=8, decode=8, stores=8, hosts=True)
        self.replicator = Replicator()
        self.given_up: list[Reclaim] = []
        self.copies = 0
        self.cluster.fleet.index.apply("s0", [BlockEvent(True, key) for key in HOT])

    def run(self, seconds: float, a_second: int, prefill_ms: float = 100.0) -> None:
        cluster, replicator = self.cluster, self.replicator
        coming: list[tuple[float, Copy]] = []
        for tick in range(int(seconds * 10)):
            cluster.now += 0.1
            if a_second and tick % max(10 // a_second, 1) == 0:
                for _ in range(max(a_second // 10, 1)):
                    facts = RequestFacts(64 * 64, HOT)
                    replicator.asked(cluster.scheduler.ask(facts, cluster.now), prefill_ms, cluster.now)
            view = cluster.fleet.view(cluster.now)
            for action in replicator.tick(view, cluster.fleet.index, cluster.now):
                if isinstance(action, Copy):
                    coming.append((cluster.now + 1.0, action))
                    self.copies += 1
                else:
                    self.given_up.append(action)
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


def test_a_crowd_gets_its_copies_within_two_transfers() -> None:
    crowd = Crowd()
    crowd.run(20, a_second=1)
    assert len(crowd.holders) == 1, "a tenth of one node needs no copy"
    crowd.run(3, a_second=100)
    assert len(crowd.holders) >= 5


def test_the_copies_go_when_the_crowd_has_gone() -> None:
    crowd = Crowd()
    crowd.run(6, a_second=30)
    assert len(crowd.holders) > 2
    crowd.run(115, a_second=0)
    assert crowd.given_up == []
    crowd.run(15, a_second=0)
    assert crowd.holders == {"s0": 1}, "what was there by itself stays"
    given_up = len(crowd.given_up)
    crowd.run(200, a_second=0)
    assert len(crowd.given_up) == given_up, "once"


def test_no_host_is_sent_the_same_twice_and_flights_are_few() -> None:
    crowd = Crowd()
    limits = ReplicationLimits(max_in_flight=2)
    crowd.replicator = Replicator(limits)
    for _ in range(300):
        facts = RequestFacts(64 * 64, HOT)
        crowd.replicator.asked(crowd.cluster.scheduler.ask(facts, 100.0), 100.0, 100.0)
    view = crowd.cluster.fleet.view(100.0)
    copies = crowd.replicator.tick(view, crowd.cluster.fleet.index, 100.0)
    assert len(copies) == 2
    assert crowd.replicator.tick(view, crowd.cluster.fleet.index, 100.0) == []
    again = crowd.replicator.tick(view, crowd.cluster.fleet.index, 200.0)
    assert len(again) <= 2, "copies of which nothing was heard are tried again"


def test_a_failed_copy_is_tried_again_and_a_dead_node_forgotten() -> None:
    crowd = Crowd()
    for _ in range(50):
        crowd.replicator.asked(crowd.cluster.scheduler.ask(RequestFacts(4096, HOT), 100.0), 100.0, 100.0)
    view = crowd.cluster.fleet.view(100.0)
    copies = crowd.replicator.tick(view, crowd.cluster.fleet.index, 100.0)
    assert copies
    for copy in copies:
        assert isinstance(copy, Copy)
        crowd.replicator.copied(copy, ok=False)
    assert crowd.replicator.tick(view, crowd.cluster.fleet.index, 100.0) == copies
    for copy in copies:
        assert isinstance(copy, Copy)
        crowd.replicator.copied(copy, ok=True)
        crowd.replicator.node_gone(copy.target)
    assert crowd.replicator.tick(view, crowd.cluster.fleet.index, 100.0) == copies, "none of them has it any more"


def test_what_is_copied_is_what_all_who_ask_have_in_common() -> None:
    crowd = Crowd()
    crowd.cluster.fleet.index.apply("s0", [BlockEvent(True, key) for key in HOT])
    for guest in range(50):
        own = [BlockKey(bytes([8, guest, block]) * 16) for block in range(20)]
        facts = RequestFacts(4096, [*HOT[:41], *own])
        crowd.replicator.asked(crowd.cluster.scheduler.ask(facts, 100.0), 100.0, 100.0)
    copies = crowd.replicator.tick(crowd.cluster.fleet.view(100.0), crowd.cluster.fleet.index, 100.0)
    assert {copy.keys for copy in copies if isinstance(copy, Copy)} == {tuple(HOT[:41])}
    targets = [copy.target for copy in copies if isinstance(copy, Copy)]
    assert len(set(targets)) == len(targets), "its beginnings, which are watched as well, come along"


def test_who_fetched_a_prefix_for_a_crowd_gives_it_up_as_copies_are() -> None:
    crowd = Crowd()
    crowd.replicator = Replicator(ReplicationLimits(max_copies=0))
    crowd.run(1, a_second=30)
    for name in ("s3", "s5"):
        crowd.tell(name, tuple(HOT), stored=True)
    crowd.run(1, a_second=30)
    assert len(crowd.holders) == 3
    crowd.run(130, a_second=0)
    assert crowd.holders == {"s0": 1}
    assert {reclaim.node_id for reclaim in crowd.given_up} == {"s3", "s5"}


def test_a_beginning_that_others_still_ask_for_is_kept() -> None:
    crowd = Crowd()
    crowd.run(6, a_second=30)
    shared = RequestFacts(8 * 64, HOT[:8])
    for _ in range(130):
        crowd.run(1, a_second=0)
        crowd.replicator.asked(crowd.cluster.scheduler.ask(shared, crowd.cluster.now), 1.0, crowd.cluster.now)
    assert crowd.given_up and all(reclaim.keys == tuple(HOT[8:]) for reclaim in crowd.given_up)


def test_however_many_crowds_come_few_are_remembered() -> None:
    """Bursts with pauses: each has a longer common prefix than the one before, and all share one."""
    crowd = Crowd()
    for burst in range(MAX_CROWDS + 20):
        crowd.cluster.now += 30.0
        own = BlockKey(burst.to_bytes(2, "big") * 16)
        crowd.cluster.fleet.index.apply("s0", [BlockEvent(True, own, HOT[31])])
        for _ in range(60):
            facts = RequestFacts(4096, [*HOT[:32], own])
            crowd.replicator.asked(crowd.cluster.scheduler.ask(facts, crowd.cluster.now), 100.0, crowd.cluster.now)
        view = crowd.cluster.fleet.view(crowd.cluster.now)
        for action in crowd.replicator.tick(view, crowd.cluster.fleet.index, crowd.cluster.now):
            assert isinstance(action, Copy)
            crowd.replicator.copied(action, ok=False)
    assert len(crowd.replicator._crowds) == MAX_CROWDS


def test_the_last_who_has_a_prefix_keeps_it() -> None:
    """The node that had it before the crowd has lost it meanwhile."""
    crowd = Crowd()
    crowd.run(6, a_second=30)
    crowd.tell("s0", tuple(HOT), stored=False)
    assert len(crowd.holders) > 1
    crowd.run(130, a_second=0)
    assert len(crowd.holders) == 1
