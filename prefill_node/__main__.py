"""``python -m prefill_node --config FILE --set key=value``: one prefill node."""

from mooncake.app.cluster.role_main import run_role
from prefill_node.node import PrefillNode

if __name__ == "__main__":
    run_role("prefill", PrefillNode)
