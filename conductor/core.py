"""The conductor without its interfaces: registry, index, costs, fleet and dispatcher, and how they are wired together.

The one place that says what follows when a node joins, reports, is replaced or times out. It opens no port and knows no
text: ``service`` receives the nodes' messages, ingress the requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from conductor.control.adapter_loader import AdapterLoader
from conductor.control.adapters import AdapterCatalogue
from conductor.control.health_monitor import HealthMonitor
from conductor.control.replica_manager import ReplicaManager
from conductor.control.role_requests import RoleRequests
from conductor.control.role_switcher import RoleSwitcher
from conductor.dispatch.dispatcher import Dispatcher
from conductor.model_facts import ModelFacts
from conductor.placement.cost import CostModel
from conductor.placement.fleet import Fleet
from conductor.prefixes.index import PrefixIndex
from conductor.prefixes.subscriber import Subscriber
from conductor.registry import Fault, NodeInfo, NodeLoad, NodeState, Registry
from conductor.wire import describe, info_from_bytes
from mooncake.adapter_loads import AdapterLoad
from mooncake.config import Config
from mooncake.directory import Directory, KnownNode
from mooncake.errors import MooncakeError, NodeIdTaken
from mooncake.rpc.server import Channels
from mooncake.types import Role
from mooncake.vital import vital

log = logging.getLogger(__name__)

TICK_S = 0.1  # how late, at most, it is noticed that a node is silent


class Core:
    """Build it on a running event loop, then ``start`` and ``stop``. ``clock`` gives monotonic seconds."""

    def __init__(
        self, config: Config, model: ModelFacts, directory: Directory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        section = config.conductor
        self.clock = clock
        self.incarnation = secrets.randbits(64) | 1
        self.heartbeat_interval_s = section.heartbeat_interval_s
        self._is_coupled = config.cluster.coupled > 0
        self.channels = Channels()
        self.registry = Registry(
            model.kv_fingerprint,
            model.shape.block_tokens,
            section.heartbeat_interval_s,
            section.node_timeout_s,
            model.max_model_len,
            model.settings,
            model.page_bytes,
        )
        self.index = PrefixIndex()
        self.costs = CostModel()
        self.fleet = Fleet(self.registry, self.costs, self.index, model.shape.chunk_tokens, section.ssd_mb_per_s)
        self.directory = directory
        self.subscriber = Subscriber(self.index, self.channels, directory)
        self.adapters = AdapterCatalogue(model.names, section.max_loaded_adapters)
        self.dispatcher = Dispatcher(
            config, model, self.fleet, self.channels, self.incarnation, self._lacking, self._has_fault, clock
        )
        self.health = HealthMonitor(
            config.health, self.registry, self.costs, self.channels, self.dispatcher.has_no_work_on, clock
        )
        self._watches_health = config.health.watch
        self.adapter_loader = AdapterLoader(
            self.adapters,
            self.registry,
            self.waiting_for,
            self.dispatcher.node_wait.change,
            section.request_timeout_s,
            clock,
        )
        self.role_requests = RoleRequests(self.registry)
        self._role_switcher: RoleSwitcher | None = None
        if section.balance:
            self._role_switcher = RoleSwitcher(section, self.fleet, model.shape.block_tokens, self.role_requests)
            self.dispatcher.placer.on_arrival.append(self._role_switcher.arrived)
        self.replica_manager: ReplicaManager | None = None
        if section.replicate:
            self.replica_manager = ReplicaManager(section, self.fleet, self.registry, self.channels)
            self.dispatcher.placer.on_arrival.append(self.replica_manager.arrived)
        self._ticker: asyncio.Task[None] | None = None
        self._closing_channels: set[asyncio.Task[None]] = set()
        self._seen_version = 0  # of the registry
        self._unheard: set[int] = set()  # incarnations of nodes that only the directory has told of

    async def start(self) -> None:
        """Start with what the directory knows from an earlier run or from another conductor."""
        for known in await self.directory.load():
            self._restore(known)
        self.directory.start(self.index.blocks_of)
        self._ticker = vital(self._tick_for_ever(), "registry tick")

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self.health.close()
        await self.dispatcher.close()
        if self.replica_manager is not None:
            await self.replica_manager.close()
        await self.subscriber.close()
        await self.directory.close()
        await asyncio.gather(*self._closing_channels, return_exceptions=True)
        await self.channels.close()

    def register(self, info: NodeInfo, adapters: Sequence[AdapterLoad] = ()) -> None:
        """``adapters``: what it has loaded while it served. Raises ConfigError or StaleEpoch, as
        ``Registry.register``, and NodeIdTaken, as ``check``."""
        self.check(info)
        known = self.registry.get(info.node_id)
        is_new = known is None or known.info.incarnation != info.incarnation
        replaced = self.registry.register(info, self.clock())
        self.adapters.adopt(adapters)
        self.registry.set_adapters(info.node_id, info.incarnation, adapters)
        self._unheard.discard(info.incarnation)
        self.role_requests.registered(info)
        if replaced is not None:
            self._remove(replaced, "was started anew" if replaced.role is info.role else f"becomes a {info.role} node")
        if self._role_switcher is not None:
            self._role_switcher.registered(info, self.clock())
        if is_new:
            self.directory.joined(info.node_id, describe(info))
            self.subscriber.follow(info)
            self.health.joined(info)
            log.info("%s node %s joins at %s", info.role, info.node_id, info.control_address)

    def check(self, info: NodeInfo) -> None:
        """Raises ConfigError when something differs that nodes must have in common, and NodeIdTaken while another
        process has the id: they would replace each other in turns. A process that has ended leaves its connection, so
        its successor need not wait until its heartbeats are late."""
        self.registry.check_same_cluster(info)
        rival = self.registry.rival(info)
        if rival is not None and self.subscriber.is_connected(rival):
            raise NodeIdTaken(
                f"the id {info.node_id!r} is taken: the {rival.role} node at {rival.control_address} has it and is "
                "alive; give every process its own node.id"
            )

    def heartbeat(
        self, node_id: str, incarnation: int, load: NodeLoad, draining: bool, adapters: Sequence[AdapterLoad] = ()
    ) -> bool:
        """Returns whether the node is known. Raises StaleEpoch when it was replaced."""
        known = self.registry.heartbeat(node_id, incarnation, load, draining, self.clock())
        if known:
            self._unheard.discard(incarnation)
            self.fleet.heartbeat(node_id, load)
            self.registry.set_adapters(node_id, incarnation, adapters)
        return known

    def _restore(self, known: KnownNode) -> None:
        """Register a node from the directory, as a suspect until its first heartbeat."""
        try:
            info = info_from_bytes(known.description)
            self.registry.register(info, self.clock())
        except MooncakeError as error:
            log.warning("the directory's entry of node %s cannot be used: %s", known.node_id, error)
            return
        self.registry.call_failed(info, self.clock())
        self._unheard.add(info.incarnation)
        self.directory.joined(info.node_id, known.description, known.table)
        self.subscriber.follow(info, known.table)
        self.health.joined(info)
        log.info("%s node %s is known with %d blocks", info.role, info.node_id, len(known.table))

    def waiting_for(self) -> list[Role]:
        """Roles that serving needs and that have no live node."""
        needed = (Role.PREFILL,) if self._is_coupled else (Role.PREFILL, Role.DECODE)
        return [role for role in needed if not self.registry.has(role, NodeState.LIVE)]

    def tick(self) -> None:
        now = self.clock()
        for node in self.registry.tick(now):
            if node.state is NodeState.LEFT:
                self._remove(node.info, "has left", logging.INFO)
            else:
                self._remove(node.info, "has stopped heartbeating")
            if self._role_switcher is not None:
                self._role_switcher.gone(node.info.node_id, now)
        if self.registry.version != self._seen_version:
            self._seen_version = self.registry.version
            without_live = self.waiting_for()
            missing = [role for role in without_live if not self.registry.has(role, NodeState.DRAINING)]
            self.dispatcher.node_wait.nodes_changed(bool(missing), is_role_draining=bool(without_live))
        self.adapter_loader.finish()
        self.adapters.drop_unused(self.dispatcher.uses_adapter)
        if self._watches_health:
            self.health.tick(now)
        if self._role_switcher is not None:
            self._role_switcher.tick(now)
        if self.replica_manager is not None:
            self.replica_manager.tick(now)

    def _lacking(self, adapter: str) -> frozenset[int]:
        """Incarnations of nodes that cannot compute with the adapter of this digest (yet)."""
        return self.registry.lacking(adapter) if self.adapters.may_be_used(adapter) else frozenset()

    def _has_fault(self, nodes: Iterable[NodeInfo], fault: Fault) -> None:
        self.health.has_fault(nodes, fault)

    def _remove(self, info: NodeInfo, why: str, level: int = logging.WARNING) -> None:
        log.log(level, "%s node %s %s", info.role, info.node_id, why)
        self.role_requests.withdraw(info.node_id)  # a later process would switch unexpectedly
        self.subscriber.forget(info.node_id)
        if info.incarnation in self._unheard:  # another conductor may hear it
            self._unheard.discard(info.incarnation)
            self.directory.forget(info.node_id)
        else:
            self.directory.left(info.node_id)
        self.costs.forget(info.node_id)
        self.health.forget(info.node_id)
        if self.replica_manager is not None:
            self.replica_manager.gone(info.node_id)
        self.dispatcher.node_gone(info, why)
        self.fleet.forget(info.node_id)
        if not any(node.info.control_address == info.control_address for node in self.registry.nodes()):
            task = asyncio.create_task(self.channels.drop(info.control_address))
            self._closing_channels.add(task)
            task.add_done_callback(self._closing_channels.discard)

    async def _tick_for_ever(self) -> None:
        while True:
            before = self.clock()
            await asyncio.sleep(TICK_S)
            pause_s = self.clock() - before - TICK_S
            try:
                if pause_s > TICK_S:  # this process was stopped or starved, or is so busy that it hears late
                    self.registry.discount_pause(pause_s)
                    self.health.discount_pause(pause_s)
                if pause_s > self.heartbeat_interval_s:
                    self.health.discard_open_probes()
                self.tick()
            except Exception:
                log.exception("the registry's tick failed")
