"""Optional dependencies: when one is missing, an error of one sentence says how to install it."""

from __future__ import annotations

import importlib.util

from mooncake.errors import ConfigError


class MissingDependency(ConfigError):
    """An optional dependency is not installed. The command line exits with code 3."""


def require(module: str, extra: str, what_for: str) -> None:
    """Raises MissingDependency unless ``module`` can be imported. Imports nothing itself."""
    if importlib.util.find_spec(module) is None:
        raise MissingDependency(
            f"{what_for} needs {module}, which is not installed; get it with: pip install 'mooncake-cluster[{extra}]'"
        )
