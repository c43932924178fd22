"""The simulated cluster: machines with measured step curves, their caches and links, and the conductor's settings.

A cluster is one TOML file; presets are such files in this folder. With ``extends`` a file contains only its differences
from another. This module holds facts only and knows no events.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvstore.eviction import POLICIES
from mooncake.errors import ConfigError

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Size = Annotated[int, msgspec.Meta(ge=0)]


class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Model(Frozen, frozen=True):
    """``token_bytes`` of KV over all layers."""

    num_layers: Count
    token_bytes: Count
    block_tokens: Count = 512


class StepCurve(Frozen, frozen=True):
    """Milliseconds of one step on one machine, fitted to measurements: a prompt's part, a batch's part, or both.

    ``prefix_ms`` is paid once per request that reuses a prefix.
    """

    prefill_step_ms: NotNegative = 0.0
    prefill_token_ms: NotNegative = 0.0
    prefill_pair_ms: NotNegative = 0.0  # per pair of a new token and one it sees
    prefix_ms: NotNegative = 0.0
    decode_step_ms: NotNegative = 0.0
    decode_sequence_ms: NotNegative = 0.0
    decode_context_ms: NotNegative = 0.0  # per token of context
    decode_tail: Positive = 1.0  # mean of the longest tenth of equal steps over the mean of all: real steps have noise
    source: str = ""  # where the numbers are from

    def prefill_ms(self, new_tokens: int, prefix_tokens: int) -> float:
        work = self.prefill_token_ms + self.prefill_pair_ms * (prefix_tokens + new_tokens / 2)
        return self.prefill_step_ms + new_tokens * work + (self.prefix_ms if prefix_tokens else 0.0)

    def decode_ms(self, batch: int, context_tokens: float) -> float:
        return self.decode_step_ms + self.decode_sequence_ms * batch + self.decode_context_ms * context_tokens


class Ssd(Frozen, frozen=True):
    """The second tier of a machine's store. ``tokens`` of KV is the size of its log, about two thirds of which is kept
    readable so that segments can be emptied. The rules are those of ``store.write_through_sights``,
    ``store.demote_sights`` and ``store.eviction``, which then also applies to DRAM."""

    tokens: Count
    read_gb_per_s: Positive = 6.0
    write_gb_per_s: Positive = 3.0
    write_through_sights: Size = 2
    demote_sights: Size = 1
    eviction: str = "lru"


class Machines(Frozen, frozen=True):
    """``count`` equal machines. Token counts are capacities."""

    role: Literal["prefill", "decode", "coupled"]
    count: Count
    curve: str
    kv_tokens: Size = 1_000_000  # KV in device memory; decode and coupled machines
    store_tokens: Size = 0  # KV in host memory, shared with other machines; prefill machines
    nic_gb_per_s: Positive = 87.0
    load_gb_per_s: Positive = 128.0  # host memory to the processors
    max_sequences: Count = 256
    chunk_tokens: Size = 0  # maximum prompt tokens in a step; 0: whole prompts
    prefix_caching: bool = True  # coupled: keep what was computed
    ssd: Ssd | None = None  # under ``store_tokens``
    beside: Positive = 1.0  # slowdown while machines of the other role work: they share a processor


_PLAIN = Machines(role="prefill", count=1, curve="")
_MEANT_FOR = {  # an error for other roles, where they would have no effect
    "kv_tokens": ("decode", "coupled"),
    "max_sequences": ("decode", "coupled"),
    "chunk_tokens": ("coupled",),
    "prefix_caching": ("coupled",),
    "store_tokens": ("prefill",),
    "load_gb_per_s": ("prefill",),
    "beside": ("prefill", "decode"),
}


class Conductor(Frozen, frozen=True):
    policy: str = "milliseconds"
    admission: str = "none"
    admission_mode: Literal["off", "hard"] = "hard"
    balances_roles: bool = False  # machines change between prefill and decode
    switch_s: NotNegative = 0.2  # duration of a switch once the machine is empty
    replicates: bool = True  # hot prefixes are copied ahead of need, to machines that do not have them
    replica_ttl_s: Positive = 120.0  # a copy not used in that time is dropped
    max_tokens: Count = 4096  # of an answer, as requested by clients
    heartbeat_s: Positive = 1.0
    sample_every: Count = 1  # nodes report every n-th measurement
    expected_output_tokens: Positive = 256.0  # until answers were observed


class SLO(Frozen, frozen=True):
    ttft_s: Positive = 30.0
    tbt_ms: Positive = 100.0


class Cluster(Frozen, frozen=True):
    name: str
    model: Model
    curves: dict[str, StepCurve]
    machines: tuple[Machines, ...]
    note: str = ""
    latency_ms: NotNegative = 0.1  # per transfer
    request_ms: NotNegative = 0.0  # added to the first token besides computing the prompt: client, conductor, calls
    conductor: Conductor = Conductor()
    slo: SLO = SLO()

    def __post_init__(self) -> None:
        for machines in self.machines:
            if machines.curve not in self.curves:
                raise ValueError(f"no curve is called {machines.curve!r}; there are: {', '.join(self.curves)}")
            if machines.ssd is not None:
                if machines.role != "prefill" or not machines.store_tokens:
                    raise ValueError("only prefill machines with store_tokens have an SSD under them")
                if machines.ssd.eviction not in POLICIES:
                    raise ValueError(f"ssd.eviction = {machines.ssd.eviction!r}: known are {', '.join(POLICIES)}")
        roles = {machines.role for machines in self.machines}
        if roles not in ({"prefill", "decode"}, {"coupled"}, {"prefill"}):
            raise ValueError("a cluster has prefill and decode machines, or coupled ones, or only prefill ones")
        for machines in self.machines:
            for name, meant_for in _MEANT_FOR.items():
                if machines.role not in meant_for and getattr(machines, name) != getattr(_PLAIN, name):
                    raise ValueError(f"{name} says nothing of {machines.role} machines")

    def check(self) -> None:
        """Raises ConfigError if a replaced value is out of bounds."""
        try:
            msgspec.convert(msgspec.to_builtins(self), Cluster)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.name}: {error}") from None

    def count(self, role: str) -> int:
        return sum(machines.count for machines in self.machines if machines.role == role)

    def with_counts(self, **counts: int) -> Cluster:
        """This many machines of each named role; the first group of a role gets all of them, and with 0 it is omitted.
        A note counts machines, so a changed cluster has none.

        Raises ConfigError for machines of a role that the cluster does not have."""
        self.check_roles(*(role for role, count in counts.items() if count))
        left = dict(counts)
        machines = []
        for group in self.machines:
            wanted = left.get(group.role, group.count)
            if group.role in left:
                left[group.role] = 0
            if wanted:
                machines.append(msgspec.structs.replace(group, count=wanted))
        note = self.note if tuple(machines) == self.machines else ""
        return msgspec.structs.replace(self, machines=tuple(machines), note=note)

    def with_machines(self, role: str = "", **values: object) -> Cluster:
        """Change the same values on every group of ``role`` (or all). Raises ConfigError if there is no such group, or
        the machines become inconsistent."""
        self.check_roles(*([role] if role else []))
        machines = tuple(
            msgspec.structs.replace(group, **values) if role in ("", group.role) else group for group in self.machines
        )
        try:
            return msgspec.structs.replace(self, machines=machines)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from None

    def check_roles(self, *roles: str) -> None:
        """Raises ConfigError if there is no machine of one of them."""
        for role in roles:
            if not self.count(role):
                raise ConfigError(f"{self.name} has no {role} machines")

    def with_conductor(self, **values: object) -> Cluster:
        return msgspec.structs.replace(self, conductor=msgspec.structs.replace(self.conductor, **values))

    def with_slo(self, **values: object) -> Cluster:
        return msgspec.structs.replace(self, slo=msgspec.structs.replace(self.slo, **values))


def preset_names() -> list[str]:
    found = (entry.name.removesuffix(".toml") for entry in files(__package__).joinpath("presets").iterdir())
    return sorted(name for name in found if not name.startswith(("_", ".")))


def preset_text(name: str) -> str:
    """Raises ConfigError, naming the existing ones."""
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(f"no preset is called {name!r}{hint} there are: {', '.join(preset_names())}")
    return files(__package__).joinpath("presets", f"{name}.toml").read_text()


def load_preset(name: str) -> Cluster:
    return _cluster(_preset(name))


def load_cluster(path: Path) -> Cluster:
    """It may extend presets and other files. Raises ConfigError, with the path, for anything that is not a cluster."""
    return _cluster(_file(path))


# What a file extends


class _Source(NamedTuple):
    """A cluster's text and a description of its origin; ``path`` is that of a user's file, which may extend others."""

    origin: str
    text: str
    path: Path | None = None


def _preset(name: str) -> _Source:
    return _Source(f"preset {name}", preset_text(name))


def _file(path: Path) -> _Source:
    try:
        return _Source(str(path), path.read_text(encoding="utf-8-sig"), path.resolve())
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the cluster file {path}: {reason}") from None


def _cluster(source: _Source) -> Cluster:
    return _converted(_tables(source, ()), source)


def _tables(source: _Source, above: tuple[_Source, ...]) -> dict[str, object]:
    """Its values merged over those of the cluster it extends; ``above`` are those that extend it."""
    if any((source.path or source.origin) == (other.path or other.origin) for other in above):
        chain = " extends ".join(one.origin for one in (*above, source))
        raise ConfigError(f"{above[0].origin}: no cluster extends itself: {chain}")
    try:
        own = tomllib.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source.origin}: {error}") from None
    if "extends" not in own:
        return own
    base = _extended(own.pop("extends"), source)
    tables = _tables(base, (*above, source))
    _converted(tables, base)  # an error is reported for the file that contains it
    return _merged({key: value for key, value in tables.items() if key not in _OF_ITS_OWN}, own)


_OF_ITS_OWN = ("name", "note")  # not inherited


def _extended(what: object, source: _Source) -> _Source:
    """``"paper-16"`` is a preset, ``"other.toml"`` a file, from the folder of the one that names it."""
    try:
        if not isinstance(what, str):
            raise ConfigError(f"it takes the name of a preset or of a .toml file, got {what!r}")
        is_file = source.path is not None and what.endswith(".toml")
        return _file(source.path.parent / what) if source.path is not None and is_file else _preset(what)
    except ConfigError as error:
        raise ConfigError(f"{source.origin}: extends: {error.message}") from None


def _merged(base: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Merge tables key by key; all other values of ``own``, including ``machines``, replace those of ``base``."""
    merged = dict(base)
    for key, value in own.items():
        under = merged.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            merged[key] = _merged(under, value)
        else:
            merged[key] = value
    return merged


def _converted(tables: dict[str, object], source: _Source) -> Cluster:
    try:
        return msgspec.convert(tables, Cluster)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source.origin}: {error}{_hint(str(error))}") from None


_UNKNOWN = re.compile(r"unknown field `([^`]*)`(?: - at `([^`]*)`)?$")
_TABLES: Mapping[str, type[Frozen]] = {  # by their places as msgspec tells them
    "": Cluster,
    "$.model": Model,
    "$.curves[...]": StepCurve,
    "$.machines[...]": Machines,
    "$.machines[...].ssd": Ssd,
    "$.conductor": Conductor,
    "$.slo": SLO,
}


def _hint(message: str) -> str:
    """After msgspec's words about a name that is not known: the nearest one there, or all."""
    unknown = _UNKNOWN.search(message)
    table = _TABLES.get(re.sub(r"\[\d+\]", "[...]", unknown[2] or "")) if unknown else None
    if unknown is None or table is None:
        return ""
    near = difflib.get_close_matches(unknown[1], table.__struct_fields__, 1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(table.__struct_fields__)}"
