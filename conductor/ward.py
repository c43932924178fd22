"""Watches over the nodes' health and acts on it: feeds ``HealthWatch`` with their reports, probes them, and tells the
registry which to avoid.

I/O only; whether a node is sick is decided in ``health``. A probe is a sign of life from every node, and a small prompt
for an isolated prefill node: it must be computed in the time it used to take, or the node stays out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conductor.cost import CostModel, DecodeCost, PrefillCost
from conductor.health import Health, HealthLimits, HealthWatch
from conductor.registry import NodeInfo, Registry
from mooncake.config import HealthSection
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc import common_pb2, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.server import Channels
from mooncake.types import Role

log = logging.getLogger(__name__)

MOST_PROBES_A_S = 200.0  # with more nodes than that each is probed less often
PROBE_TOKENS = 64
PROBE_MARGIN_MS = 250.0  # of a call, on top of its computation
CORRUPT = "checksum_mismatches"  # a store's counter of its own blocks found corrupt


@dataclass(slots=True)
class _Usual:
    """What a node's steps took when it was last known to be well, and its counters so far."""

    prefill: PrefillCost = field(default_factory=PrefillCost)
    decode: DecodeCost = field(default_factory=DecodeCost)
    corrupt: int | None = None
    probe_at: float = 0.0


class Ward:
    """One owner, one event loop. ``is_empty`` says whether nothing of this conductor's runs on a node."""

    def __init__(
        self,
        section: HealthSection,
        registry: Registry,
        costs: CostModel,
        channels: Channels,
        is_empty: Callable[[NodeInfo], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._section = section
        self._registry = registry
        self._costs = costs
        self._channels = channels
        self._is_empty = is_empty
        self._clock = clock
        self._usual: dict[str, _Usual] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._excused_at = 0.0
        self.watch = HealthWatch(
            HealthLimits(
                slow_ratio=section.slow_ratio,
                missed_probes=section.missed_probes,
                checksum_errors=section.checksum_errors,
                confirm_s=section.confirm_s,
                clear_s=section.clear_s,
                probation_s=section.probation_s,
            )
        )

    def joined(self, info: NodeInfo) -> None:
        self.watch.join(info.node_id, info.role, self._clock())
        later_s = random.random() * self._section.probe_interval_s  # so that nodes are not all probed at once
        self._usual[info.node_id] = _Usual(probe_at=self._clock() + later_s)

    def forget(self, node_id: str) -> None:
        self.watch.forget(node_id)
        self._usual.pop(node_id, None)
        if task := self._probes.pop(node_id, None):
            task.cancel()

    async def close(self) -> None:
        tasks, self._probes = list(self._probes.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def excuse(self) -> None:
        """This process itself was not listening: probes not answered by now do not count."""
        self._excused_at = self._clock()

    def reported(self, node_id: str, samples: pb.CostSamples, counters: dict[str, int]) -> None:
        """A heartbeat. Its steps are compared with what the node took while it was well: the cost model would learn
        to expect a slow node to be slow."""
        usual = self._usual.get(node_id)
        if usual is None:
            return
        if not self.watch.may_be_slow(node_id):
            usual.prefill, usual.decode = self._costs.prefill(node_id), self._costs.decode(node_id)
        for prefill in samples.prefill if usual.prefill.is_known else ():
            self.watch.measured(node_id, prefill.ms, usual.prefill.ms(prefill.new_tokens, prefill.prefix_tokens))
        for step in samples.decode if usual.decode.is_known else ():
            self.watch.measured(node_id, step.ms, usual.decode.ms(step.batch, step.context_tokens))
        corrupt = counters.get(CORRUPT, 0)
        node = self._registry.get(node_id)
        if node is not None and node.info.role is Role.STORE:  # on other roles it counts what others have sent
            for _ in range(corrupt - usual.corrupt if usual.corrupt is not None else 0):
                self.watch.checksum_error(node_id, self._clock())
        usual.corrupt = corrupt

    def corrupt(self, nodes: Iterable[NodeInfo]) -> None:
        """Bytes were corrupted between these nodes; the one that is involved again and again is to blame."""
        for info in nodes:
            self.watch.checksum_error(info.node_id, self._clock())

    def tick(self, now: float) -> None:
        """Judge, tell the registry, and start the probes that are due."""
        nodes = [node.info for node in self._registry.nodes()]
        for move in self.watch.tick(now, [info.node_id for info in nodes if self._is_empty(info)]):
            self._registry.judge(move.node_id, move.to, move.why)
            level = logging.INFO if move.to is Health.HEALTHY else logging.WARNING
            log.log(level, "%s is %s: %s", move.node_id, move.to, move.why or "it is well again")
        interval_s = max(self._section.probe_interval_s, len(nodes) / MOST_PROBES_A_S)
        for info in nodes:
            usual = self._usual.get(info.node_id)
            if usual is not None and now >= usual.probe_at and info.node_id not in self._probes:
                usual.probe_at = now + interval_s
                task = asyncio.create_task(self._probe(info), name=f"probe of {info.node_id}")
                self._probes[info.node_id] = task
                task.add_done_callback(lambda _, name=info.node_id: self._probes.pop(name, None))  # type: ignore[misc]

    async def _probe(self, info: NodeInfo) -> None:
        begin, is_out = self._clock(), self.watch.state(info.node_id) is Health.ISOLATED
        try:
            if is_out and info.role is Role.PREFILL:
                ok = await self._computes_in_time(info)
            else:
                ok = await self._is_serving(info)
        except grpc.RpcError as error:
            log.debug("probe of %s: %s", info.node_id, error)
            ok = False
        if ok or begin > self._excused_at:
            self.watch.probed(info.node_id, ok)

    async def _is_serving(self, info: NodeInfo) -> bool:
        channel = self._channels.get(info.control_address)
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # the package has no types
        response = await check(health_pb2.HealthCheckRequest(), timeout=self._section.probe_timeout_s)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _computes_in_time(self, info: NodeInfo) -> bool:
        """A prompt that no cache has, computed as fast as the node used to."""
        cost = self._usual[info.node_id].prefill
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
        async for _ in stub.Run(request, timeout=self._section.probe_timeout_s):
            pass
        took_ms = (self._clock() - begin) * 1e3
        allowed = self._section.slow_ratio * cost.ms(PROBE_TOKENS, 0) + PROBE_MARGIN_MS
        return not cost.is_known or took_ms <= allowed
