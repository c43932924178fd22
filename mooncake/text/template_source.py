"""Where a chat template of one's own comes from: a file, or the text itself. By vLLM's rule; nothing is compiled."""

from __future__ import annotations

import os
from pathlib import Path

from mooncake.errors import ConfigError, shown
from mooncake.text.chat_template import MAX_TEMPLATE_CHARS

_ONLY_IN_TEXTS = frozenset("{}\n")


def template_source(given: str | Path | None, name: str) -> str:
    """The file that ``given`` names, or else ``given`` itself, if it has braces or several lines. In a text of one line
    ``\\n`` is the end of a line, as in vLLM's. Nothing given is "".

    Raises ConfigError, with ``name`` for the setting, for a file that cannot be read.
    """
    if given is None or given == "":
        return ""
    if not isinstance(given, (str, Path)):
        raise ConfigError(f"{name} is a file, or the text of a template, got {shown(given)}")
    try:
        with open(os.path.expanduser(given), encoding="utf-8") as file:  # noqa: PTH111, PTH123 - for "~nobody"
            source = file.read(MAX_TEMPLATE_CHARS + 1)
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {given} is not text in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: what cannot be a path
        if isinstance(given, Path) or _ONLY_IN_TEXTS.isdisjoint(given):
            why = error.strerror if isinstance(error, OSError) else error
            what = "a template given as text has braces" if isinstance(given, str) else ""
            raise ConfigError(f"{name}: cannot read {given}: {why}" + (f"; {what}" if what else "")) from None
        source = given if "\n" in given else given.replace("\\n", "\n")
    if not source.strip():
        raise ConfigError(f"{name}: the template is empty")
    return source
