"""Placement of a request, or of what is left of it after a failed attempt: its facts, and the best nodes for it.

It counts and books nothing and calls no node. The scheduler compares pairs; here the nodes that failed this request are
ruled out, pairs without a way between them are avoided, and a local prefill on the decode node is considered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from conductor.dispatch.broken_pairs import BrokenPairs, Pair
from conductor.dispatch.request_progress import RequestProgress
from conductor.dispatch.retry import incarnations
from conductor.model_facts import ModelFacts
from conductor.placement.fleet import Fleet
from conductor.placement.local_prefill import local_prefill
from conductor.placement.policies import POLICIES, Policy
from conductor.placement.scheduler import Placement, PlacementScheduler, check_time
from conductor.placement.view import PlacementQuery, RequestFacts
from conductor.stats import DispatchStats
from mooncake.config import Config
from mooncake.errors import ConfigError, NodeUnavailable, Overloaded
from mooncake.hashing import Chain
from mooncake.hashing import prepare as prepare_hashing
from mooncake.pooling import Pooling
from mooncake.types import Role

NodesLacking = Callable[[str], frozenset[int]]  # by an adapter's digest: incarnations of nodes that do not have it


class Placer:
    """One owner: the dispatcher."""

    def __init__(
        self, config: Config, model: ModelFacts, fleet: Fleet, stats: DispatchStats, lacking: NodesLacking
    ) -> None:
        """``stats`` describes recent answers. Raises ConfigError for an unknown policy."""
        self.scheduler = PlacementScheduler(fleet, model.shape, _policy(config.conductor.policy))
        self.broken_pairs = BrokenPairs()
        self.on_arrival: list[Callable[[PlacementQuery, Placement, float], None]] = []  # called once per request
        self._model = model
        self._fleet = fleet
        self._stats = stats
        self._lacking = lacking
        self._max_local_tokens = config.conductor.max_tail_tokens
        self._is_coupled = config.cluster.coupled > 0  # prefill nodes give whole answers, and keep their KV
        prepare_hashing()

    def facts(self, progress: RequestProgress, now: float) -> RequestFacts:
        """What placement depends on, for the remaining part of the request."""
        request, tokens = progress.request, progress.tokens
        left = request.sampling.max_tokens - progress.num_kept
        chain = Chain.of(self._model.kv_fingerprint, request.salt, request.adapter, request.adapter_start)
        # Of a prompt that is scored, or whose states' mean is wanted, every token is computed, whatever is cached.
        is_scored = request.sampling.prompt_logprobs is not None and not progress.num_kept
        computes_all = is_scored or request.pooling is Pooling.MEAN
        return RequestFacts(
            num_tokens=len(tokens),
            keys=[] if computes_all else chain.keys(tokens, self._model.shape.block_tokens),
            expected_tokens=self._stats.expected_output_tokens(left),
            needs_decode=not self._is_coupled and (left > 1 or progress.is_beam_search),
            # Only requests that have cost nothing yet are refused; a retry goes on as long as it may.
            budget_ms=(request.deadline - now) * 1e3 if progress.is_new else float("inf"),
            excluded=self._lacking(request.adapter) if request.adapter else frozenset(),
            session=request.session,
            number=self._stats.requests,
        )

    def place(self, facts: RequestFacts, progress: RequestProgress, now: float) -> Placement:
        """Avoid nodes that failed this request, unless they are alive and the only ones that can compute it. Raises
        NodeUnavailable, and Overloaded when the deadline cannot be met."""
        registry, retries = self._fleet.registry, progress.retries
        if retries.dead:  # some may have sent heartbeats since: the client read late, or the request waited for them
            retries.revive(registry.live())
        barred = facts.excluded | retries.failed
        usable = (
            incarnations(node.info for node in (*registry.usable(role), *registry.usable(role, barred)))
            - facts.excluded
            for role in (Role.PREFILL, Role.DECODE)
        )
        placement = self._best(facts._replace(excluded=facts.excluded | retries.excluded(usable)), progress, now)
        return placement._replace(pools=(), fetched_tokens=0) if self._is_coupled else placement

    def report_unplaced(self, facts: RequestFacts, progress: RequestProgress, now: float) -> None:
        """Tell ``on_arrival`` of a request that is not placed: refused requests are demand too."""
        with contextlib.suppress(NodeUnavailable, Overloaded):
            self._best(facts, progress, now)

    def _best(self, facts: RequestFacts, progress: RequestProgress, now: float) -> Placement:
        """The scheduler's pair, or a decode node alone."""
        query = self.scheduler.query(facts, now)
        placement = self.scheduler.choose(query)
        if self._is_broken(placement, now):
            query, placement = self._around(facts, query, placement, now)
        if progress.is_new:
            for tell in self.on_arrival:
                tell(query, placement, now)
        check_time(placement, facts.budget_ms)
        if not facts.needs_decode or len(progress.emitted) > 1 or not self._max_local_tokens:
            return placement
        return local_prefill(query, placement, self._fleet.costs, self._max_local_tokens) or placement

    def _is_broken(self, placement: Placement, now: float) -> bool:
        return placement.decode is not None and self.broken_pairs.avoids(pair_of(placement), now)

    def _around(
        self, facts: RequestFacts, query: PlacementQuery, placement: Placement, now: float
    ) -> tuple[PlacementQuery, Placement]:
        """Other nodes than this broken pair, of which one is enough. The pair itself if there is nobody else."""
        broken, barred = (query, placement), facts.excluded
        while self._is_broken(placement, now):
            for incarnation in reversed(pair_of(placement)):
                try:
                    query = self.scheduler.query(facts._replace(excluded=barred | {incarnation}), now)
                    placement = self.scheduler.choose(query)
                except NodeUnavailable:
                    continue
                barred |= {incarnation}
                break
            else:
                return broken
        return query, placement


def pair_of(placement: Placement) -> Pair:
    """The nodes of a placement that has two."""
    assert placement.decode is not None
    return placement.prefill.incarnation, placement.decode.incarnation


def _policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"conductor.policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]
