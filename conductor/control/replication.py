"""Replication of hot prefixes: which to copy to more hosts before all of their nodes fetch them, and when to drop them.

Pure. Replicas mostly follow from placement: a node that fetches a prefix has it from then on. In a sudden burst that is
too slow, because every node fetches from one host. So prefixes are watched at a few depths; one that needs more nodes
than hold it is copied in the background, up to the point where the burst's prompts diverge, with bounds on the number
of replicas and on copies in flight. When it was not requested during its time to live, the nodes that got it in the
burst, by a copy or a fetch, drop it unless another prompt's blocks follow on it; those that had it before keep it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from conductor.arrays import Bools
from conductor.placement.view import NONE, PlacementQuery, View
from conductor.prefixes.index import PrefixIndex
from mooncake.types import BlockKey

DEPTHS = tuple(2**power for power in range(2, 16))  # prefix lengths in blocks that are watched
MAX_WATCHED = 4096  # prefixes; beyond that those not requested for longest are forgotten
MAX_REPLICATED = 256  # prefixes; copies of the oldest one are left to eviction
TICK_S = 0.25  # between two ticks
IDLE_REQUESTS = 0.5  # below this many recent requests, a new one begins a burst


class CopyPrefix(NamedTuple):
    """``target`` should read these blocks from ``source``."""

    source: str
    target: str
    keys: tuple[BlockKey, ...]


class DropReplica(NamedTuple):
    """``node_id`` should drop these blocks, last one first, except those that other blocks follow on."""

    node_id: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class ReplicationLimits:
    half_life_s: float = 3.0  # of a prefix's heat: a burst shows within a second
    min_requests: float = 5.0  # recent ones: a few long prompts are no burst
    busy: float = 0.5  # fraction of a node that one prefix may take before another node should hold it
    max_in_flight: int = 8
    max_copies: int = 32  # of one prefix
    ttl_s: float = 120.0
    copy_timeout_s: float = 30.0  # a copy without a result after this long has failed


@dataclass(slots=True)
class _WatchedPrefix:
    """A prefix of a watched length."""

    keys: tuple[BlockKey, ...]  # common to all recent requests for it: the prefix, and perhaps more
    original_holders: frozenset[str]  # stores that had it before the burst
    heat: float = 0.0  # decayed sum of prefill ms requested
    requests: float = 0.0  # decayed count
    updated_at: float = 0.0
    requested_at: float = 0.0


@dataclass(slots=True)
class _HotPrefix:
    """A prefix that needed more than one node."""

    keys: tuple[BlockKey, ...]
    original_holders: frozenset[str]  # stores that had it before the burst
    copies: set[str] = field(default_factory=set)  # stores it was copied to


class Replicator:
    """One owner. Call ``observe`` for every request, and ``tick`` as often as copies may start."""

    def __init__(self, limits: ReplicationLimits | None = None) -> None:
        self.limits = limits or ReplicationLimits()
        self._watched: OrderedDict[bytes, _WatchedPrefix] = OrderedDict()  # by the watched prefix's last key
        self._hot: set[bytes] = set()  # of these, the ones too much for a single node
        self._replicated: dict[bytes, _HotPrefix] = {}  # by their last key
        self._in_flight: dict[CopyPrefix, float] = {}  # start times

    @property
    def has_hot_prefixes(self) -> bool:
        """Whether a ``tick`` may return anything."""
        return bool(self._hot or self._replicated)

    def observe(self, query: PlacementQuery, prefill_ms: float, now: float) -> None:
        """A request arrived that takes ``prefill_ms`` of a prefill node that holds its prefix."""
        keys = cast("Sequence[BlockKey]", query.facts.keys)
        whole = tuple(keys[: DEPTHS[-1]])
        runs = query.store_runs
        longest = float(runs.max(initial=0.0))
        for depth in _depths(keys):
            name = keys[depth - 1]
            watched = self._watched.get(name)
            decay = self._decay(watched, now) if watched is not None else 0.0
            if watched is None or watched.requests * decay < IDLE_REQUESTS:
                original_holders = frozenset(_names(query.view, runs >= depth)) if depth <= longest else frozenset()
                watched = self._watched[name] = _WatchedPrefix(whole, original_holders)
                if len(self._watched) > MAX_WATCHED:
                    self._hot.discard(self._watched.popitem(last=False)[0])
            else:
                watched.keys = _common_prefix(watched.keys, whole)
            self._watched.move_to_end(name)
            watched.heat = watched.heat * decay + prefill_ms
            watched.requests = watched.requests * decay + 1.0
            watched.updated_at = watched.requested_at = now
            if self._nodes_needed(watched, now) > 1:
                self._hot.add(name)

    def tick(self, view: View, index: PrefixIndex, now: float) -> list[CopyPrefix | DropReplica]:
        """What to copy and what to drop."""
        for copy, since in list(self._in_flight.items()):
            if now - since > self.limits.copy_timeout_s:
                del self._in_flight[copy]
        return [*self._drops(view, index, now), *self._new_copies(view, index, now)]

    def copied(self, copy: CopyPrefix, ok: bool) -> None:
        """A copy has ended. A failed one may be retried."""
        replicated = self._replicated.get(copy.keys[-1])
        if self._in_flight.pop(copy, None) is not None and ok and replicated is not None:
            replicated.copies.add(copy.target)

    def node_gone(self, node_id: str) -> None:
        for replicated in self._replicated.values():
            replicated.copies.discard(node_id)
        self._in_flight = {copy: since for copy, since in self._in_flight.items() if copy.target != node_id}

    def _new_copies(self, view: View, index: PrefixIndex, now: float) -> list[CopyPrefix]:
        """For the longest prefixes first: a node that is sent one has all its beginnings."""
        copies: list[CopyPrefix] = []
        done: set[bytes] = set()
        hot = ((-len(self._watched[name].keys), -self._watched[name].heat, name) for name in self._hot)
        for *_, name in sorted(hot):
            watched = self._watched[name]
            needed = self._nodes_needed(watched, now)
            if needed <= 1:
                self._hot.discard(name)
                continue
            keys = watched.keys
            holds = self._holders(view, index, keys)
            if keys[-1] in done or not holds.any():
                continue
            done.add(keys[-1])
            replicated = self._replicated.get(keys[-1])
            if replicated is None:
                replicated = self._replicated[keys[-1]] = _HotPrefix(keys, watched.original_holders)
                if len(self._replicated) > MAX_REPLICATED:  # copies of the oldest one are left to eviction
                    del self._replicated[next(iter(self._replicated))]
            coming = {copy.target for copy in self._in_flight if copy.keys[: len(keys)] == keys}
            missing = min(needed - int(holds.sum()), self.limits.max_copies - len(replicated.copies)) - len(coming)
            for target in self._targets(view, holds, coming, missing):
                if len(self._in_flight) >= self.limits.max_in_flight:
                    return copies
                copy = CopyPrefix(self._source(view, holds), target, keys)
                copies.append(copy)
                self._in_flight[copy] = now
        return copies

    def _targets(self, view: View, holds: Bools, coming: set[str], count: int) -> list[str]:
        """Stores without the prefix, those with the least busy prefill nodes first."""
        busy = np.full(len(view.stores.nodes), np.inf)
        for p, local_store in enumerate(view.prefill.local_store):
            if local_store != NONE:
                busy[local_store] = min(busy[local_store], float(view.prefill.queued_ms[p]))
        found: list[str] = []
        for at in np.argsort(busy, kind="stable"):
            target = view.stores.nodes[int(at)].node_id
            if len(found) >= count or not np.isfinite(busy[at]):
                break
            if not holds[int(at)] and target not in coming:
                found.append(target)
        return found

    def _source(self, view: View, holds: Bools) -> str:
        """The holder that is sending least now."""
        flows = np.where(holds, view.stores.sending_flows, np.inf)
        return view.stores.nodes[int(flows.argmin())].node_id

    def _drops(self, view: View, index: PrefixIndex, now: float) -> list[DropReplica]:
        """Replicas of prefixes that are no longer requested."""
        found: list[DropReplica] = []
        for end, replicated in list(self._replicated.items()):
            wanted = self._requested_depth(replicated.keys, now)
            if wanted == _depths(replicated.keys)[-1] or any(copy.keys[-1] == end for copy in self._in_flight):
                continue
            del self._replicated[end]
            holders = _names(view, self._holders(view, index, replicated.keys))
            spared = replicated.original_holders if replicated.original_holders.intersection(holders) else holders[:1]
            found += (DropReplica(node_id, replicated.keys[wanted:]) for node_id in holders if node_id not in spared)
        return found

    def _holders(self, view: View, index: PrefixIndex, keys: tuple[BlockKey, ...]) -> Bools:
        holds: Bools = index.runs(keys)[view.stores.slots] >= len(keys)
        return holds

    def _requested_depth(self, keys: tuple[BlockKey, ...], now: float) -> int:
        """How many of the first blocks have been requested during the time to live."""
        for depth in reversed(_depths(keys)):
            watched = self._watched.get(keys[depth - 1])
            if watched is not None and now - watched.requested_at <= self.limits.ttl_s:
                return depth
        return 0

    def _decay(self, watched: _WatchedPrefix, now: float) -> float:
        return math.pow(0.5, (now - watched.updated_at) / self.limits.half_life_s)

    def _nodes_needed(self, watched: _WatchedPrefix, now: float) -> int:
        """Nodes that the prefix keeps busy. Heat is a decayed sum: at a steady rate it is rate · half-life / ln 2."""
        decay = self._decay(watched, now)
        if watched.requests * decay < self.limits.min_requests:
            return 1
        busy_nodes = watched.heat * decay * math.log(2) / self.limits.half_life_s / 1e3
        return math.ceil(busy_nodes / self.limits.busy)


def _depths(keys: Sequence[BlockKey]) -> Sequence[int]:
    """The depths at which this prefix is watched."""
    return DEPTHS[: bisect_right(DEPTHS, len(keys))]


def _names(view: View, chosen: Bools) -> list[str]:
    return [view.stores.nodes[int(at)].node_id for at in np.flatnonzero(chosen)]


def _common_prefix(mine: tuple[BlockKey, ...], theirs: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
    """The common prefix. A key stands for all before it, so the first difference is found by bisection."""
    end = min(len(mine), len(theirs))
    if mine[end - 1] != theirs[end - 1]:
        end = bisect_left(range(end), True, key=lambda at: mine[at] != theirs[at])
    return mine if end == len(mine) else mine[:end]
