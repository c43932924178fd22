"""A node that prefills or decodes, and can change: ``python -m mooncake.app.compute_node --set node.role=prefill``.

One process with one engine, one paged cache and both services; the role is what it is registered as. A switch drains it
(the conductor places nothing new here), and registers it anew in the other role, under another incarnation. Weights and
cached blocks stay where they are, so the prefix index finds them again. A call for the old role that was already on its
way is still served, because both services always are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time

from msgspec.structs import replace

from decode_node.role import DecodeRole
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.report import add_transports
from mooncake.app.role_main import run_role
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, EngineSection, transfer_secret
from mooncake.engine.engine import StepHook, StepPlan
from mooncake.engine.host import EngineHost, plan_cache
from mooncake.engine.sequence import Sequence
from mooncake.errors import ConfigError, MooncakeError
from mooncake.events import CacheEventsServicer
from mooncake.membership import Membership, first_end
from mooncake.rpc import cluster_pb2, common_pb2_grpc
from mooncake.rpc.convert import segment_to_wire
from mooncake.rpc.server import Channels, RpcServer, join_address
from mooncake.types import BlockKey, Role
from prefill_node.role import PrefillRole

log = logging.getLogger(__name__)

DRAIN_S = 120.0  # a drain that takes longer is given up: the node keeps its role


class BothHooks:
    """Each role's hook knows its own requests and passes over the others'."""

    def __init__(self, first: StepHook, second: StepHook) -> None:
        self._hooks = (first, second)

    def admitted(self, sequence: Sequence, to_load: list[tuple[int, int, BlockKey]]) -> None:
        for hook in self._hooks:
            hook.admitted(sequence, to_load)

    @property
    def wants_layers(self) -> bool:
        return any(hook.wants_layers for hook in self._hooks)

    def begin_step(self, plan: StepPlan) -> None:
        for hook in self._hooks:
            hook.begin_step(plan)

    def before_layer(self, layer: int) -> None:
        for hook in self._hooks:
            hook.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        for hook in self._hooks:
            hook.after_layer(layer)

    def end_step(self, plan: StepPlan) -> None:
        for hook in self._hooks:
            hook.end_step(plan)


class ComputeNode:
    """``await start()``, then serve until ``await stop()``. Raises ConfigError or ModelError from ``start``."""

    def __init__(self, config: Config) -> None:
        if config.node.role not in (Role.PREFILL, Role.DECODE):
            raise ConfigError(f'node.role must be "prefill" or "decode", got {config.node.role!r}')
        self.config = config
        self.role = Role(config.node.role)
        self.node_id = config.node.id or f"compute-{os.getpid()}"
        self.control_address = ""
        self.last_switch_ms = 0.0  # of control work, once it was drained
        self._switching: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def start(self) -> None:
        config, transfer = self.config, self.config.transfer
        checkpoint = open_checkpoint(config.model.path, config.model.max_model_len)
        section = _section_for_both(config.prefill, config.decode)
        plan = plan_cache(config, section, checkpoint)
        self._transfer = TransferEngine(
            self.node_id, transfer.transports, transfer.streams, transfer.max_mb_per_s, transfer_secret(config)
        )
        self._channels = Channels()
        self._prefill = PrefillRole(self.node_id, config, self._transfer, self._channels)
        self._decode = DecodeRole(self.node_id, config, plan, self._transfer, self._channels)
        self.host = EngineHost(config, section, checkpoint, plan)
        await self.host.start(BothHooks(self._prefill.hook, self._decode.hook), self._decode.buffer)
        self._server = RpcServer()
        self._prefill.serve(self.host, self._server)
        self._decode.serve(self.host, self._server)
        self._server.add(
            common_pb2_grpc.add_CacheEventsServicer_to_server,
            CacheEventsServicer(self.host.events),
            "mooncake.v1.CacheEvents",
        )
        port = await self._server.start(config.node.host, config.node.port)
        self.control_address = join_address(config.node.reached_at, port)
        self._membership = Membership(config, self._info(), self._report, self._on_wanted_role)
        await self._membership.start()

    async def wait_fatal(self) -> MooncakeError:
        """Return the error once another process has taken this node's place, or the engine is broken."""
        return await first_end(self._membership.wait_replaced(), self.host.wait_broken())

    async def stop(self) -> None:
        """What it was given ends first, within ``node.drain_s``."""
        self._is_stopping = True
        if self._switching is not None:
            self._switching.cancel()
            await asyncio.gather(self._switching, return_exceptions=True)
        await self._membership.drain(lambda: not self._is_answering, self.config.node.drain_s)
        await self._membership.stop()
        self.host.events.end()
        await self._server.stop()
        await self._prefill.drain()
        await self._decode.drain()
        await self._decode.finish_writing()
        await self.host.stop()
        self._prefill.stop()
        self._decode.stop()
        self._transfer.close()
        await self._channels.close()

    async def become(self, role: Role) -> bool:
        """Drain and register in ``role``; False when it did not get empty within ``DRAIN_S`` and stays what it was."""
        if role is self.role:
            return True
        if not await self._membership.drain(self._is_idle, DRAIN_S):
            log.warning("%s did not get empty within %.0f s and stays %s", self.node_id, DRAIN_S, self.role)
            self._membership.draining = False
            return False
        started = time.monotonic()
        self.role = role
        self.host.incarnation = secrets.randbits(63) | 1
        self.host.events.begin_anew(self.host.incarnation)
        await self._membership.change(self._info())
        self.last_switch_ms = (time.monotonic() - started) * 1e3
        log.info("%s is a %s node now; the switch took %.1f ms", self.node_id, role, self.last_switch_ms)
        return True

    @property
    def _is_answering(self) -> bool:
        return self._prefill.is_answering or self._decode.is_answering

    def _is_idle(self) -> bool:
        load = self.host.engine.load()
        return not load.running and not load.waiting and self._prefill.is_idle and self._decode.is_idle

    def _on_wanted_role(self, role: str) -> None:
        if not self._is_stopping and (self._switching is None or self._switching.done()):
            self._switching = asyncio.create_task(self._switch(Role(role)), name=f"become {role}")

    async def _switch(self, role: Role) -> None:
        try:
            await self.become(role)
        except MooncakeError as error:
            log.error("%s could not become a %s node: %s", self.node_id, role, error.message)

    def _info(self) -> cluster_pb2.NodeInfo:
        return cluster_pb2.NodeInfo(
            node_id=self.node_id,
            role=self.role,
            incarnation=self.host.incarnation,
            control_address=self.control_address,
            segment=segment_to_wire(self._decode.address),
            kv_fingerprint=self.host.fingerprint,
            block_tokens=self.config.block.tokens,
            max_sequences=self.config.decode.max_sequences,
            can_switch=True,
            device=self.host.device,
        )

    def _report(self) -> cluster_pb2.HeartbeatRequest:
        report = cluster_pb2.HeartbeatRequest(load=self.host.load(), samples=self.host.samples.take())
        self._decode.report(report.load)
        report.load.counters["last_switch_us"] = int(self.last_switch_ms * 1e3)
        add_transports(report, self._transfer)
        return report


def _section_for_both(prefill: EngineSection, decode: EngineSection) -> EngineSection:
    """One engine for either role: the larger cache, the chunks of prefill, the sequences of decode."""
    return replace(
        decode,
        kv_gb=max(prefill.kv_gb, decode.kv_gb),
        chunk_tokens=prefill.chunk_tokens,
        max_sequences=max(prefill.max_sequences, decode.max_sequences),
        threads=max(prefill.threads, decode.threads),
    )


if __name__ == "__main__":
    run_role("compute", ComputeNode)
