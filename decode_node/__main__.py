"""``python -m decode_node --config FILE --set key=value``: one decode node."""

from decode_node.node import DecodeNode
from mooncake.app.cluster.role_main import run_role

if __name__ == "__main__":
    run_role("decode", DecodeNode)
