"""Which nodes are sick: slower than predicted, corrupting blocks, or silent when probed.

Pure: it is told what was measured and returns what to do. A node moves through a table of states: a suspected node gets
work only when no other is left, then it is drained, isolated, probed, taken back on probation, and trusted again.
Nobody is judged when everybody is slow: that is load, not sickness.

    healthy → suspected → draining → isolated → probation → healthy
                  └→ healthy                 └→ isolated
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MOST_DEVIATION = 1.0  # cap on one step's deviation, in ln


class Health(StrEnum):
    HEALTHY = "healthy"
    SUSPECTED = "suspected"  # gets work only when no other node is left
    DRAINING = "draining"  # finishes what it has
    ISOLATED = "isolated"  # gets nothing but probes
    PROBATION = "probation"  # works, but the first complaint isolates it again


class Sign(StrEnum):
    COMPLAINT = "complaint"  # slow, corrupt or silent
    CONFIRMED = "confirmed"  # complaints go on
    CLEAR = "clear"  # no complaint for a while
    EMPTY = "empty"  # nothing runs there any more
    PROBE_OK = "probe ok"  # several in a row


_H, _S = Health, Sign
MOVES: Mapping[tuple[Health, Sign], Health] = {
    (_H.HEALTHY, _S.COMPLAINT): _H.SUSPECTED,
    (_H.SUSPECTED, _S.CONFIRMED): _H.DRAINING,
    (_H.SUSPECTED, _S.CLEAR): _H.HEALTHY,
    (_H.DRAINING, _S.EMPTY): _H.ISOLATED,
    (_H.ISOLATED, _S.PROBE_OK): _H.PROBATION,
    (_H.PROBATION, _S.COMPLAINT): _H.ISOLATED,
    (_H.PROBATION, _S.CLEAR): _H.HEALTHY,
}


class HealthMove(NamedTuple):
    node_id: str
    to: Health
    why: str  # "" when it recovers


@dataclass(frozen=True, slots=True)
class HealthLimits:
    slow_ratio: float = 1.5  # this many times slower than usual
    slow_errors: float = 3.0  # and by this many of its usual deviations
    missed_probes: int = 3
    checksum_errors: int = 2  # within ``memory_s``
    memory_s: float = 60.0
    confirm_s: float = 5.0  # after this long with complaints it is drained
    clear_s: float = 10.0  # after this long without any it is trusted again
    probes_needed: int = 3
    probation_s: float = 60.0
    max_share: float = 1 / 3  # of a role's nodes that may be out of service at once


class _Pace:
    """How a node's steps compare with their predictions: ln(measured / predicted), recent and long-term."""

    __slots__ = ("count", "deviation", "lately", "usual")

    def __init__(self) -> None:
        self.lately = 0.0
        self.usual = 0.0
        self.deviation = 0.1
        self.count = 0

    def add(self, log_ratio: float, learning: float) -> None:
        """``learning``: rate of the long-term mean, 1 as usual, 0 not at all."""
        self.count += 1
        self.lately += max(0.15, 1.0 / self.count) * (log_ratio - self.lately)
        if self.count == 1:
            self.usual = log_ratio
        # A hiccup neither predicts more of them nor is remembered for long.
        apart = min(abs(log_ratio - self.usual), MOST_DEVIATION)
        self.deviation += learning * max(0.03, 1.0 / (self.count + 4)) * (apart - self.deviation)
        self.usual += learning * max(0.01, 1.0 / self.count) * (log_ratio - self.usual)

    @property
    def slowness(self) -> float:
        """ln of how many times slower than usual it is; 0 until there are enough samples."""
        return self.lately - self.usual if self.count >= 20 else 0.0


@dataclass(slots=True)
class _Record:
    group: str  # role: nodes are compared within it
    state: Health = Health.HEALTHY
    since: float = 0.0
    complained_since: float = math.inf
    complained_at: float = -math.inf
    why: str = ""
    missed: int = 0
    probes_ok: int = 0
    errors: list[float] | None = None


class HealthWatch:
    """One owner. Tell it what is measured; ``tick`` returns which nodes change state."""

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self.limits = limits or HealthLimits()
        self._records: dict[str, _Record] = {}
        self._paces: dict[str, _Pace] = {}

    def join(self, node_id: str, group: str, now: float) -> None:
        """A node has registered. One that returns under its id starts afresh."""
        self._records[node_id] = _Record(group, since=now)
        self._paces[node_id] = _Pace()

    def forget(self, node_id: str) -> None:
        self._records.pop(node_id, None)
        self._paces.pop(node_id, None)

    def state(self, node_id: str) -> Health:
        record = self._records.get(node_id)
        return record.state if record else Health.HEALTHY

    def is_slow(self, node_id: str) -> bool:
        """Whether it has been slow lately, whatever its state."""
        pace = self._paces.get(node_id)
        return pace is not None and self._is_slow(pace)

    def may_be_slow(self, node_id: str) -> bool:
        """Half-way to slow: current measurements should not shape what counts as usual."""
        pace = self._paces.get(node_id)
        return pace is not None and 2.0 * pace.slowness > self._slow_from(pace)

    def measured(self, node_id: str, ms: float, predicted_ms: float) -> None:
        """One step. Slow steps do not adjust what counts as usual, and doubtful ones hardly do, so that sickness
        does not become the norm."""
        pace = self._paces.get(node_id)
        if pace is not None and ms > 0.0 and predicted_ms > 0.0:
            learning = 0.0 if self._is_slow(pace) else 0.1 if self.may_be_slow(node_id) else 1.0
            pace.add(math.log(ms / predicted_ms), learning)

    def checksum_error(self, node_id: str, now: float) -> None:
        """A block that the node wrote or stored had the wrong bytes."""
        record = self._records.get(node_id)
        if record is not None:
            recent = [at for at in record.errors or [] if now - at < self.limits.memory_s]
            record.errors = [*recent[-63:], now]

    def probed(self, node_id: str, ok: bool) -> None:
        """Whether it answered a probe, or computed a known result, in time."""
        record = self._records.get(node_id)
        if record is not None:
            record.missed = 0 if ok else record.missed + 1
            record.probes_ok = record.probes_ok + 1 if ok else 0

    def tick(self, now: float, empty: Iterable[str] = ()) -> list[HealthMove]:
        """Judge all nodes. ``empty``: nodes on which nothing runs."""
        is_empty = set(empty)
        moves = []
        for node_id, record in self._records.items():
            why = self._complaint(node_id, record, now)
            if why:
                record.why, record.complained_at = why, now
                record.complained_since = min(record.complained_since, now)
            elif now - record.complained_at > self.limits.clear_s:
                record.complained_since = math.inf
            sign = self._sign(record, bool(why), now, node_id in is_empty)
            to = MOVES.get((record.state, sign)) if sign else None
            if to is None or (to is Health.DRAINING and not self._may_lose(record.group)):
                continue
            record.state, record.since = to, now
            if to is Health.ISOLATED:
                record.probes_ok = 0  # earlier ones were of a node at work
            if to is Health.PROBATION:
                self._paces[node_id] = _Pace()
                record.complained_since, record.errors = math.inf, None
            moves.append(HealthMove(node_id, to, "" if to is Health.HEALTHY else record.why))
        return moves

    def _complaint(self, node_id: str, record: _Record, now: float) -> str:
        if record.missed >= self.limits.missed_probes:
            return f"{record.missed} probes were not answered"
        errors = sum(now - at < self.limits.memory_s for at in record.errors or ())
        if errors >= self.limits.checksum_errors:
            return f"{errors} checksum errors"
        pace = self._paces[node_id]
        if self._is_slow(pace) and not self._all_slow(record.group):
            return f"{math.exp(pace.slowness):.1f} times slower than usual"
        return ""

    def _sign(self, record: _Record, complains: bool, now: float, is_empty: bool) -> Sign | None:
        limits = self.limits
        match record.state:
            case Health.HEALTHY:
                return Sign.COMPLAINT if complains else None
            case Health.SUSPECTED:
                if complains and now - record.complained_since >= limits.confirm_s:
                    return Sign.CONFIRMED
                return Sign.CLEAR if now - record.complained_at > limits.clear_s else None
            case Health.DRAINING:
                return Sign.EMPTY if is_empty else None
            case Health.ISOLATED:
                return Sign.PROBE_OK if record.probes_ok >= limits.probes_needed else None
            case Health.PROBATION:
                if complains:
                    record.probes_ok = 0
                    return Sign.COMPLAINT
                return Sign.CLEAR if now - record.since >= limits.probation_s else None

    def _is_slow(self, pace: _Pace) -> bool:
        return pace.slowness > self._slow_from(pace)

    def _slow_from(self, pace: _Pace) -> float:
        return max(math.log(self.limits.slow_ratio), self.limits.slow_errors * pace.deviation)

    def _all_slow(self, group: str) -> bool:
        """More than half of the group is slow: then the node is not the cause."""
        paces = [self._paces[name] for name, record in self._records.items() if record.group == group]
        return len(paces) > 1 and 2 * sum(map(self._is_slow, paces)) > len(paces)

    def _may_lose(self, group: str) -> bool:
        """Whether one more node of the group may be taken out of service: never the last, and never more than
        ``max_share``."""
        of_group = [record for record in self._records.values() if record.group == group]
        out = sum(record.state in (Health.DRAINING, Health.ISOLATED) for record in of_group)
        return out + 1 < len(of_group) and out < max(1, int(self.limits.max_share * len(of_group)))
