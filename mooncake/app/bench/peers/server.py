"""vLLM's OpenAI server as a peer: ``server_script.py`` under its own interpreter."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mooncake.app.bench.peers.engine import StartedPeer, vllm_environment
from mooncake.app.bench.peers.process import signal_group

SCRIPT = Path(__file__).with_name("server_script.py")


class PeerServer(StartedPeer):
    """``with PeerServer(…) as peer, peer.awake():`` it answers at ``peer.port``."""

    def __init__(self, python: str, model: str, name: str, dtype: str, *, threads: int, max_model_len: int) -> None:
        command = [python, str(SCRIPT), model, "--name", name, "--dtype", dtype]
        command += ["--max-model-len", str(max_model_len), "--max-num-seqs", "64"]
        super().__init__("vllm", command, vllm_environment(threads))

    @property
    def port(self) -> int:
        return self.started.port

    @property
    def pid(self) -> int:
        """Of the process that clients speak to, apart from that of the engine; 0: unknown."""
        return self.started.pid

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Its processes run inside, and are stopped outside."""
        signal_group(self.process, signal.SIGCONT)
        try:
            yield
        finally:
            signal_group(self.process, signal.SIGSTOP)
