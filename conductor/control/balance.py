"""The balance of prefill and decode nodes: when a node should switch its role, and which one.

Pure: it is told what arrives and what the cluster looks like, and returns at most one switch at a time. Demand is
counted in nodes, refused requests included (``demand``). Decode demand is also estimated from the KV that the nodes
hold, which shows longer answers before the first of them has ended.

Traffic is usually steady, so the default is to do nothing. A switch must lower the load of the busier role by most of
what one node can, and the shortage without it, added up over time, must exceed the cost of a switch. A large shortage
adds up in seconds; noise around the limit leaks away. Reversing the last switch costs more.

A switch (``SWITCH_MOVES``): the node drains, that is, accepts no new work; what it decodes ends or continues elsewhere
from the pool; then it flips with its weights and its host's KV in place, and registers with a new incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from conductor.control.demand import Average, Demand, RequestClock
from conductor.placement.view import View
from mooncake.types import Role

EMPTY = 1e6  # load of a role with fewer nodes than required; finite, so that two of them compare equal


class SwitchState(StrEnum):
    DRAINING = "draining"  # accepts no new work
    FLIPPING = "flipping"  # empty, and changing what it serves
    DONE = "done"  # registered in its new role
    GIVEN_UP = "given up"  # the node is gone, or did not drain in time: it keeps its role


SWITCH_MOVES: Mapping[SwitchState, frozenset[SwitchState]] = {
    SwitchState.DRAINING: frozenset({SwitchState.FLIPPING, SwitchState.GIVEN_UP}),
    SwitchState.FLIPPING: frozenset({SwitchState.DONE, SwitchState.GIVEN_UP}),
    SwitchState.DONE: frozenset(),
    SwitchState.GIVEN_UP: frozenset(),
}


class Switch(NamedTuple):
    node_id: str
    to: Role


class _Running(NamedTuple):
    """The switch in progress."""

    switch: Switch
    state: SwitchState
    since: float


@dataclass(frozen=True, slots=True)
class BalanceLimits:
    """Tuned on parts of Azure's traces, then checked on generated ones that no result is reported for: changing any
    of seven, usually to half or double, gains at most 1.3 points of goodput
    (tests/bench/results/balance-limits-generated.json)."""

    busy: float = 0.9  # above this load there is a shortage
    cost_s: float = 1.0  # what a switch costs: this long at a shortage as large as the role itself
    turn_back: float = 2.0  # factor on the cost when a switch reverses the last one
    leak: float = 0.02  # a shortage this small never adds up
    worth: float = 0.6  # required gain, as a fraction of the most that one node can give a role
    burst: float = 0.5  # prompts come in bursts: room for this many standard deviations (square-root staffing)
    burst_kept: float = 0.8  # likewise, for the role that gives a node away
    room: float = 1.15  # a node as busy as it can be on average is overloaded half the time
    smoothing_s: float = 30.0  # time constant of demand, in time as requests see it
    drain_s: float = 25.0  # how far ahead decoding is predicted; about the length of a drain
    dwell_s: float = 60.0  # pause after a switch that was given up; its node rests twice as long, so another is asked
    node_dwell_s: float = 600.0  # minimum time between two switches of one node
    patience_s: float = 120.0  # a drain that takes longer is given up
    min_prefill: int = 1
    min_decode: int = 1

    @property
    def fast_s(self) -> float:
        """Time constant of a rate."""
        return self.smoothing_s / 6

    @property
    def slow_s(self) -> float:
        """Time constant of the baseline against which a rise is detected."""
        return self.smoothing_s / 2


class Balancer:
    """One owner. Call ``arrived`` for every request, refused ones included, and ``tick`` about once a second."""

    def __init__(self, tbt_ms: float, block_tokens: int, limits: BalanceLimits | None = None) -> None:
        self.limits = limits = limits or BalanceLimits()
        self._tbt_ms = tbt_ms
        self._block_tokens = block_tokens
        self.prefill = Demand(limits.fast_s, limits.smoothing_s)
        self.decode = Demand(limits.fast_s, limits.smoothing_s)
        self.switches = 0
        self.clock = RequestClock(limits.fast_s, limits.smoothing_s)
        self._held, self._held_baseline = Average(limits.fast_s), Average(limits.slow_s)
        self._age_s = 0.0
        self._ticked_at: float | None = None
        self._shortage_s = {Role.PREFILL: 0.0, Role.DECODE: 0.0}  # accumulated shortage of nodes
        self._running: _Running | None = None
        self._last_to: Role | None = None
        self._paused_until = -math.inf
        self._node_rests_until: dict[str, float] = {}

    @property
    def switching(self) -> tuple[Switch, SwitchState] | None:
        """The switch in progress."""
        return (self._running.switch, self._running.state) if self._running else None

    def arrived(self, view: View, prefill_ms: float, num_tokens: int, expected_tokens: float) -> None:
        """Count one request's work for a prefill node, and for a decode node that keeps its step at the limit."""
        self.clock.arrived()
        self.prefill.add(prefill_ms)
        side = view.decode
        if not len(side.nodes):
            return
        fixed = float(side.step_ms.mean())
        own = float(side.sequence_ms.mean()) + float(side.context_ms.mean()) * (num_tokens + expected_tokens / 2)
        # Within a step of ``tbt`` ms the sequences of a node share what its fixed part leaves.
        share = own / max(self._tbt_ms - fixed, 0.05 * self._tbt_ms)
        blocks = side.total_blocks.mean()
        if blocks:
            share = max(share, (num_tokens + expected_tokens / 2) / (float(blocks) * self._block_tokens))
        self.decode.add(share * expected_tokens * self._tbt_ms)

    def tick(self, view: View, now: float) -> Switch | None:
        """The switch to start now, if any."""
        limits, since = self.limits, self._ticked_at
        self._ticked_at = now
        if since is None or now <= since:
            return None
        self._update(view, now - since)
        if self._running is not None:
            if now - self._running.since > limits.patience_s:
                self.moved(SwitchState.GIVEN_UP, now)
            return None
        to = self._due() if now >= self._paused_until else None
        if to is None:
            return None
        node_id = self._idlest(view, Role.PREFILL if to is Role.DECODE else Role.DECODE, now)
        if node_id is None:
            return None
        switch = Switch(node_id, to)
        self._running = _Running(switch, SwitchState.DRAINING, now)
        return switch

    def moved(self, to: SwitchState, now: float) -> None:
        """The switch in progress has advanced. An illegal move is our bug."""
        assert self._running is not None, "no switch is in progress"
        switch, state, _ = self._running
        assert to in SWITCH_MOVES[state], f"{state} -> {to}"
        self._running = self._running._replace(state=to)
        if not SWITCH_MOVES[to]:
            self._running = None
            self._ended(switch, to is SwitchState.DONE, now)

    def _ended(self, switch: Switch, is_done: bool, now: float) -> None:
        limits = self.limits
        resting = {node_id: until for node_id, until in self._node_rests_until.items() if until > now}
        rest_s = limits.node_dwell_s if is_done else 2.0 * limits.dwell_s
        self._node_rests_until = resting | {switch.node_id: now + rest_s}
        remaining_s = min(max(self._shortage_s[switch.to] - limits.cost_s, 0.0), limits.cost_s)
        self._shortage_s = dict.fromkeys(self._shortage_s, 0.0)
        if is_done:
            self.switches += 1
            self._last_to, self._shortage_s[switch.to] = switch.to, remaining_s
        else:
            self._paused_until = now + limits.dwell_s

    def _update(self, view: View, elapsed_s: float) -> None:
        """Update demand and shortage with what arrived since the last tick and what is there now."""
        requests_s = self.clock.tick(elapsed_s)
        self.prefill.tick(elapsed_s, requests_s)
        self.decode.tick(elapsed_s, requests_s)
        held = self._held_nodes(view)
        self._held.add(held, elapsed_s)
        self._held_baseline.add(held, elapsed_s)
        self._age_s += elapsed_s
        if self._age_s < self.limits.slow_s:
            return
        to, shortage = self._best_switch(view)
        for role in self._shortage_s:
            change = (shortage if role is to else 0.0) - self.limits.leak
            self._shortage_s[role] = max(self._shortage_s[role] + change * requests_s, 0.0)

    def _held_nodes(self, view: View) -> float:
        """Decode nodes filled by the KV that exists now. Prompts still waiting for their prefill hold none."""
        side, context = view.decode, float(view.decode.context_tokens.sum())
        if not context:
            return 0.0
        room_ms = np.maximum(self._tbt_ms - side.step_ms, 0.05 * self._tbt_ms)
        placed = (side.sequence_ms * side.sequences + side.context_ms * side.context_tokens) / room_ms
        return float(placed.sum()) * (1.0 - min(float(view.prefill.queued_tokens.sum()) / context, 1.0))

    def _demand(self) -> tuple[float, float]:
        """Nodes needed of each role. Held KV is extrapolated by one drain while it rises."""
        limits, held = self.limits, self._held.value
        rise = max(held - self._held_baseline.value, 0.0) / (limits.slow_s - limits.fast_s)
        return self.prefill.level, limits.room * max(self.decode.level, held + rise * limits.drain_s)

    def _best_switch(self, view: View) -> tuple[Role | None, float]:
        """The role for which one more node lowers the highest load, and its shortage without it."""
        limits, num_prefill, num_decode = self.limits, len(view.prefill.nodes), len(view.decode.nodes)
        prefill, decode = self._demand()

        def highest_load(move: int, burst: float) -> float:
            """After ``move`` nodes became prefill nodes. Too little room for bursts counts as full, not as more."""
            if num_prefill + move < limits.min_prefill or num_decode - move < limits.min_decode:
                return EMPTY
            with_bursts = (prefill + burst * math.sqrt(prefill)) / (num_prefill + move)
            computing = min(with_bursts, max(1.0, limits.room * prefill / (num_prefill + move)))
            return max(computing, decode / (num_decode - move))

        best = Role.PREFILL if highest_load(1, limits.burst) < highest_load(-1, limits.burst) else Role.DECODE
        move, burst, most = 1, limits.burst, 1.0 / (num_prefill + 1)
        if best is Role.DECODE:
            move, burst, most = -1, limits.burst_kept, 1.0 / (num_decode + 1)
        now, then = highest_load(0, burst), highest_load(move, burst)
        if not now or 1.0 - then / now < limits.worth * most:
            return None, 0.0
        return best, max(now - max(then, limits.busy), 0.0)

    def _due(self) -> Role | None:
        """The role whose accumulated shortage exceeds the cost of a switch."""
        to = max(self._shortage_s, key=lambda role: self._shortage_s[role])
        is_reversal = self._last_to not in (None, to)
        cost_s = self.limits.cost_s * (self.limits.turn_back if is_reversal else 1.0)
        return to if self._shortage_s[to] > cost_s else None

    def _idlest(self, view: View, role: Role, now: float) -> str | None:
        """The node of ``role`` that will be empty first and has not been asked lately."""
        side = view.prefill if role is Role.PREFILL else view.decode
        load = view.prefill.queued_ms if role is Role.PREFILL else view.decode.context_tokens
        for at in np.argsort(load, kind="stable"):
            node_id = side.nodes[int(at)].node_id
            if now >= self._node_rests_until.get(node_id, -math.inf):
                return node_id
        return None
