"""Hot prefixes: which to copy to more hosts before everyone has fetched them, and which copies to drop again.

Pure. Replication mostly follows from placement: whoever fetches a prefix has it from then on. That is too slow for a
sudden crowd, because all of it fetches from one host. So prefixes are watched at a few depths; one that needs more
nodes than hold it is copied in the background, up to the point where the crowd's prompts diverge, with bounds on the
number of copies and on those in flight. When nobody has asked for it during its time to live, the nodes that got it for
the crowd, by a copy or a fetch, drop it unless something was built on it; those that had it before keep it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from conductor.prefix_index import PrefixIndex
from conductor.view import NONE, Bools, Question, View
from mooncake.types import BlockKey

DEPTHS = tuple(2**power for power in range(2, 16))  # prefix lengths in blocks that are watched
MAX_WATCHED = 4096
MAX_CROWDS = 256
LOOK_S = 0.25  # between two ticks
NOBODY = 0.5  # recent requests: below this, a new request has the prefix to itself


class Copy(NamedTuple):
    """``target`` should read these blocks from ``source``."""

    source: str
    target: str
    keys: tuple[BlockKey, ...]


class Reclaim(NamedTuple):
    """``node_id`` should drop these blocks, from the last one on, unless something is built on them."""

    node_id: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class ReplicationLimits:
    half_life_s: float = 3.0  # of a prefix's heat: a crowd shows within a second
    min_requests: float = 5.0  # recent ones: a few long prompts are not a crowd
    busy: float = 0.5  # fraction of a node that one prefix may take before another node should hold it
    max_in_flight: int = 8
    max_copies: int = 32  # of one prefix, made by us
    ttl_s: float = 120.0
    copy_timeout_s: float = 30.0  # a copy not heard from for this long


@dataclass(slots=True)
class _Watched:
    """A prefix of a watched length."""

    keys: tuple[BlockKey, ...]  # what all recent requests for it have in common: it, and perhaps more
    homes: frozenset[str]  # stores that had it before the requests came
    heat: float = 0.0  # decayed ms of prefill requested
    requests: float = 0.0  # decayed count
    heated_at: float = 0.0
    asked_at: float = 0.0


@dataclass(slots=True)
class _Crowd:
    """A prefix that took more than one node."""

    keys: tuple[BlockKey, ...]
    homes: frozenset[str]  # nodes that had it before
    copies: set[str] = field(default_factory=set)  # nodes it was sent to


class Replicator:
    """One owner. Call ``asked`` for every request, and ``tick`` as often as copies may start."""

    def __init__(self, limits: ReplicationLimits | None = None) -> None:
        self.limits = limits or ReplicationLimits()
        self._watched: OrderedDict[bytes, _Watched] = OrderedDict()  # by the watched prefix's last key
        self._hot: set[bytes] = set()  # of these, the ones too much for a single node
        self._crowds: dict[bytes, _Crowd] = {}  # by their last key
        self._in_flight: dict[Copy, float] = {}  # start times

    @property
    def has_crowds(self) -> bool:
        """Whether a ``tick`` may return anything."""
        return bool(self._hot or self._crowds)

    def asked(self, question: Question, prefill_ms: float, now: float) -> None:
        """A request arrived that takes ``prefill_ms`` of a prefill node that holds its prefix."""
        keys = cast("Sequence[BlockKey]", question.facts.keys)
        whole = tuple(keys[: DEPTHS[-1]])
        runs = question.store_runs
        longest = float(runs.max(initial=0.0))
        for depth in _depths(keys):
            name = keys[depth - 1]
            watched = self._watched.get(name)
            fading = self._fading(watched, now) if watched is not None else 0.0
            if watched is None or watched.requests * fading < NOBODY:
                homes = frozenset(_names(question.view, runs >= depth)) if depth <= longest else frozenset()
                watched = self._watched[name] = _Watched(whole, homes)
                if len(self._watched) > MAX_WATCHED:
                    self._hot.discard(self._watched.popitem(last=False)[0])
            else:
                watched.keys = _in_common(watched.keys, whole)
            self._watched.move_to_end(name)
            watched.heat = watched.heat * fading + prefill_ms
            watched.requests = watched.requests * fading + 1.0
            watched.heated_at = watched.asked_at = now
            if self._nodes_needed(watched, now) > 1:
                self._hot.add(name)

    def tick(self, view: View, index: PrefixIndex, now: float) -> list[Copy | Reclaim]:
        """What to copy and what to drop."""
        for copy, since in list(self._in_flight.items()):
            if now - since > self.limits.copy_timeout_s:
                del self._in_flight[copy]
        return [*self._reclaims(view, index, now), *self._new_copies(view, index, now)]

    def copied(self, copy: Copy, ok: bool) -> None:
        """A copy has ended. A failed one may be retried."""
        crowd = self._crowds.get(copy.keys[-1])
        if self._in_flight.pop(copy, None) is not None and ok and crowd is not None:
            crowd.copies.add(copy.target)

    def node_gone(self, node_id: str) -> None:
        for crowd in self._crowds.values():
            crowd.copies.discard(node_id)
        self._in_flight = {copy: since for copy, since in self._in_flight.items() if copy.target != node_id}

    def _new_copies(self, view: View, index: PrefixIndex, now: float) -> list[Copy]:
        """For the longest prefixes first: a node that is sent one has all its beginnings."""
        copies: list[Copy] = []
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
            crowd = self._crowds.get(keys[-1])
            if crowd is None:
                crowd = self._crowds[keys[-1]] = _Crowd(keys, watched.homes)
                if len(self._crowds) > MAX_CROWDS:  # copies of the oldest one are left to eviction
                    del self._crowds[next(iter(self._crowds))]
            coming = {copy.target for copy in self._in_flight if copy.keys[: len(keys)] == keys}
            missing = min(needed - int(holds.sum()), self.limits.max_copies - len(crowd.copies)) - len(coming)
            for target in self._targets(view, holds, coming, missing):
                if len(self._in_flight) >= self.limits.max_in_flight:
                    return copies
                copy = Copy(self._source(view, holds), target, keys)
                copies.append(copy)
                self._in_flight[copy] = now
        return copies

    def _targets(self, view: View, holds: Bools, coming: set[str], count: int) -> list[str]:
        """Stores without the prefix, those with the least busy prefill nodes first."""
        busy = np.full(len(view.stores.nodes), np.inf)
        for p, home in enumerate(view.prefill.home):
            if home != NONE:
                busy[home] = min(busy[home], float(view.prefill.queued_ms[p]))
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

    def _reclaims(self, view: View, index: PrefixIndex, now: float) -> list[Reclaim]:
        """What nodes hold only for crowds that are gone."""
        found: list[Reclaim] = []
        for end, crowd in list(self._crowds.items()):
            wanted = self._wanted_part(crowd.keys, now)
            if wanted == _depths(crowd.keys)[-1] or any(copy.keys[-1] == end for copy in self._in_flight):
                continue
            del self._crowds[end]
            holders = _names(view, self._holders(view, index, crowd.keys))
            spared = crowd.homes if crowd.homes.intersection(holders) else holders[:1]
            found += (Reclaim(node_id, crowd.keys[wanted:]) for node_id in holders if node_id not in spared)
        return found

    def _holders(self, view: View, index: PrefixIndex, keys: tuple[BlockKey, ...]) -> Bools:
        holds: Bools = index.runs(keys)[view.stores.slots] >= len(keys)
        return holds

    def _wanted_part(self, keys: tuple[BlockKey, ...], now: float) -> int:
        """How many of the first blocks have been asked for during the time to live."""
        for depth in reversed(_depths(keys)):
            watched = self._watched.get(keys[depth - 1])
            if watched is not None and now - watched.asked_at <= self.limits.ttl_s:
                return depth
        return 0

    def _fading(self, watched: _Watched, now: float) -> float:
        return math.pow(0.5, (now - watched.heated_at) / self.limits.half_life_s)

    def _nodes_needed(self, watched: _Watched, now: float) -> int:
        """Nodes that the prefix keeps busy. Heat is a decayed sum: at a steady rate it is rate · half-life / ln 2."""
        fading = self._fading(watched, now)
        if watched.requests * fading < self.limits.min_requests:
            return 1
        busy_nodes = watched.heat * fading * math.log(2) / self.limits.half_life_s / 1e3
        return math.ceil(busy_nodes / self.limits.busy)


def _depths(keys: Sequence[BlockKey]) -> Sequence[int]:
    """The depths at which this prefix is watched."""
    return DEPTHS[: bisect_right(DEPTHS, len(keys))]


def _names(view: View, chosen: Bools) -> list[str]:
    return [view.stores.nodes[int(at)].node_id for at in np.flatnonzero(chosen)]


def _in_common(mine: tuple[BlockKey, ...], theirs: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
    """The common prefix. A key stands for all before it, so the first difference is found by bisection."""
    end = min(len(mine), len(theirs))
    if mine[end - 1] != theirs[end - 1]:
        end = bisect_left(range(end), True, key=lambda at: mine[at] != theirs[at])
    return mine if end == len(mine) else mine[:end]
