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


class Ready(msgspec.Struct):
    """The first line of the script's output."""

    versions: dict[str, str]
    start_s: float


class Done(msgspec.Struct):
    """The script's answer to a task."""

    s: float


class PeerEngine(PeerProcess):
    """``with PeerEngine("vllm", python, model, dtype, threads) as peer``: loaded inside. Raises the errors of
    ``PeerProcess``."""

    def __init__(self, name: str, python: str, model: str, dtype: str, threads: int) -> None:
        self.has_prefix_cache = name != "transformers"
        self.versions: dict[str, str] = {}
        self.start_s = 0.0
        added = vllm_environment(threads) if name == "vllm" else {"OMP_NUM_THREADS": str(threads)}
        self.preload = added.get("LD_PRELOAD", "")
        command = [python, str(SCRIPT), name, model, "--dtype", dtype, "--threads", str(threads)]
        super().__init__(name, command, os.environ | added, TIMEOUT_S)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            ready = self.decode(self.greeting, Ready)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.versions, self.start_s = ready.versions, ready.start_s
        return self

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
