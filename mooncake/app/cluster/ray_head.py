"""The head of a Ray: a private one is started and ended here, one that exists is asked whether it can be joined.

A private Ray is core Ray with token authentication, on loopback, with its own port and folder, and without a dashboard.
"""

from __future__ import annotations

import contextlib
import ipaddress
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
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from mooncake.addresses import check_address, join_address, split_address
from mooncake.app.cluster.preflight import free_port, port_holder
from mooncake.app.cluster.role_main import PARENT_ENV
from mooncake.errors import ConfigError, NodeUnavailable

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80_000_000  # the minimum that Ray accepts; we do not use it
START_S = 120.0  # limit on the start of Ray
JOIN_S = 5.0  # limit on the first answer of a Ray that is to be joined; Ray itself tries for minutes
STOP_S = 15.0
_LOOPBACK_ENV = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray keeps 127.0.0.1 as it is, on any system
PRIVATE_ENV = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", _LOOPBACK_ENV)  # how a private Ray is reached
TOKEN_SETTINGS = "RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH"

# Replace this process by Ray, which then ends when its parent ends, in whatever way.
_LEASH = "import os, sys; from mooncake.app.cluster.role_main import die_with_parent; die_with_parent(); "
_LEASH += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


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


def check_answers(ray_address: str) -> None:
    """Raise NodeUnavailable unless a Ray's head answers within ``JOIN_S`` where ``ray.init`` will look for it, and
    accepts our token; and InvalidRequest when that is no address."""
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


def found(ray_address: str) -> str:
    """The address that Ray takes "auto" for: of a Ray that runs on this machine. Others name themselves. Raises
    NodeUnavailable."""
    if ray_address != "auto":
        return ray_address
    from ray._private.services import get_ray_address_from_environment  # no public function tells it

    try:
        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError:
        raise NodeUnavailable("no Ray runs on this machine (RAY_ADDRESS=auto)") from None


def _check_token(channel: grpc.Channel, ray_address: str) -> None:
    """Make the first call of ``ray.init``, which repeats it for 20 seconds when the token is refused. Whatever else is
    wrong, it will say itself. Raises NodeUnavailable."""
    from ray import _raylet as raylet
    from ray.exceptions import AuthenticationError

    try:
        token = raylet.AuthenticationTokenLoader.instance().get_token_for_http_header()  # type: ignore[attr-defined]
    except AuthenticationError as error:  # there is none, or not where the environment says
        raise NodeUnavailable(f"{str(error).partition('. ')[0]} ({TOKEN_SETTINGS})") from None
    ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/ray.rpc.NodeInfoGcsService/GetClusterId"
    )  # an empty message is no bytes
    try:
        ask(b"", timeout=JOIN_S, metadata=tuple(token.items()))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            with_which = "refuses our token" if token else "wants a token"
            raise NodeUnavailable(f"the Ray at {ray_address} {with_which} ({TOKEN_SETTINGS})") from None


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
