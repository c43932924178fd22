"""``mooncake role``: ask a node to change its role, and follow it until it has changed or failed."""

from __future__ import annotations

import contextlib
import time

from rich.markup import escape

from mooncake.app.console import out
from mooncake.app.reach import reach
from mooncake.errors import MooncakeError, NodeUnavailable
from mooncake.rpc import cluster_pb2 as pb

LOOK_S = 0.1
MISSING_S = 5.0  # a restarted conductor knows its nodes again sooner than this
UNTOLD_S = 15.0  # the node learns of the request with its next heartbeat


class Switch:
    """The state of one switch, from statuses of the node. Pure: time is an argument."""

    def __init__(self, node: pb.NodeStatus, to: str) -> None:
        """``node``: its status at the time of the request."""
        self._name, self._from, self._to = node.info.node_id, node.info.role, to
        self._incarnation = node.info.incarnation
        self._has_drained = False
        self._missing_since: float | None = None
        self._untold_since: float | None = None

    def is_done(self, node: pb.NodeStatus | None, now: float) -> bool:
        """``node``: its current status; None if the cluster does not know it. Raises NodeUnavailable when it will not
        switch."""
        if node is None:
            self._missing_since = now if self._missing_since is None else self._missing_since
            if now - self._missing_since >= MISSING_S:
                raise NodeUnavailable(f"{self._name} ended before it could become a {self._to} node")
            return False
        self._missing_since = None
        if node.info.role == self._to:
            return True
        if node.info.incarnation != self._incarnation:
            raise NodeUnavailable(f"{self._name} ended and was restarted as a {self._from} node; try again")
        if node.state == "draining":
            self._has_drained, self._untold_since = True, None
            return False
        if self._has_drained and node.state == "live":
            raise NodeUnavailable(f"{self._name} did not drain in time and stays a {self._from} node")
        self._untold_since = now if self._untold_since is None else self._untold_since
        if now - self._untold_since >= UNTOLD_S:
            raise NodeUnavailable(f"{self._name} has not begun to drain within {UNTOLD_S:g} s and keeps its role")
        return False


def switch_role(address: str, node_id: str, role: str) -> None:
    """Request the switch and follow it: the node drains, then registers again.

    Raises InvalidRequest when it cannot switch, NodeUnavailable when it does not; the request is then withdrawn.
    """
    with reach(address) as client:
        before = _find(client.status(), node_id)
        client.set_role(node_id, role)
        if before is not None:
            switch = Switch(before, role)
            with out.status(f"{escape(node_id)} drains") as shown:
                try:
                    while not switch.is_done(node := _find(client.status(), node_id), time.monotonic()):
                        running = node.load.running + node.load.waiting if node is not None else 0
                        shown.update(f"{escape(node_id)} drains: {running} sequences left")
                        time.sleep(LOOK_S)
                except NodeUnavailable:
                    with contextlib.suppress(MooncakeError):
                        client.set_role(node_id, before.info.role)
                    raise
    out.print(f"{escape(node_id)} is a {escape(role)} node")


def _find(status: pb.StatusResponse, node_id: str) -> pb.NodeStatus | None:
    return next((node for node in status.nodes if node.info.node_id == node_id), None)
