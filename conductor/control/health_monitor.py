"""Health monitoring: feeds ``HealthTracker`` with the nodes' reports, probes them, and tells the registry what changed.

I/O only; whether a node is sick is decided in ``health``. A probe is a gRPC health check, and for an isolated prefill
node a small prompt, which it must compute in the time that used to take it to return to service.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conductor.control.health import HealthTracker
from conductor.placement.cost import CostModel, DecodeCost, PrefillCost
from conductor.registry import Fault, Health, NodeInfo, NodeState, Registry
from mooncake.config import HealthSection
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc import common_pb2, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.server import Channels
from mooncake.types import Role

log = logging.getLogger(__name__)

MAX_PROBES_PER_S = 200.0  # with more nodes than that each is probed less often
PROBE_TOKENS = 64
PROBE_MARGIN_MS = 250.0  # of a call, on top of its computation
CORRUPT_COUNTER = "checksum_mismatches"  # a store's counter of its own blocks found corrupt


@dataclass(slots=True)
class _Baseline:
    """A node's costs when it was last healthy, its counter of corrupt blocks, and when it is probed next."""

    prefill: PrefillCost = field(default_factory=PrefillCost)
    decode: DecodeCost = field(default_factory=DecodeCost)
    corrupt: int | None = None
    probe_at: float = 0.0


class HealthMonitor:
    """One owner, one event loop. ``is_idle``: whether nothing placed by this conductor runs on a node."""

    def __init__(
        self,
        section: HealthSection,
        registry: Registry,
        costs: CostModel,
        channels: Channels,
        is_idle: Callable[[NodeInfo], bool],
        clock: Callable[[], float],
    ) -> None:
        self._section = section
        self._registry = registry
        self._costs = costs
        self._channels = channels
        self._is_idle = is_idle
        self._clock = clock
        self._baselines: dict[str, _Baseline] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._discarded_at = 0.0
        self.tracker = HealthTracker(section)

    def joined(self, info: NodeInfo) -> None:
        self.tracker.join(info.node_id, info.role, self._clock())
        later_s = random.random() * self._section.probe_interval_s  # so that nodes are not all probed at once
        self._baselines[info.node_id] = _Baseline(probe_at=self._clock() + later_s)

    def forget(self, node_id: str) -> None:
        self.tracker.forget(node_id)
        self._baselines.pop(node_id, None)
        if task := self._probes.pop(node_id, None):
            task.cancel()

    async def close(self) -> None:
        tasks, self._probes = list(self._probes.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def discard_open_probes(self) -> None:
        """This process itself was not running: probes that are open now do not count if they fail."""
        self._discarded_at = self._clock()

    def discount_pause(self, pause_s: float) -> None:
        """This process itself was not running for this long."""
        self.tracker.discount_pause(pause_s)

    def heartbeat(self, node_id: str, samples: pb.CostSamples, counters: dict[str, int]) -> None:
        """Compare the reported steps with the node's costs while it was healthy. The cost model itself would learn to
        expect a slow node to be slow."""
        baseline = self._baselines.get(node_id)
        if baseline is None:
            return
        if not self.tracker.may_be_slow(node_id):
            baseline.prefill, baseline.decode = self._costs.prefill(node_id), self._costs.decode(node_id)
        for prefill in samples.prefill if baseline.prefill.is_known else ():
            self.tracker.measured(node_id, prefill.ms, baseline.prefill.ms(prefill.new_tokens, prefill.prefix_tokens))
        for step in samples.decode if baseline.decode.is_known else ():
            self.tracker.measured(node_id, step.ms, baseline.decode.ms(step.batch, step.context_tokens))
        corrupt = counters.get(CORRUPT_COUNTER, 0)
        node = self._registry.get(node_id)
        if node is not None and node.info.role is Role.STORE:  # on other roles it counts what others have sent
            before = corrupt if baseline.corrupt is None else baseline.corrupt
            self.tracker.checksum_errors(node_id, corrupt - before, self._clock())
        baseline.corrupt = corrupt

    def has_fault(self, nodes: Iterable[NodeInfo], fault: Fault) -> None:
        """One of these nodes has. It counts against each; the faulty one collects more of them."""
        for info in nodes:
            self.tracker.has_fault(info.node_id, fault, 1, self._clock())

    def tick(self, now: float) -> None:
        """Pass health changes to the registry, and start the probes that are due."""
        nodes = [node.info for node in self._registry.nodes()]
        leaving = {node.info.node_id for node in self._registry.nodes() if node.state is NodeState.DRAINING}
        for change in self.tracker.tick(now, [info.node_id for info in nodes if self._is_idle(info)]):
            self._registry.set_health(change.node_id, change.to, change.reason)
            level = logging.INFO if change.to is Health.HEALTHY else logging.WARNING
            log.log(level, "%s is %s: %s", change.node_id, change.to, change.reason or "it is well again")
        interval_s = max(self._section.probe_interval_s, len(nodes) / MAX_PROBES_PER_S)
        for info in nodes:
            baseline = self._baselines.get(info.node_id)
            if info.node_id in leaving:  # it may have stopped to answer, as it has announced
                continue
            if baseline is not None and now >= baseline.probe_at and info.node_id not in self._probes:
                baseline.probe_at = now + interval_s
                task = asyncio.create_task(self._probe(info), name=f"probe of {info.node_id}")
                self._probes[info.node_id] = task
                task.add_done_callback(lambda _, name=info.node_id: self._probes.pop(name, None))  # type: ignore[misc]

    async def _probe(self, info: NodeInfo) -> None:
        begin, is_isolated = self._clock(), self.tracker.state(info.node_id) is Health.ISOLATED
        try:
            if is_isolated and info.role is Role.PREFILL:
                ok = await self._computes_in_time(info)
            else:
                ok = await self._is_serving(info)
        except grpc.RpcError as error:
            log.debug("probe of %s: %s", info.node_id, error)
            ok = False
        if ok or begin > self._discarded_at:
            self.tracker.probed(info.node_id, ok)

    async def _is_serving(self, info: NodeInfo) -> bool:
        channel = self._channels.get(info.control_address)
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # the package has no types
        response = await check(health_pb2.HealthCheckRequest(), timeout=self._section.probe_timeout_s)
        # None: gRPC's word for bytes that are no message
        return response is not None and bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _computes_in_time(self, info: NodeInfo) -> bool:
        """Whether the node computes a prompt that no cache has as fast as it used to."""
        cost = self._baselines[info.node_id].prefill
        name = f"probe/{secrets.token_hex(8)}"
        request = prefill_pb2.PrefillRequest(
            request_id=name,
            tokens=bytes(4 * PROBE_TOKENS),
            num_prompt_tokens=PROBE_TOKENS,
            sampling=common_pb2.SamplingParams(max_tokens=1),
            cache_salt=name,
        )
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(info.control_address))
        begin = self._clock()
        async for said in stub.Run(request, timeout=self._section.probe_timeout_s):
            if cast(object, said) is None:
                return False
        took_ms = (self._clock() - begin) * 1e3
        allowed = self._section.slow_ratio * cost.ms(PROBE_TOKENS, 0) + PROBE_MARGIN_MS
        return not cost.is_known or took_ms <= allowed
