"""How many nodes prefill and how many decode: when a node should change its role, and which one.

Pure: it is told what arrives and what the cluster looks like, and returns at most one switch at a time. Demand is
counted in nodes, refused requests included, and looked at a drain's time ahead. Open traffic is mostly steady, so it
holds still: a switch must bring the busiest side down by more than the dead band, and switches keep a distance unless a
side is short of nodes at once.

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
    dead_band: float = 0.15  # the busiest side must become so much less busy
    least_busy: float = 0.6  # below that nobody waits, and nothing is to be gained
    dwell_s: float = 60.0  # between two switches of the cluster
    short: float = 0.9  # how busy a side is that lacks nodes now: then the next switch
    hurry_s: float = 2.0  # waits only so long
    node_dwell_s: float = 600.0  # between two of one node
    drain_s: float = 30.0  # how far ahead demand is looked at; about what a drain takes
    smoothing_s: float = 30.0  # of demand
    patience_s: float = 120.0  # a drain that takes longer is given up
    min_prefill: int = 1
    min_decode: int = 1


class Demand:
    """A rate in nodes, smoothed with its trend (Holt), over work that is told as it arrives."""

    def __init__(self, smoothing_s: float) -> None:
        self._smoothing_s = smoothing_s
        self._arrived_ms = 0.0
        self._since: float | None = None
        self.level = 0.0
        self.trend = 0.0  # nodes a second
        self._elapsed_s = 0.0

    def add(self, node_ms: float) -> None:
        self._arrived_ms += node_ms

    def tick(self, now: float) -> None:
        """Close the interval since the last tick."""
        if self._since is None:
            self._since = now
            return
        elapsed_s = now - self._since
        if elapsed_s <= 0.0:
            return
        rate = self._arrived_ms / 1e3 / elapsed_s
        self._arrived_ms, self._since = 0.0, now
        # At first a plain mean, so that an empty beginning does not count for a minute.
        weight = max(1.0 - math.exp(-elapsed_s / self._smoothing_s), elapsed_s / (self._elapsed_s + elapsed_s))
        self._elapsed_s += elapsed_s
        before = self.level
        self.level += weight * (rate - self.level)
        slope = (self.level - before) / elapsed_s
        if self._elapsed_s > self._smoothing_s:
            self.trend += (1.0 - math.exp(-elapsed_s / (2.0 * self._smoothing_s))) * (slope - self.trend)

    def ahead(self, horizon_s: float) -> float:
        """The level in ``horizon_s``; a trend counts for at most half of the level."""
        drift = self.trend * horizon_s
        return max(self.level + min(max(drift, -0.5 * self.level), 0.5 * self.level), 0.0)

    @property
    def is_settled(self) -> bool:
        return self._elapsed_s >= self._smoothing_s


class Balancer:
    """One owner. ``arrived`` for every request, also those that were refused; ``tick`` about once a second."""

    def __init__(self, tbt_ms: float, block_tokens: int, limits: BalanceLimits | None = None) -> None:
        self.limits = limits or BalanceLimits()
        self._tbt_ms = tbt_ms
        self._block_tokens = block_tokens
        self.prefill = Demand(self.limits.smoothing_s)
        self.decode = Demand(self.limits.smoothing_s)
        self.switches = 0
        self._switching: tuple[Switch, SwitchState, float] | None = None
        self._last_switch = -math.inf
        self._may_hurry = True
        self._switched_at: dict[str, float] = {}

    @property
    def switching(self) -> tuple[Switch, SwitchState] | None:
        """The switch under way."""
        return self._switching[:2] if self._switching else None

    def arrived(self, view: View, prefill_ms: float, num_tokens: int, expected_tokens: float) -> None:
        """One request's work: of a prefill node, and of a decode node that keeps its step at the limit."""
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
        self.prefill.tick(now)
        self.decode.tick(now)
        limits = self.limits
        if self._switching is not None:
            if now - self._switching[2] > limits.patience_s:
                self.moved(SwitchState.GIVEN_UP, now)
            return None
        rested_s = now - self._last_switch
        if not self.prefill.is_settled or rested_s < (limits.hurry_s if self._may_hurry else limits.dwell_s):
            return None
        to = self._wanted(view, may_wait=rested_s < limits.dwell_s)
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
        switch, state, since = self._switching
        assert to in SWITCH_MOVES[state], f"{state} -> {to}"
        self._switching = (switch, to, since)
        if not SWITCH_MOVES[to]:
            self._switching = None
            self._last_switch = self._switched_at[switch.node_id] = now
            self._may_hurry = to is SwitchState.DONE
            self.switches += self._may_hurry

    def _demand(self, view: View) -> tuple[float, float]:
        """Nodes wanted of each role: what is forecast and, as forecasts come late, what is there already."""
        limits, waiting_s = self.limits, float(view.prefill.queued_ms.sum()) / 1e3
        prefill = self.prefill.ahead(limits.drain_s) + waiting_s / limits.drain_s
        side = view.decode
        room_ms = np.maximum(self._tbt_ms - side.step_ms, 0.05 * self._tbt_ms)
        held = (side.sequence_ms * side.sequences + side.context_ms * side.context_tokens) / room_ms
        return prefill, max(self.decode.ahead(limits.drain_s), float(held.sum()))

    def _wanted(self, view: View, may_wait: bool) -> Role | None:
        """The role of which one node more makes the busier side less busy, by more than the dead band. ``may_wait``:
        only when a side is short of nodes now."""
        limits, num_prefill, num_decode = self.limits, len(view.prefill.nodes), len(view.decode.nodes)
        prefill, decode = self._demand(view)

        def busiest(move: int) -> float:
            if num_prefill + move < limits.min_prefill or num_decode - move < limits.min_decode:
                return math.inf
            return max(prefill / (num_prefill + move), decode / (num_decode - move))

        now, best = busiest(0), min((-1, 1), key=busiest)
        if now < (limits.short if may_wait else limits.least_busy):
            return None
        if busiest(best) > now * (1.0 - min(limits.dead_band, 0.5 / num_prefill)):
            return None
        return Role.PREFILL if best == 1 else Role.DECODE

    def _idlest(self, view: View, role: Role, now: float) -> str | None:
        """The node of ``role`` that is empty soonest and has not switched lately."""
        side = view.prefill if role is Role.PREFILL else view.decode
        load = view.prefill.queued_ms if role is Role.PREFILL else view.decode.context_tokens
        for at in np.argsort(load, kind="stable"):
            node_id = side.nodes[int(at)].node_id
            if now - self._switched_at.get(node_id, -math.inf) >= self.limits.node_dwell_s:
                return node_id
        return None
