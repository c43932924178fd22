"""A configuration as a file with a line of explanation above each setting.

The explanations are the comments of ``mooncake.config_sections``, where the settings are: they are written once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import get_type_hints

from mooncake.app.origins import Setting
from mooncake.config import Config, toml_value

_FIELD = re.compile(r" {4}(\w+): [^=]+ = ")


def toml_text(settings: Iterable[Setting]) -> str:
    """The file that means these settings, in their order."""
    return "\n".join(_lines(settings)) + "\n"


def _lines(settings: Iterable[Setting]) -> Iterator[str]:
    sections = get_type_hints(Config)
    previous, said = "", dict[str, list[str]]()
    for setting in settings:
        section, _, key = setting.name.partition(".")
        if section != previous:
            said = _comments(sections[section])
            yield from ([""] if previous else []) + [f"[{section}]"]
            previous = section
        yield from (f"# {line}" for line in said.get(key, []))
        if setting.by_device is None:
            yield f"{key} = {toml_value(setting.value)}"
        else:
            yield f"{key} = {toml_value(setting.by_device)}  # {toml_value(setting.value)} on this device"


def _comments(section: type) -> dict[str, list[str]]:
    """By field, the comments above it and behind it. A field that a section inherits is its parent's."""
    found: dict[str, list[str]] = {}
    for parent in reversed([each for each in section.__mro__ if each.__module__ == section.__module__]):
        above: list[str] = []
        for line in inspect.getsource(parent).splitlines():
            if line.startswith("    # "):
                above.append(line[6:])
                continue
            if field := _FIELD.match(line):
                behind = line.partition("  # ")[2]
                found[field[1]] = [*above, *([behind] if behind else [])]
            above = []
    return found
