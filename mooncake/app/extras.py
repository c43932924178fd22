"""Optional dependencies: asked for by name, missed in one sentence that says how to get them."""

from __future__ import annotations

import importlib.util

from mooncake.errors import ConfigError


class MissingDependency(ConfigError):
    """Something optional is not installed. The command line leaves with exit code 3."""


def require(module: str, extra: str, what_for: str) -> None:
    """Raises MissingDependency unless ``module`` can be imported. Imports nothing itself."""
    if importlib.util.find_spec(module) is None:
        raise MissingDependency(
            f"{what_for} needs {module}, which is not installed; get it with: pip install 'mooncake-cluster[{extra}]'"
        )
