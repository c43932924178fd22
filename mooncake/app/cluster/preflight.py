"""Checks before a cluster starts: valid names, free ports, enough memory; and the threads of each node, its part of the
free memory and of a GPU.

A check passes or raises ConfigError with one sentence that names the flag to change. It starts nothing, and knows of
the roles only the names of their policies and modes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from conductor.admission.admission import Mode
from conductor.admission.rules import ADMISSIONS
from conductor.ingress.parsers.output_format import REASONING_PARSERS, TOOL_CALL_PARSERS
from conductor.placement.policies import POLICIES
from kvstore.eviction import POLICIES as EVICTIONS
from mooncake.app.extras import require_tracing
from mooncake.checkpoint import Checkpoint
from mooncake.config import Config, EngineSection, PrefillSection
from mooncake.errors import ConfigError
from mooncake.host_memory import available_bytes
from mooncake.sizing import GB, cpu_cache_bytes, longest_pages, shares_of_a_card, weights_bytes

ENGINE_OVERHEAD_GB = 0.45  # resident size of a prefill or decode process without weights and KV: interpreter and torch
PROCESS_OVERHEAD_GB = 0.1  # of other processes

_CHOICES: dict[str, Collection[str]] = {
    "conductor.policy": POLICIES,
    "conductor.admission": ADMISSIONS,
    "conductor.admission_mode": tuple(Mode),
    "conductor.reasoning_parser": REASONING_PARSERS,
    "conductor.tool_call_parser": TOOL_CALL_PARSERS,
    "store.eviction": EVICTIONS,
}


def resolve(config: Config) -> Config:
    """The configuration with all automatic values chosen: ports and threads."""
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
    """Twice a node's share of the cores unless nodes are pinned: seldom are all nodes busy, and our own threads do not
    slow others while they have no core."""
    if section.threads:
        return section
    share = _share_of_cores(config)
    threads = share if config.cluster.pin else min(2 * share, available_cores())
    return replace(section, threads=max(threads // section.num_shares, 1))


def share_cards(config: Config) -> Config:
    """The configuration of nodes that all start on this machine: those on one GPU do not each take all of it. Raises
    ConfigError when they ask for more than there is."""
    cluster = config.cluster
    on_cards: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)  # (role, what it asks for) of each node
    for role, section, count in (
        ("prefill", config.prefill, cluster.num_prefill),
        ("decode", config.decode, cluster.num_decode),
    ):
        if section.device != "cpu":
            first = int(section.device.partition(":")[2] or 0)
            for card in range(first, first + section.tensor_parallel):
                on_cards[card] += [(role, section.gpu_memory_utilization)] * count
    shares: dict[str, float] = {}
    for card, nodes in on_cards.items():
        given = shares_of_a_card([wanted for _, wanted in nodes], f"cuda:{card}")
        for (role, _), share in zip(nodes, given, strict=True):
            shares[role] = min(share, shares.get(role, 1.0))
    prefill, decode = (
        replace(section, gpu_memory_utilization=shares.get(role, section.gpu_memory_utilization))
        for role, section in (("prefill", config.prefill), ("decode", config.decode))
    )
    return replace(config, prefill=prefill, decode=decode)


def openmp_threads(section: EngineSection, config: Config) -> int:
    """Threads for torch's own operations: at most the node's cores, since they wait for each other."""
    return min(section.threads, _share_of_cores(config))


def _share_of_cores(config: Config) -> int:
    return max(1, available_cores() // (config.cluster.num_prefill + config.cluster.num_decode))


def decode_share(config: Config) -> float:
    """``node.decode_share`` of the nodes that are started here: below 1 where prefill and decode share cores.

    A decode step takes as long for one sequence as for a few, since it reads the same weights. If small batches took
    the cores again and again, prompts would queue and batches would stay small.
    """
    cluster, cores = config.cluster, available_cores()
    threads = cluster.num_prefill * config.prefill.all_threads + cluster.num_decode * config.decode.all_threads
    on_cpu = config.prefill.device == config.decode.device == "cpu"
    return cluster.decode_share if on_cpu and threads > cores and cluster.num_decode and not cluster.pin else 1.0


def cores_of_nodes(config: Config) -> dict[str, tuple[int, ...]]:
    """With ``cluster.pin``, the disjoint cores of each prefill and decode node by id; else empty.

    Raises ConfigError when the nodes have more threads than the machine has cores.
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
            f"this machine has {len(cores)}: lower prefill.threads or decode.threads, or do not pin"
        )
    taken = iter(cores)
    return {node: tuple(next(taken) for _ in range(threads)) for node, threads in wanted.items()}


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port(host: str, but: int = 0) -> int:
    """A free TCP port other than ``but``, because the system may return the same port twice. Another process may still
    take it first. Raises ConfigError."""
    try:
        with _bound(host, 0) as listener:
            port = int(listener.getsockname()[1])
            return port if port != but else free_port(host, but)
    except OSError as error:
        raise ConfigError(_port_sentence(host, 0, "", error)) from None


def check_choices(config: Config) -> None:
    """Raises ConfigError for an unknown policy, rule or mode, and MissingDependency where traces are wanted that cannot
    be sent: once, rather than from several processes."""
    require_tracing(config.conductor.otlp_traces_endpoint)
    for name, known in _CHOICES.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_ports(config: Config) -> None:
    """Raises ConfigError for the ports that cannot be used, with their flags and, if known, the processes that hold
    them."""
    conductor = config.conductor
    if conductor.http_port == conductor.grpc_port:
        raise ConfigError(f"--http-port and --grpc-port are both {conductor.http_port}; they must differ")
    wrong = []
    for flag, port in (("--http-port", conductor.http_port), ("--grpc-port", conductor.grpc_port)):
        try:
            _bound(conductor.host, port).close()
        except OSError as error:
            wrong.append(_port_sentence(conductor.host, port, flag, error))
            if error.errno != errno.EADDRINUSE:
                break  # the other one would be the same
    if wrong:
        raise ConfigError("; ".join(wrong))


def hold_ports(config: Config) -> list[socket.socket]:
    """Sockets bound to the conductor's ports, which do not listen. The conductor can still bind them, but the system
    does not give them to a process that asks for any port, such as a node that starts earlier."""
    held = []
    for port in (config.conductor.http_port, config.conductor.grpc_port):
        with contextlib.suppress(OSError):  # taken meanwhile: the conductor will report it
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
        return f"port {port} is taken{by}; choose another with {flag}, or stop that process"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one above 1023 with {flag}"
    return (
        f"cannot listen on {host}:{port}: {error.strerror or error}; set conductor.host to an address of this machine"
    )


def port_holder(port: int) -> str:
    """ "process 4121 (redis-server)" for the local listener on a TCP port, or "" if unknown."""
    inodes = set(_listening_inodes(port))
    for fd in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        try:
            if fd.readlink().name in inodes:
                pid = fd.parts[2]
                return f"process {pid} ({Path('/proc', pid, 'comm').read_text().strip()})"
        except OSError:  # the process has ended, or belongs to another user
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
    """Gigabytes of host memory that a cluster on this machine needs when its caches are full.

    Weights on a GPU do not count; a GPU's cache has a mirror of the same size in host memory. Where the size is left to
    the nodes (``kv_gb`` 0), a CPU's cache is what ``sizing`` says; a mirror takes of what is left, and does not count.
    """

    weights_gb: float
    kv_gb: float
    store_gb: float
    processes_gb: float

    @property
    def total_gb(self) -> float:
        return self.weights_gb + self.kv_gb + self.store_gb + self.processes_gb


def memory_need(config: Config, checkpoint: Checkpoint, available_gb: float | None = None) -> MemoryNeed:
    """``available_gb``, if known, bounds caches whose size is left to the nodes."""
    need = _fixed_need(config, checkpoint)
    part = None if available_gb is None else int(spare_gb(config, checkpoint, available_gb) * GB)
    automatic = sum(
        count * cpu_cache_bytes(_longest_bytes(config, checkpoint, section), part) / GB
        for section, count in _nodes(config)
        if not _kv_gb(config, section) and section.device == "cpu"
    )
    return dataclasses.replace(need, kv_gb=need.kv_gb + automatic)


def spare_gb(config: Config, checkpoint: Checkpoint, available_gb: float) -> float:
    """``node.spare_gb`` of the nodes that are started here: what everything else leaves, in equal parts."""
    count = sum(count for section, count in _nodes(config) if not _kv_gb(config, section))
    return max(available_gb - _fixed_need(config, checkpoint).total_gb, 0.0) / max(count, 1)


def _nodes(config: Config) -> list[tuple[EngineSection, int]]:
    return [(config.prefill, config.cluster.num_prefill), (config.decode, config.cluster.num_decode)]


def _kv_gb(config: Config, section: EngineSection) -> float:
    """A switchable node has the larger cache of both roles; 0: as large as fits."""
    return max(config.prefill.kv_gb, config.decode.kv_gb) if config.cluster.switchable else section.kv_gb


def _longest_bytes(config: Config, checkpoint: Checkpoint, section: EngineSection) -> int:
    groups, model = config.page_groups(checkpoint.config), config.model
    block = checkpoint.kv_layout(config.block.tokens, config.precision().kv_dtype, model.keep_hidden)
    context = checkpoint.config.context(model.max_model_len)
    pages = longest_pages(groups, context, section.chunk_tokens, config.block.tokens)
    return pages * groups.page_layout(block).block_bytes


def _fixed_need(config: Config, checkpoint: Checkpoint) -> MemoryNeed:
    """Without caches whose size is left to the nodes."""
    cluster, prefill = config.cluster, config.prefill
    nodes = _nodes(config)
    ranks = cluster.num_prefill * prefill.context_parallel  # each has all weights
    on_cpus = sum(
        count * _weights_gb(config, checkpoint, section) for section, count in nodes if section.device == "cpu"
    )
    stages = cluster.num_prefill * prefill.pipeline_stages if prefill.pipeline_stages > 1 else 0
    engines = ranks + cluster.num_decode + stages + sum(count * (each.tensor_parallel - 1) for each, count in nodes)
    return MemoryNeed(
        weights_gb=on_cpus,
        kv_gb=sum(count * (_kv_gb(config, section) + section.swap_gb) for section, count in nodes),
        store_gb=cluster.store * config.store.dram_gb,
        processes_gb=engines * ENGINE_OVERHEAD_GB + (1 + cluster.store) * PROCESS_OVERHEAD_GB,
    )


def _weights_gb(config: Config, checkpoint: Checkpoint, section: EngineSection) -> float:
    """Weights of all processes of a node."""
    whole_gb = weights_bytes(checkpoint, config.precision(checkpoint.coding).weights) / GB
    return whole_gb * (section.context_parallel if isinstance(section, PrefillSection) else 1)


def host_gb() -> float | None:
    """What this machine (or container) has available; None: nobody knows."""
    available = available_bytes()
    return None if available is None else available / GB


def check_memory(config: Config, checkpoint: Checkpoint, available_gb: float | None) -> None:
    """Raises ConfigError when the cluster needs more memory than this machine (or container) has available; None:
    nobody knows."""
    need = memory_need(config, checkpoint, available_gb)
    if available_gb is not None and need.total_gb > available_gb:
        raise ConfigError(
            f"this cluster needs {need.total_gb:.1f} GB of memory (weights {need.weights_gb:.1f}, KV caches "
            f"{need.kv_gb:.1f}, store {need.store_gb:.1f}, processes {need.processes_gb:.1f}) and {available_gb:.1f} "
            "GB are available; lower prefill.kv_gb, decode.kv_gb or store.dram_gb with --set, or start fewer nodes"
        )
