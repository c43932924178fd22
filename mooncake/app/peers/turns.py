"""A peer that is measured in turns: a script under another Python, which takes tasks and answers, a line of JSON each.

It is stopped (SIGSTOP, its whole process group) while it is not at its turn, because engines that are idle still poll
and spin. It must not know what is measured.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from mooncake.app.peers.process import end_group, read_line, signal_group
from mooncake.errors import DeadlineExceeded, InternalError, NodeUnavailable

TIMEOUT_S = 30.0  # to start, and for an answer

Answer = TypeVar("Answer")


class PeerInTurns:
    """``with PeerInTurns(name, python, script) as peer``: started inside, all its processes gone after.

    Entering raises NodeUnavailable when it does not start (with its last words), DeadlineExceeded when that takes too
    long.
    """

    def __init__(self, name: str, python: str, script: Path) -> None:
        self.name = name
        self._command = [python, str(script)]
        self._ending = ExitStack()

    def __enter__(self) -> PeerInTurns:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    process_group=0,
                )
            except OSError as error:
                raise NodeUnavailable(f"cannot start {self.name}: {self._command[0]}: {error.strerror}") from None
            stack.callback(end_group, self._process)
            while b"ready" not in self._line():
                pass
            signal_group(self._process, signal.SIGSTOP)
            self._ending = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    def ask(self, task: object, answer: type[Answer]) -> Answer:
        """Let it run until it has answered. Raises NodeUnavailable when it ended, DeadlineExceeded, or InternalError
        when its answer means nothing."""
        assert self._process.stdin is not None
        signal_group(self._process, signal.SIGCONT)
        try:
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()
            while not (line := self._line()).startswith(b"{"):  # it may talk in between
                pass
            return msgspec.json.decode(line, type=answer)
        except (BrokenPipeError, msgspec.DecodeError) as error:
            raise InternalError(f"{self.name}: {error}") from None
        finally:
            signal_group(self._process, signal.SIGSTOP)

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, TIMEOUT_S)
        if line is None:
            raise DeadlineExceeded(f"{self.name} did not answer within {TIMEOUT_S:g} s")
        if not line:
            self._log.seek(0)
            words = self._log.read().decode(errors="replace").strip().splitlines()
            raise NodeUnavailable(f"{self.name} ended: {words[-1] if words else 'without a word'}")
        return line
