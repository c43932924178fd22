"""Failure detection: which nodes are slower than predicted, corrupt blocks, make no sense, or do not answer probes.

Pure: it is told what was measured and returns state changes. A suspected node gets work only when no other is left;
then it is drained, isolated, probed, taken back on probation, and trusted again. Slow means slower than usual by more
than the other nodes of its role are: what slows all of them is load, a busy host, or a longer prompt beside them, and
there is no better node to give the work to.

    healthy → suspected → draining → isolated → probation → healthy
                  └→ healthy                 └→ isolated
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_low
from typing import NamedTuple

from conductor.registry import Fault, Health
from mooncake.config import HealthSection

MAX_DEVIATION = 1.0  # cap on one step's deviation, in ln
SLOW_DEVIATIONS = 3.0  # a slow node's steps are also longer by this many of its typical deviations
ERRORS_KEPT_S = 60.0  # corrupt blocks, and messages without sense, count together for this long
ERRORS_KEPT = 64  # of them, of one node
PROBES_NEEDED = 3  # in a row, to return to service
MAX_SHARE = 1 / 3  # of a role's nodes that may be out of service at once
JITTER_MS = 2.0  # what a busy machine may add to a step: one of 1 ms that takes 2 is no fault


class HealthSignal(StrEnum):
    FAULT = "fault"  # slow, corrupt, senseless or silent
    PERSISTS = "persists"  # faults for ``confirm_s``
    CLEAR = "clear"  # no fault for ``clear_s``
    DRAINED = "drained"  # nothing runs there any more
    PROBES_PASSED = "probes passed"  # several in a row


_H, _S = Health, HealthSignal
TRANSITIONS: Mapping[tuple[Health, HealthSignal], Health] = {
    (_H.HEALTHY, _S.FAULT): _H.SUSPECTED,
    (_H.SUSPECTED, _S.PERSISTS): _H.DRAINING,
    (_H.SUSPECTED, _S.CLEAR): _H.HEALTHY,
    (_H.DRAINING, _S.DRAINED): _H.ISOLATED,
    (_H.ISOLATED, _S.PROBES_PASSED): _H.PROBATION,
    (_H.PROBATION, _S.FAULT): _H.ISOLATED,
    (_H.PROBATION, _S.CLEAR): _H.HEALTHY,
}


class HealthChange(NamedTuple):
    node_id: str
    to: Health
    reason: str  # "" when it recovers


class _StepSpeed:
    """How a node's steps compare with their predictions: ln(measured / predicted), recent and long-term mean; both
    times with ``JITTER_MS`` added."""

    __slots__ = ("baseline", "count", "deviation", "recent")

    def __init__(self) -> None:
        self.recent = 0.0
        self.baseline = 0.0
        self.deviation = 0.1
        self.count = 0

    def add(self, log_ratio: float, learning: float) -> None:
        """``learning`` scales the rate at which the baseline follows: 1 in full, 0 not at all."""
        self.count += 1
        further = log_ratio - self.recent
        if self.is_known:  # one step, as one during which the machine stood still, says little
            further = min(further, MAX_DEVIATION)
        self.recent += max(0.15, 1.0 / self.count) * further
        if self.count == 1:
            self.baseline = log_ratio
        apart = min(abs(log_ratio - self.baseline), MAX_DEVIATION)  # one outlier must not widen it for long
        self.deviation += learning * max(0.03, 1.0 / (self.count + 4)) * (apart - self.deviation)
        self.baseline += learning * max(0.01, 1.0 / self.count) * (log_ratio - self.baseline)

    @property
    def slowness(self) -> float:
        """ln of how many times slower than its baseline it is; 0 until there are enough samples."""
        return self.recent - self.baseline if self.is_known else 0.0

    @property
    def is_known(self) -> bool:
        return self.count >= 20


@dataclass(slots=True)
class _Record:
    group: str  # role: nodes are compared within it
    state: Health = Health.HEALTHY
    since: float = 0.0
    faulty_since: float = math.inf
    fault_at: float = -math.inf
    reason: str = ""
    missed: int = 0
    probes_ok: int = 0
    errors: list[tuple[float, Fault]] = field(default_factory=list)


class HealthTracker:
    """One owner. Report measurements to it; ``tick`` returns the nodes that change state."""

    def __init__(self, limits: HealthSection) -> None:
        self._limits = limits
        self._records: dict[str, _Record] = {}
        self._speeds: dict[str, _StepSpeed] = {}
        self._slowness: dict[str, float] = {}  # of a group as a whole, at the last tick

    def join(self, node_id: str, group: str, now: float) -> None:
        """A node has registered. One that returns under its id starts afresh."""
        self._records[node_id] = _Record(group, since=now)
        self._speeds[node_id] = _StepSpeed()

    def forget(self, node_id: str) -> None:
        self._records.pop(node_id, None)
        self._speeds.pop(node_id, None)

    def state(self, node_id: str) -> Health:
        record = self._records.get(node_id)
        return record.state if record else Health.HEALTHY

    def is_slow(self, node_id: str) -> bool:
        """Whether its steps have lately taken longer than usual, by more than those of the other nodes of its role."""
        record, speed = self._records.get(node_id), self._speeds.get(node_id)
        if record is None or speed is None or speed.slowness <= self._slow_threshold(speed):
            return False
        return speed.slowness - self._slowness.get(record.group, math.inf) > math.log(self._limits.slow_ratio)

    def may_be_slow(self, node_id: str) -> bool:
        """Half-way to slow: current measurements should not shape the baseline."""
        speed = self._speeds.get(node_id)
        return speed is not None and 2.0 * speed.slowness > self._slow_threshold(speed)

    def measured(self, node_id: str, ms: float, predicted_ms: float) -> None:
        """One step. The baseline does not follow steps of a slow node, and hardly those of one that may be slow: a
        degraded node would become the norm."""
        speed = self._speeds.get(node_id)
        if speed is not None and 0.0 < ms < math.inf and predicted_ms > 0.0:
            learning = 0.0 if self.is_slow(node_id) else 0.1 if self.may_be_slow(node_id) else 1.0
            speed.add(math.log((ms + JITTER_MS) / (predicted_ms + JITTER_MS)), learning)

    def checksum_errors(self, node_id: str, count: int, now: float) -> None:
        """So many blocks that the node wrote or stored had the wrong bytes."""
        self.has_fault(node_id, Fault.CHECKSUM, count, now)

    def has_fault(self, node_id: str, fault: Fault, count: int, now: float) -> None:
        """It was seen so many times."""
        record = self._records.get(node_id)
        if record is not None:
            recent = [(at, known) for at, known in record.errors if now - at < ERRORS_KEPT_S]
            record.errors = [*recent, *[(now, fault)] * max(0, min(count, ERRORS_KEPT))][-ERRORS_KEPT:]

    def probed(self, node_id: str, ok: bool) -> None:
        """Whether it answered a probe, or computed a known result, in time."""
        record = self._records.get(node_id)
        if record is not None:
            record.missed = 0 if ok else record.missed + 1
            record.probes_ok = record.probes_ok + 1 if ok else 0

    def discount_pause(self, pause_s: float) -> None:
        """Nobody was listening for this long: what was seen before has lasted no longer for it."""
        for record in self._records.values():
            record.since += pause_s
            record.faulty_since += pause_s
            record.fault_at += pause_s
            record.errors = [(at + pause_s, fault) for at, fault in record.errors]

    def tick(self, now: float, idle: Iterable[str] = ()) -> list[HealthChange]:
        """The nodes that change state now. ``idle``: nodes on which nothing runs."""
        is_idle = set(idle)
        self._slowness = self._slowness_of_groups()
        changes = []
        for node_id, record in self._records.items():
            reason = self._fault(node_id, record, now)
            if reason:
                record.reason, record.fault_at = reason, now
                record.faulty_since = min(record.faulty_since, now)
            elif now - record.fault_at > self._limits.clear_s:
                record.faulty_since = math.inf
            signal = self._signal(record, bool(reason), now, node_id in is_idle)
            to = TRANSITIONS.get((record.state, signal)) if signal else None
            if to is None or (to is Health.DRAINING and not self._may_remove(record.group)):
                continue
            record.state, record.since = to, now
            if to is Health.ISOLATED:
                record.probes_ok = 0  # earlier ones were of a node at work
            if to is Health.PROBATION:
                self._speeds[node_id] = _StepSpeed()
                record.faulty_since, record.errors = math.inf, []
            changes.append(HealthChange(node_id, to, "" if to is Health.HEALTHY else record.reason))
        return changes

    def _fault(self, node_id: str, record: _Record, now: float) -> str:
        if record.missed >= self._limits.missed_probes:
            return f"{record.missed} probes were not answered"
        errors = Counter(fault for at, fault in record.errors if now - at < ERRORS_KEPT_S)
        if errors.total() >= self._limits.checksum_errors:
            return ", ".join(f"{count} {fault}" for fault, count in errors.items())
        if self.is_slow(node_id):
            slower = math.exp(self._speeds[node_id].slowness)
            others = math.exp(self._slowness[record.group])
            return f"steps take {slower:.1f} times as long as usual, on other {record.group} nodes {others:.1f} times"
        return ""

    def _signal(self, record: _Record, is_faulty: bool, now: float, is_idle: bool) -> HealthSignal | None:
        limits = self._limits
        match record.state:
            case Health.HEALTHY:
                return HealthSignal.FAULT if is_faulty else None
            case Health.SUSPECTED:
                if is_faulty and now - record.faulty_since >= limits.confirm_s:
                    return HealthSignal.PERSISTS
                return HealthSignal.CLEAR if now - record.fault_at > limits.clear_s else None
            case Health.DRAINING:
                return HealthSignal.DRAINED if is_idle else None
            case Health.ISOLATED:
                return HealthSignal.PROBES_PASSED if record.probes_ok >= PROBES_NEEDED else None
            case Health.PROBATION:
                if is_faulty:
                    record.probes_ok = 0
                    return HealthSignal.FAULT
                return HealthSignal.CLEAR if now - record.since >= limits.probation_s else None

    def _slow_threshold(self, speed: _StepSpeed) -> float:
        return max(math.log(self._limits.slow_ratio), SLOW_DEVIATIONS * speed.deviation)

    def _slowness_of_groups(self) -> dict[str, float]:
        """The (lower) median of each group's nodes: for a node slower than it, that of the others. A group of which one
        node has been measured has none."""
        found: dict[str, list[float]] = {}
        for node_id, record in self._records.items():
            if self._speeds[node_id].is_known:
                found.setdefault(record.group, []).append(self._speeds[node_id].slowness)
        return {group: median_low(each) for group, each in found.items() if len(each) > 1}

    def _may_remove(self, group: str) -> bool:
        """Whether one more node of the group may be taken out of service: never the last, and never more than
        ``MAX_SHARE``."""
        of_group = [record for record in self._records.values() if record.group == group]
        out = sum(record.state in (Health.DRAINING, Health.ISOLATED) for record in of_group)
        return out + 1 < len(of_group) and out < max(1, int(MAX_SHARE * len(of_group)))
