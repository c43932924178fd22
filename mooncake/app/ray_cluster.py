"""The same nodes as named Ray actors: Ray places them, starts them, and restarts them when they die.

Tokens and KV do not pass through Ray: nodes talk to each other as always, and an actor's methods only report and stop.
A running Ray cluster is joined; otherwise a private one is started (core Ray, no dashboard, token authentication,
loopback, its own port and folder) and ended again. Needs the extra ``ray``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import grpc
import msgspec
from grpc_health.v1 import health_pb2
from msgspec.structs import replace

from mooncake.app.extras import require
from mooncake.app.local import children_of
from mooncake.app.preflight import (
    available_cores,
    check_choices,
    check_ports,
    free_port,
    hold_ports,
    port_holder,
    resolve,
)
from mooncake.app.readiness import Readiness
from mooncake.app.role_main import PARENT_ENV, Node, raise_file_limit, set_up_logging
from mooncake.config import Config
from mooncake.errors import Cancelled, ConfigError, MooncakeError, NodeUnavailable
from mooncake.rpc.server import check_address, join_address, split_address
from mooncake.tls import check_tls, tls_of
from mooncake.types import Role

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE = "mooncake"
LOOPBACK = "127.0.0.1"
ACTOR_CPUS = {"conductor": 0.25, "store": 0.25, "prefill": 1.0, "decode": 1.0}
OBJECT_STORE_BYTES = 80_000_000  # the minimum that Ray accepts; we do not use it
START_S = 120.0  # limit on the start of Ray
JOIN_S = 5.0  # limit on the first answer of a Ray that is to be joined; Ray itself tries for minutes
READY_S = 600.0  # limit on the start of a node: large weights take minutes
STOP_S = 15.0
RETRY_S = 2.0  # between two attempts to restart a node
LOOK_S = 2.0  # between two checks of the nodes
ANSWER_S = 5.0
LISTEN_S = 1  # timeout of one step of a start, which delays a cancellation; Ray takes whole seconds
_LOOPBACK_ENV = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray keeps 127.0.0.1 as it is, on any system
PRIVATE_ENV = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", _LOOPBACK_ENV)  # how a private Ray is reached
_TOKEN_SETTINGS = "RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH"

NODE_BUILDERS = {
    "conductor": ("conductor.__main__", "build"),
    "store": ("kvstore.__main__", "build"),
    "prefill": ("prefill_node.node", "PrefillNode"),
    "decode": ("decode_node.node", "DecodeNode"),
}
SWITCHABLE = ("mooncake.app.compute_node", "ComputeNode")

# Replace this process by Ray, which then ends when its parent ends, in whatever way.
_LEASH = "import os, sys; from mooncake.app.role_main import die_with_parent; die_with_parent(); "
_LEASH += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class RayNode:
    """The body of an actor: one node on its own event loop. Ray runs ``__init__`` again after a crash; the node then
    registers under its old name and a new incarnation."""

    def __init__(self, role: str, config_json: bytes, log_level: str) -> None:
        config = msgspec.json.decode(config_json, type=Config)
        if not is_loopback(config.conductor.host):
            import ray

            host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
            config = replace(config, node=replace(config.node, host=host, advertise=""))
        set_up_logging(config.node.id, log_level)
        raise_file_limit()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="node", daemon=True).start()
        self._failure = ""
        try:
            self._node: Node = self._run(_started(role, config))
        except MooncakeError as error:
            if was_alive():  # a taken port or too little memory may pass: Ray tries again once this process has ended
                log.error("%s cannot start again: %s", config.node.id, error.message)
                time.sleep(RETRY_S)
                os._exit(1)
            self._failure = error.message  # returned by `failure`: Ray would bury it in a traceback
        else:
            self._ending = asyncio.run_coroutine_threadsafe(_end_when_fatal(self._node), self._loop)

    def failure(self) -> str:
        """Why the node did not start; "" if it did."""
        return self._failure

    def address(self) -> str:
        return self._node.control_address

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        if not self._failure:
            self._run(self._node.stop())

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def was_alive() -> bool:
    """Whether Ray has restarted this actor."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


async def _started(role: str, config: Config) -> Node:
    can_switch = config.cluster.switchable and role in (Role.PREFILL, Role.DECODE)
    module, name = SWITCHABLE if can_switch else NODE_BUILDERS[role]
    node = cast(Node, getattr(importlib.import_module(module), name)(config))
    await node.start()
    return node


async def _end_when_fatal(node: Node) -> None:
    log.error("%s", await node.wait_fatal())
    os._exit(1)


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
                f"({_TOKEN_SETTINGS})"
            ) from None
        self._is_joined = True
        if self._ray_address == "auto":
            self._ray_address = str(ray.get_runtime_context().gcs_address)
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
                self._forget()
            else:
                self._leave()
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
        self._forget()

    def _forget(self) -> None:
        self.actors.clear()
        self._group = None
        self._is_up = self._is_joined = False


async def _pid_of(actor: ActorHandle[RayNode]) -> int:
    """The actor's process id; 0 if it does not answer."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            return int(await actor.pid.remote())
    return 0


class PrivateRay:
    """A private Ray head. It does not touch any other Ray on this machine."""

    def __init__(self, gcs_port: int = 0) -> None:
        """0 means any free port."""
        self._port = gcs_port
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, num_cpus: int, go_on: Callable[[], None] = lambda: None) -> str:
        """Start it and return its address. Raises ConfigError when the port is taken, NodeUnavailable when Ray does not
        start, and what ``go_on`` raises, which is called meanwhile."""
        go_on()
        self._port = self._port or free_port(LOOPBACK)
        if _answers(self._port):
            by = port_holder(self._port)
            raise ConfigError(
                f"port {self._port} is taken{f' by {by}' if by else ''}; if that is Ray, join it with "
                f"RAY_ADDRESS={LOOPBACK}:{self._port}"
            )
        self._folder = Path(tempfile.mkdtemp(prefix="mr-"))  # short: Ray puts Unix sockets deep inside
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        _set_ray_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), _LOOPBACK_ENV: "0"})
        with (self._folder / "log").open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _LEASH, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                    *("--port", str(self._port), "--node-ip-address", LOOPBACK, "--num-cpus", str(num_cpus)),
                    *("--include-dashboard", "false", "--temp-dir", str(self._folder), "--disable-usage-stats"),
                    *("--object-store-memory", str(OBJECT_STORE_BYTES)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {PARENT_ENV: str(os.getpid())},
            )
        self._wait(go_on)
        return f"{LOOPBACK}:{self._port}"

    def stop(self) -> None:
        """End it, by force if necessary, and remove its folder. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            _set_ray_environment({})

    def _wait(self, go_on: Callable[[], None]) -> None:
        assert self._process is not None
        assert self._folder is not None
        deadline = time.monotonic() + START_S
        log_file = self._folder / "log"
        while "Ray runtime started" not in log_file.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                words = log_file.read_text(errors="replace").strip().splitlines()
                raise NodeUnavailable(f"Ray did not start: {words[-1] if words else 'no output'}")
            go_on()
            time.sleep(0.05)


def needs_of(config: Config, role: str) -> dict[str, float]:
    """The resources that Ray reserves for an actor of this role. The actor sees only its own GPUs, from 0 on."""
    section = {"prefill": config.prefill, "decode": config.decode}.get(role)
    cpus = {"CPU": ACTOR_CPUS[role]}
    return cpus if section is None or section.device == "cpu" else cpus | {"GPU": float(section.tensor_parallel)}


def check_answers(ray_address: str) -> None:
    """Raise NodeUnavailable unless a Ray's head answers within ``JOIN_S`` where ``ray.init`` will look for it, and
    accepts our token; and InvalidRequest when that is no address.

    "auto" names no address: Ray looks for one on this machine, and says at once when there is none.
    """
    if ray_address == "auto":
        return
    address = _as_ray_reads(ray_address.removeprefix("ray://"))
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            check(health_pb2.HealthCheckRequest(), timeout=JOIN_S)
        except grpc.RpcError:
            where = ray_address if address == ray_address else f"{ray_address}, which it reads as {address}"
            raise NodeUnavailable(f"no Ray answers at {where}") from None
        _check_token(channel, ray_address)


def _check_token(channel: grpc.Channel, ray_address: str) -> None:
    """Make the first call of ``ray.init``, which repeats it for 20 seconds when the token is refused. Whatever else is
    wrong, it will say itself. Raises NodeUnavailable."""
    from ray import _raylet as raylet
    from ray.exceptions import AuthenticationError

    try:
        token = raylet.AuthenticationTokenLoader.instance().get_token_for_http_header()  # type: ignore[attr-defined]
    except AuthenticationError as error:  # there is none, or not where the environment says
        raise NodeUnavailable(f"{str(error).partition('. ')[0]} ({_TOKEN_SETTINGS})") from None
    ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/ray.rpc.NodeInfoGcsService/GetClusterId"
    )  # an empty message is no bytes
    try:
        ask(b"", timeout=JOIN_S, metadata=tuple(token.items()))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            with_which = "refuses our token" if token else "wants a token"
            raise NodeUnavailable(f"the Ray at {ray_address} {with_which} ({_TOKEN_SETTINGS})") from None


def _set_ray_environment(variables: dict[str, str]) -> None:
    """Set these of ``PRIVATE_ENV`` for this process and those it starts, and unset the others. Ray reads them while it
    is imported, which somebody may have done before."""
    from ray import _raylet as raylet
    from ray._private import ray_constants

    for name in PRIVATE_ENV:
        os.environ.pop(name, None)
    os.environ.update(variables)
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(_LOOPBACK_ENV) != "0"
    raylet.Config.initialize("")  # type: ignore[attr-defined]  # from the environment, before the token is asked for
    raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def _as_ray_reads(address: str) -> str:
    """Ray takes this machine's address for a loopback one, unless told not to."""
    import ray

    host, port = split_address(check_address(address))
    if not is_loopback(host) or os.environ.get(_LOOPBACK_ENV) == "0":
        return address
    return join_address(str(ray.util.get_node_ip_address()), port)  # type: ignore[no-untyped-call]


def take_back_sigterm() -> None:
    """Install Python's handler of SIGTERM once more: ``ray.init`` takes it for a crash, and puts one before it that
    prints stacks and aborts the process."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
        return True
    return False
