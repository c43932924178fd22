"""Nodes in processes that are forked from one that has imported all roles: to import torch takes longer than all else
that a small node does at its start."""

from __future__ import annotations

import asyncio
import atexit
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from fork_server import Forked, ForkServer

from mooncake.app.cluster.local import NodeProcess, start_module
from mooncake.app.cluster.role_main import PARENT_ENV

THREADS_ENV = "OMP_NUM_THREADS"  # read when torch is imported
IMPORTED = (
    *("conductor.node", "kvstore.node", "prefill_node.node", "decode_node.node", "mooncake.app.cluster.directory"),
    "forked_ranks",
)


@cache
def fork_server() -> ForkServer:
    server = ForkServer(*IMPORTED, "uvloop", **{THREADS_ENV: "1"})
    atexit.register(server.close)
    return server


class ForkedNode:
    """As ``asyncio.subprocess.Process``."""

    def __init__(self, forked: Forked, stdout: asyncio.StreamReader) -> None:
        self._forked = forked
        self.pid = forked.pid
        self.stdout = stdout

    @property
    def returncode(self) -> int | None:
        return self._forked.poll()

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


async def fork_module(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NodeProcess:
    """For ``LocalCluster``."""
    if environment[THREADS_ENV] != "1":
        return await start_module(module, arguments, environment)
    ours, theirs = os.pipe()
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        server = fork_server()
        environment = {**environment, PARENT_ENV: str(server.pid)}
        arguments = [module, *arguments]
        forked = server.start("forked_nodes:run", arguments, nothing, theirs, theirs, environment, in_session=True)
    finally:
        os.close(nothing)
        os.close(theirs)
    return ForkedNode(forked, reader)


def run() -> None:
    """What ``python -m`` does, in the forked process."""
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
