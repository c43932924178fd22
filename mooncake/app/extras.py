"""Optional dependencies: when one is missing, an error of one sentence says how to install it."""

from __future__ import annotations

import importlib.util

from mooncake.errors import ConfigError


class MissingDependency(ConfigError):
    """An optional dependency is not installed. The command line exits with code 3."""


def require(module: str, extra: str, what_for: str) -> None:
    """Raises MissingDependency unless ``module`` can be imported. Of it only packages around it are imported."""
    if not _is_there(module):
        raise MissingDependency(
            f"{what_for} needs {module}, which is not installed; get it with: pip install 'mooncake-cluster[{extra}]'"
        )


def require_tracing(endpoint: str) -> None:
    """Of ``conductor.otlp_traces_endpoint``. Raises MissingDependency."""
    if endpoint:
        for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc"):
            require(module, "tracing", "conductor.otlp_traces_endpoint")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False
