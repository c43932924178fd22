"""Hot prefixes: which to copy to more hosts before everybody has fetched them, and which copies to give up again.

Pure. Replicas mostly follow from placement: whoever fetches a prefix has it from then on. That is too slow when a crowd
comes at once, because all of them fetch from one host. So prefixes are watched at a few depths; one that needs more
nodes than hold it is copied in the background, the copies bounded in number and in flight. A copy that nobody asks for
during its time to live is given up; what a node came to hold by itself is left to its own eviction.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conductor.prefix_index import PrefixIndex
from conductor.view import NONE, Bools, Question, View

DEPTHS = tuple(2**power for power in range(2, 16))  # blocks at which prefixes are watched
MAX_WATCHED = 4096


class Copy(NamedTuple):
    """``target`` shall read these blocks from ``source``."""

    source: str
    target: str
    keys: tuple[bytes, ...]


class Reclaim(NamedTuple):
    """``node_id`` may drop these blocks first."""

    node_id: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReplicationLimits:
    half_life_s: float = 3.0  # of a prefix's heat: a crowd shows within a second
    min_requests: float = 5.0  # of lately: a few long prompts are no crowd
    busy: float = 0.5  # share of a node that one prefix may take before another node shall hold it
    max_in_flight: int = 8
    max_copies: int = 32  # of one prefix, made here
    ttl_s: float = 120.0
    copy_timeout_s: float = 30.0  # a copy of which nothing is heard


@dataclass(slots=True)
class _Watched:
    keys: tuple[bytes, ...]
    heat: float = 0.0  # ms of prefill asked for, decayed
    requests: float = 0.0  # decayed
    heated_at: float = 0.0
    asked_at: float = 0.0


class Replicator:
    """One owner. ``asked`` for every request, ``tick`` as often as copies may begin."""

    def __init__(self, limits: ReplicationLimits | None = None) -> None:
        self.limits = limits or ReplicationLimits()
        self._watched: OrderedDict[bytes, _Watched] = OrderedDict()  # by the prefix's last key
        self._in_flight: dict[tuple[str, bytes], float] = {}  # (target, last key) → since
        self._copies: dict[tuple[str, bytes], tuple[bytes, ...]] = {}  # made here
        self._hot: set[bytes] = set()

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def asked(self, question: Question, prefill_ms: float, now: float) -> None:
        """A request came that takes ``prefill_ms`` of a prefill node that holds its prefix."""
        keys = question.facts.keys
        for depth in DEPTHS:
            if depth > len(keys):
                return
            name = keys[depth - 1]
            watched = self._watched.get(name)
            if watched is None:
                watched = self._watched[name] = _Watched(tuple(keys[:depth]), heated_at=now)
                if len(self._watched) > MAX_WATCHED:
                    self._hot.discard(self._watched.popitem(last=False)[0])
            else:
                self._watched.move_to_end(name)
            fading = self._fading(watched, now)
            watched.heat = watched.heat * fading + prefill_ms
            watched.requests = watched.requests * fading + 1.0
            watched.heated_at = watched.asked_at = now
            if self._nodes_needed(watched, now) > 1:
                self._hot.add(name)

    def tick(self, view: View, index: PrefixIndex, now: float) -> list[Copy | Reclaim]:
        """What to copy and what to give up."""
        for flight, since in list(self._in_flight.items()):
            if now - since > self.limits.copy_timeout_s:
                del self._in_flight[flight]
        return [*self._reclaims(now), *self._new_copies(view, index, now)]

    def copied(self, copy: Copy, ok: bool) -> None:
        """A copy has ended. One that failed may be tried again."""
        flight = (copy.target, copy.keys[-1])
        if self._in_flight.pop(flight, None) is not None and ok:
            self._copies[flight] = copy.keys

    def node_gone(self, node_id: str) -> None:
        self._copies = {name: keys for name, keys in self._copies.items() if name[0] != node_id}
        self._in_flight = {name: since for name, since in self._in_flight.items() if name[0] != node_id}

    def _new_copies(self, view: View, index: PrefixIndex, now: float) -> list[Copy]:
        """For the hottest prefixes first, the deepest of several that are one another's beginning."""
        copies: list[Copy] = []
        for name in sorted(self._hot, key=lambda name: (-len(self._watched[name].keys), name)):
            watched = self._watched[name]
            needed = self._nodes_needed(watched, now)
            if needed <= 1:
                self._hot.discard(name)
                continue
            runs = index.runs(watched.keys)[view.stores.slots]
            holds = runs >= len(watched.keys)
            missing = needed - int(holds.sum()) - self._copies_coming(name)
            if not holds.any() or missing <= 0:
                continue
            for target in self._targets(view, holds, name, missing):
                if len(self._in_flight) >= self.limits.max_in_flight:
                    return copies
                source = self._source(view, holds)
                copies.append(Copy(source, target, watched.keys))
                self._in_flight[target, name] = now
        return copies

    def _targets(self, view: View, holds: Bools, name: bytes, count: int) -> list[str]:
        """Stores without the prefix, those first whose prefill nodes have the least to do."""
        made = sum(key == name for _, key in self._copies)
        count = min(count, self.limits.max_copies - made)
        busy = np.full(len(view.stores.nodes), np.inf)
        for p, home in enumerate(view.prefill.home):
            if home != NONE:
                busy[home] = min(busy[home], float(view.prefill.queued_ms[p]))
        found: list[str] = []
        for at in np.argsort(busy, kind="stable"):
            target = view.stores.nodes[int(at)].node_id
            if len(found) >= count or not np.isfinite(busy[at]):
                break
            if not holds[int(at)] and (target, name) not in self._in_flight:
                found.append(target)
        return found

    def _source(self, view: View, holds: Bools) -> str:
        """The holder that sends least now."""
        flows = np.where(holds, view.stores.sending_flows, np.inf)
        return view.stores.nodes[int(flows.argmin())].node_id

    def _reclaims(self, now: float) -> list[Reclaim]:
        """Copies of prefixes that nobody has asked for."""
        old = []
        for (node_id, name), keys in list(self._copies.items()):
            watched = self._watched.get(name)
            if watched is None or now - watched.asked_at > self.limits.ttl_s:
                del self._copies[node_id, name]
                old.append(Reclaim(node_id, keys))
        return old

    def _copies_coming(self, name: bytes) -> int:
        return sum(key == name for _, key in self._in_flight)

    def _fading(self, watched: _Watched, now: float) -> float:
        return math.pow(0.5, (now - watched.heated_at) / self.limits.half_life_s)

    def _nodes_needed(self, watched: _Watched, now: float) -> int:
        """Nodes that the prefix keeps busy. Heat is a decayed sum: of a steady rate it is rate · half-life / ln 2."""
        fading = self._fading(watched, now)
        if watched.requests * fading < self.limits.min_requests:
            return 1
        busy_nodes = watched.heat * fading * math.log(2) / self.limits.half_life_s / 1e3
        return math.ceil(busy_nodes / self.limits.busy)
