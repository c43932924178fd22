"""Ranks and stages of models in forked processes, as nodes in ``forked_nodes``: to import torch takes each longer than
most tests. A module with a fixture ``forked_ranks`` of its own starts them as they are."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from io import FileIO

import pytest
from fork_server import Forked

from mooncake.model.parallel import context_parallel, pipeline_stage, tensor_parallel
from mooncake.model.parallel.ranks import Workers

MAIN = {module.__name__: module.main for module in (context_parallel, pipeline_stage, tensor_parallel)}


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "start", start)
        yield


class ForkedRank:
    """As ``subprocess.Popen``. Any thread may ask how it ended: one of its own waits for that."""

    def __init__(self, forked: Forked, stdin: FileIO, stdout: FileIO) -> None:
        self.pid, self.stdin, self.stdout = forked.pid, stdin, stdout
        self._forked, self._has_ended = forked, threading.Event()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        self._forked.wait(None)
        self._has_ended.set()

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode if self._has_ended.is_set() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired("a rank", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(workers: Workers, module: str, arguments: Sequence[object], share: Collection[int] = ()) -> None:
    """For ``Workers.start``."""
    from forked_nodes import fork_server  # few tests need it

    (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
    try:
        command = [module, *map(str, arguments)]
        forked = fork_server().start("forked_ranks:run", command, their_stdin, their_stdout, share=share)
    finally:
        os.close(their_stdin)
        os.close(their_stdout)
    rank = ForkedRank(forked, FileIO(stdin, "w"), FileIO(stdout))
    workers.processes.append(rank)  # type: ignore[arg-type]


def run() -> None:
    """In the forked process."""
    module, *arguments = sys.argv[1:]
    main = MAIN.get(module) or importlib.import_module(module).main
    main(arguments)
