"""A fleet of nodes of known speed, to test where a request is placed. Nothing is faked, because there is no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from conductor.placement.bookings import Booking
from conductor.placement.cost import CostModel
from conductor.placement.fleet import Fleet
from conductor.placement.policies import DEFAULT_POLICY, POLICIES
from conductor.placement.scheduler import Placement, PlacementScheduler
from conductor.placement.view import RequestFacts, Shape
from conductor.prefixes.index import PrefixIndex
from conductor.registry import NodeInfo, Registry
from mooncake.types import BlockEvent, BlockKey, Role, SegmentAddress, Tier

SHAPE = Shape(block_tokens=64, block_bytes=1 << 20, num_layers=10)


def incarnation(node_id: str) -> int:
    return int.from_bytes(node_id.encode(), "little")


def node(node_id: str, role: Role, host: str = "h") -> NodeInfo:
    segment = SegmentAddress(node_id, 1, host, "@x", "127.0.0.1:1", 1 << 20, 100)
    return NodeInfo(node_id, role, incarnation(node_id), f"{node_id}:1", segment, "kv", 64)


@dataclass
class Cluster:
    """A fleet with nodes of known speed: 1 ms per token of prefill, 10 ms per decode step, 1 ms per MB of transfer."""

    prefill: int = 2
    decode: int = 2
    stores: int = 1
    measured: bool = True
    now: float = 100.0
    policy: str = DEFAULT_POLICY
    native: bool = True
    hosts: bool = False  # each prefill node has its own host with a store; else all are on one
    chunk_tokens: int = 0
    ssd_mb_per_s: float = 1000.0
    fleet: Fleet = field(init=False)
    scheduler: PlacementScheduler = field(init=False)
    prompts: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        registry, costs = Registry("kv", 64, 0.5, 5.0), CostModel()
        self.fleet = Fleet(registry, costs, PrefixIndex(), self.chunk_tokens, self.ssd_mb_per_s)
        shape = replace(SHAPE, chunk_tokens=self.chunk_tokens)
        self.scheduler = PlacementScheduler(
            self.fleet, shape, POLICIES[self.policy], np.random.default_rng(1), self.native
        )
        for role, number in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode), (Role.STORE, self.stores)):
            for i in range(number):
                host = f"h{i}" if self.hosts and role is not Role.DECODE else "h"
                registry.register(node(f"{role[0]}{i}", role, host), self.now)
        if not self.measured:
            return
        for size in (1, 10, 100, 1000):
            costs.observe_prefill("p0", size, 0, float(size))
            costs.observe_decode("d0", size, 64 * size, 10.0 + size)
            costs.observe_transfer("p0", "d0", size << 20, float(size))

    def place(
        self,
        num_tokens: int = 640,
        runs: dict[str, int] | None = None,
        in_dram: dict[str, int] | None = None,
        **changes: object,
    ) -> Placement:
        """Place a new prompt. ``runs``: leading blocks that these nodes hold; for stores also how many of them are in
        DRAM (default: all)."""
        facts = self.facts(num_tokens, runs, in_dram, **changes)
        return self.scheduler.place(facts, self.now)

    def facts(
        self,
        num_tokens: int = 640,
        runs: dict[str, int] | None = None,
        in_dram: dict[str, int] | None = None,
        **changes: object,
    ) -> RequestFacts:
        prompt = next(self.prompts)
        keys = [BlockKey(bytes([block]) + prompt.to_bytes(31, "little")) for block in range(num_tokens // 64)]
        self.fleet.view(self.now)  # a store's two tiers are known once it is in a view
        for node_id, run in (runs or {}).items():
            fast = (in_dram or {}).get(node_id, run)
            for tier, part in ((Tier.DRAM, keys[: min(fast, run)]), (Tier.SSD, keys[fast:run])):
                self.fleet.index.apply(node_id, [BlockEvent(True, key) for key in part], tier)
        return RequestFacts(num_tokens, keys, expected_tokens=10.0)._replace(**changes)

    def book(self, placement: Placement, num_tokens: int = 640) -> Booking:
        return self.scheduler.book(self.facts(num_tokens), placement, self.now)


def incarnations(*node_ids: str) -> frozenset[int]:
    return frozenset(map(incarnation, node_ids))


def pair(placement: Placement) -> tuple[str, str]:
    return placement.prefill.node_id, placement.decode.node_id if placement.decode else ""
