"""The nodes of the cluster by id, with incarnation, state and last reported load.

Pure: time is an argument and nothing is sent from here. A node's states are a table. A process that was replaced by a
newer one of the same id is refused for ever, so that the two cannot take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mooncake.adapter_loads import AdapterLoad
from mooncake.errors import ConfigError, StaleEpoch
from mooncake.types import Role, SegmentAddress

MAX_NODES = 4096
REPLACED_KEPT = 64  # replaced incarnations remembered per node id
GONE_KEPT = 4096  # node ids whose last incarnation is remembered after they timed out, and whose replaced ones are
MISSED_HEARTBEATS = 3  # after this many a node is suspect


class NodeState(StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"  # a call failed or heartbeats are late: gets work only if no live node of its role is left
    DRAINING = "draining"  # finishes what it has
    GONE = "gone"
    LEFT = "left"  # gone as it had announced


class NodeEvent(StrEnum):
    REGISTERED = "registered"
    HEARD = "heard"
    DRAINS = "drains"
    CALL_FAILED = "call failed"
    LATE = "late"
    TIMED_OUT = "timed out"


_S, _E = NodeState, NodeEvent
TRANSITIONS: dict[tuple[NodeState, NodeEvent], NodeState] = {
    (_S.LIVE, _E.REGISTERED): _S.LIVE,
    (_S.LIVE, _E.HEARD): _S.LIVE,
    (_S.LIVE, _E.DRAINS): _S.DRAINING,
    (_S.LIVE, _E.CALL_FAILED): _S.SUSPECT,
    (_S.LIVE, _E.LATE): _S.SUSPECT,
    (_S.LIVE, _E.TIMED_OUT): _S.GONE,
    (_S.SUSPECT, _E.REGISTERED): _S.LIVE,
    (_S.SUSPECT, _E.HEARD): _S.LIVE,
    (_S.SUSPECT, _E.DRAINS): _S.DRAINING,
    (_S.SUSPECT, _E.CALL_FAILED): _S.SUSPECT,
    (_S.SUSPECT, _E.LATE): _S.SUSPECT,
    (_S.SUSPECT, _E.TIMED_OUT): _S.GONE,
    (_S.DRAINING, _E.REGISTERED): _S.LIVE,
    (_S.DRAINING, _E.DRAINS): _S.DRAINING,
    (_S.DRAINING, _E.HEARD): _S.LIVE,
    (_S.DRAINING, _E.CALL_FAILED): _S.DRAINING,
    (_S.DRAINING, _E.LATE): _S.DRAINING,
    (_S.DRAINING, _E.TIMED_OUT): _S.LEFT,
}


class Health(StrEnum):
    """How well a node works, as ``control.health`` judges it: beside its state, which says whether it is heard."""

    HEALTHY = "healthy"
    SUSPECTED = "suspected"  # gets work only when no other node is left
    DRAINING = "draining"  # finishes what it has
    ISOLATED = "isolated"  # gets nothing but probes
    PROBATION = "probation"  # works, but the first fault isolates it again


class Fault(StrEnum):
    """What counts against a node's health, whenever it is seen."""

    CHECKSUM = "checksum errors"  # blocks that it wrote or stored had the wrong bytes
    NONSENSE = "messages without sense"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says about itself when it registers. ``segment`` is None for a node without registered memory."""

    node_id: str
    role: Role
    incarnation: int
    control_address: str
    segment: SegmentAddress | None = None
    kv_fingerprint: str = ""
    block_tokens: int = 0
    max_sequences: int = 0
    can_switch: bool = False  # between prefill and decode
    device: str = ""  # the device it computes on
    max_model_len: int = 0  # tokens of prompt plus answer, as configured; 0: not said
    settings: tuple[tuple[str, str], ...] = ()  # (name, value) of those that nodes must have in common
    kv_bytes: int = 0  # of its KV cache
    kv_why: str = ""  # so many, where nobody said
    chunk_tokens: int = 0  # of prompts in a step

    @property
    def host_id(self) -> str:
        return self.segment.host_id if self.segment else ""


class NodeLoad(NamedTuple):
    """A node's last report of its work, in tokens and blocks."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet computed
    context_tokens: int = 0  # of running sequences
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0


@dataclass(slots=True)
class Node:
    info: NodeInfo
    state: NodeState
    heard_at: float
    load: NodeLoad = field(default_factory=NodeLoad)
    suspect_until: float = 0.0  # heartbeats before this time do not clear a failed call
    health: Health = Health.HEALTHY
    health_reason: str = ""  # why it is not healthy
    adapters: tuple[AdapterLoad, ...] = ()  # loaded while the cluster served, or tried in vain

    @property
    def effective_state(self) -> NodeState:
        """The state by which it gets work: health can lower it, not raise it."""
        if self.state is NodeState.LIVE:
            return _EFFECTIVE_STATE.get(self.health, NodeState.LIVE)
        return NodeState.DRAINING if self.health in (Health.DRAINING, Health.ISOLATED) else self.state


_EFFECTIVE_STATE = {
    Health.SUSPECTED: NodeState.SUSPECT,
    Health.DRAINING: NodeState.DRAINING,
    Health.ISOLATED: NodeState.DRAINING,
}


class Registry:
    """One owner. Methods that need the time take it as an argument (seconds, monotonic)."""

    def __init__(
        self,
        kv_fingerprint: str,
        block_tokens: int,
        interval_s: float,
        timeout_s: float,
        max_model_len: int = 0,
        settings: Mapping[str, str] | None = None,
        slot_bytes: int = 0,
    ) -> None:
        """``settings`` are those that nodes must have in common; ``slot_bytes`` is what a store's slot must hold."""
        self._fingerprint = kv_fingerprint
        self._max_model_len = max_model_len
        self._settings = settings or {}
        self._slot_bytes = slot_bytes
        self.block_tokens = block_tokens
        self._late_s = min(MISSED_HEARTBEATS * interval_s, timeout_s)
        self._timeout_s = timeout_s
        self._suspect_s = 2 * interval_s
        self._nodes: dict[str, Node] = {}
        self._replaced: dict[str, deque[int]] = {}
        self._gone: dict[str, int] = {}  # by node id: incarnations that timed out; they may only be paused
        self.version = 0  # changes whenever the set of nodes, a state or a node's memory does
        self._most_pages: dict[Role, int] = {}  # of this version
        self._pages_version = 0

    def register(self, info: NodeInfo, now: float) -> NodeInfo | None:
        """Add a node. Returns the incarnation it replaces, if any.

        Raises ConfigError when something differs that nodes must have in common, or the cluster is full; StaleEpoch
        when it was itself replaced.
        """
        if not info.node_id or not info.control_address:
            raise ConfigError("a node must register with an id and a control address")
        self.check_same_cluster(info)
        self._refuse_replaced(info.node_id, info.incarnation)
        old = self._nodes.get(info.node_id)
        if old is None and len(self._nodes) >= MAX_NODES:
            raise ConfigError(f"the cluster already has as many nodes as it can ({MAX_NODES})")
        if old is not None and old.info.incarnation == info.incarnation:
            old.info, old.heard_at, old.suspect_until = info, now, 0.0
            self._move(old, NodeEvent.REGISTERED)
            return None
        before = self._gone.pop(info.node_id, None) if old is None else old.info.incarnation
        if before not in (None, info.incarnation):
            self._replaced.setdefault(info.node_id, deque(maxlen=REPLACED_KEPT)).append(before)
            while len(self._replaced) > GONE_KEPT:
                del self._replaced[next(iter(self._replaced))]
        self._nodes[info.node_id] = Node(info, NodeState.LIVE, now)
        self.version += 1
        return old.info if old else None

    def rival(self, info: NodeInfo) -> NodeInfo | None:
        """The process that ``info`` would replace although its heartbeats arrive and it is not leaving. One at the
        same address has ended: its successor listens there, or it has taken another role."""
        node = self._nodes.get(info.node_id)
        if node is None or node.state is not NodeState.LIVE or node.info.incarnation == info.incarnation:
            return None
        return node.info if node.info.control_address != info.control_address else None

    def heartbeat(self, node_id: str, incarnation: int, load: NodeLoad, draining: bool, now: float) -> bool:
        """Returns whether the node is known; if not it must register. Raises StaleEpoch when it was replaced."""
        self._refuse_replaced(node_id, incarnation)
        node = self._nodes.get(node_id)
        if node is None or node.info.incarnation != incarnation:
            return False
        self.version += node.load.blocks_total != load.blocks_total
        node.heard_at, node.load = now, load
        if draining:
            self._move(node, NodeEvent.DRAINS)
        elif node.state is not NodeState.LIVE and now >= node.suspect_until:
            self._move(node, NodeEvent.HEARD)
        return True

    def call_failed(self, info: NodeInfo, now: float) -> None:
        """A call could not reach the node. It gets no work until a heartbeat that is certainly newer than the call."""
        node = self._nodes.get(info.node_id)
        if node is not None and node.info.incarnation == info.incarnation:
            node.suspect_until = now + self._suspect_s
            self._move(node, NodeEvent.CALL_FAILED)

    def set_health(self, node_id: str, health: Health, reason: str) -> None:
        """``reason``: why it is not healthy; "" when it is."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.health, node.health_reason = health, reason
            self.version += 1

    def set_adapters(self, node_id: str, incarnation: int, loads: Iterable[AdapterLoad]) -> None:
        """What the node says of its adapters."""
        node, adapters = self._nodes.get(node_id), tuple(loads)
        if node is not None and node.info.incarnation == incarnation:
            self.version += node.adapters != adapters
            node.adapters = adapters

    def lacking(self, adapter: str) -> frozenset[int]:
        """Incarnations of the nodes that have not loaded the adapter of this digest."""
        return frozenset(
            node.info.incarnation
            for node in self._nodes.values()
            if not any(load.adapter.digest == adapter and not load.error for load in node.adapters)
        )

    def is_draining(self, info: NodeInfo) -> bool:
        """Whether the node has announced that it is leaving."""
        node = self._nodes.get(info.node_id)
        return node is not None and node.info.incarnation == info.incarnation and node.state is NodeState.DRAINING

    def discount_pause(self, pause_s: float) -> None:
        """The conductor itself was not listening for this long: silence during that time does not count."""
        for node in self._nodes.values():
            node.heard_at += pause_s

    def tick(self, now: float) -> list[Node]:
        """Check for silent nodes. Returns the ones that are gone or have left as of this call; they are forgotten."""
        gone = []
        for node in self._nodes.values():
            silent_s = now - node.heard_at
            if silent_s > self._timeout_s:
                self._move(node, NodeEvent.TIMED_OUT)
                gone.append(node)
            elif silent_s > self._late_s:
                self._move(node, NodeEvent.LATE)
        for node in gone:
            del self._nodes[node.info.node_id]
            self._gone[node.info.node_id] = node.info.incarnation
        while len(self._gone) > GONE_KEPT:
            del self._gone[next(iter(self._gone))]
        return gone

    def get(self, node_id: str) -> Node | None:
        return self._nodes.get(node_id)

    def nodes(self) -> Iterable[Node]:
        """All nodes that are not gone, by id."""
        return (self._nodes[node_id] for node_id in sorted(self._nodes))

    def has(self, role: Role, state: NodeState) -> bool:
        """Whether a node of that role is in that state."""
        return any(node.state is state and node.info.role is role for node in self._nodes.values())

    def live(self) -> frozenset[int]:
        """Incarnations of the nodes whose heartbeats arrive."""
        return frozenset(node.info.incarnation for node in self._nodes.values() if node.state is NodeState.LIVE)

    def usable(self, role: Role, barred: frozenset[int] = frozenset()) -> list[Node]:
        """Nodes that may get work, by id: the live ones; if none, the suspects; if none, the sick ones: slow answers
        are better than none, and wrong bytes are detected. With ``barred`` (incarnations), those of the others that are
        live or, if none is, suspects: whoever has failed a request need not be worse than a sick one."""
        of_role = [node for node in self.nodes() if node.info.role is role and node.info.incarnation not in barred]
        for state in (NodeState.LIVE, NodeState.SUSPECT):
            if found := [node for node in of_role if node.effective_state is state]:
                return found
        return [] if barred else [node for node in of_role if node.state is NodeState.LIVE]

    def most_pages(self, role: Role) -> int:
        """KV pages of the role's node with the most memory; 0 while unknown. Asked for each request several times, so
        that nodes are looked at only when one has changed."""
        if self._pages_version != self.version:
            self._pages_version, self._most_pages = self.version, {}
            for node in self._nodes.values():
                pages = max(node.load.blocks_total, self._most_pages.get(node.info.role, 0))
                self._most_pages[node.info.role] = pages
        return self._most_pages.get(role, 0)

    def _move(self, node: Node, event: NodeEvent) -> None:
        before, node.state = node.state, TRANSITIONS[node.state, event]
        if node.state is not before:
            self.version += 1

    def _refuse_replaced(self, node_id: str, incarnation: int) -> None:
        if incarnation in self._replaced.get(node_id, ()):
            raise StaleEpoch(f"another process has registered as {node_id!r} since, and replaced this one")

    def check_same_cluster(self, info: NodeInfo) -> None:
        """Raises ConfigError when something differs that nodes must have in common."""
        others = [
            f"{name} = {value} where this cluster has {self._settings[name]}"
            for name, value in info.settings
            if self._settings.get(name, value) != value
        ]
        if others:
            raise ConfigError(f"node {info.node_id!r} has {', '.join(others)}: give every node the same configuration")
        if info.role is Role.STORE:
            self._check_slots(info)
            return
        if info.block_tokens != self.block_tokens:
            raise ConfigError(
                f"node {info.node_id!r} uses blocks of {info.block_tokens} tokens, this cluster {self.block_tokens}: "
                "give every node the same configuration"
            )
        if info.kv_fingerprint != self._fingerprint:
            raise ConfigError(
                f"node {info.node_id!r} makes KV {info.kv_fingerprint or '(none)'}, this cluster serves "
                f"{self._fingerprint}: give every node the same model, dtype, block size and max_model_len"
            )
        if 0 < info.max_model_len < self._max_model_len:
            raise ConfigError(
                f"node {info.node_id!r} has a context of {info.max_model_len} tokens, this cluster "
                f"{self._max_model_len}: give every node the same max_model_len"
            )

    def _check_slots(self, store: NodeInfo) -> None:
        if store.segment is not None and store.segment.block_bytes < self._slot_bytes:
            raise ConfigError(
                f"node {store.node_id!r} has slots of {store.segment.block_bytes} bytes, too few for this cluster's "
                f"blocks of {self._slot_bytes}: leave store.block_bytes out, or raise it"
            )
