"""The same nodes as named Ray actors: Ray places them, starts them, and restarts them when they die.

Tokens and KV do not pass through Ray: nodes talk to each other as always, and an actor's methods only report and stop.
A running Ray cluster is joined; otherwise a private one is started and ended again (``ray_head``). Needs the extra
``ray``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec
from msgspec.structs import replace

from mooncake.addresses import join_address, split_address
from mooncake.app.cluster.local import children_of
from mooncake.app.cluster.preflight import (
    available_cores,
    check_choices,
    check_ports,
    hold_ports,
    resolve,
)
from mooncake.app.cluster.ray_head import (
    TOKEN_SETTINGS,
    PrivateRay,
    check_answers,
    found,
    is_loopback,
    take_back_sigterm,
)
from mooncake.app.cluster.ray_node import RayNode
from mooncake.app.cluster.readiness import Readiness
from mooncake.app.extras import require
from mooncake.config import Config
from mooncake.errors import Cancelled, ConfigError, NodeUnavailable
from mooncake.tls import check_tls, tls_of
from mooncake.types import Role

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)

NAMESPACE = "mooncake"
ACTOR_CPUS = {"conductor": 0.25, "store": 0.25, "prefill": 1.0, "decode": 1.0}
START_S = 120.0  # limit on Ray finding room for the actors
READY_S = 600.0  # limit on the start of a node: large weights take minutes
STOP_S = 15.0
LEAVE_S = 2 * STOP_S + 10.0  # for all steps of leaving a Ray: one that ends meanwhile does not answer the next
LOOK_S = 2.0  # between two checks of the nodes
ANSWER_S = 5.0
LISTEN_S = 1  # timeout of one step of a start, which delays a cancellation; Ray takes whole seconds


class RayCluster:
    """``async with RayCluster(config) as cluster``: ready inside, stopped after; a joined Ray cluster keeps running.

    ``ray_address`` "" means RAY_ADDRESS of the environment, or a private Ray if that is empty too. If the conductor
    listens on loopback all actors are placed on one machine; otherwise Ray may spread them. Entering raises
    MissingDependency, ConfigError, or NodeUnavailable when Ray cannot place or start an actor in time.
    """

    def __init__(
        self,
        config: Config,
        *,
        ray_address: str = "",
        gcs_port: int = 0,
        log_level: str = "WARNING",
        tell: Callable[[str], None] = log.info,
    ) -> None:
        self.config = resolve(config)
        self.actors: dict[str, ActorHandle[RayNode]] = {}
        self._ray_address = ray_address or os.environ.get("RAY_ADDRESS", "")
        self._private = PrivateRay(gcs_port) if not self._ray_address else None
        self._log_level = log_level
        self._tell = tell
        self._group: PlacementGroup | None = None
        self._grpc_address = ""
        self._ports: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop
        self._starting: asyncio.Future[None] | None = None
        self._give_up = threading.Event()
        self._is_joined = False
        self._is_up = False

    @property
    def grpc_address(self) -> str:
        return self._grpc_address

    @property
    def http_url(self) -> str:
        section = self.config.conductor
        return f"{section.http_scheme}://{join_address(split_address(self._grpc_address)[0], section.http_port)}"

    async def __aenter__(self) -> RayCluster:
        require("ray", "ray", "--ray")
        try:
            self._loop = asyncio.get_running_loop()
            self._starting = self._loop.run_in_executor(None, self._start)
            await asyncio.shield(self._starting)
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Return once the conductor knows every node, including restarted ones."""
        nodes = [node_id for node_id in self.actors if node_id != "conductor"]
        api_key, tls = self.config.conductor.api_key, tls_of(self.config)
        await Readiness(self._grpc_address, nodes, self._tell, api_key=api_key, tls=tls).wait(timeout_s)

    async def pids(self) -> dict[str, int]:
        """Process ids by node id, from the actors."""
        return {node_id: int(await actor.pid.remote()) for node_id, actor in self.actors.items()}

    async def watch(self) -> NoReturn:
        """Report nodes that are gone or back, until cancelled. Raises NodeUnavailable when Ray itself is gone."""
        pids, away = await self.pids(), set[str]()
        while True:
            await asyncio.sleep(LOOK_S)
            found = dict(zip(self.actors, await asyncio.gather(*map(_pid_of, self.actors.values())), strict=True))
            for node_id, pid in found.items():
                if not pid and node_id not in away:
                    away.add(node_id)
                    self._tell(f"{node_id} does not answer; Ray restarts it once it is dead")
                elif pid and (pid != pids[node_id] or node_id in away):
                    away.discard(node_id)
                    pids[node_id] = pid
                    self._tell(f"{node_id} is back, as process {pid}")
            if len(away) == len(self.actors):
                await asyncio.to_thread(check_answers, self._ray_address)

    async def stop(self) -> None:
        """Cancel a start in progress, stop the nodes, then a private Ray. Idempotent."""
        self._give_up.set()
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.to_thread(self._stop)

    def kill(self) -> None:
        """Kill everything now, after a second Ctrl-C."""
        if self._private is not None:
            self._private.kill()

    def _start(self) -> None:
        check_choices(self.config)
        if self.config.cluster.pin:
            raise ConfigError("cluster.pin is for nodes on this machine; with Ray, Ray places the nodes")
        if is_loopback(self.config.conductor.host):
            check_ports(self.config)
            self._ports = hold_ports(self.config)
            check_tls(self.config.conductor)
        children = children_of(self.config)
        needs = [needs_of(self.config, child.role) for child in children]
        if self._private is not None:
            self._tell("starting a private Ray")
            self._ray_address = self._private.start(
                num_cpus=max(available_cores(), int(sum(need["CPU"] for need in needs)) + 1), go_on=self._go_on
            )
        else:
            self._ray_address = found(self._ray_address)
            check_answers(self._ray_address)
        self._connect()
        self._place(needs)
        for index, child in enumerate(children):
            self._tell(f"starting {child.node_id}")
            self._start_actor(index, child.node_id, child.role)
        for node_id in self.actors:
            self._check_started(node_id)
        self._is_up = True

    def _go_on(self) -> None:
        """Called between two steps of a start. Raises Cancelled if it was cancelled."""
        if self._give_up.is_set():
            raise Cancelled("stopped while Ray was starting")

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._go_on()
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns when it is not started on the main thread
        try:
            ray.init(
                address=self._ray_address,
                namespace=NAMESPACE,
                log_to_driver=self._log_level in ("DEBUG", "INFO"),
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise NodeUnavailable(
                f"cannot join the Ray at {self._ray_address}: {reason}; a Ray that wants a token has to be given it "
                f"({TOKEN_SETTINGS})"
            ) from None
        self._is_joined = True
        self._loop.call_soon_threadsafe(take_back_sigterm)

    def _place(self, needs: list[dict[str, float]]) -> None:
        import ray

        strategy = "STRICT_PACK" if is_loopback(self.config.conductor.host) else "PACK"
        self._group = ray.util.placement_group(needs, strategy=strategy)
        deadline = time.monotonic() + START_S
        while not self._group.wait(LISTEN_S):
            self._go_on()
            if time.monotonic() > deadline:
                cpus, gpus = (sum(need.get(kind, 0.0) for need in needs) for kind in ("CPU", "GPU"))
                raise NodeUnavailable(
                    f"Ray has no room for {len(needs)} actors with {cpus:g} CPUs and {gpus:g} GPUs in all; start fewer "
                    "nodes, or give Ray more of them"
                )

    def _start_actor(self, bundle: int, node_id: str, role: str) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._group is not None
        conductor = self._grpc_address if role != "conductor" else ""
        node = replace(self.config.node, id=node_id, conductor=conductor)
        if role in (Role.PREFILL, Role.DECODE):
            node = replace(node, role=role)
        config = replace(self.config, node=node)
        self.actors[node_id] = cast(
            "ActorHandle[RayNode]",
            ray.remote(RayNode)
            .options(
                name=node_id,
                num_cpus=ACTOR_CPUS[role],
                num_gpus=needs_of(self.config, role).get("GPU", 0.0),
                max_restarts=-1,
                max_concurrency=4,  # other methods must work while a call hangs
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
            )
            .remote(role, msgspec.json.encode(config), self._log_level),
        )
        if role == "conductor":
            self._check_started(node_id)
            self._grpc_address = self._ask(node_id, "address")

    def _check_started(self, node_id: str) -> None:
        if failure := self._ask(node_id, "failure"):
            raise NodeUnavailable(f"{node_id} did not start: {failure}")

    def _ask(self, node_id: str, method: str) -> str:
        import ray

        answer = getattr(self.actors[node_id], method).remote()
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and not ray.wait([answer], timeout=LISTEN_S)[0]:
            self._go_on()
        try:
            return str(ray.get(answer, timeout=0))
        except ray.exceptions.RayError as error:
            raise NodeUnavailable(f"{node_id} did not start: {str(error).strip().splitlines()[-1]}") from None

    def _stop(self) -> None:
        if self._is_joined:
            try:
                check_answers(self._ray_address)
            except NodeUnavailable:  # calls to it would wait for minutes, and Ray then end this process
                pass
            else:
                wait_at_most(LEAVE_S, self._leave)
            self._forget()
        for port in self._ports:
            port.close()
        if self._private is not None:
            self._private.stop()

    def _leave(self) -> None:
        import ray

        if self._is_up:
            conductor, *nodes = self.actors.values()  # the conductor stops first, so that requests can finish
            for actors in ([conductor], nodes):
                with contextlib.suppress(ray.exceptions.RayError):
                    stops: list[object] = [actor.stop.remote() for actor in actors]
                    ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def _forget(self) -> None:
        self.actors.clear()
        self._group = None
        self._is_up = self._is_joined = False


def wait_at_most(limit_s: float, work: Callable[[], object]) -> None:
    """Do the work on a thread of its own, which after ``limit_s`` is left alone and holds up no end of the process."""
    thread = threading.Thread(target=work, name="leave Ray", daemon=True)
    thread.start()
    thread.join(limit_s)


async def _pid_of(actor: ActorHandle[RayNode]) -> int:
    """The actor's process id; 0 if it does not answer."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            return int(await actor.pid.remote())
    return 0


def needs_of(config: Config, role: str) -> dict[str, float]:
    """The resources that Ray reserves for an actor of this role. The actor sees only its own GPUs, from 0 on."""
    section = {"prefill": config.prefill, "decode": config.decode}.get(role)
    cpus = {"CPU": ACTOR_CPUS[role]}
    return cpus if section is None or section.device == "cpu" else cpus | {"GPU": float(section.tensor_parallel)}
