"""Another engine as a peer: ``script.py`` under its own interpreter, which generates for a list of prompts."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from mooncake.app.bench.peers.process import PeerProcess

SCRIPT = Path(__file__).with_name("script.py")
TIMEOUT_S = 900.0  # vLLM compiles for minutes the first time

Prompts = Sequence[Sequence[int]]


class Started(msgspec.Struct):
    """The first line of a script's output."""

    versions: dict[str, str]
    start_s: float
    port: int = 0  # of a server
    pid: int = 0  # of the process that clients of a server speak to; 0: unknown


class Done(msgspec.Struct):
    """The script's answer to a task."""

    s: float


class StartedPeer(PeerProcess):
    """Another engine or its server, loaded inside its ``with`` block. Raises the errors of ``PeerProcess``."""

    def __init__(self, name: str, command: Sequence[str], added: dict[str, str]) -> None:
        """``added`` to our environment is its own."""
        super().__init__(name, command, os.environ | added, TIMEOUT_S)
        self.started = Started({}, 0.0)
        self._preload = added.get("LD_PRELOAD", "")

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.started = self.decode(self.greeting, Started)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @property
    def facts(self) -> dict[str, object]:
        """What a report tells of it."""
        return {"start_s": round(self.started.start_s, 1), "preload": self._preload, **self.started.versions}


class PeerEngine(StartedPeer):
    """``with PeerEngine("vllm", python, model, dtype, threads) as peer``."""

    def __init__(self, name: str, python: str, model: str, dtype: str, threads: int) -> None:
        self.has_prefix_cache = name != "transformers"
        command = [python, str(SCRIPT), name, model, "--dtype", dtype, "--threads", str(threads)]
        added = vllm_environment(threads) if name == "vllm" else {"OMP_NUM_THREADS": str(threads)}
        super().__init__(name, command, added)

    def run(self, prompts: Prompts, new: int) -> float:
        """Seconds to generate exactly ``new`` tokens for each prompt."""
        return self.ask({"prompts": [list(map(int, prompt)) for prompt in prompts], "new": new}, Done).s


def vllm_environment(threads: int) -> dict[str, str]:
    """Added to a vLLM's environment: as many cores as other engines have, and the allocator that it recommends on CPUs,
    where it is installed."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        # By default it keeps a core free for its scheduler, which is half of a machine with two.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
    }
    own = {name: os.environ.get(name, value) for name, value in settings.items()}
    preload = ctypes.util.find_library("tcmalloc_minimal")
    return own | {"OMP_NUM_THREADS": str(threads)} | ({"LD_PRELOAD": preload} if preload else {})
