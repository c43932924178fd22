"""``mooncake bench transfer``: one-sided reads and writes of another process's registered memory.

Ours, with checksums, alternates (A B A B) with Mooncake's own transfer engine (which has none), a bare socket and a
memory copy, over TCP on this machine. Also the rate and the stalls when one of four paths is slowed or cut.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from rich.progress import Progress

from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.requests import ReadRange, Request, Transfer, WriteRange
from mooncake.addresses import split_address
from mooncake.app.bench.peers.process import PeerProcess
from mooncake.app.bench.peers.rails import Rails
from mooncake.app.bench.peers.spawned import spawned
from mooncake.app.bench.report import Figure, Report, tell, told
from mooncake.app.bench.shared.bare_socket import BareSocket, serve
from mooncake.app.bench.shared.memory import Memory, pages, random_pages
from mooncake.app.bench.shared.processor_time import cpu_s
from mooncake.app.bench.shared.timing import median_us, repeated
from mooncake.app.cli.flags import Flags, names
from mooncake.prefault import prefault
from mooncake.types import SegmentAddress

BLOCK_BYTES = 16 << 20
NUM_BLOCKS = 16
EPOCH = 1
SUM_BYTES = 1 << 20  # bytes per checksum; the store has one per layer of a block
DEADLINE_S = 30.0
OURS, THEIRS, BARE, COPY = "mooncake", "mooncake-transfer-engine", "socket", "memcpy"
TASKS = ((64, 1), (1 << 20, 1), (1 << 20, 16), (4 << 20, 1), (16 << 20, 1))  # bytes per range, ranges per call
NUM_RAILS = 4
RAIL_BYTES_PER_S = 50e6
RAIL_BLOCK_BYTES = 1 << 20
RAIL_BLOCKS = 64
SETTLE_S = 0.2  # for the engine to adapt to a changed path
WATCHED_S = 1.0
SCRIPT = Path(__file__).with_name("peers") / "transfer_script.py"
NOTES = (
    "GB = 1e9 bytes; CPU seconds are those of both processes; ours computes an xxh3 of every MiB, in the reader of a "
    "read and in the writer of a write, the others none",
    "ratios of rates are better above 1, of seconds below 1; 16x1 MiB: 16 ranges in one call",
)


@dataclass(frozen=True, slots=True)
class Options:
    mooncake_python: str
    transports: tuple[str, ...]
    streams: int
    seconds: float
    reps: int
    rails: bool
    seed: int
    json: Path | None


class Answer(msgspec.Struct):
    """The result of one turn. ``cpu_s`` is the CPU time of all processes involved."""

    calls: int
    seconds: float
    cpu_s: float
    p50_us: float


class Subject(Protocol):
    name: str

    def turn(self, operation: str, size: int, count: int, seconds: float) -> Answer:
        """Repeat calls of ``count`` ranges of ``size`` bytes for ``seconds``."""
        ...


def main(args: list[str]) -> None:
    """Raises ConfigError, NodeUnavailable when a peer does not start, Cancelled after Ctrl-C."""
    options = parse(args)
    rails = {"number": NUM_RAILS, "mb_per_s": RAIL_BYTES_PER_S / 1e6} if options.rails else {}
    config = told(options, "mooncake_python", peer=bool(options.mooncake_python), rails=rails)
    report = Report("transfer", config, options.seed, notes=list(NOTES))
    with report.measuring("transfer") as shown:
        measure(options, report, shown)
        if options.rails:
            measure_rails(report, shown)
    compare(report)
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench transfer", __doc__)
    add = flags.add
    flags.mooncake_python()
    flags.transports("tcp,shm", "our transports, each measured")
    half = max(1, (os.cpu_count() or 2) // 2)
    add("--streams", type=int, default=min(2, half), help="TCP connections; both ends of one use a core each here")
    add("--seconds", type=float, default=0.3, help="seconds per repetition")
    flags.reps(5, "turns of each")
    add("--no-rails", action="store_true", help="skip the measurement with slowed and cut paths")
    flags.seed()
    flags.json_file()
    flags.quick()
    given = flags.read(args)
    if given.quick:
        given.seconds, given.reps = 0.02, 1
    transports = names("--transports", given.transports, ("tcp", "shm"))
    return Options(
        given.mooncake_python,
        transports,
        max(1, given.streams),
        given.seconds,
        given.reps,
        not given.no_rails,
        given.seed,
        given.json,
    )


def measure(options: Options, report: Report, shown: Progress) -> None:
    with ExitStack() as stack:
        tell(shown, "starting")
        address, bare_address, pid = stack.enter_context(spawned(tuple, _own, BLOCK_BYTES, NUM_BLOCKS, is_killed=True))
        memory = random_pages(NUM_BLOCKS * BLOCK_BYTES, options.seed).reshape(NUM_BLOCKS, BLOCK_BYTES)
        subjects: list[Subject] = []
        for transport in options.transports:
            engine = TransferEngine("bench", (transport,), options.streams)
            stack.callback(engine.close)
            subjects.append(_Ours(f"{OURS} {transport}", engine, address, pid, memory))
        if options.mooncake_python:
            peer = PeerProcess(THEIRS, [options.mooncake_python, str(SCRIPT)])
            subjects.append(_Theirs(stack.enter_context(peer)))
        bare = stack.enter_context(closing(BareSocket(bare_address, memory.reshape(-1).data)))
        subjects.append(_Bare(bare, pid))
        subjects.append(_Copy(memory))
        for rep in range(options.reps):
            for size, count in TASKS:
                for operation in ("read", "write"):
                    for subject in subjects:
                        tell(shown, f"{subject.name}: {operation} {_label(size, count)}, {rep + 1}/{options.reps}")
                        subject.turn(operation, size, count, 0.0)  # warm-up
                        answer = subject.turn(operation, size, count, options.seconds)
                        _add(report, subject.name, operation, size, count, answer)


def compare(report: Report) -> None:
    for operation in ("read", "write"):
        for size, count in TASKS:
            params = {"size": _label(size, count)}
            label = params["size"].replace(" ", "")
            name, ratio = (f"{operation} round trip", "64B_time") if size == 64 else (operation, label)
            for peer, theirs in (("mooncake", THEIRS), ("socket", BARE)):
                report.compare_subjects(f"tcp_{operation}_{ratio}_vs_{peer}", name, OURS + " tcp", theirs, **params)
            if size > 64:
                report.compare_subjects(f"shm_{operation}_{label}_vs_memcpy", operation, OURS + " shm", COPY, **params)
    for size, count in TASKS[1:]:
        label = _label(size, count)
        for who, key in ((OURS + " tcp", "tcp"), (BARE, "socket")):
            both = [_cpu_ratio(report, who, operation, label) for operation in ("read", "write")]
            if None not in both:  # the worse of reading and writing
                report.ratios[f"{key}_cpu_{label.replace(' ', '')}_vs_mooncake"] = max(filter(None, both))


def _cpu_ratio(report: Report, who: str, operation: str, label: str) -> float | None:
    """CPU seconds per GB, over Mooncake's."""
    figure, theirs = (report.find(each, f"{operation} CPU", size=label) for each in (who, THEIRS))
    return figure.best / theirs.best if figure and theirs else None


def _add(report: Report, name: str, operation: str, size: int, count: int, answer: Answer) -> None:
    label, moved_gb = _label(size, count), answer.calls * size * count / 1e9
    if size == 64:
        report.add_value(name, f"{operation} round trip", "us", answer.p50_us, size=label)
        return
    report.add_value(name, operation, "GB/s", moved_gb / answer.seconds, more_is_better=True, size=label)
    if name != COPY:
        report.add_value(name, f"{operation} CPU", "s/GB", answer.cpu_s / moved_gb, size=label)


def _label(size: int, count: int) -> str:
    one = f"{size} B" if size < 1 << 20 else f"{size >> 20} MiB"
    return one if count == 1 else f"{count}x{one}"


# The subjects


class _Turns:
    """Repeated calls; CPU time is that of this process and of one other."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._calls = 0  # of all turns

    def measured(self, call: Callable[[int], None], places: int, seconds: float) -> Answer:
        first, before_s = self._calls + 1, _cpu_s(self._pid) + time.process_time()
        taken, elapsed_s = repeated(lambda number: call((first + number) % places), seconds)
        used_s = _cpu_s(self._pid) + time.process_time() - before_s
        self._calls += len(taken)
        return Answer(len(taken), elapsed_s, used_s, median_us(taken))


class _Ours(_Turns):
    def __init__(self, name: str, engine: TransferEngine, address: SegmentAddress, pid: int, memory: Memory) -> None:
        super().__init__(pid)
        self.name = name
        self._engine = engine
        self._address = address
        self._memory = memory

    def turn(self, operation: str, size: int, count: int, seconds: float) -> Answer:
        call = self._read if operation == "read" else self._write
        return self.measured(lambda at: call(_rows(at, size, count), size), _places(size, count), seconds)

    def _read(self, rows: list[tuple[int, int]], size: int) -> None:
        ranges = [ReadRange(block, start, self._memory[block, start : start + size].data) for block, start in rows]
        self._engine.read(self._address, ranges, time.monotonic() + DEADLINE_S, checksum_bytes=min(size, SUM_BYTES))

    def _write(self, rows: list[tuple[int, int]], size: int) -> None:
        parts = ((block, start, self._memory[block, start : start + size].data) for block, start in rows)
        ranges = [WriteRange(*part, EPOCH) for part in parts]
        self._engine.write(self._address, ranges, time.monotonic() + DEADLINE_S, checksum_bytes=min(size, SUM_BYTES))


class _Bare(_Turns):
    name = BARE

    def __init__(self, bare: BareSocket, pid: int) -> None:
        super().__init__(pid)
        self._socket = bare

    def turn(self, operation: str, size: int, count: int, seconds: float) -> Answer:
        move = self._socket.read if operation == "read" else self._socket.write

        def call(at: int) -> None:
            for index in range(count):
                move((at * count + index) * size, size)

        return self.measured(call, _places(size, count), seconds)


class _Copy(_Turns):
    name = COPY

    def __init__(self, memory: Memory) -> None:
        super().__init__(os.getpid())
        self._source = memory.reshape(-1)
        self._target = pages(self._source.nbytes)
        self._target.fill(0)

    def turn(self, operation: str, size: int, count: int, seconds: float) -> Answer:
        return self.measured(lambda at: self._copy(at, size * count), _places(size, count), seconds)

    def _copy(self, at: int, size: int) -> None:
        np.copyto(self._target[at * size : (at + 1) * size], self._source[at * size : (at + 1) * size])


class _Theirs:
    """``transfer_script.py`` under Mooncake's Python."""

    def __init__(self, peer: PeerProcess) -> None:
        self.name = peer.name
        self._peer = peer

    def turn(self, operation: str, size: int, count: int, seconds: float) -> Answer:
        task = {"operation": operation, "size": size, "count": count, "seconds": max(seconds, 0.002)}
        return self._peer.ask(task, Answer)


def _rows(at: int, size: int, count: int) -> list[tuple[int, int]]:
    starts = ((at * count + index) * size for index in range(count))
    return [divmod(start, BLOCK_BYTES) for start in starts]


def _places(size: int, count: int) -> int:
    return NUM_BLOCKS * BLOCK_BYTES // (size * count) if size >= 1 << 20 else 1024


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads of another process; 0 for this process, which has a finer clock."""
    return 0.0 if pid == os.getpid() else cpu_s(pid)


def _own(control: Connection, block_bytes: int, num_blocks: int) -> None:
    """The other process: sends the address of its segment, that of a bare socket over the same memory, and its pid."""
    segment = Segment.create("bench", block_bytes, num_blocks)
    prefault(segment.array)
    server = SegmentServer(segment, "bench")
    server.start()
    server.grant(range(num_blocks), EPOCH)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, segment.buffer), daemon=True).start()
    control.send((server.address, listener.getsockname(), os.getpid()))
    with suppress(EOFError):
        control.recv()


# Paths that change


def measure_rails(report: Report, shown: Progress) -> None:
    """Write continuously over four paths of equal speed, and measure rate and stalls after one of them has changed."""
    changes: tuple[tuple[str, float, Callable[[Rails], None]], ...] = (
        ("one of four cut to a tenth", 3.1, lambda rails: rails.set_rate(0, RAIL_BYTES_PER_S / 10)),
        ("one of four killed", 3.0, lambda rails: rails.kill(0)),
        ("one of four silent", 3.0, lambda rails: rails.freeze(0)),
    )
    for name, left, change in changes:
        tell(shown, name)
        rate, stall_s = _watch_change(change)
        share = rate / (left * RAIL_BYTES_PER_S)
        report.add(Figure(OURS + " tcp", f"{name}: of what is left", "", (share,), more_is_better=True))
        report.add(Figure(OURS + " tcp", f"{name}: longest stall", "ms", (stall_s * 1e3,)))
        key = "paths_" + name.removeprefix("one of four ").split()[0]
        report.ratios[f"{key}_vs_left"] = share
        report.ratios[f"{key}_stall_ms"] = stall_s * 1e3


def _watch_change(change: Callable[[Rails], None]) -> tuple[float, float]:
    """Bytes per second, from SETTLE_S after the change on, and the longest time without progress after it."""
    segment = Segment.create("rails", RAIL_BLOCK_BYTES, RAIL_BLOCKS)
    server = SegmentServer(segment, "rails", ("tcp",))
    server.start()
    server.grant(range(RAIL_BLOCKS), EPOCH)
    engine = TransferEngine("bench", ("tcp",), streams=NUM_RAILS)
    data = np.zeros(RAIL_BLOCK_BYTES, np.uint8).data
    running: list[Transfer] = []
    try:
        with Rails(split_address(server.address.tcp_address), NUM_RAILS, RAIL_BYTES_PER_S) as rails:
            address = replace(server.address, tcp_address=",".join(rails.addresses))

            def more() -> Transfer:
                ranges = [WriteRange(block, 0, data, EPOCH) for block in range(RAIL_BLOCKS)]
                [transfer] = engine.submit([Request(address, ranges, time.monotonic() + DEADLINE_S)])
                return transfer

            def watch(seconds: float) -> tuple[int, float]:
                """Bytes moved, and the longest pause."""
                first = last = _moved(engine)
                began = at = time.monotonic()
                pause = 0.0
                while (now := time.monotonic()) < began + seconds:
                    if (moved := _moved(engine)) != last:
                        last, at = moved, now
                    pause = max(pause, now - at)
                    running[:] = [each for each in running if not each.has_ended]
                    while len(running) < 2:
                        running.append(more())
                    time.sleep(0.001)
                return last - first, pause

            watch(1.0)
            change(rails)
            _, early = watch(SETTLE_S)
            moved, late = watch(WATCHED_S)
            return moved / WATCHED_S, max(early, late)
    finally:
        engine.close()
        server.stop()
        segment.close()


def _moved(engine: TransferEngine) -> int:
    return sum(entry.nbytes for entry in engine.stats())
