"""Real processes for the tests of the store: started when asked for, ended whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

from kvstore.transfer.engine import TransferEngine
from mooncake.types import SegmentAddress

ACTOR = Path(__file__).with_name("actor.py")
ROOT = ACTOR.parents[2]


@pytest.fixture(scope="session")
def actors() -> Iterator[ForkServer]:
    """What forks them: they import the same, which takes longer than most tests."""
    server = ForkServer("actor", PYTHONPATH=os.pathsep.join((str(ACTOR.parent), str(ROOT))))
    yield server
    server.close()


class Actor:
    """One process of ``actor.py``."""

    def __init__(self, actors: ForkServer, role: str, **arguments: object) -> None:
        stdin, self._to = os.pipe()
        self._from, stdout = os.pipe()
        self.process = actors.start("actor:main", [role, json.dumps(arguments)], stdin, stdout)
        os.close(stdin)
        os.close(stdout)
        self._heard = b""
        self.greeting: Any = self.listen()

    def ask(self, *command: object) -> Any:
        self.tell(*command)
        return self.listen()

    def tell(self, *command: object) -> None:
        os.write(self._to, json.dumps(command).encode() + b"\n")

    def listen(self, timeout_s: float = 30.0) -> Any:
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._from], [], [], timeout_s)
            more = os.read(self._from, 1 << 16) if ready else b""
            assert more, f"the process said nothing (exit code {self.process.returncode})"
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    @property
    def address(self) -> SegmentAddress:
        return SegmentAddress(**self.greeting.get("segment", self.greeting))

    def freeze(self) -> None:
        self.process.freeze()

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        os.close(self._to)
        os.close(self._from)


@pytest.fixture
def start_actor(actors: ForkServer) -> Iterator[Callable[..., Actor]]:
    started: list[Actor] = []

    def start(role: str, **arguments: object) -> Actor:
        started.append(Actor(actors, role, **arguments))
        return started[-1]

    yield start
    for actor in started:
        actor.end()


@pytest.fixture
def engine_over() -> Iterator[Callable[..., TransferEngine]]:
    """``engine_over("tcp", streams=1)``: a transfer engine, closed at the end."""
    engines: list[TransferEngine] = []

    def make(*transports: object, **options: object) -> TransferEngine:
        engines.append(TransferEngine("tester", transports, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


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
