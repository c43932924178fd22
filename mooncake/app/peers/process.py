"""The parent's side of ``script.py``: start another engine in its own interpreter, and give it turns.

Between its turns a peer is stopped (SIGSTOP, the whole process group), because engines that are idle still poll and
spin, and would slow down whoever is measured next. It must not know what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

import msgspec

from mooncake.errors import DeadlineExceeded, InternalError, NodeUnavailable

SCRIPT = Path(__file__).with_name("script.py")
START_TIMEOUT_S = 900.0  # vLLM compiles for minutes the first time
TASK_TIMEOUT_S = 900.0
END_GRACE_S = 10.0

Prompts = Sequence[Sequence[int]]


class Ready(msgspec.Struct):
    """The first line that a peer writes."""

    versions: dict[str, str]
    start_s: float


class Done(msgspec.Struct):
    """Its answer to a task."""

    s: float


Answer = TypeVar("Answer", Ready, Done)


class PeerProcess:
    """``with PeerProcess("vllm", python, model, dtype, threads) as peer``: loaded inside, all its processes gone after.

    Entering raises NodeUnavailable when it does not start (with its last words), DeadlineExceeded when that takes too
    long.
    """

    def __init__(self, engine: str, python: str, model: str, dtype: str, threads: int) -> None:
        self.engine = engine
        self.has_prefix_cache = engine == "vllm"
        self.versions: dict[str, str] = {}
        self.start_s = 0.0
        self.preload = (ctypes.util.find_library("tcmalloc_minimal") or "") if engine == "vllm" else ""
        self._command = [python, str(SCRIPT), engine, model, "--dtype", dtype, "--threads", str(threads)]
        self._environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        if self.preload:  # vLLM's own advice for CPUs
            self._environment["LD_PRELOAD"] = self.preload
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._ending = ExitStack()

    def __enter__(self) -> PeerProcess:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = self._start(self._log)
            stack.callback(end_group, self._process)
            ready = self._answer(Ready, START_TIMEOUT_S)
            self.versions, self.start_s = ready.versions, ready.start_s
            self._signal(signal.SIGSTOP)
            self._ending = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    @property
    def pid(self) -> int:
        """Of the process that answers; it may have started others, all in one process group."""
        assert self._process is not None, "a peer is used in its with block"
        return self._process.pid

    def run(self, prompts: Prompts, new: int) -> float:
        """Seconds in which the peer generated exactly ``new`` tokens for each prompt. Raises as entering does."""
        assert self._process is not None, "a peer is used in its with block"
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            task = {"prompts": [list(map(int, prompt)) for prompt in prompts], "new": new}
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()
            return self._answer(Done, TASK_TIMEOUT_S).s
        except BrokenPipeError:
            raise NodeUnavailable(f"{self.engine} ended: {self._last_words()}") from None
        finally:
            self._signal(signal.SIGSTOP)

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """In a process group of its own but in our session: if we are killed, the kernel wakes and hangs up a stopped
        group that lost its parent, so that it does not stay for ever."""
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
            raise NodeUnavailable(f"cannot start {self.engine} with {self._command[0]}: {error.strerror}") from None

    def _answer(self, kind: type[Answer], timeout_s: float) -> Answer:
        assert self._process is not None
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, timeout_s)
        if line is None:
            raise DeadlineExceeded(f"{self.engine} did not answer within {timeout_s:g} s")
        if not line:
            raise NodeUnavailable(f"{self.engine} ended: {self._last_words()}")
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError:
            raise InternalError(f"{self.engine} answered {line[:80]!r}") from None

    def _last_words(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        signal_group(self._process, number)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask by closing its input, then make sure of every process that it started."""
    signal_group(process, signal.SIGCONT)
    with process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)
        signal_group(process, signal.SIGKILL)


def read_line(pipe: IO[bytes], timeout_s: float) -> bytes | None:
    """A whole line; empty at the end of the stream, None after ``timeout_s``. A peer writes one line at a time."""
    deadline = time.monotonic() + timeout_s
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return b""
            line += data
    return line
