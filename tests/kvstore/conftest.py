"""Real processes for the tests of the store: started when asked for, ended whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.types import SegmentAddress

ACTOR = Path(__file__).with_name("actor.py")
ROOT = ACTOR.parents[2]


class Actor:
    """One process of ``actor.py``."""

    def __init__(self, role: str, **arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ACTOR), role, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.greeting: Any = self.listen()

    def ask(self, *command: object) -> Any:
        self.tell(*command)
        return self.listen()

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def listen(self, timeout_s: float = 30.0) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else b""
        assert line, f"the process said nothing (exit code {self.process.poll()})"
        return json.loads(line)

    @property
    def address(self) -> SegmentAddress:
        return SegmentAddress(**self.greeting.get("segment", self.greeting))

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start_actor() -> Iterator[Callable[..., Actor]]:
    actors: list[Actor] = []

    def start(role: str, **arguments: object) -> Actor:
        actors.append(Actor(role, **arguments))
        return actors[-1]

    yield start
    for actor in actors:
        actor.end()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """``eventually(lambda: …)`` returns once the condition holds, and fails after ``within_s``."""

    def wait(condition: Callable[[], object], within_s: float = 5.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    return wait


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    yield
    assert not list(Path("/dev/shm").glob("*mooncake*"))
