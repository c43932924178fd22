"""Reads JSON: files of a model, with a size limit, values of settings, and files of lines; every mistake is one
sentence."""

from __future__ import annotations

import json
from pathlib import Path

from mooncake.errors import ConfigError, ModelError, shown

MAX_JSON_BYTES = 64 << 20


def read_json(path: Path, why: str = "") -> dict[str, object]:
    """A JSON object from a file of the model. Raises ModelError."""
    tree = _read(path, why)
    if not isinstance(tree, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return tree


def read_json_list(path: Path) -> list[dict[str, object]]:
    """A list of JSON objects from a file of the model. Raises ModelError."""
    tree = _read(path)
    if not isinstance(tree, list) or not all(isinstance(each, dict) for each in tree):
        raise ModelError(f"{path} must hold a list of JSON objects")
    return tree


def _read(path: Path, why: str = "") -> object:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB")
        tree: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"there is no {path.name} in {path.parent}" + (f"; {why}" if why else "")) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    return tree


def filled_lines(file: Path) -> list[tuple[str, str]]:
    """Where each line of a file is that is not blank, in words, and the line. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other ends of lines, as they are
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    return [(f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def json_object(text: str, name: str) -> dict[str, object]:
    """The setting ``name``, a JSON object; "" is an empty one. Raises ConfigError."""
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is a JSON object, got {shown(found)}")
    return found
