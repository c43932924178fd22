"""One configuration for the whole cluster: a TOML file, overridden by ``--set section.key=value``.

Every role reads the same file, so a cluster has one description. Unknown keys are errors that name the nearest known
key. Values that mean "decide for me" are 0 or "auto"; each is resolved once, by the part that owns it, and logged.
The sections are in ``config_sections.py``, the rules for their values in ``config_checks.py``.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import get_type_hints

import msgspec
from msgspec.structs import replace

from mooncake.api_keys import API_KEY_ENV, HIDDEN
from mooncake.config_checks import check_values
from mooncake.config_sections import (
    BY_DEVICE,
    GENERATION_CONFIGS,
    TBT_ROOM,
    BlockSection,
    ClusterSection,
    ConductorSection,
    Config,
    DirectorySection,
    EngineSection,
    HealthSection,
    ModelSection,
    NodeSection,
    PoolLayoutSection,
    PrefillSection,
    StoreSection,
    TransferSection,
)
from mooncake.errors import ConfigError

__all__ = [
    "BY_DEVICE",
    "GENERATION_CONFIGS",
    "TBT_ROOM",
    "BlockSection",
    "ClusterSection",
    "ConductorSection",
    "Config",
    "DirectorySection",
    "EngineSection",
    "HealthSection",
    "ModelSection",
    "NodeSection",
    "PoolLayoutSection",
    "PrefillSection",
    "StoreSection",
    "TransferSection",
    "dump_toml",
    "load_config",
    "masked",
    "read_tree",
    "toml_value",
    "transfer_secret",
]

_FILES = {
    "model": ("key_scales",),
    "conductor": ("calibration", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
    "store": ("ssd_path",),
    "prefill": ("variant",),
    "transfer": ("secret_file",),
    "node": ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
}
"""Values that are paths. Those of models and adapters are not only paths: who opens them knows what ``~`` means."""

_SPELT = {"array": '; a list is written ["a", "b"]', "bool": "; it is true or false, in lower case"}


def load_config(path: Path | None = None, overrides: list[str] | None = None) -> Config:
    """Read a TOML file (or only the defaults) and apply ``section.key=value`` overrides. ``~`` at the start of a path
    is this process's home. API keys in neither come from the environment. Raises ConfigError."""
    tree = read_tree(path, overrides)
    _check_names(tree, Config, "")
    _expand_home(tree)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        hint = next((hint for kind, hint in _SPELT.items() if what.startswith(f"Expected `{kind}`")), "")
        raise ConfigError(f"{where.rstrip('`') or 'configuration'}: {what}{hint}") from None
    if not config.conductor.api_keys and (key := os.environ.get(API_KEY_ENV)):
        config = replace(config, conductor=replace(config.conductor, api_keys=(key,)))
    check_values(config)
    return config


def read_tree(path: Path | None, overrides: list[str] | None) -> dict[str, object]:
    """What a file and overrides say, by section and key, unchecked. Raises ConfigError where they cannot be read."""
    tree: dict[str, object] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # it may nest too deeply, or hold a number of thousands of digits
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides or []:
        _apply_override(tree, override)
    return tree


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
        lines.extend(f"{key} = {toml_value(value)}" for key, value in values.items())
        lines.append("")
    return "\n".join(lines)


def toml_value(value: object) -> str:
    """A string, number, boolean or list of them in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    # JSON strings are TOML basic strings, except for DEL, which TOML requires to be escaped
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _apply_override(tree: dict[str, object], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set takes section.key=value, got {name + equals + ('…' if text else '')!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
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


def _expand_home(tree: dict[str, object]) -> None:
    for section, keys in _FILES.items():
        branch = tree.get(section, {})
        assert isinstance(branch, dict), "_check_names has refused others"
        for key in keys:
            if isinstance(value := branch.get(key), str):
                branch[key] = os.path.expanduser(value)  # noqa: PTH111 - Path's raises where there is no such user


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
