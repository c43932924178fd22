"""``python -m mooncake.app.cluster.compute_node --config FILE --set node.role=prefill``: one node that switches."""

from mooncake.app.cluster.role_main import Node, run_role
from mooncake.config import Config


def build(config: Config) -> Node:
    """Torch is imported here, which takes seconds: by now the end of a launcher would end this process."""
    from mooncake.app.cluster.compute_node.node import ComputeNode

    return ComputeNode(config)


if __name__ == "__main__":
    run_role("compute", build)
