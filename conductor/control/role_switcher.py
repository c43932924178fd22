"""Carries out what ``Balancer`` decides: asks a node to change its role, and tracks it until it has.

No I/O: ``RoleRequests`` holds the request for the node's next heartbeat, and the node drains and registers again by
itself. At most one switch is in progress.
"""

from __future__ import annotations

import logging

from conductor.control.balance import BalanceLimits, Balancer, Switch, SwitchState
from conductor.control.role_requests import RoleRequests
from conductor.placement.fleet import Fleet
from conductor.placement.scheduler import Placement
from conductor.placement.view import PlacementQuery
from conductor.registry import NodeInfo
from mooncake.config import ConductorSection
from mooncake.errors import InvalidRequest

log = logging.getLogger(__name__)

TICK_S = 1.0
DEFAULT_TBT_MS = 200.0  # what a decode node is sized for when there is no limit


class RoleSwitcher:
    """One owner. What it asks nodes for goes through ``requests``."""

    def __init__(
        self,
        section: ConductorSection,
        fleet: Fleet,
        block_tokens: int,
        requests: RoleRequests,
    ) -> None:
        limits = BalanceLimits(
            smoothing_s=section.balance_smoothing_s,
            dwell_s=section.balance_dwell_s,
            node_dwell_s=section.balance_node_dwell_s,
        )
        self.balancer = Balancer(section.tbt_limit_ms or DEFAULT_TBT_MS, block_tokens, limits)
        self._fleet = fleet
        self._requests = requests
        self._switch: Switch | None = None
        self._next_tick_at = 0.0

    def arrived(self, query: PlacementQuery, placement: Placement, now: float) -> None:
        """A request has arrived, whether or not it was admitted."""
        facts, work_ms = query.facts, placement.breakdown.prefill_ms + placement.breakdown.fetch_ms
        self.balancer.arrived(query.view, work_ms, facts.num_tokens, facts.expected_tokens)

    def registered(self, info: NodeInfo, now: float) -> None:
        """A node has joined or returned: perhaps the one that switches."""
        if self._switch is not None and info.node_id == self._switch.node_id:
            if info.role is self._switch.to:
                self.balancer.moved(SwitchState.FLIPPING, now)
                self._end(SwitchState.DONE, now)
            else:
                self._end(SwitchState.GIVEN_UP, now)

    def gone(self, node_id: str, now: float) -> None:
        if self._switch is not None and node_id == self._switch.node_id:
            self._end(SwitchState.GIVEN_UP, now)

    def tick(self, now: float) -> None:
        if now < self._next_tick_at:
            return
        self._next_tick_at = now + TICK_S
        switch = self.balancer.tick(self._fleet.view(now), now)
        if self._switch is not None and self.balancer.switching is None:
            log.warning("%s did not drain in time and keeps its role", self._switch.node_id)
            self._requests.withdraw(self._switch.node_id)
            self._switch = None
        if switch is None:
            return
        self._switch = switch
        try:
            self._requests.request(switch.node_id, switch.to)
            log.info("%s is to become a %s node: that side is the busier one", switch.node_id, switch.to)
        except InvalidRequest as error:
            log.debug("no switch: %s", error.message)
            self._end(SwitchState.GIVEN_UP, now)

    def _end(self, state: SwitchState, now: float) -> None:
        self._switch = None
        self.balancer.moved(state, now)
