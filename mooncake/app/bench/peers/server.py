"""vLLM's OpenAI server as a peer: ``server_script.py`` under its own interpreter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from mooncake.app.bench.peers.engine import TIMEOUT_S, vllm_environment
from mooncake.app.bench.peers.process import PeerProcess, signal_group

SCRIPT = Path(__file__).with_name("server_script.py")


class Listening(msgspec.Struct):
    """The only line of the script's output."""

    port: int
    versions: dict[str, str]
    start_s: float


class PeerServer(PeerProcess):
    """``with PeerServer(…) as peer, peer.awake():`` it answers at ``peer.port``. Raises the errors of
    ``PeerProcess``."""

    def __init__(self, python: str, model: str, name: str, dtype: str, *, threads: int, max_model_len: int) -> None:
        self.versions: dict[str, str] = {}
        self.start_s, self.port = 0.0, 0
        added = vllm_environment(threads)
        self.preload = added.get("LD_PRELOAD", "")
        sizes = {"--max-model-len": max_model_len, "--max-num-seqs": 64}
        command = [python, str(SCRIPT), model, "--name", name, "--dtype", dtype]
        command += [str(part) for flag in sizes.items() for part in flag]
        super().__init__("vllm", command, os.environ | added, TIMEOUT_S)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            ready = self.decode(self.greeting, Listening)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.port, self.versions, self.start_s = ready.port, ready.versions, ready.start_s
        return self

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Its processes run inside, and are stopped outside."""
        signal_group(self.process, signal.SIGCONT)
        try:
            yield
        finally:
            signal_group(self.process, signal.SIGSTOP)
