"""Processes for tests that need no start of an interpreter each: one process imports what they use, and forks them.

Each is a process of its own, as real as any: it is frozen, killed and interrupted like one that was started, and ends
as an interpreter does, but for what is imported, which takes long to take apart. ``ForkServer`` is the side of the
tests; run as a script, this file is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

MOST_BYTES = 1 << 17  # of a request: arguments and environment
MOST_FDS = 64  # that come with it


class Forked:
    """One process; ends with the server at the latest. ``status`` tells its id, and how it ended once it has."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = int(status.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, as ``wait``; None while it runs."""
        with contextlib.suppress(TimeoutError):
            self.wait(0)
        return self.returncode

    def wait(self, timeout_s: float | None) -> int:
        """Its exit code, or minus the signal that ended it. Raises TimeoutError."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} runs on")
            self.returncode = os.waitstatus_to_exitcode(int(self._status.recv(64)))
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread stands still."""
        self.send_signal(signal.SIGSTOP)
        while any(_state(task) != "T" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            time.sleep(0.001)

    def kill(self) -> None:
        """Returns once it is gone."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.wait(10)


def _state(task: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


class ForkServer:
    """Forks processes that have ``modules`` imported. ``close`` ends it and them."""

    def __init__(self, *modules: str, **environment: str) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join((str(Path(__file__).parents[2]), *filter(None, sys.path)))
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *modules],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", **environment},  # numpy starts others
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(
        self,
        function: str,
        arguments: Sequence[str],
        stdin: int,
        stdout: int,
        stderr: int = 2,
        environment: Mapping[str, str] | None = None,
        in_session: bool = False,
        share: Collection[int] = (),
    ) -> Forked:
        """Run ``function`` (``module:name``) with ``arguments`` as its command line, in the folder of now, and in the
        environment of now unless another is given; with ``in_session`` in a session and a group of its own. It has the
        file descriptors ``share`` under the same numbers."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ if environment is None else environment)
        given = [function, list(arguments), environment, str(Path.cwd()), in_session, [0, 1, 2, *share]]
        with theirs:
            fds = [theirs.fileno(), stdin, stdout, stderr, *share]
            socket.send_fds(self._requests, [json.dumps(given).encode()], fds)
        return Forked(ours)

    def run(
        self,
        function: str,
        arguments: Sequence[str] = (),
        *,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """As ``start``, until it ends, with its output as text."""
        with tempfile.TemporaryFile() as given, ThreadPoolExecutor(2) as readers:
            given.write(stdin.encode())
            given.seek(0)
            ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
            process = self.start(function, arguments, given.fileno(), *theirs, environment)
            for fd in theirs:
                os.close(fd)
            outputs = [readers.submit(_read, fd) for fd in ours]
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
            out, err = (output.result() for output in outputs)
        return subprocess.CompletedProcess(arguments, code, out, err)

    def close(self) -> None:
        self._requests.close()
        self._process.wait(10)


def _read(fd: int) -> str:
    with open(fd, encoding="utf-8") as pipe:
        return pipe.read()


def serve(requests: socket.socket) -> Callable[[], object]:
    """Fork a process for each request. Returns in each with what it is to call; never returns in the server."""
    running: dict[int, socket.socket] = {}
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _tell_ends(running)
        if requests not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(requests, MOST_BYTES, MOST_FDS)
        if not request:
            _end_all(running)
        teller = socket.socket(fileno=fds.pop(0))
        pid = os.fork()
        if pid == 0:
            for other in (requests, woken, wakes, teller, *running.values()):
                other.close()
            return _become(*json.loads(request), fds)
        running[pid] = teller
        running[pid].send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def _tell_ends(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as teller, contextlib.suppress(BrokenPipeError):  # the test asks no more
            teller.send(str(status).encode())


def _end_all(running: dict[int, socket.socket]) -> NoReturn:
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _become(
    function: str,
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    in_session: bool,
    numbers: list[int],
    fds: list[int],
) -> Callable[[], object]:
    if in_session:
        os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _renumber(fds, numbers)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    module, _, name = function.partition(":")
    sys.argv = [module, *arguments]
    called: Callable[[], object] = getattr(importlib.import_module(module), name)
    return called


def _renumber(fds: list[int], numbers: list[int]) -> None:
    """Any of the numbers may be that of another one now."""
    free_from = max(*fds, *numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free_from) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _call(function: Callable[[], object]) -> NoReturn:
    """What an interpreter does with a script, and with its exit."""
    code: object = 0
    try:
        function()
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        importlib.import_module(each)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    gc.freeze()  # so that no process copies the pages of what it does not change
    _call(serve(socket.socket(fileno=int(sys.argv[1]))))
