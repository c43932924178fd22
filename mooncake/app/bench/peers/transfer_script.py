"""Times Mooncake's own transfer engine: a script run by the Python interpreter that has it.

It imports nothing of ours, because that interpreter has another ``mooncake``. A second process owns the registered
memory; the first reads and writes it over TCP. Each line on stdin is a JSON object ``{"operation": "read"|"write",
"size": bytes, "count": ranges per call, "seconds": s}``; each answer is ``{"calls": n, "seconds": s, "cpu_s": s,
"p50_us": us}``, with the CPU time of both processes. The first line of output says that it is ready.

    python transfer_script.py
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TransferEngine = importlib.import_module("mooncake.engine").TransferEngine  # theirs, not the package of this file
BYTES = 256 << 20


def engine() -> Any:
    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("the engine does not start")
    return made


def registered(made: Any) -> Any:
    room = np.ones(BYTES + mmap.PAGESIZE, dtype=np.uint8)
    memory = room[-room.ctypes.data % mmap.PAGESIZE :][:BYTES]
    if made.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise SystemExit("the memory cannot be registered")
    return memory


def own() -> None:
    made = engine()
    memory = registered(made)
    print("READY", made.get_rpc_port(), memory.ctypes.data, flush=True)
    signal.pause()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    owner = subprocess.Popen([sys.executable, __file__, "own"], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    words = ["", "", ""]
    while words[0] != "READY":
        line = owner.stdout.readline()
        if not line:
            raise SystemExit("the owner of the memory ended")
        words = line.split() or [""]
    peer, remote = f"127.0.0.1:{words[1]}", int(words[2])
    made = engine()
    memory = registered(made)
    local = memory.ctypes.data
    calls = {
        ("read", False): made.transfer_sync_read,
        ("write", False): made.transfer_sync_write,
        ("read", True): made.batch_transfer_sync_read,
        ("write", True): made.batch_transfer_sync_write,
    }
    answer({"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        size, count = task["size"], task["count"]
        call = calls[task["operation"], count > 1]
        places = BYTES // (size * count)
        taken: list[float] = []
        before, started = cpu_s(owner.pid) + time.process_time(), time.perf_counter()
        while (now := time.perf_counter()) < started + task["seconds"]:
            at = len(taken) % places * size * count
            if count == 1:
                status = call(peer, local + at, remote + at, size)
            else:
                offsets = [at + index * size for index in range(count)]
                status = call(peer, [local + at for at in offsets], [remote + at for at in offsets], [size] * count)
            if status != 0:
                raise SystemExit(f"a transfer failed: {status}")
            taken.append(time.perf_counter() - now)
        seconds = time.perf_counter() - started
        used = cpu_s(owner.pid) + time.process_time() - before
        taken.sort()
        answer({"calls": len(taken), "seconds": seconds, "cpu_s": used, "p50_us": taken[len(taken) // 2] * 1e6})
    owner.kill()
    owner.wait()


def answer(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    own() if sys.argv[1:] == ["own"] else main()
