"""Carries out what ``Replicator`` decides: tells stores to fetch hot prefixes, and to drop them when demand is over.

I/O only, in the background; a failed copy may be tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import cast

import grpc

from conductor.control.replication import TICK_S, CopyPrefix, DropReplica, ReplicationLimits, Replicator
from conductor.placement.fleet import Fleet
from conductor.placement.scheduler import Placement
from conductor.placement.view import PlacementQuery
from conductor.registry import Registry
from mooncake.config import ConductorSection
from mooncake.rpc import replica_pb2
from mooncake.rpc.replica_pb2_grpc import ReplicaStub
from mooncake.rpc.server import Channels

log = logging.getLogger(__name__)

DROP_TIMEOUT_S = 5.0


class ReplicaManager:
    """One owner, one event loop."""

    def __init__(self, section: ConductorSection, fleet: Fleet, registry: Registry, channels: Channels) -> None:
        limits = ReplicationLimits(ttl_s=section.replica_ttl_s)
        self.replicator = Replicator(limits)
        self.copied = 0  # prefixes
        self._timeout_s = limits.copy_timeout_s
        self._fleet = fleet
        self._registry = registry
        self._channels = channels
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_tick_at = 0.0

    def arrived(self, query: PlacementQuery, placement: Placement, now: float) -> None:
        self.replicator.observe(query, placement.breakdown.prefill_ms, now)

    def gone(self, node_id: str) -> None:
        self.replicator.node_gone(node_id)

    def tick(self, now: float) -> None:
        if now < self._next_tick_at:
            return
        self._next_tick_at = now + TICK_S
        if not self.replicator.has_hot_prefixes:
            return
        for action in self.replicator.tick(self._fleet.view(now), self._fleet.index, now):
            self._begin(self._copy(action) if isinstance(action, CopyPrefix) else self._drop(action))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _copy(self, copy: CopyPrefix) -> None:
        source, target = self._registry.get(copy.source), self._registry.get(copy.target)
        held = 0
        if source is not None and target is not None:
            request = replica_pb2.FetchRequest(source=source.info.control_address, keys=copy.keys)
            stub = ReplicaStub(self._channels.get(target.info.control_address))
            try:
                answer = await stub.Fetch(request, timeout=self._timeout_s)
                # None: gRPC's word for bytes that are no message
                held = 0 if cast(object, answer) is None else answer.held
            except grpc.RpcError as error:
                log.info("a hot prefix was not copied to %s: %s", copy.target, error)
        ok = held == len(copy.keys)
        self.replicator.copied(copy, ok)
        self.copied += ok
        if ok:
            log.info("a hot prefix of %d blocks is on %s too", held, copy.target)

    async def _drop(self, drop: DropReplica) -> None:
        node = self._registry.get(drop.node_id)
        if node is None:
            return
        stub = ReplicaStub(self._channels.get(node.info.control_address))
        try:
            await stub.GiveUp(replica_pb2.GiveUpRequest(keys=drop.keys), timeout=DROP_TIMEOUT_S)
        except grpc.RpcError as error:
            log.info("a copy on %s is left to its eviction: %s", drop.node_id, error)
