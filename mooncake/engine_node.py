"""What a node with an engine does besides its roles: open the model, run one engine, serve, join the cluster, leave it.

It does not know which roles there are: a node supplies its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from typing import Protocol

from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.report import add_transports
from mooncake.adapter_keeper import AdapterKeeper
from mooncake.adapter_loads import load_from_wire, load_to_wire
from mooncake.addresses import join_address
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, EngineSection, transfer_secret
from mooncake.engine.backends.backend import CacheSize
from mooncake.engine.contract import StepHook
from mooncake.engine.hosting.host import EngineHost, HostPlan
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepPlan
from mooncake.errors import MooncakeError
from mooncake.events import CacheEventsServicer, EventLog
from mooncake.membership import Membership, check_settings, first_end
from mooncake.model.pages import Mappable
from mooncake.outbox import Outboxes
from mooncake.rpc import cluster_pb2, common_pb2_grpc, outputs_pb2_grpc
from mooncake.rpc.server import Channels, RpcServer
from mooncake.types import Role


class NodeRole(Protocol):
    """What a process does for the cluster with an open engine: served, drained, and stopped last."""

    @property
    def hook(self) -> StepHook:
        """What it does around the engine's steps."""
        ...

    def rest_after_s(self, step_s: float) -> float:
        """How long the engine leaves its cores to others after a step of ``step_s``. See ``RestAfter``."""
        ...

    def serve(self, server: RpcServer) -> None: ...

    def describe(self, info: cluster_pb2.NodeInfo) -> None:
        """Add what the cluster must know of this role, which is served."""
        ...

    @property
    def is_answering(self) -> bool:
        """Whether a client waits for its work."""
        ...

    def report(self, load: cluster_pb2.Load) -> None:
        """Add this role's counters."""
        ...

    async def drain(self) -> None:
        """Return once nothing of finished requests is held; the engine is still running."""
        ...

    def stop(self) -> None:
        """Called when the engine has stopped, whether or not the role was served."""
        ...


class EngineNode:
    """``await start()``, then serve until ``await stop()``. ``start`` raises ConfigError or ModelError.

    A subclass supplies its roles and, if others write into its cache, the memory.
    """

    def __init__(self, config: Config, role: Role, section: EngineSection) -> None:
        self.config = config
        self.role = role
        self.node_id = config.node.id or f"{role}-{os.getpid()}"
        self.control_address = ""
        self.host: EngineHost
        self._section = section
        self._events = EventLog(secrets.randbits(63) | 1)
        self._outboxes = Outboxes()
        self._plan: HostPlan
        self._roles: list[NodeRole] = []
        self._transfer: TransferEngine
        self._channels: Channels
        self._membership: Membership
        self._adapters: AdapterKeeper
        self._cleanup = contextlib.AsyncExitStack()  # in the reverse order of starting

    def _open_memory(self, size: CacheSize) -> Mappable | None:
        """For the cache, or its mirror; None: the engine allocates it."""
        return None

    def _make_roles(self) -> Iterable[NodeRole]:
        """Over ``host``, which is open. Those made before an error are stopped."""
        raise NotImplementedError

    async def start(self) -> None:
        """Cleans up after itself when it fails half-way; ``stop`` may then be called or not."""
        try:
            config, section = self.config, self._section
            checkpoint = open_checkpoint(config.model.path, config.model.max_model_len)
            plan = self._plan = HostPlan(config, section, checkpoint)
            await check_settings(config, self._info())  # without what roles add: there are none yet
            self._open_transfer()
            self._cleanup.callback(self._stop_roles)  # after the engine
            self.host = await EngineHost.open(plan, self._events, self._open_memory(plan.cache_size))
            self._cleanup.push_async_callback(self.host.stop)
            self._roles.extend(self._make_roles())
            self.host.run(_together([role.hook for role in self._roles]), self._rest_after_s)
            await self._serve()
            await self._join()
        except BaseException:
            await self.stop()
            raise

    def _open_transfer(self) -> None:
        transfer = self.config.transfer
        self._channels = Channels()
        self._cleanup.push_async_callback(self._channels.close)
        self._transfer = TransferEngine(
            self.node_id, transfer.transports, transfer.streams, transfer.max_mb_per_s, transfer_secret(self.config)
        )
        self._cleanup.callback(self._transfer.close)
        self._transfer.check_usable()

    def _rest_after_s(self, step_s: float) -> float:
        return max(role.rest_after_s(step_s) for role in self._roles)

    def _stop_roles(self) -> None:
        for role in reversed(self._roles):
            role.stop()

    async def _serve(self) -> None:
        node, server = self.config.node, RpcServer()
        for role in self._roles:
            role.serve(server)
            self._cleanup.push_async_callback(role.drain)
        events = CacheEventsServicer(self._events)
        server.add(common_pb2_grpc.add_CacheEventsServicer_to_server, events, "mooncake.v1.CacheEvents")
        server.add(outputs_pb2_grpc.add_OutputsServicer_to_server, self._outboxes, "mooncake.v1.Outputs")
        port = await server.start(node.host, node.port)
        self._cleanup.push_async_callback(server.stop)
        self._cleanup.callback(self._events.end)
        self._cleanup.callback(self._outboxes.end)
        self.control_address = join_address(node.reached_at, port)

    async def _join(self) -> None:
        membership = self._membership = Membership(self.config, self._info(), self._report, self._on_answer)
        self._adapters = AdapterKeeper(self.host.adapters, membership.report_soon)
        self._cleanup.push_async_callback(self._adapters.stop)
        self._cleanup.push_async_callback(membership.stop)
        await membership.start()
        self._cleanup.push_async_callback(membership.drain, lambda: not self._is_answering, self.config.node.drain_s)

    async def wait_fatal(self) -> MooncakeError:
        """Return the error once another process has taken this node's place, or the engine is broken."""
        return await first_end(self._membership.wait_replaced(), self.host.wait_broken())

    async def stop(self) -> None:
        """Requests in progress finish first, within ``node.drain_s``. Idempotent."""
        await self._cleanup.aclose()

    @property
    def _is_answering(self) -> bool:
        return any(role.is_answering for role in self._roles)

    def _on_answer(self, answer: cluster_pb2.HeartbeatResponse) -> None:
        self._adapters.want(map(load_from_wire, answer.adapters))
        if answer.wanted_role:
            self._on_wanted_role(answer.wanted_role)

    def _on_wanted_role(self, role: str) -> None:
        """Called repeatedly while the conductor wants another role; most nodes cannot change."""

    def _info(self) -> cluster_pb2.NodeInfo:
        info = cluster_pb2.NodeInfo(
            node_id=self.node_id,
            role=self.role,
            incarnation=self._events.incarnation,
            control_address=self.control_address,
            kv_fingerprint=self._plan.fingerprint,
            block_tokens=self.config.block.tokens,
            max_sequences=self._section.max_sequences,
            device=self._section.device,
            max_model_len=self._plan.max_model_len,
            settings=self._plan.settings,
            kv_bytes=self._plan.cache_size.num_bytes,
            kv_why=self._plan.cache_size.why,
            chunk_tokens=self._section.chunk_tokens,
        )
        for role in self._roles:
            role.describe(info)
        return info

    def _report(self) -> cluster_pb2.HeartbeatRequest:
        report = cluster_pb2.HeartbeatRequest(load=self.host.load(), samples=self.host.samples.take())
        for role in self._roles:
            role.report(report.load)
        report.adapters.extend(map(load_to_wire, self._adapters.report()))
        add_transports(report, self._transfer)
        return report


def _together(hooks: list[StepHook]) -> StepHook:
    return hooks[0] if len(hooks) == 1 else _Hooks(hooks)


class _Hooks:
    """Those of several roles; each ignores the other's requests."""

    def __init__(self, hooks: Iterable[StepHook]) -> None:
        self._hooks = tuple(hooks)

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
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
