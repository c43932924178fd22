"""How many nodes prefill and how many decode: when a node should change its role, and which one.

Pure: it is told what arrives and what the cluster looks like, and returns at most one switch at a time. Demand is
counted in nodes, refused requests included, and is the load that a request meets: rates of seconds, averaged over
requests instead of over time, so that a pause between two bursts changes nothing. Decoding is also seen by what the
nodes hold, which tells of longer answers before the first of them has ended.

Open traffic is mostly steady, so it holds still: a switch must bring the busiest side down by most of what a node can
bring, and what is lacking without it must have added up to what it costs. A great lack adds up in seconds, noise around
the limit leaks away; to take back the last switch needs more.

How a switch runs (``SWITCH_MOVES``): the node drains, that is takes nothing new; what it decodes ends or moves on from
the pool; then it flips with its weights and its host's KV in place, and registers under a new epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from conductor.view import View
from mooncake.types import Role

EMPTY = 1e6  # how busy a side is that has fewer nodes than it must have; finite, so that two such are equal


class SwitchState(StrEnum):
    DRAINING = "draining"  # gets no new work
    FLIPPING = "flipping"  # is empty, and changes what it serves
    DONE = "done"  # has registered in its new role
    GIVEN_UP = "given up"  # the node is gone, or did not get empty in time: it keeps its role


SWITCH_MOVES: Mapping[SwitchState, frozenset[SwitchState]] = {
    SwitchState.DRAINING: frozenset({SwitchState.FLIPPING, SwitchState.GIVEN_UP}),
    SwitchState.FLIPPING: frozenset({SwitchState.DONE, SwitchState.GIVEN_UP}),
    SwitchState.DONE: frozenset(),
    SwitchState.GIVEN_UP: frozenset(),
}


class Switch(NamedTuple):
    node_id: str
    to: Role


@dataclass(frozen=True, slots=True)
class BalanceLimits:
    """Chosen by looking at parts of Azure's traces; then held against generated ones that nothing is scored on, where
    changing any of seven, mostly to half or twice as much, gains 1.3 points of goodput at most
    (tests/bench/results/balance-limits-generated.json)."""

    busy: float = 0.9  # from here on something is lacking
    cost_s: float = 1.0  # what a switch costs: so long for a side that lacks as much as it has
    turn_back: float = 2.0  # times as much when it takes back the last one
    leak: float = 0.02  # a lack as small as this never adds up
    worth: float = 0.6  # of the most that one node can bring a side
    burst: float = 0.5  # prompts come in bursts: room for so many standard deviations (square-root staffing)
    burst_kept: float = 0.8  # of a side that gives a node away
    room: float = 1.15  # what is as busy as it can be on average is overloaded half the time
    smoothing_s: float = 30.0  # of demand, in time as requests see it
    drain_s: float = 25.0  # how far ahead decoding is looked at; about what a drain takes
    dwell_s: float = 60.0  # after a switch that was given up; its node rests twice as long, so that another is asked
    node_dwell_s: float = 600.0  # between two of one node
    patience_s: float = 120.0  # a drain that takes longer is given up
    min_prefill: int = 1
    min_decode: int = 1

    @property
    def fast_s(self) -> float:
        """Over which a rate is taken."""
        return self.smoothing_s / 6

    @property
    def slow_s(self) -> float:
        """Against which a rise is seen."""
        return self.smoothing_s / 2


class Average:
    """An exponential mean that begins as a plain one, so that an empty beginning does not count for long."""

    def __init__(self, smoothing_s: float) -> None:
        self._smoothing_s = smoothing_s
        self._age_s = 0.0
        self.value = 0.0

    def add(self, value: float, elapsed_s: float) -> float:
        self._age_s += elapsed_s
        if elapsed_s > 0.0:
            weight = max(1.0 - math.exp(-elapsed_s / self._smoothing_s), elapsed_s / self._age_s)
            self.value += weight * (value - self.value)
        return self.value


class Demand:
    """The load that requests meet, in nodes, of work that is told as it arrives."""

    def __init__(self, limits: BalanceLimits) -> None:
        self._arrived_ms = 0.0
        self._rate = Average(limits.fast_s)
        self._met = Average(limits.smoothing_s)

    @property
    def level(self) -> float:
        return self._met.value

    def add(self, node_ms: float) -> None:
        self._arrived_ms += node_ms

    def tick(self, elapsed_s: float, requests_s: float) -> None:
        """Close an interval, which was ``requests_s`` long as requests see it."""
        rate = self._rate.add(self._arrived_ms / 1e3 / elapsed_s, elapsed_s)
        self._arrived_ms = 0.0
        self._met.add(rate, requests_s)


class RequestClock:
    """Time as requests see it: a second in which fewer come than usually is shorter by as much."""

    def __init__(self, limits: BalanceLimits) -> None:
        self._count = 0
        self._rate = Average(limits.fast_s)
        self._usual = Average(limits.smoothing_s)

    def arrived(self) -> None:
        self._count += 1

    def tick(self, elapsed_s: float) -> float:
        rate = self._rate.add(self._count / elapsed_s, elapsed_s)
        self._count = 0
        if not rate:
            return 0.0
        requests_s = elapsed_s * rate / max(self._usual.value, rate)
        self._usual.add(rate, requests_s)
        return requests_s


class Balancer:
    """One owner. ``arrived`` for every request, also those that were refused; ``tick`` about once a second."""

    def __init__(self, tbt_ms: float, block_tokens: int, limits: BalanceLimits | None = None) -> None:
        self.limits = limits = limits or BalanceLimits()
        self._tbt_ms = tbt_ms
        self._block_tokens = block_tokens
        self.prefill, self.decode = Demand(limits), Demand(limits)
        self.switches = 0
        self.clock = RequestClock(limits)
        self._held, self._held_before = Average(limits.fast_s), Average(limits.slow_s)
        self._age_s = 0.0
        self._ticked_at: float | None = None
        self._lacked = {Role.PREFILL: 0.0, Role.DECODE: 0.0}  # s, for want of a switch to the role
        self._switching: tuple[Switch, SwitchState, float] | None = None
        self._last_to: Role | None = None
        self._rests_until = -math.inf
        self._left_alone_until: dict[str, float] = {}

    @property
    def switching(self) -> tuple[Switch, SwitchState] | None:
        """The switch under way."""
        return self._switching[:2] if self._switching else None

    def arrived(self, view: View, prefill_ms: float, num_tokens: int, expected_tokens: float) -> None:
        """One request's work: of a prefill node, and of a decode node that keeps its step at the limit."""
        self.clock.arrived()
        self.prefill.add(prefill_ms)
        side = view.decode
        if not len(side.nodes):
            return
        fixed = float(side.step_ms.mean())
        own = float(side.sequence_ms.mean()) + float(side.context_ms.mean()) * (num_tokens + expected_tokens / 2)
        # In each step of ``tbt`` ms the sequences of a node share what its fixed part leaves.
        share = own / max(self._tbt_ms - fixed, 0.05 * self._tbt_ms)
        blocks = side.total_blocks.mean()
        if blocks:
            share = max(share, (num_tokens + expected_tokens / 2) / (float(blocks) * self._block_tokens))
        self.decode.add(share * expected_tokens * self._tbt_ms)

    def tick(self, view: View, now: float) -> Switch | None:
        """The switch to begin now."""
        limits, since = self.limits, self._ticked_at
        self._ticked_at = now
        if since is None or now <= since:
            return None
        self._look(view, now - since)
        if self._switching is not None:
            if now - self._switching[2] > limits.patience_s:
                self.moved(SwitchState.GIVEN_UP, now)
            return None
        to = self._due() if now >= self._rests_until else None
        if to is None:
            return None
        node_id = self._idlest(view, Role.PREFILL if to is Role.DECODE else Role.DECODE, now)
        if node_id is None:
            return None
        switch = Switch(node_id, to)
        self._switching = (switch, SwitchState.DRAINING, now)
        return switch

    def moved(self, to: SwitchState, now: float) -> None:
        """The switch under way has come so far. An illegal move is our bug."""
        assert self._switching is not None, "no switch is under way"
        limits, (switch, state, since) = self.limits, self._switching
        assert to in SWITCH_MOVES[state], f"{state} -> {to}"
        self._switching = (switch, to, since)
        if not SWITCH_MOVES[to]:
            self._switching = None
            done = to is SwitchState.DONE
            self._left_alone_until[switch.node_id] = now + (limits.node_dwell_s if done else 2.0 * limits.dwell_s)
            lacks_more = min(max(self._lacked[switch.to] - limits.cost_s, 0.0), limits.cost_s)
            self._lacked = dict.fromkeys(self._lacked, 0.0)
            if done:
                self.switches += 1
                self._last_to, self._lacked[switch.to] = switch.to, lacks_more
            else:
                self._rests_until = now + limits.dwell_s

    def _look(self, view: View, elapsed_s: float) -> None:
        """What arrived since the last tick, what is there now, and what is lacking of it."""
        requests_s = self.clock.tick(elapsed_s)
        self.prefill.tick(elapsed_s, requests_s)
        self.decode.tick(elapsed_s, requests_s)
        held = self._held_nodes(view)
        self._held.add(held, elapsed_s)
        self._held_before.add(held, elapsed_s)
        self._age_s += elapsed_s
        if self._age_s < self.limits.slow_s:
            return
        to, lack = self._wanted(view)
        for role in self._lacked:
            more = (lack if role is to else 0.0) - self.limits.leak
            self._lacked[role] = max(self._lacked[role] + more * requests_s, 0.0)

    def _held_nodes(self, view: View) -> float:
        """Decode nodes that what is there now fills; of prompts that still wait for their prefill nothing is there."""
        side, context = view.decode, float(view.decode.context_tokens.sum())
        if not context:
            return 0.0
        room_ms = np.maximum(self._tbt_ms - side.step_ms, 0.05 * self._tbt_ms)
        placed = (side.sequence_ms * side.sequences + side.context_ms * side.context_tokens) / room_ms
        return float(placed.sum()) * (1.0 - min(float(view.prefill.queued_tokens.sum()) / context, 1.0))

    def _demand(self) -> tuple[float, float]:
        """Nodes wanted of each role. What is held of decoding is looked at a drain ahead while it rises."""
        limits, held = self.limits, self._held.value
        rise = max(held - self._held_before.value, 0.0) / (limits.slow_s - limits.fast_s)
        return self.prefill.level, limits.room * max(self.decode.level, held + rise * limits.drain_s)

    def _wanted(self, view: View) -> tuple[Role | None, float]:
        """The role of which one node more makes the busiest side less busy, and by how much of what it lacks."""
        limits, num_prefill, num_decode = self.limits, len(view.prefill.nodes), len(view.decode.nodes)
        prefill, decode = self._demand()

        def busiest(move: int, burst: float) -> float:
            """Too little room for bursts counts as full, and only a load that is too much as more."""
            if num_prefill + move < limits.min_prefill or num_decode - move < limits.min_decode:
                return EMPTY
            with_bursts = (prefill + burst * math.sqrt(prefill)) / (num_prefill + move)
            computing = min(with_bursts, max(1.0, limits.room * prefill / (num_prefill + move)))
            return max(computing, decode / (num_decode - move))

        best = Role.PREFILL if busiest(1, limits.burst) < busiest(-1, limits.burst) else Role.DECODE
        move, burst, most = 1, limits.burst, 1.0 / (num_prefill + 1)
        if best is Role.DECODE:
            move, burst, most = -1, limits.burst_kept, 1.0 / (num_decode + 1)
        now, then = busiest(0, burst), busiest(move, burst)
        if not now or 1.0 - then / now < limits.worth * most:
            return None, 0.0
        return best, max(now - max(then, limits.busy), 0.0)

    def _due(self) -> Role | None:
        """The role for want of which more has been lacking than a switch costs."""
        to = max(self._lacked, key=lambda role: self._lacked[role])
        takes_back = self._last_to not in (None, to)
        return to if self._lacked[to] > self.limits.cost_s * (self.limits.turn_back if takes_back else 1.0) else None

    def _idlest(self, view: View, role: Role, now: float) -> str | None:
        """The node of ``role`` that is empty soonest and has not been asked lately."""
        side = view.prefill if role is Role.PREFILL else view.decode
        load = view.prefill.queued_ms if role is Role.PREFILL else view.decode.context_tokens
        for at in np.argsort(load, kind="stable"):
            node_id = side.nodes[int(at)].node_id
            if now >= self._left_alone_until.get(node_id, -math.inf):
                return node_id
        return None
