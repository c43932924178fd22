"""C++ versions of hot paths: each is built at first use, and its Python reference serves where that is not possible."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

from mooncake.native import ROUNDING_AS_PYTHON, BuildFailed, load_module

log = logging.getLogger(__name__)

KEYS_HEADER = Path(__file__).with_name("keys.h")


def load_or_warn(name: str, source: Path, task: str) -> ModuleType | None:
    """Load one of our libraries. If it cannot be built: None, with a warning that ``task`` runs in Python."""
    try:
        return load_module(name, source, [KEYS_HEADER], ROUNDING_AS_PYTHON)
    except BuildFailed as error:
        log.warning("%s in Python, several times slower: %s", task, error)
        return None
