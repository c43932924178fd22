"""A node that can switch between prefill and decode: one engine, one paged cache, both services.

Its role is the one it is registered with. A switch drains it (the conductor places nothing new on it), and registers it
in the other role under a new incarnation. Weights and cached blocks stay in memory, and the prefix index finds the
blocks again. A late call for the old role is still served, because both services are always running.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator

from msgspec.structs import replace

from decode_node.role import DecodeRole, open_segment
from mooncake.config import Config, EngineSection
from mooncake.engine.backends.backend import CacheSize
from mooncake.engine_node import EngineNode, NodeRole
from mooncake.errors import ConfigError, MooncakeError
from mooncake.model.pages import Mappable
from mooncake.rpc import cluster_pb2
from mooncake.types import Role
from mooncake.vital import vital
from prefill_node.role import PrefillRole

log = logging.getLogger(__name__)

DRAIN_S = 120.0  # after this time a drain is given up, and the node keeps its role


class ComputeNode(EngineNode):
    """``await start()``, then serve until ``await stop()``. Raises ConfigError or ModelError from ``start``."""

    def __init__(self, config: Config) -> None:
        if config.node.role not in (Role.PREFILL, Role.DECODE):
            raise ConfigError(f'node.role must be "prefill" or "decode", got {config.node.role!r}')
        super().__init__(config, Role(config.node.role), _section_for_both(config.prefill, config.decode))
        self.last_switch_ms = 0.0  # control work of the last switch, after the drain
        self._switching: asyncio.Task[None] | None = None
        self._is_stopping = False

    def _open_memory(self, size: CacheSize) -> Mappable:
        self._segment = open_segment(self.node_id, size)
        return self._segment

    def _make_roles(self) -> Iterator[NodeRole]:
        self._prefill = PrefillRole(self.host, self._transfer, self._channels, self._outboxes)
        yield self._prefill
        self._decode = DecodeRole(
            self.node_id, self.host, self._segment, self._transfer, self._channels, self._outboxes
        )
        yield self._decode

    async def stop(self) -> None:
        """Stop after the running requests have ended, or after ``node.drain_s``. Idempotent."""
        self._is_stopping = True
        if self._switching is not None:
            self._switching.cancel()
            await asyncio.gather(self._switching, return_exceptions=True)
        await super().stop()

    async def become(self, role: Role) -> bool:
        """Drain and register in ``role``. False when it was not empty within ``DRAIN_S``: it keeps its role."""
        if role is self.role:
            return True
        if not await self._membership.drain(self._is_idle, DRAIN_S):
            log.warning("%s was not empty within %.0f s and stays a %s node", self.node_id, DRAIN_S, self.role)
            self._membership.draining = False
            return False
        started = time.monotonic()
        self.role = role
        self._events.begin_anew(secrets.randbits(63) | 1)
        await self._membership.change(self._info())
        self.last_switch_ms = (time.monotonic() - started) * 1e3
        log.info("%s is a %s node now; the switch took %.1f ms", self.node_id, role, self.last_switch_ms)
        return True

    def _is_idle(self) -> bool:
        load = self.host.engine.load()
        return not load.running and not load.waiting and self._prefill.is_idle and self._decode.is_idle

    def _on_wanted_role(self, role: str) -> None:
        if not self._is_stopping and (self._switching is None or self._switching.done()):
            self._switching = vital(self._switch(Role(role)), f"become {role}")

    async def _switch(self, role: Role) -> None:
        try:
            await self.become(role)
        except MooncakeError as error:
            log.error("%s could not become a %s node: %s", self.node_id, role, error.message)

    def _info(self) -> cluster_pb2.NodeInfo:
        info = super()._info()
        info.can_switch = True
        return info

    def _report(self) -> cluster_pb2.HeartbeatRequest:
        report = super()._report()
        report.load.counters["last_switch_us"] = int(self.last_switch_ms * 1e3)
        return report


def _section_for_both(prefill: EngineSection, decode: EngineSection) -> EngineSection:
    """Settings of one engine for both roles: the larger cache, the chunks of prefill, the sequences of decode."""
    return replace(
        decode,
        kv_gb=max(prefill.kv_gb, decode.kv_gb),  # 0 if both are: as large as fits
        gpu_memory_utilization=min(prefill.gpu_memory_utilization, decode.gpu_memory_utilization),
        chunk_tokens=prefill.chunk_tokens,
        max_sequences=max(prefill.max_sequences, decode.max_sequences),
        threads=max(prefill.threads, decode.threads),
    )
