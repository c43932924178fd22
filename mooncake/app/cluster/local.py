"""A whole cluster on this machine: one process per node, supervised, with nothing left behind when it stops.

It starts, watches and ends processes, and asks the conductor's Cluster service whether all have registered. It must not
know what the roles do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from conductor.api import DRAIN_S
from mooncake.adapters import open_adapters, parse_adapters
from mooncake.app.cluster.preflight import (
    check_choices,
    check_memory,
    check_ports,
    cores_of_nodes,
    decode_share,
    hold_ports,
    host_gb,
    openmp_threads,
    resolve,
    share_cards,
    spare_gb,
)
from mooncake.app.cluster.readiness import Readiness
from mooncake.app.cluster.role_main import PARENT_ENV
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, dump_toml
from mooncake.errors import ConfigError, MooncakeError, NodeUnavailable
from mooncake.host_memory import RecentOomKills
from mooncake.sampling_defaults import overridden
from mooncake.text.template_source import template_source
from mooncake.tls import check_tls, tls_of
from mooncake.types import Role

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 600.0  # large weights and a first compilation take minutes; a process that dies is reported at once
CONDUCTOR_GRACE_S = DRAIN_S + 5.0  # for the conductor to finish its requests, and to close
STOP_GRACE_S = 8.0  # for the other nodes to exit
POLL_S = 0.05
MIN_BACKOFF_S = 0.25
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0  # a process that ran for so long restarts after the shortest pause
OOM_KILL_RECENT_S = 15.0  # a process that the system kills for lack of memory may take seconds to give it back
OOM_KILL_LOOK_S = 5.0
LOG_LINES_KEPT = 40  # per process, to report why it died

PACKAGES = {"conductor": "conductor", "store": "kvstore", "prefill": "prefill_node", "decode": "decode_node"}
SWITCHABLE = "mooncake.app.cluster.compute_node"


class NodeProcess(Protocol):
    """A process that runs a node, as ``asyncio.subprocess.Process`` has it; its id is that of its group."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """What it logs."""
        ...

    def terminate(self) -> None:
        """Raises ProcessLookupError."""
        ...


StartModule = Callable[[str, Sequence[str], Mapping[str, str]], Awaitable[NodeProcess]]
"""Starts a module with arguments in an environment. Raises OSError."""


async def start_module(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NodeProcess:
    """Python in a process and a session of its own."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # do not import from the working directory, which may have a folder named like a role
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C at the terminal reaches only this process, which ends them in order
        env=environment,
    )


@dataclass(slots=True)
class Child:
    """One process of the cluster; its name stays the same after a restart."""

    node_id: str
    role: str
    process: NodeProcess | None = None
    incarnation: int = 0  # last known to the conductor; 0: none
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES_KEPT))

    @property
    def pid(self) -> int:
        """Process id; 0 if it is not running."""
        return self.process.pid if self.process is not None and self.process.returncode is None else 0


def children_of(config: Config) -> list[Child]:
    cluster = config.cluster
    counts = {
        ("store", "store"): cluster.store,
        ("coupled" if cluster.coupled else "prefill", "prefill"): cluster.num_prefill,
        ("decode", "decode"): cluster.num_decode,
    }
    nodes = [Child(f"{name}-{index}", role) for (name, role), count in counts.items() for index in range(count)]
    return [Child("conductor", "conductor"), *nodes]


class LocalCluster:
    """``async with LocalCluster(config) as cluster``: ready inside, stopped after.

    ``tell`` gets sentences for a person (what it waits for, which process died); ``tell_log`` gets every line that a
    process logs. Errors of either are ignored. With ``restart``, a process that dies is restarted after a pause, which
    doubles while it keeps dying. Entering raises ConfigError (a port is taken, too little memory, a wrong value),
    ModelError, or NodeUnavailable when a process dies or is not ready within ``ready_timeout_s``; nothing is left
    behind then either.
    """

    def __init__(
        self,
        config: Config,
        *,
        restart: bool = False,
        log_level: str = "WARNING",
        ready_timeout_s: float = READY_TIMEOUT_S,
        tell: Callable[[str], None] = log.info,
        tell_log: Callable[[str], None] = log.debug,
        start_module: StartModule = start_module,
    ) -> None:
        self.config = share_cards(resolve(config))
        self._cores = cores_of_nodes(self.config)
        self.children = {child.node_id: child for child in children_of(config)}
        self._restart = restart
        self._log_level = log_level
        self._ready_timeout_s = ready_timeout_s
        self._tell = _or_lose(tell)
        self._tell_log = _or_lose(tell_log)
        self._start_module = start_module
        self._spare_gb = 0.0
        self._config_fd = -1  # an anonymous file in memory: it may hold keys, and vanishes however this process ends
        self._ports: list[socket.socket] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._was_ready = False
        self._fatal: asyncio.Future[MooncakeError] | None = None
        self._dead: set[int] = set()  # incarnations
        self._oom_kills = RecentOomKills(OOM_KILL_RECENT_S)
        self._stopping = asyncio.Event()

    @property
    def http_url(self) -> str:
        section = self.config.conductor
        return f"{section.http_scheme}://{section.http_address}"

    @property
    def grpc_address(self) -> str:
        return self.config.conductor.grpc_address

    @property
    def config_file(self) -> Path:
        """The configuration that the processes read; readable by this user while the cluster runs."""
        return Path(f"/proc/{os.getpid()}/fd/{self._config_fd}")

    @property
    def pids(self) -> dict[str, int]:
        """Running processes by node id."""
        return {node_id: child.pid for node_id, child in self.children.items() if child.pid}

    async def __aenter__(self) -> LocalCluster:
        try:
            await self.start()
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Run all checks, then start the processes. Call ``wait_ready`` next."""
        check_choices(self.config)
        check_ports(self.config)
        self._ports = hold_ports(self.config)
        check_tls(self.config.conductor)
        tls_of(self.config)
        checkpoint = await asyncio.to_thread(open_checkpoint, self.config.model.path)
        await asyncio.to_thread(open_adapters, parse_adapters(self.config.model.adapters))
        checkpoint.config.context(self.config.model.max_model_len)
        model = self.config.model
        overridden(checkpoint.sampling_defaults(model.generation_config), model.generation_overrides)
        if template := template_source(model.chat_template, "model.chat_template"):
            await asyncio.to_thread(checkpoint.load_tokenizer, template)
        available = host_gb()
        check_memory(self.config, checkpoint, available)
        self._spare_gb = 0.0 if available is None else spare_gb(self.config, checkpoint, available)
        self._fatal = asyncio.get_running_loop().create_future()
        self._config_fd = os.memfd_create("cluster.toml")
        os.pwrite(self._config_fd, dump_toml(self.config).encode(), 0)
        self._watchers.append(asyncio.create_task(self._watch_memory(), name="watch for lack of memory"))
        for child in self.children.values():
            await self._spawn(child)
            self._watchers.append(asyncio.create_task(self._watch(child), name=f"watch {child.node_id}"))

    async def wait_ready(self) -> None:
        """Return once the conductor is ready and knows every node, restarted ones by their new incarnation; meanwhile
        report which are missing. Raises NodeUnavailable after ``ready_timeout_s``, or the error of a process that ended
        and is not restarted."""
        assert self._fatal is not None, "start() comes first"
        nodes = [child.node_id for child in self.children.values() if child.role != "conductor"]
        api_key, tls = self.config.conductor.api_key, tls_of(self.config)
        readiness = Readiness(self.grpc_address, nodes, self._tell, frozenset(self._dead), api_key, tls)
        ready = asyncio.create_task(readiness.wait(self._ready_timeout_s), name="wait until ready")
        try:
            await asyncio.wait((ready, self._fatal), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise self._fatal.result()
            ready.result()
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        for node_id in nodes:
            self.children[node_id].incarnation = readiness.incarnations[node_id]
        self._was_ready = True

    async def wait_fatal(self) -> MooncakeError:
        """Return the error once the cluster cannot go on: a process died and is not to be restarted."""
        assert self._fatal is not None, "start() comes first"
        return await asyncio.shield(self._fatal)

    async def stop(self) -> None:
        """End every process, the conductor first so that requests can finish. Idempotent."""
        self._stopping.set()
        children = list(self.children.values())
        await _end([child for child in children if child.role == "conductor"], CONDUCTOR_GRACE_S)
        await _end(children, STOP_GRACE_S)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()
        for port in self._ports:
            port.close()
        if self._config_fd >= 0:
            os.close(self._config_fd)
            self._config_fd = -1

    def kill(self) -> None:
        """Kill all processes without waiting, after a second Ctrl-C."""
        self._stopping.set()
        for child in self.children.values():
            if child.process is not None and child.pid:
                _kill_group(child.process)

    def _package(self, child: Child) -> str:
        if self.config.cluster.switchable and child.role in (Role.PREFILL, Role.DECODE):
            return SWITCHABLE
        return PACKAGES[child.role]

    async def _spawn(self, child: Child) -> None:
        section = {"prefill": self.config.prefill, "decode": self.config.decode}.get(child.role)
        threads = openmp_threads(section, self.config) if section else 1
        cores = self._cores.get(child.node_id, ())
        share = decode_share(self.config)
        arguments = (
            "--config",
            str(self.config_file),
            "--set",
            f"node.id={child.node_id}",
            *(("--set", f"node.role={child.role}") if self._package(child) == SWITCHABLE else ()),
            *(("--set", f"node.cores={list(cores)}") if cores else ()),
            *(("--set", f"node.decode_share={share}") if section and share < 1 else ()),
            *(("--set", f"node.spare_gb={self._spare_gb}") if section and self._spare_gb else ()),
            "--log-level",
            self._log_level,
        )
        environment = os.environ | {PARENT_ENV: str(os.getpid()), "OMP_NUM_THREADS": str(threads)}
        child.process = await self._start_module(self._package(child), arguments, environment)

    async def _watch_memory(self) -> None:
        while True:
            self._oom_kills.look(time.monotonic())
            await asyncio.sleep(OOM_KILL_LOOK_S)

    async def _watch(self, child: Child) -> None:
        """Supervise one child through all its restarts."""
        backoff_s = MIN_BACKOFF_S
        while True:
            born = time.monotonic()
            code = await self._live(child)
            if self._stopping.is_set():
                return
            self._dead.add(child.incarnation)
            error = _death(child, code, self._oom_kills.look(time.monotonic()))
            # A configuration that once worked is not wrong: too little memory or a taken port may pass.
            is_final = isinstance(error, ConfigError) and not self._was_ready
            if is_final or not self._restart:
                self._fail(error)
                return
            if time.monotonic() - born > STABLE_S:
                backoff_s = MIN_BACKOFF_S
            self._tell(f"{error.message}; starting it again in {backoff_s:g} s")
            backoff_s = await self._revive(child, backoff_s)
            if self._stopping.is_set():
                return

    async def _revive(self, child: Child, backoff_s: float) -> float:
        """Restart it after a pause, and again while the system cannot create a process. Returns the next pause. Nothing
        is started while the cluster stops; a process started meanwhile is ended."""
        while True:
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            if self._stopping.is_set():
                return backoff_s
            try:
                await self._spawn(child)
            except OSError as error:
                self._tell(f"cannot start {child.node_id}: {error.strerror}; trying again in {backoff_s:g} s")
                continue
            if self._stopping.is_set() and child.process is not None:
                _kill_group(child.process)
            return backoff_s

    async def _live(self, child: Child) -> int:
        """Forward the log lines of a process until it ends. Returns its exit code."""
        process = child.process
        assert process is not None
        reading = asyncio.create_task(self._read_log(child, process), name=f"log of {child.node_id}")
        code = await _exit_code(process)
        _kill_group(process)  # processes that it had started, such as a compiler
        await asyncio.wait((reading,), timeout=1.0)
        reading.cancel()
        return code

    async def _read_log(self, child: Child, process: NodeProcess) -> None:
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-(1 << 16) :]
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                child.last_lines.append(text)
                if not self._stopping.is_set():  # the conductor stops first, and the nodes complain about that
                    self._tell_log(text)

    def _fail(self, error: MooncakeError) -> None:
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_result(error)


def _or_lose(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Ignore errors of ``tell``: a full disk or a closed terminal must not end the supervision."""

    def tell_or_lose(text: str) -> None:
        with contextlib.suppress(OSError):
            tell(text)

    return tell_or_lose


def _death(child: Child, code: int, was_short_of_memory: bool) -> MooncakeError:
    """Why a process ended, with the last lines of its log if they say so. ``was_short_of_memory``: the system has
    lately killed somebody for that."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if code == -signal.SIGKILL and was_short_of_memory:
        how += ", as the system does when memory runs out: lower kv_gb or dram_gb, or start fewer nodes"
    has_said_why = code not in (-signal.SIGKILL, -signal.SIGTERM)  # those are sent from outside
    words = child.last_lines[-1] if has_said_why and child.last_lines else ""
    sentence = f"{child.node_id} {how}" + (f": {words}" if words else "")
    return ConfigError(sentence) if code == 2 else NodeUnavailable(sentence)


async def _exit_code(process: NodeProcess) -> int:
    """Wait for the process alone: asyncio's wait() also waits for the end of the pipe, which a process started by this
    one may hold open."""
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return process.returncode


def _kill_group(process: NodeProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(children: list[Child], grace_s: float) -> None:
    """Send SIGTERM, then SIGKILL to those still running after ``grace_s``."""
    running = [child.process for child in children if child.process is not None and child.pid]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    ends = [asyncio.create_task(_exit_code(process)) for process in running]
    if not ends:
        return
    await asyncio.wait(ends, timeout=grace_s)
    for process in running:
        if process.returncode is None:
            _kill_group(process)
    await asyncio.wait(ends)
