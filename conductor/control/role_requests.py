"""Which nodes have been asked to change their role, by an operator or by ``role_switcher``.

Pure. A request is passed on in the replies to the node's heartbeats, and ends when the node registers in that role, is
gone, or the request is withdrawn.
"""

from __future__ import annotations

from conductor.registry import NodeInfo, Registry
from mooncake.errors import InvalidRequest, shown
from mooncake.types import Role


class RoleRequests:
    """One owner."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._requested: dict[str, Role] = {}  # by node id
        self.num_switches = 0
        self.switched_last = ""  # node id

    def request(self, node_id: str, role: Role) -> None:
        """Ask a node to switch, or withdraw that if it already has this role. Raises InvalidRequest when it cannot."""
        node = self._registry.get(node_id)
        if node is None:
            known = ", ".join(sorted(each.info.node_id for each in self._registry.nodes()))
            raise InvalidRequest(f"there is no node {shown(node_id)}; there are: {known}", "node_id")
        if node.info.role is role:
            self.withdraw(node_id)
            return
        if Role.STORE in (node.info.role, role):
            raise InvalidRequest(f"{node_id} stays a {node.info.role} node: stores do not change their role", "node_id")
        if not node.info.can_switch or role not in (Role.PREFILL, Role.DECODE):
            raise InvalidRequest(f"{node_id} cannot become a {role} node (start it with cluster.switchable)", "node_id")
        others = [other.info.node_id for other in self._registry.usable(node.info.role)]
        if not any(other != node_id and other not in self._requested for other in others):
            raise InvalidRequest(f"{node_id} is the last {node.info.role} node", "node_id")
        self._requested[node_id] = role

    def withdraw(self, node_id: str) -> None:
        self._requested.pop(node_id, None)

    def of(self, node_id: str) -> Role | None:
        """The role that a node has been asked to take and does not have yet."""
        return self._requested.get(node_id)

    def registered(self, info: NodeInfo) -> None:
        """A node has registered, perhaps in the role it was asked to take."""
        if self._requested.get(info.node_id) is info.role:
            self.withdraw(info.node_id)
            self.num_switches += 1
            self.switched_last = info.node_id
