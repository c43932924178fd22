"""The Cluster gRPC service: translates nodes' messages to the core's types, and the core's state for an operator.

The only file of the conductor that reads the fields of ``proto/cluster.proto``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from conductor.core import Core
from conductor.placement.cost import CostModel
from conductor.registry import Health, Node, NodeInfo, NodeLoad, NodeState
from conductor.wire import info_from_wire, info_to_wire
from mooncake.adapter_loads import AdapterLoad, load_from_wire, load_to_wire
from mooncake.errors import InvalidRequest, shown
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc import cluster_pb2_grpc
from mooncake.types import Role

MAX_SAMPLES = 1024  # samples of a kind used per message


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, core: Core, model: str) -> None:
        self._core = core
        self._model = model
        self._reports: dict[str, pb.HeartbeatRequest] = {}  # the last of each node, for Status

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:  # noqa: N802
        info = info_from_wire(request.node)
        self._core.register(info, [load_from_wire(each) for each in request.adapters])
        observe(self._core.costs, info.node_id, request.samples)
        return pb.RegisterResponse(
            conductor_incarnation=self._core.incarnation, heartbeat_interval_s=self._core.heartbeat_interval_s
        )

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:  # noqa: N802
        self._core.check(info_from_wire(request.node))
        return pb.CheckResponse()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:  # noqa: N802
        known = self._core.heartbeat(
            request.node_id,
            request.incarnation,
            node_load(request.load),
            request.draining,
            [load_from_wire(each) for each in request.adapters],
        )
        if known:
            self._core.health.heartbeat(request.node_id, request.samples, dict(request.load.counters))
            observe(self._core.costs, request.node_id, request.samples)
            self._remember(request)
        return pb.HeartbeatResponse(
            known=known,
            conductor_incarnation=self._core.incarnation,
            wanted_role=self._core.role_requests.of(request.node_id) or "",
            adapters=map(load_to_wire, self._core.adapters.wanted()),
        )

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:  # noqa: N802
        if request.role not in tuple(Role):
            raise InvalidRequest(f"no such role: {shown(request.role)}; it is prefill or decode", "role")
        self._core.role_requests.request(request.node_id, Role(request.role))
        return pb.SetRoleResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:  # noqa: N802
        await self._core.adapter_loader.load(request.name, request.path, request.in_place)
        return pb.LoadAdapterResponse()

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:  # noqa: N802
        self._core.adapter_loader.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:  # noqa: N802
        return await asyncio.to_thread(self.status())

    def status(self) -> Callable[[], pb.StatusResponse]:
        """What makes the message of the cluster as it is now, as an operator sees it. Call that once, in a thread: a
        thousand nodes take it 20 ms."""
        stats = self._core.dispatcher.stats
        waiting_for = self._core.waiting_for()
        nodes = [self._seen(node) for node in self._core.registry.nodes()]
        status = pb.StatusResponse(
            model=self._model,
            ready=not waiting_for,
            waiting_for=waiting_for,
            requests_total=stats.requests,
            requests_running=stats.running,
            requests_failed=stats.failed,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            blended_tokens=stats.blended_tokens,
            prediction_error_ms=stats.prediction_error_ms,
            block_queries=stats.block_queries,
            block_hits=stats.block_hits,
            role_switches=self._core.role_requests.num_switches,
            last_switch_ms=self._last_switch_ms(),
            adapters=map(load_to_wire, self._core.adapters.loaded()),
            index_dropped_blocks=self._core.index.dropped,
        )

        def whole() -> pb.StatusResponse:
            status.nodes.extend(map(_node_status, nodes))
            return status

        return whole

    def _last_switch_ms(self) -> float:
        """Duration reported by the node that switched last."""
        report = self._reports.get(self._core.role_requests.switched_last)
        return report.load.counters.get("last_switch_us", 0) / 1e3 if report is not None else 0.0

    def _seen(self, node: Node) -> _SeenNode:
        report = self._reports.get(node.info.node_id)
        return _SeenNode(
            info=node.info,
            state=node.state,
            heartbeat_age_s=max(0.0, self._core.clock() - node.heard_at),
            report=report if report is not None and report.incarnation == node.info.incarnation else None,
            indexed_blocks=self._core.index.num_blocks(node.info.node_id),
            health=node.health,
            health_reason=node.health_reason,
            adapters=node.adapters,
        )

    def _remember(self, report: pb.HeartbeatRequest) -> None:
        report.ClearField("samples")
        self._reports[report.node_id] = report
        if len(self._reports) > 2 * max(64, sum(1 for _ in self._core.registry.nodes())):
            self._reports = {name: kept for name, kept in self._reports.items() if self._core.registry.get(name)}


class _SeenNode(NamedTuple):
    """A node at one moment. Nothing in it changes, so a thread may read it."""

    info: NodeInfo
    state: NodeState
    heartbeat_age_s: float
    report: pb.HeartbeatRequest | None  # of this process; None before its first
    indexed_blocks: int
    health: Health
    health_reason: str
    adapters: tuple[AdapterLoad, ...]


def _node_status(node: _SeenNode) -> pb.NodeStatus:
    return pb.NodeStatus(
        info=info_to_wire(node.info),
        state=node.state,
        heartbeat_age_s=node.heartbeat_age_s,
        load=node.report.load if node.report is not None else None,
        transports=node.report.transports if node.report is not None else (),
        indexed_blocks=node.indexed_blocks,
        health=node.health,
        health_reason=node.health_reason,
        adapters=map(load_to_wire, node.adapters),
    )


def observe(costs: CostModel, node_id: str, samples: pb.CostSamples) -> None:
    for prefill in samples.prefill[:MAX_SAMPLES]:
        costs.observe_prefill(node_id, prefill.new_tokens, prefill.prefix_tokens, prefill.ms)
    for step in samples.decode[:MAX_SAMPLES]:
        costs.observe_decode(node_id, step.batch, step.context_tokens, step.ms)
    for transfer in samples.transfer[:MAX_SAMPLES]:
        costs.observe_transfer(node_id, transfer.peer, transfer.bytes, transfer.ms)


def node_load(message: pb.Load) -> NodeLoad:
    return NodeLoad(
        running=message.running,
        waiting=message.waiting,
        waiting_tokens=message.waiting_tokens,
        context_tokens=message.context_tokens,
        blocks_total=message.blocks_total,
        blocks_free=message.blocks_free,
        blocks_cached=message.blocks_cached,
    )
