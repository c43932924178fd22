"""Times Mooncake's own store: a script run by the Python interpreter that has it.

It imports nothing of ours, because that interpreter has another ``mooncake``. It starts the master and the process that
owns the memory; the client has no memory in the pool, so every byte crosses between processes. Each line on stdin is a
JSON object ``{"operation": "get"|"put"|"exists", "size": bytes, "seconds": s}``; each answer is ``{"calls": n,
"seconds": s, "p50_us": us}``. The first line of output says that it is ready.

    python store_script.py
"""

from __future__ import annotations

import importlib
import json
import mmap
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

POOL_BYTES = 2 << 30
MEMORY_BYTES = 256 << 20
EXISTS = 250
START_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_master(port: int) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).parent / "mooncake_master"
    command = [str(program), f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"]
    process = subprocess.Popen([*command, "--metrics_host=127.0.0.1"], stdout=sys.stderr, stderr=sys.stderr)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return process
        except OSError:
            time.sleep(0.02)
    raise SystemExit("the master does not start")


def join(port: int, pool_bytes: int) -> Any:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", pool_bytes, 512 << 20, "tcp", "", f"127.0.0.1:{port}") != 0:
        raise SystemExit("the store does not start")
    return store


def own(port: int) -> None:
    kept = join(port, POOL_BYTES)
    print("READY", flush=True)
    signal.pause()
    kept.close()


def main() -> None:
    port = free_port()
    master = start_master(port)
    owner = subprocess.Popen([sys.executable, __file__, str(port)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    while not (line := owner.stdout.readline()).startswith("READY"):
        if not line:
            raise SystemExit("the owner of the memory ended")
    store = join(port, 0)
    room = np.ones(MEMORY_BYTES + mmap.PAGESIZE, dtype=np.uint8)
    memory = room[-room.ctypes.data % mmap.PAGESIZE :][:MEMORY_BYTES]
    if store.register_buffer(memory.ctypes.data, memory.nbytes) != 0:
        raise SystemExit("the memory cannot be registered")
    answer({"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        call = prepare(store, memory.ctypes.data, task["operation"], task["size"])
        taken: list[float] = []
        call(0)  # warm-up
        started = time.perf_counter()
        while not taken or time.perf_counter() < started + task["seconds"]:
            began = time.perf_counter()
            call(len(taken))
            taken.append(time.perf_counter() - began)
        seconds = time.perf_counter() - started
        answer({"calls": len(taken), "seconds": seconds, "p50_us": sorted(taken)[len(taken) // 2] * 1e6})
    for process in (owner, master):
        process.kill()
        process.wait()


def prepare(store: Any, base: int, operation: str, size: int) -> Callable[[int], None]:
    size = size or 64
    places = MEMORY_BYTES // size
    store.remove_all(True)

    def insist(key: str, place: int) -> None:
        deadline = time.monotonic() + START_S
        while store.put_from(key, base + place % places * size, size) != 0:
            if time.monotonic() > deadline:
                raise SystemExit("it takes no more blocks")
            time.sleep(0.001)  # full until it evicts

    if operation == "put":
        return lambda number: insist(f"put {size} {time.monotonic_ns()}", number)
    if operation == "get":
        for number in range(places):
            insist(f"get {size} {number}", number)

        def get(number: int) -> None:
            if store.get_into(f"get {size} {number % places}", base + number % places * size, size) != size:
                raise SystemExit("a block was not there")

        return get
    keys = [f"exists {number}" for number in range(EXISTS)]
    for key in keys:
        insist(key, 0)
    return lambda number: store.batch_is_exist(keys)


def answer(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    own(int(sys.argv[1])) if sys.argv[1:] else main()
