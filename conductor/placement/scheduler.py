"""Where a request goes: applies the policy, predicts what its choice costs, and books it.

Pure: reads no clock; the random generator is an argument. What policies need not know is checked here: that some node
is available, that nodes which failed this request are avoided, and that the deadline can be met.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from conductor.arrays import Bools
from conductor.placement.bookings import Booking
from conductor.placement.fleet import Fleet
from conductor.placement.pending_native import new_pending_prefixes
from conductor.placement.policies import DEFAULT_POLICY, POLICIES, Policy
from conductor.placement.policies.milliseconds import milliseconds
from conductor.placement.predict import Breakdown, Prediction, explain
from conductor.placement.search_native import NativeSearch, load_search
from conductor.placement.view import NONE, Choice, PlacementQuery, RequestFacts, Shape, View
from conductor.registry import NodeInfo
from mooncake.errors import NodeUnavailable, Overloaded

MIN_RETRY_S, MAX_RETRY_S = 0.05, 30.0  # of a retry time, for a deadline that cannot be met


class Placement(NamedTuple):
    prefill: NodeInfo
    decode: NodeInfo | None
    pools: tuple[NodeInfo, ...]  # stores to read the prefix from and to write new blocks to, best first
    local_tokens: int  # prompt tokens in the prefill node's cache
    fetched_tokens: int  # prompt tokens beyond those, from the first pool
    new_tokens: int  # prompt tokens to compute
    sent_blocks: int  # blocks the decode node lacks
    is_known: bool  # whether the prefill node's predictions rest on measurements
    breakdown: Breakdown
    # At most this many leading tokens are read from the first pool: it holds more, but reading them is slower than
    # computing them. None: no limit.
    pool_tokens: int | None = None
    ssd_tokens: int = 0  # those of the fetched ones that are only on the SSD

    @property
    def predicted_ttft_ms(self) -> float:
        parts = self.breakdown
        return parts.queue_ms + parts.fetch_ms + parts.prefill_ms


class PlacementScheduler:
    """One owner. ``place`` changes nothing; ``book`` takes effect at once, before any node has heard of the request."""

    def __init__(
        self,
        fleet: Fleet,
        shape: Shape,
        policy: Policy = POLICIES[DEFAULT_POLICY],
        rng: np.random.Generator | None = None,
        native: bool = True,
    ) -> None:
        self.fleet = fleet
        self.shape = shape
        self.policy = policy
        self._rng = rng if rng is not None else np.random.default_rng(0)
        # Only our policy counts pending prefixes; the published ones use what caches report.
        self._pending_prefixes = new_pending_prefixes(shape.block_tokens, native) if policy is milliseconds else None
        library = load_search() if native else None
        self._native = NativeSearch(library, shape) if library is not None else None

    def query(self, facts: RequestFacts, now: float) -> PlacementQuery:
        """The request, and the cluster as it is now."""
        view = self._view(facts, now)
        runs = self.fleet.index.runs(facts.keys)
        if self._pending_prefixes is not None:
            self._pending_prefixes.extend_runs(facts.keys, view, runs, self.fleet.index.longest)
        query = PlacementQuery(facts, view, self.shape, now * 1e3, runs)
        if facts.excluded:
            query.prefill_ok = _allowed(view.prefill.nodes, facts.excluded)
            query.decode_ok = _allowed(view.decode.nodes, facts.excluded)
        if facts.session:
            query.last_prefill, query.last_decode = self.fleet.session(facts.session, view)
        return query

    def _view(self, facts: RequestFacts, now: float) -> View:
        """The usual one, unless it has nobody for this request and there are suspects."""
        view = self.fleet.view(now)
        if not facts.excluded or all(_allowed(nodes, facts.excluded).any() for nodes in _needed(view, facts)):
            return view
        suspects_too = self.fleet.view_apart_from(facts.excluded)
        return suspects_too if all(_needed(suspects_too, facts)) else view

    def place(self, facts: RequestFacts, now: float) -> Placement:
        """The policy's choice.

        Raises NodeUnavailable when a role has no usable node, Overloaded when the deadline is predicted to pass.
        """
        return self.answer(self.query(facts, now))

    def answer(self, query: PlacementQuery) -> Placement:
        """Like ``place``, for a query that was built before."""
        placement = self.choose(query)
        check_time(placement, query.facts.budget_ms)
        return placement

    def choose(self, query: PlacementQuery) -> Placement:
        """Like ``answer``, whether or not the deadline can be met. Raises NodeUnavailable."""
        _check_available(query)
        if self._native is not None and self.policy is milliseconds:
            return Placement(*self._native(query))
        choice = self.policy(query, self._rng)
        return describe(query, choice, explain(query, choice))

    def book(self, facts: RequestFacts, placement: Placement, now: float) -> Booking:
        """Count the placement on its nodes, until ``prefill_done`` and ``close``."""
        parts = placement.breakdown
        source = placement.pools[0] if placement.fetched_tokens else None
        booking = Booking(
            prefill_id=placement.prefill.node_id,
            decode_id=placement.decode.node_id if placement.decode else "",
            new_tokens=placement.new_tokens,
            prefill_ms=parts.fetch_ms + parts.prefill_ms,
            context_tokens=facts.num_tokens,
            blocks=placement.sent_blocks,
            source_id=source.node_id if source else "",
            ssd_bytes=placement.ssd_tokens * self.shape.block_bytes / self.shape.block_tokens,
        )
        self.fleet.book(booking, now, facts.session)
        if self._pending_prefixes is not None:
            held = (placement.local_tokens + placement.fetched_tokens) // self.shape.block_tokens
            self._pending_prefixes.add(booking, facts.keys, held)
        return booking

    def prefill_done(self, booking: Booking, now: float) -> None:
        if self._pending_prefixes is not None:
            self._pending_prefixes.remove(booking)
        self.fleet.prefill_done(booking, now)

    def close(self, booking: Booking, now: float) -> None:
        if self._pending_prefixes is not None and booking.open_prefill:
            self._pending_prefixes.remove(booking)
        self.fleet.close(booking, now)


def describe(query: PlacementQuery, choice: Choice, found: Prediction) -> Placement:
    view = query.view
    p, d = choice.prefill, choice.decode
    cached = found.local_tokens + found.fetched_tokens
    return Placement(
        view.prefill.nodes[p],
        None if d == NONE else view.decode.nodes[d],
        _pools(query, p, found.source),
        found.local_tokens,
        found.fetched_tokens,
        query.facts.num_tokens - cached,
        found.sent_blocks,
        bool(view.prefill.known[p]),
        found.breakdown,
        _pool_tokens(query, p, found.source, cached),
        0 if found.source == NONE else max(cached - int(query.dram_tokens.item(found.source)), 0),
    )


def _pool_tokens(query: PlacementQuery, p: int, source: int, cached: int) -> int | None:
    """The most tokens to read, where the store that the node will be told of holds more of the prompt."""
    if not query.view.stores.nodes:
        return None
    at = source if source != NONE else max(query.view.prefill.local_store.item(p), 0)
    if query.store_tokens.item(at) <= cached:
        return None
    return cached if source != NONE else 0


def _pools(query: PlacementQuery, p: int, source: int) -> tuple[NodeInfo, ...]:
    """The store to read from, else the one on the prefill node's host, else any."""
    stores = query.view.stores.nodes
    if not stores:
        return ()
    if source == NONE:
        source = int(query.view.prefill.local_store[p])
    return (stores[source] if source != NONE else stores[0],)


def _check_available(query: PlacementQuery) -> None:
    """Raises NodeUnavailable."""
    _check_some("prefill", query.view.prefill.nodes, query.prefill_ok)
    if query.facts.needs_decode:
        _check_some("decode", query.view.decode.nodes, query.decode_ok)


def _check_some(role: str, nodes: tuple[NodeInfo, ...], ok: Bools | None) -> None:
    if not nodes:
        raise NodeUnavailable(f"no {role} node is available")
    if ok is not None and not ok.any():
        raise NodeUnavailable(f"no {role} node is left for this request: each has failed it, or lacks its adapter")


def check_time(placement: Placement, budget_ms: float) -> None:
    """Raises Overloaded when the first token is predicted to come later than that."""
    if budget_ms == math.inf:
        return
    late_ms = placement.predicted_ttft_ms - budget_ms
    if late_ms > 0.0:
        raise Overloaded(
            f"the first token is predicted in {placement.predicted_ttft_ms:.0f} ms, after the request's deadline",
            min(max(late_ms / 1e3, MIN_RETRY_S), MAX_RETRY_S),
        )


def _needed(view: View, facts: RequestFacts) -> tuple[tuple[NodeInfo, ...], ...]:
    return (view.prefill.nodes, view.decode.nodes) if facts.needs_decode else (view.prefill.nodes,)


def _allowed(nodes: tuple[NodeInfo, ...], excluded: frozenset[int]) -> Bools:
    return np.array([info.incarnation not in excluded for info in nodes], dtype=bool)
