"""The command ``mooncake`` in processes of its own that are forked from one that has it imported."""

from __future__ import annotations

import atexit
import subprocess
from functools import cache

from fork_server import ForkServer

IMPORTED = (
    "cli.main",
    "cluster.serve",
    "key_scales",
    "run_batch",
    "sim.commands.simulate",
    "talk",
    "traces.replay_command",
)


@cache
def _server() -> ForkServer:
    server = ForkServer(*(f"mooncake.app.{name}" for name in IMPORTED), "typer._adapters")  # of every flag
    atexit.register(server.close)
    return server


def run(*arguments: str, stdin: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` of ``mooncake`` with ``arguments``, its output captured as text."""
    return _server().run("mooncake.__main__:main", arguments, stdin=stdin, timeout_s=timeout)
