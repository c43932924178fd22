"""The real conductor in virtual time: its registry, index, costs, fleet, scheduler and admission, called where the live
dispatcher calls them. Nothing is decided here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

import numpy as np

from conductor.admission.admission import Admission, Mode
from conductor.admission.rules import ADMISSIONS, Limits
from conductor.control.balance import Balancer, Switch
from conductor.control.replication import CopyPrefix, DropReplica, ReplicationLimits, Replicator
from conductor.placement.cost import CostModel, DecodeCost, PrefillCost, StartCosts, TransferCost
from conductor.placement.fleet import Fleet
from conductor.placement.policies import POLICIES
from conductor.placement.scheduler import Placement, PlacementScheduler
from conductor.placement.view import RequestFacts, Shape
from conductor.prefixes.index import PrefixIndex
from conductor.registry import NodeInfo, NodeLoad, Registry
from conductor.stats import DispatchStats
from mooncake.app.sim.cluster import Cluster, Machines
from mooncake.app.sim.requests import SimRequest
from mooncake.errors import ConfigError
from mooncake.types import BlockEvent, Role, SegmentAddress

FINGERPRINT = "simulated"
TIMEOUT_BEATS = 4  # heartbeats that a node may miss


class Refused(Exception):
    """Refused by admission; worth a retry after ``retry_after_s``."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


class SimConductor:
    """One conductor. Methods take the time (s). Raises ConfigError for an unknown policy or admission."""

    def __init__(self, cluster: Cluster, rng: np.random.Generator) -> None:
        settings, model = cluster.conductor, cluster.model
        _check_known("policy", settings.policy, POLICIES)
        _check_known("admission", settings.admission, ADMISSIONS)
        self._has_decode = cluster.count("decode") > 0
        self._max_tokens = settings.max_tokens
        timeout_s = TIMEOUT_BEATS * settings.heartbeat_s
        self.registry = Registry(FINGERPRINT, model.block_tokens, settings.heartbeat_s, timeout_s)
        self.index = PrefixIndex()
        self.costs = CostModel(start_costs(cluster))
        ssds = [group.ssd for group in cluster.machines if group.ssd is not None]
        self._is_tiered = bool(ssds)
        ssd_mb_per_s = min((ssd.read_gb_per_s * 1e3 for ssd in ssds), default=1e3)
        self.fleet = Fleet(self.registry, self.costs, self.index, ssd_mb_per_s=ssd_mb_per_s)
        shape = Shape(model.block_tokens, model.block_tokens * model.token_bytes, model.num_layers)
        policy_rng, admission_rng, self._probing_rng = rng.spawn(3)
        self.scheduler = PlacementScheduler(self.fleet, shape, POLICIES[settings.policy], policy_rng)
        self.admission: Admission | None = None
        if settings.admission != "none":
            limits = Limits(cluster.slo.ttft_s * 1e3, cluster.slo.tbt_ms)
            rule, mode = ADMISSIONS[settings.admission], Mode(settings.admission_mode)
            self.admission = Admission(rule, limits, mode, rng=admission_rng)
        self.balancer = Balancer(cluster.slo.tbt_ms, model.block_tokens) if settings.balances_roles else None
        self.replicator: Replicator | None = None
        if settings.replicates:
            self.replicator = Replicator(ReplicationLimits(ttl_s=settings.replica_ttl_s))
        self.stats = DispatchStats()
        self.stats.recent_output_tokens.append(round(settings.expected_output_tokens))
        self._block_tokens = model.block_tokens
        self._incarnations = itertools.count(1)
        self.kept: dict[int, Placement] | None = None  # where each request was or would have been placed, if wanted
        self.script: Mapping[int, Placement] | None = None  # a replay: use these placements instead of deciding
        self.turned_away: set[int] = set()  # to be refused, whatever admission says

    # Requests

    def place(self, request: SimRequest, now: float) -> None:
        """Choose nodes and book them. Raises Refused, and TryLater if nobody can take it."""
        facts = self._facts(request)
        if self.script is not None:
            if request.index in self.turned_away:
                raise Refused(math.nan)
            self._book(request, facts, self.script[request.index], now)
            return
        query = self.scheduler.query(facts, now)
        placement = self.scheduler.answer(query)
        if self.balancer is not None and request.attempts == 0:
            work_ms = placement.breakdown.prefill_ms + placement.breakdown.fetch_ms
            self.balancer.arrived(query.view, work_ms, request.num_tokens, facts.expected_tokens)
        if self.replicator is not None and request.attempts == 0:
            self.replicator.observe(query, placement.breakdown.prefill_ms, now)
        if self.admission is not None and request.attempts == 0:  # a retry has already cost something: it continues
            verdict = self.admission.decide(query, placement, now, self._max_tokens)
            if self.kept is not None:
                self.kept[request.index] = placement
            if request.index in self.turned_away:
                raise Refused(math.nan)
            if not verdict.is_admitted:
                raise Refused(verdict.retry_after_s)
        self._book(request, facts, placement, now)

    def _book(self, request: SimRequest, facts: RequestFacts, placement: Placement, now: float) -> None:
        booking = self.scheduler.book(facts, placement, now)
        if self.admission is not None:
            self.admission.placed(booking, facts, self._max_tokens, placement, now)
        if request.attempts:
            request.begin_attempt()
        request.attempts += 1
        request.placement, request.booking = placement, booking
        request.prefill_id = placement.prefill.node_id
        request.decode_id = placement.decode.node_id if placement.decode else ""
        if request.attempts == 1:
            request.predicted_ttft_s = placement.predicted_ttft_ms / 1e3

    def would_admit(self, request: SimRequest, now: float) -> bool:
        """Whether the request would be admitted if it came now; changes nothing."""
        query = self.scheduler.query(self._facts(request), now)
        placement = self.scheduler.answer(query)
        return self.admission is None or self.admission.fits(query, placement, now, self._max_tokens, self._probing_rng)

    def prefill_ended(self, request: SimRequest, now: float) -> bool:
        """The first token is ready. False: drop the request."""
        assert request.booking is not None
        self.scheduler.prefill_done(request.booking, now)
        if self.admission is None:
            return True
        is_checked = self.admission.checks_after_prefill and request.attempts == 1
        query = self.scheduler.query(self._facts(request), now) if is_checked else None
        return self.admission.prefill_ended(request.booking, query, now)

    def ended(self, request: SimRequest, output_tokens: int, now: float) -> None:
        """The attempt is over; ``output_tokens`` of a whole answer, or 0."""
        booking, request.booking = request.booking, None
        if booking is None:
            return
        self.scheduler.close(booking, now)
        if output_tokens:
            self.stats.recent_output_tokens.append(output_tokens)
        if self.admission is not None:
            self.admission.finished(booking, now, output_tokens)

    def _facts(self, request: SimRequest) -> RequestFacts:
        return RequestFacts(
            num_tokens=request.num_tokens,
            keys=request.keys,
            expected_tokens=self.stats.expected_output_tokens(1 << 20),
            needs_decode=self._has_decode and request.output_tokens > 1,
            excluded=request.dead,
            session=request.session,
            number=self.stats.requests,
        )

    # Nodes

    def join(self, name: str, group: Machines, now: float, has_store: bool = True) -> None:
        """Register a machine: a prefill machine as the node and, if new, as its host's store."""
        if group.role == "decode":
            self._register(name, name, Role.DECODE, group.max_sequences, now)
            return
        self._register(name, name, Role.PREFILL, 0, now)
        if group.role == "coupled" or not has_store:
            return
        self._register(store_id(name), name, Role.STORE, 0, now, is_tiered=group.ssd is not None)
        for num_bytes in (10**8, 10**9, 10**10):  # it has read from its own host's memory before
            load_ms = num_bytes / group.load_gb_per_s / 1e6
            self.costs.observe_transfer(name, store_id(name), num_bytes, load_ms)

    def stored(self, name: str, events: Iterable[BlockEvent]) -> None:
        if self.script is not None:  # not used in a replay
            return
        if not self._is_tiered:
            self.index.apply(name, events)
            return
        for tier, changes in itertools.groupby(events, key=attrgetter("tier")):
            self.index.apply(name, changes, tier)

    def heartbeat(self, node_id: str, load: NodeLoad, now: float, draining: bool = False) -> None:
        node = self.registry.get(node_id)
        if node is not None:
            self.registry.heartbeat(node_id, node.info.incarnation, load, draining, now)

    def switch(self, now: float) -> Switch | None:
        """The machine that should change its role now."""
        return self.balancer.tick(self.fleet.view(now), now) if self.balancer is not None else None

    def replications(self, now: float) -> list[CopyPrefix | DropReplica]:
        """Which prefixes to copy now, and which copies to drop."""
        if self.replicator is None or not self.replicator.has_hot_prefixes:
            return []
        return self.replicator.tick(self.fleet.view(now), self.index, now)

    def copied(self, copy: CopyPrefix, ok: bool) -> None:
        if self.replicator is not None:
            self.replicator.copied(copy, ok)

    def call_failed(self, node_id: str, now: float) -> int:
        """A call failed because the node is dead. Returns the dead incarnation."""
        node = self.registry.get(node_id)
        if node is None:
            return 0
        self.registry.call_failed(node.info, now)
        return node.info.incarnation

    def tick(self, now: float) -> None:
        for node in self.registry.tick(now):
            self._forget(node.info)

    def _forget(self, info: NodeInfo) -> None:
        self.index.forget(info.node_id)
        self.costs.forget(info.node_id)
        self.fleet.forget(info.node_id)
        if self.replicator is not None:
            self.replicator.node_gone(info.node_id)

    def _register(
        self, node_id: str, host: str, role: Role, max_sequences: int, now: float, is_tiered: bool = False
    ) -> None:
        incarnation = next(self._incarnations)
        segment = SegmentAddress(node_id, incarnation, host, "", "", 0, 0)
        info = NodeInfo(node_id, role, incarnation, node_id, segment, FINGERPRINT, self._block_tokens, max_sequences)
        replaced = self.registry.register(info, now)
        if replaced is not None:
            self._forget(replaced)
        self.index.join(node_id, is_tiered)


def store_id(host: str) -> str:
    return f"store-{host}"


def host_of(store: str) -> str:
    return store.removeprefix("store-")


def start_costs(cluster: Cluster) -> StartCosts:
    """What ``mooncake calibrate`` would have found on the first machine of each role."""
    prefill, decode = PrefillCost(), DecodeCost()
    for group in reversed(cluster.machines):
        curve = cluster.curves[group.curve]
        if group.role != "decode":
            prefill = PrefillCost(curve.prefill_step_ms, curve.prefill_token_ms, curve.prefill_pair_ms, True)
        if group.role != "prefill":
            decode = DecodeCost(curve.decode_step_ms, curve.decode_sequence_ms, curve.decode_context_ms, True)
    speed = min(group.nic_gb_per_s for group in cluster.machines)
    return StartCosts(prefill, decode, TransferCost(cluster.latency_ms, 1e-6 / speed, True))


def _check_known(what: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise ConfigError(f"no {what} is called {name!r}; there are: {', '.join(names)}")
