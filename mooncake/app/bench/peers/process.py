"""A peer of a benchmark: a script under another Python interpreter, with tasks and answers as lines of JSON.

Its process group is stopped (SIGSTOP) between tasks, because idle engines still poll and spin, which would slow down
the next measurement. It must not know what is measured.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Self, TypeVar

import msgspec

from mooncake.errors import DeadlineExceeded, InternalError, NodeUnavailable

TIMEOUT_S = 30.0
END_GRACE_S = 10.0

Answer = TypeVar("Answer")


class PeerProcess:
    """``with PeerProcess(name, command) as peer``: started inside, all its processes ended after.

    The first line of JSON from it means that it is ready (``greeting``); other lines are ignored. Entering and ``ask``
    raise NodeUnavailable when it does not start or has ended (with its last output), DeadlineExceeded when no line
    comes within ``timeout_s``, InternalError for an invalid answer.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.name = name
        self.greeting = b""
        self._command = list(command)
        self._environment = environment
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = self._start(self._log)
            stack.callback(_end_group, self._process)
            self.greeting = self._line()
            signal_group(self._process, signal.SIGSTOP)
            self._ending = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that answers; it may have started others in its process group."""
        assert self._process is not None, "a peer is used in its with block"
        return self._process

    def ask(self, task: object, kind: type[Answer]) -> Answer:
        """Send a task, and let the process run until it has answered."""
        pipe = self.process.stdin
        assert pipe is not None
        signal_group(self.process, signal.SIGCONT)
        try:
            pipe.write(msgspec.json.encode(task) + b"\n")
            pipe.flush()
            return self.decode(self._line(), kind)
        except BrokenPipeError:
            raise NodeUnavailable(f"{self.name} ended: {self._last_words()}") from None
        finally:
            signal_group(self.process, signal.SIGSTOP)

    def decode(self, line: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError:
            raise InternalError(f"{self.name} answered {line[:80]!r}") from None

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start it in its own process group, but in our session: if we are killed, the kernel sends SIGHUP and SIGCONT
        to a stopped orphaned group, so that it does not stay forever."""
        try:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                process_group=0,
            )
        except OSError as error:
            raise NodeUnavailable(f"cannot start {self.name} with {self._command[0]}: {error.strerror}") from None

    def _line(self) -> bytes:
        """The next line of JSON."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + self._timeout_s
        while True:
            line = _read_line(self.process.stdout, deadline)
            if line is None:
                raise DeadlineExceeded(f"{self.name} did not answer within {self._timeout_s:g} s")
            if not line:
                raise NodeUnavailable(f"{self.name} ended: {self._last_words()}")
            if line.startswith(b"{"):
                return line

    def _last_words(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Close its input to end it, then kill every process that it started."""
    signal_group(process, signal.SIGCONT)
    with process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)
        signal_group(process, signal.SIGKILL)


def _read_line(pipe: IO[bytes], deadline: float) -> bytes | None:
    """A whole line; empty at the end of the stream, None after ``deadline``. It reads no byte beyond the line, because
    these would be lost."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            byte = os.read(pipe.fileno(), 1)
            if not byte:
                return b""
            line += byte
    return line
