"""``python -m conductor --config FILE``: one conductor process."""

from conductor.node import ConductorNode
from mooncake.app.role_main import run_role

if __name__ == "__main__":
    run_role("conductor", ConductorNode)
