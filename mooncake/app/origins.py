"""The origin of each value of a configuration: default, environment, file or flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mooncake.config import BY_DEVICE, Config, EngineSection, PrefillSection, load_config, masked, read_tree


@dataclass(frozen=True, slots=True)
class Setting:
    name: str  # "section.key"
    value: object
    origin: str  # "default", "environment", the file's name, or "flag"
    default: object
    by_device: object = None  # what a file has for it where the value follows from the device; None: it does not


def settings(path: Path | None, overrides: list[str]) -> list[Setting]:
    """All values in the order of the configuration, with secrets hidden. Raises ConfigError for a wrong value."""
    config = load_config(path, overrides)
    values = dict(_flat(msgspec.to_builtins(masked(config))))
    prefill, decode = PrefillSection(device=config.prefill.device), EngineSection(device=config.decode.device)
    defaults = dict(_flat(msgspec.to_builtins(Config(prefill=prefill, decode=decode))))  # of these devices
    defaults |= dict.fromkeys(("prefill.device", "decode.device"), "cpu")
    in_file = dict(_flat(read_tree(path, [])))
    given = dict(_flat(read_tree(path, overrides)))
    flagged = {override.partition("=")[0].strip() for override in overrides}

    def origin(name: str) -> str:
        if name in flagged:
            return "flag"
        if name in in_file:
            return str(path)
        return "default" if values[name] == defaults[name] else "environment"

    def by_device(name: str) -> object:
        says_so = BY_DEVICE.get(name.partition(".")[2])
        return says_so if given.get(name, says_so) == says_so else None

    return [Setting(name, value, origin(name), defaults[name], by_device(name)) for name, value in values.items()]


def _flat(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for section, keys in tree.items():
        assert isinstance(keys, dict)
        yield from ((f"{section}.{key}", value) for key, value in keys.items())
