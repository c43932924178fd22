"""What a launcher settles before it starts anything: names that exist, free ports, enough memory, threads a node.

Each check either passes or raises ConfigError with one sentence that names the flag to change. It starts nothing, and
knows of the roles only the names that their parts go by.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from conductor.admission import ADMISSIONS, Mode
from conductor.ingress.reading.form import REASONING_PARSERS, TOOL_CALL_PARSERS
from conductor.policies import POLICIES
from kvstore.eviction import POLICIES as EVICTIONS
from mooncake.checkpoint import Checkpoint, ModelConfig, weight_shapes
from mooncake.config import Config, EngineSection, PrefillSection
from mooncake.errors import ConfigError
from mooncake.host_memory import available_bytes

GB = 1e9
ENGINE_OVERHEAD_GB = 0.45  # resident size of a prefill or decode process beside weights and KV: interpreter and torch
PROCESS_OVERHEAD_GB = 0.1  # of the others

_CHOICES: dict[str, Collection[str]] = {
    "conductor.policy": POLICIES,
    "conductor.admission": ADMISSIONS,
    "conductor.admission_mode": tuple(Mode),
    "conductor.reasoning_parser": REASONING_PARSERS,
    "conductor.tool_call_parser": TOOL_CALL_PARSERS,
    "store.eviction": EVICTIONS,
}


def resolve(config: Config) -> Config:
    """The same configuration with every "decide for me" of the launcher settled: ports and threads."""
    conductor = config.conductor
    http_port = conductor.http_port or free_port(conductor.host, conductor.grpc_port)
    grpc_port = conductor.grpc_port or free_port(conductor.host, http_port)
    return replace(
        config,
        conductor=replace(conductor, http_port=http_port, grpc_port=grpc_port),
        prefill=_with_threads(config.prefill, config),
        decode=_with_threads(config.decode, config),
    )


def _with_threads(section: EngineSection, config: Config) -> EngineSection:
    """Twice a node's share of the cores, but for nodes that are pinned: seldom are all busy, and threads of our own
    that find no core cost the others nothing."""
    if section.threads:
        return section
    share = _share_of_cores(config)
    threads = share if config.cluster.pin else min(2 * share, available_cores())
    return replace(section, threads=max(threads // section.num_shares, 1))


def openmp_threads(section: EngineSection, config: Config) -> int:
    """For what torch computes itself: its threads wait for each other, so no more than there are cores for."""
    return min(section.threads, _share_of_cores(config))


def _share_of_cores(config: Config) -> int:
    return max(1, available_cores() // (config.cluster.num_prefill + config.cluster.num_decode))


def niceness(child_role: str, config: Config) -> int:
    """By how much a node gives way where prefill and decode share cores.

    A decode step takes as long for one sequence as for a few: it reads the same weights. With half of the cores for
    small batches, prompts queue and the batches stay small. A switchable node does not give way: it could not take
    that back when it changes to prefill.
    """
    cluster, cores = config.cluster, available_cores()
    threads = cluster.num_prefill * config.prefill.all_threads + cluster.num_decode * config.decode.all_threads
    on_cpu = config.prefill.device == config.decode.device == "cpu"
    gives_way = child_role == "decode" and on_cpu and threads > cores and not (cluster.pin or cluster.switchable)
    return cluster.decode_nice if gives_way else 0


def cores_of_nodes(config: Config) -> dict[str, tuple[int, ...]]:
    """With ``cluster.pin``, the cores of each prefill and decode node by its id, disjoint; else empty.

    Raises ConfigError when the machine has fewer cores than the nodes have threads: shared cores separate nothing.
    """
    if not config.cluster.pin:
        return {}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    wanted = {
        f"{role}-{number}": section.all_threads
        for role, section, count in (
            ("coupled" if config.cluster.coupled else "prefill", config.prefill, config.cluster.num_prefill),
            ("decode", config.decode, config.cluster.num_decode),
        )
        for number in range(count)
    }
    if sum(wanted.values()) > len(cores):
        raise ConfigError(
            f"cluster.pin needs {sum(wanted.values())} cores for the threads of {len(wanted)} nodes, "
            f"this machine has {len(cores)}: lower prefill.threads or decode.threads, or do without"
        )
    taken = iter(cores)
    return {node: tuple(next(taken) for _ in range(threads)) for node, threads in wanted.items()}


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port(host: str, but: int = 0) -> int:
    """A TCP port nobody listens on, and not ``but``: the system gives one again that was free a moment ago. Another
    process may still take it before we do. Raises ConfigError."""
    try:
        with _bound(host, 0) as listener:
            port = int(listener.getsockname()[1])
            return port if port != but else free_port(host, but)
    except OSError as error:
        raise ConfigError(_port_sentence(host, 0, "", error)) from None


def check_choices(config: Config) -> None:
    """Raises ConfigError for a policy, rule or mode that does not exist, before several processes say so."""
    for name, known in _CHOICES.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_ports(config: Config) -> None:
    """Raises ConfigError naming the port, the flag, and who holds it where that can be known."""
    conductor = config.conductor
    if conductor.http_port == conductor.grpc_port:
        raise ConfigError(f"--http-port and --grpc-port are both {conductor.http_port}; they must differ")
    for flag, port in (("--http-port", conductor.http_port), ("--grpc-port", conductor.grpc_port)):
        try:
            _bound(conductor.host, port).close()
        except OSError as error:
            raise ConfigError(_port_sentence(conductor.host, port, flag, error)) from None


def hold_ports(config: Config) -> list[socket.socket]:
    """The conductor's ports, bound until they are closed, but not listened on: it can have them, and nobody does whom
    the system gives any port, such as a node that starts sooner."""
    held = []
    for port in (config.conductor.http_port, config.conductor.grpc_port):
        with contextlib.suppress(OSError):  # somebody was quicker: the conductor will say so
            held.append(_bound(config.conductor.host, port, listens=False))
    return held


def _bound(host: str, port: int, listens: bool = True) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        if listens:
            listener.listen()  # two sockets with SO_REUSEADDR may bind one port; only one may listen
    except OSError:
        listener.close()
        raise
    return listener


def _port_sentence(host: str, port: int, flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        by = f" by {holder}" if holder else ""
        return f"port {port} is taken{by}; choose another with {flag}, or stop what holds it"
    if error.errno == errno.EACCES:
        return f"port {port} needs rights that this user does not have; choose one above 1023 with {flag}"
    return (
        f"cannot listen on {host}:{port}: {error.strerror or error}; set conductor.host to an address of this machine"
    )


def port_holder(port: int) -> str:
    """ "process 4121 (redis-server)" for the local listener on a TCP port, or "" when /proc does not tell."""
    inodes = set(_listening_inodes(port))
    for fd in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        try:
            if fd.readlink().name in inodes:
                pid = fd.parts[2]
                return f"process {pid} ({Path('/proc', pid, 'comm').read_text().strip()})"
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                yield f"socket:[{row[9]}]"


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Gigabytes of host memory that a cluster on this machine will hold when its caches are full.

    Weights that a GPU computes with are not in it; a GPU's cache has a mirror of the same size here.
    """

    weights_gb: float
    kv_gb: float
    store_gb: float
    processes_gb: float

    @property
    def total_gb(self) -> float:
        return self.weights_gb + self.kv_gb + self.store_gb + self.processes_gb


def memory_need(config: Config, checkpoint: Checkpoint) -> MemoryNeed:
    cluster, prefill, decode = config.cluster, config.prefill, config.decode
    nodes: list[tuple[EngineSection, int]] = [(prefill, cluster.num_prefill), (decode, cluster.num_decode)]
    ranks = cluster.num_prefill * prefill.context_parallel  # each has all weights
    on_cpus = sum(
        count * _weights_gb(config, checkpoint, section) for section, count in nodes if section.device == "cpu"
    )
    stages = cluster.num_prefill * prefill.pipeline_stages if prefill.pipeline_stages > 1 else 0
    engines = ranks + cluster.num_decode + stages + sum(count * (each.tensor_parallel - 1) for each, count in nodes)
    return MemoryNeed(
        weights_gb=on_cpus,
        kv_gb=sum(count * (section.kv_gb + section.swap_gb) for section, count in nodes),
        store_gb=cluster.store * config.store.dram_gb,
        processes_gb=engines * ENGINE_OVERHEAD_GB + (1 + cluster.store) * PROCESS_OVERHEAD_GB,
    )


def _weights_gb(config: Config, checkpoint: Checkpoint, section: EngineSection) -> float:
    """Of all processes of a node."""
    precision, num_ranks = config.precision(checkpoint.coding), section.tensor_parallel
    plain_bytes = 1 if precision.coding else 4 if precision.dtype == "float32" else 2
    own_codes = checkpoint.num_codes if precision.codes else 0  # of one byte each
    keeps_groups = precision.keeps_groups and num_ranks == 1
    in_groups, group_bytes = checkpoint.groups if keeps_groups and not own_codes else (0, 0)
    others = parameter_count(checkpoint.config) - own_codes - in_groups
    repeated = (num_ranks - 1) * parameter_count(checkpoint.config, "embed_tokens", "lm_head")  # ranks have all of them
    whole_gb = ((others + repeated) * plain_bytes + own_codes + group_bytes) / GB
    return whole_gb * (section.context_parallel if isinstance(section, PrefillSection) else 1)


def parameter_count(model: ModelConfig, *names: str) -> int:
    """Of all weights, or those with one of ``names``; experts that a token never meets included."""
    shapes = weight_shapes(model).items()
    return sum(math.prod(shape) for name, shape in shapes if not names or any(part in name for part in names))


def check_memory(config: Config, checkpoint: Checkpoint, available_gb: float | None = None) -> None:
    """Raises ConfigError when the cluster would not fit what this machine (or container) has left."""
    need = memory_need(config, checkpoint)
    if available_gb is None:
        available = available_bytes()
        available_gb = None if available is None else available / GB
    if available_gb is not None and need.total_gb > available_gb:
        raise ConfigError(
            f"this cluster needs {need.total_gb:.1f} GB of memory (weights {need.weights_gb:.1f}, KV caches "
            f"{need.kv_gb:.1f}, store {need.store_gb:.1f}, processes {need.processes_gb:.1f}) and {available_gb:.1f} "
            "GB are available; lower prefill.kv_gb, decode.kv_gb or store.dram_gb with --set, or start fewer nodes"
        )
