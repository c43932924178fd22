"""How fast one-sided reads and writes of 1 MiB ranges are, beside a memory copy and a bare socket, in alternating runs.

    python tests/kvstore/measure_transfer.py [--seconds 0.3] [--rounds 5] [--json]

Reads and writes include their xxh3 checksums. GB = 1e9 bytes; CPU is of both processes, in seconds for one GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np

from kvstore.checksum import checksum
from kvstore.segment import Segment
from kvstore.transfer.engine import ReadRange, TransferEngine, WriteRange
from kvstore.transfer.server import SegmentServer
from mooncake.types import SegmentAddress

BLOCK = 1 << 20
NUM = 64
EPOCH = 1
LAYER = 96 << 10  # of a block of 64 tokens of a small model


def own(control: Connection) -> None:
    """The other process: a segment, and a bare echo of 1 MiB for comparison."""
    segment = Segment.create("bench", BLOCK, NUM)
    segment.populate()
    server = SegmentServer(segment, "bench")
    server.start()
    server.grant(range(NUM), EPOCH)
    listener = socket.create_server(("127.0.0.1", 0))
    control.send((server.address, listener.getsockname()))
    bare, _ = listener.accept()
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(ConnectionError):
        while index := bare.recv(1, socket.MSG_WAITALL):
            bare.sendall(segment.block(index[0]))
    control.recv()
    server.stop()


def operations(address: SegmentAddress, bare: socket.socket) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Name, bytes moved, and the operation."""
    source = np.random.default_rng(0).integers(0, 256, (NUM, BLOCK), dtype=np.uint8)
    target = np.empty_like(source)
    step = [0]

    def at() -> int:
        step[0] = (step[0] + 1) % NUM
        return step[0]

    def copy() -> None:
        i = at()
        np.copyto(target[i], source[i])

    def bare_read() -> None:
        i = at()
        bare.send(bytes([i]))
        bare.recv_into(target[i], BLOCK, socket.MSG_WAITALL)

    yield "memcpy 1 MiB", BLOCK, copy
    yield "bare socket read 1 MiB", BLOCK, bare_read
    for transport in ("shm", "tcp"):
        engine = TransferEngine("bench", (transport,), streams=2)

        def write(count: int = 1, size: int = BLOCK, engine: TransferEngine = engine) -> None:
            parts = [source[at()][:size] for _ in range(count)]
            for part in parts:
                checksum(part)
            ranges = [WriteRange(i % NUM, 0, part, EPOCH) for i, part in enumerate(parts)]
            engine.write(address, ranges, time.monotonic() + 10)

        def read(count: int = 1, size: int = BLOCK, engine: TransferEngine = engine) -> None:
            parts = [target[at()][:size] for _ in range(count)]
            engine.read(address, [ReadRange(i % NUM, 0, part) for i, part in enumerate(parts)], time.monotonic() + 10)
            for part in parts:
                checksum(part)

        yield f"{transport} write 1 MiB", BLOCK, write
        yield f"{transport} read 1 MiB", BLOCK, read
        yield f"{transport} write 16 x 1 MiB", 16 * BLOCK, lambda write=write: write(16)
        yield f"{transport} read 16 x 1 MiB", 16 * BLOCK, lambda read=read: read(16)
        yield f"{transport} write 16 x 96 KiB", 16 * LAYER, lambda write=write: write(16, LAYER)
        yield f"{transport} read 16 x 96 KiB", 16 * LAYER, lambda read=read: read(16, LAYER)
        yield f"{transport} write 64 B", 64, lambda write=write: write(1, 64)
        yield f"{transport} read 64 B", 64, lambda read=read: read(1, 64)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    owner = context.Process(target=own, args=(there,), daemon=True)
    owner.start()
    address, bare_address = here.recv()
    bare = socket.create_connection(bare_address)
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    todo = list(operations(address, bare))
    for _ in range(arguments.rounds):
        for name, size, operation in todo:
            operation()
            before = cpu_seconds(os.getpid()) + cpu_seconds(owner.pid or 0)
            taken: list[float] = []
            end = time.perf_counter() + arguments.seconds
            while (started := time.perf_counter()) < end:
                operation()
                taken.append(time.perf_counter() - started)
            used = cpu_seconds(os.getpid()) + cpu_seconds(owner.pid or 0) - before
            times.setdefault(name, []).extend(taken)
            cpu.setdefault(name, []).append(used / (size * len(taken) / 1e9))
            sizes[name] = size
    rows = [
        {
            "name": name,
            "best_gb_per_s": sizes[name] / min(taken) / 1e9,
            "median_gb_per_s": sizes[name] / statistics.median(taken) / 1e9,
            "median_us": statistics.median(taken) * 1e6,
            "cpu_s_per_gb": statistics.median(cpu[name]),
        }
        for name, taken in times.items()
    ]
    print(f"{'':24} {'best GB/s':>10} {'median':>8} {'us':>8} {'CPU s/GB':>9}")
    for row in rows:
        print(
            f"{row['name']:24} {row['best_gb_per_s']:10.2f} {row['median_gb_per_s']:8.2f} {row['median_us']:8.0f} "
            f"{row['cpu_s_per_gb']:9.3f}"
        )
    if arguments.json:
        print(json.dumps({"bench": "transfer", "results": rows}))
    here.send(None)
    owner.join(5)


if __name__ == "__main__":
    main()
