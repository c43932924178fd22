"""``python -m conductor --config FILE``: one conductor process."""

from conductor.node import ConductorNode
from mooncake.app.cluster.directory import open_directory
from mooncake.app.cluster.role_main import run_role
from mooncake.app.extras import require_tracing
from mooncake.config import Config


def build(config: Config) -> ConductorNode:
    require_tracing(config.conductor.otlp_traces_endpoint)
    return ConductorNode(config, open_directory)


if __name__ == "__main__":
    run_role("conductor", build)
