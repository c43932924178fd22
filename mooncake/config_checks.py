"""What a configuration must fulfil: bounds of its numbers, known words, and settings that exclude each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from mooncake.adapters import parse_adapters
from mooncake.api_keys import KEY_WORDS, is_key
from mooncake.config_sections import GENERATION_CONFIGS, ConductorSection, Config, EngineSection, NodeSection
from mooncake.errors import ConfigError
from mooncake.json_file import json_object
from mooncake.precision import KV_FORMATS, check_device

MISSED_HEARTBEATS = 3  # before a node is gone: one or two may be late

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
    "transfer.handoff_timeout_s",
)
_NOT_NEGATIVE = (
    "model.max_model_len",
    "cluster.coupled",
    "conductor.node_wait_s",
    "conductor.retries",
    "conductor.ttft_limit_ms",
    "conductor.tbt_limit_ms",
    "conductor.max_tail_tokens",
    "conductor.balance_dwell_s",
    "conductor.balance_node_dwell_s",
    "prefill.kv_gb",
    "decode.kv_gb",
    "node.spare_gb",
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
    "pool_layout.tensor_parallel",
    "pool_layout.block_tokens",
    "store.block_bytes",
    "store.write_through_sights",
    "store.demote_sights",
    "conductor.max_loaded_adapters",
    "conductor.stored_responses_mb",
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
_MOST = 1e15  # of anything: beyond it, timers and sizes are numbers that nothing can count in
_SHARES = ("cluster.decode_share", "node.decode_share")
_UP_TO_ONE = ("prefill.gpu_memory_utilization", "decode.gpu_memory_utilization")
_BETWEEN = {
    "block.tokens": range(1, 1025),
    "transfer.streams": range(1, 17),
    "conductor.http_port": range(65536),
    "conductor.ssl_cert_reqs": range(3),
    "conductor.grpc_port": range(65536),
    "node.port": range(65536),
}


def check_values(config: Config) -> None:
    """Raises ConfigError for the first value that breaks a rule, with the rule."""
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
    _require(config, _SHARES, "must be between 0.01 and 1", lambda value: 0.01 <= value <= 1)
    _require(config, _UP_TO_ONE, "must be between 0 and 1", lambda value: 0 <= value <= 1)
    for name, allowed in _BETWEEN.items():
        _require(config, (name,), f"must be between {allowed[0]} and {allowed[-1]}", allowed.__contains__)
    unbounded = (*_AT_LEAST_10_MS, *_POSITIVE, *_NOT_NEGATIVE, *_AT_LEAST_ONE)
    _require(config, unbounded, f"must be below {_MOST:g}", lambda value: value < _MOST)


def _check_conductor(section: ConductorSection) -> None:
    interval_s, timeout_s = section.heartbeat_interval_s, section.node_timeout_s
    if timeout_s < MISSED_HEARTBEATS * interval_s * (1 - 1e-9):
        what = f"at least {MISSED_HEARTBEATS} times conductor.heartbeat_interval_s ({interval_s:g})"
        raise ConfigError(f"conductor.node_timeout_s must be {what}, got {timeout_s:g}")
    if not all(map(is_key, section.api_keys)):
        raise ConfigError(f"conductor.api_keys: a key is {KEY_WORDS}")
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
    json_object(config.model.generation_overrides, "model.generation_overrides")
    if "chat_template" in json_object(config.model.chat_template_kwargs, "model.chat_template_kwargs"):
        raise ConfigError("model.chat_template_kwargs cannot set the chat template: set model.chat_template")
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
        "conductor.max_loaded_adapters": config.conductor.max_loaded_adapters,
        "model.key_scales": config.model.key_scales,
        "cluster.switchable": config.cluster.switchable,
    }
    of_prefill = excluded | {"prefill.blend_share": prefill.blend_share, "prefill.variant": prefill.variant}
    ways = [name for name in ("tensor_parallel", "pipeline_stages", "context_parallel") if getattr(prefill, name) > 1]
    for way in ways:
        others: dict[str, object] = {f"prefill.{other}": other != way for other in ways}
        if way != "tensor_parallel":
            others["a GPU as prefill.device"] = prefill.device != "cpu"
        _exclude(f"prefill.{way}", of_prefill | others)
    if config.decode.tensor_parallel > 1 and not config.cluster.coupled:
        _exclude("decode.tensor_parallel", excluded)


def _exclude(name: str, excluded: dict[str, object]) -> None:
    for other, is_asked in excluded.items():
        if is_asked:
            raise ConfigError(f"{name} does not go together with {other}")


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _require(config: Config, names: Iterable[str], rule: str, holds: Callable[[float], bool]) -> None:
    for name in names:
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if not holds(value):
            raise ConfigError(f"{name} {rule}, got {value}")
