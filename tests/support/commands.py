"""The command ``mooncake`` in processes of its own that are forked from one that has it imported."""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from fork_server import ForkServer

IMPORTED = ("cli", "cluster.serve", "key_scales", "run_batch", "sim.simulate", "talk", "traces.replay_command")


@cache
def _server() -> ForkServer:
    server = ForkServer(*(f"mooncake.app.{name}" for name in IMPORTED))
    atexit.register(server.close)
    return server


def run(*arguments: str, stdin: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` of ``mooncake`` with ``arguments``, its output captured as text."""
    with tempfile.TemporaryFile() as given, ThreadPoolExecutor(2) as readers:
        given.write(stdin.encode())
        given.seek(0)
        ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
        process = _server().start("mooncake.__main__:main", arguments, given.fileno(), *theirs)
        for fd in theirs:
            os.close(fd)
        outputs = [readers.submit(_read, fd) for fd in ours]
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out, err = (output.result() for output in outputs)
    return subprocess.CompletedProcess(arguments, code, out, err)


def _read(fd: int) -> str:
    with open(fd, encoding="utf-8") as pipe:
        return pipe.read()
