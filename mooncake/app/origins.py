"""The origin of each value of a configuration: default, environment, file or flag."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mooncake.config import Config, EngineSection, PrefillSection, load_config, masked


@dataclass(frozen=True, slots=True)
class Setting:
    name: str  # "section.key"
    value: object
    origin: str  # "default", "environment", the file's name, or "flag"
    default: object


def settings(path: Path | None, overrides: list[str]) -> list[Setting]:
    """All values in the order of the configuration, with secrets hidden. Raises ConfigError for a wrong value."""
    config = load_config(path, overrides)
    values = dict(_flat(msgspec.to_builtins(masked(config))))
    prefill, decode = PrefillSection(device=config.prefill.device), EngineSection(device=config.decode.device)
    defaults = dict(_flat(msgspec.to_builtins(Config(prefill=prefill, decode=decode))))  # of these devices
    defaults |= dict.fromkeys(("prefill.device", "decode.device"), "cpu")
    in_file = (
        {name for name, _ in _flat(tomllib.loads(path.read_text(encoding="utf-8-sig")))} if path is not None else set()
    )
    flagged = {override.partition("=")[0].strip() for override in overrides}

    def origin(name: str) -> str:
        if name in flagged:
            return "flag"
        if name in in_file:
            return str(path)
        return "default" if values[name] == defaults[name] else "environment"

    return [Setting(name, value, origin(name), defaults[name]) for name, value in values.items()]


def _flat(tree: dict[str, dict[str, object]]) -> Iterable[tuple[str, object]]:
    return ((f"{section}.{key}", value) for section, keys in tree.items() for key, value in keys.items())
