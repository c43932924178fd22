"""``python -m decode_node --config FILE --set key=value``: one decode node."""

from mooncake.app.cluster.role_main import Node, run_role
from mooncake.config import Config


def build(config: Config) -> Node:
    """Torch is imported here, which takes seconds: by now the end of a launcher would end this process."""
    from decode_node.node import DecodeNode

    return DecodeNode(config)


if __name__ == "__main__":
    run_role("decode", build)
