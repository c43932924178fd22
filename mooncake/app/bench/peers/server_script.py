"""Runs another engine's OpenAI server, under that engine's Python interpreter, until stdin closes.

It imports nothing of ours, because that interpreter does not have our ``mooncake``. The first line of output says where
the server listens, which process does, what was started, and how long that took.

    python server_script.py MODEL --dtype bfloat16 --max-model-len 4096 --max-num-seqs 64 --name model
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version

POLL_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="an HF folder")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--name", required=True, help="of the model, as clients give it")
    options = parser.parse_args()

    _die_with_parent()
    port = _free_port()
    begin = time.perf_counter()
    server = subprocess.Popen(_command(options, port), stdin=subprocess.DEVNULL, stdout=2)
    try:
        _wait_until_healthy(server, port)
        start_s = time.perf_counter() - begin
        versions = {"torch": version("torch"), **{name: version(name) for name in _vllm_distributions()}}
        print(json.dumps({"port": port, "pid": server.pid, "versions": versions, "start_s": start_s}), flush=True)
        sys.stdin.read()
    finally:
        server.terminate()
        server.wait()


def _command(options: argparse.Namespace, port: int) -> list[str]:
    """The server that ``vllm serve`` runs; it caches prefixes and batches continuously by default."""
    flags = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--model": options.model,
        "--served-model-name": options.name,
        "--dtype": options.dtype,
        "--max-model-len": str(options.max_model_len),
        "--max-num-seqs": str(options.max_num_seqs),
        "--uvicorn-log-level": "warning",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-log-stats"]
    return [*command, *(part for flag in flags.items() for part in flag)]


def _wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> None:
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode} before it was ready")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _vllm_distributions() -> list[str]:
    from importlib.metadata import packages_distributions

    return sorted(set(packages_distributions().get("vllm", [])))


def _die_with_parent() -> None:
    """End this process when its parent dies. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
