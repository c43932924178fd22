"""``mooncake bench rdma``: one-sided writes and reads of registered memory, compared with perftest on the same device.

Both move the same bytes between two processes through one queue pair, alternately. It needs RDMA verbs; ``--machine``
names a program that runs a command on a machine that has them. It must not know how a path works.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.rdma.find import VerbsUnavailable
from kvstore.transfer.rdma.verbs import Device
from kvstore.transfer.requests import ReadRange, WriteRange
from mooncake.app.bench.peers.spawned import spawned
from mooncake.app.bench.report import Report, tell
from mooncake.app.cli.flags import Flags, numbers
from mooncake.errors import ConfigError
from mooncake.types import SegmentAddress

EPOCH = 1
DEADLINE_S = 120.0
PEER_TIMEOUT_S = 60.0
MACHINE_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Options:
    kib: tuple[int, ...]
    mb: int
    reps: int
    seed: int
    save: Path | None


def main(arguments: Sequence[str]) -> None:
    """Raises ConfigError without RDMA verbs."""
    options, machine = _options(arguments)
    if machine is not None:
        _go_to(machine, arguments, options.save)
    try:
        device = Device()
    except VerbsUnavailable as error:
        raise ConfigError(f"bench rdma: {error}; --machine PROGRAM runs it where there are verbs") from None
    report = Report("rdma", {"kib": options.kib, "mb": options.mb, "reps": options.reps}, options.seed)
    gid_index, name = device.gid_index, device.name
    device.close()
    with report.measuring("rdma") as shown:
        for kib in options.kib:
            tell(shown, f"{kib} KiB")
            _measure(kib << 10, name, gid_index, options, report)
    report.notes.append("GB/s of 1e9 bytes, of payload; perftest with its default depth of 128 requests")
    report.finish(options.save)


def _options(arguments: Sequence[str]) -> tuple[Options, str | None]:
    flags = Flags("bench rdma", __doc__)
    add = flags.add
    add("--kib", default="1024", help="sizes of one write or read, comma-separated")
    add("--mb", type=int, default=16, help="approximate MB moved per repetition")
    flags.reps(3)
    flags.seed()
    flags.json_file()
    add(
        "--machine",
        help="a program that runs a command on a machine with verbs: PROGRAM --timeout S --rw DIR COMMAND …",
    )
    given = flags.read(arguments)
    kib = numbers("--kib", given.kib, 1)
    return Options(kib, max(1, given.mb), given.reps, given.seed, given.json), given.machine


def _go_to(machine: str, arguments: Sequence[str], save: Path | None) -> None:
    """Replace this process by the benchmark on the other machine."""
    program = shutil.which(machine)
    if program is None:
        raise ConfigError(f"--machine: there is no program {machine!r}")
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument("--machine")
    rest = only.parse_known_args(arguments)[1]
    command = [program, "--timeout", str(MACHINE_SECONDS)]
    if save is not None:
        command += ["--rw", str(save.resolve().parent)]
    code = f"from mooncake.app.bench.rdma import main; main({rest!r})"
    os.execv(program, [*command, sys.executable, "-c", code])


def _measure(size: int, device: str, gid_index: int, options: Options, report: Report) -> None:
    count = max(1, options.mb * 1_000_000 // size)
    data = np.random.default_rng(options.seed).integers(0, 256, (count, size), dtype=np.uint8)
    loose = data.copy()
    transfer = TransferEngine("bench-rdma", ("rdma",))
    transfer.register(data.data)
    with spawned(SegmentAddress, _own, size, count) as address:

        def write(rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> float:
            ranges = [WriteRange(block, 0, rows[block].data, EPOCH) for block in range(count)]
            return transfer.write(address, ranges, time.monotonic() + DEADLINE_S).nbytes

        def read() -> float:
            ranges = [ReadRange(block, 0, data[block].data) for block in range(count)]
            return transfer.read(address, ranges, time.monotonic() + DEADLINE_S).nbytes

        ways: dict[tuple[str, str], Callable[[], float]] = {
            ("mooncake", "write"): lambda: _rate(lambda: write(data)),
            ("perftest", "write"): lambda: _perftest("ib_write_bw", device, gid_index, size, count),
            ("mooncake", "read"): lambda: _rate(read),
            ("perftest", "read"): lambda: _perftest("ib_read_bw", device, gid_index, size, count),
            ("mooncake", "write, copied"): lambda: _rate(lambda: write(loose)),
        }
        if shutil.which("ib_write_bw") is None:
            report.notes.append("perftest is not installed: nothing to compare with")
            ways = {way: measure for way, measure in ways.items() if way[0] == "mooncake"}
        write(data), read()  # warm-up: opens the path and its windows
        for _ in range(options.reps):
            for (subject, name), measure in ways.items():
                before = _late_acknowledgements(device)
                report.add_value(subject, name, "GB/s", measure(), more_is_better=True, KiB=size >> 10)
                late = _late_acknowledgements(device) - before
                report.add_value(subject, f"{name}: late acks", "", late, KiB=size >> 10)
    transfer.close()
    for name in ("write", "read"):
        ratio = f"{name}_{size >> 10}KiB_vs_ib_{name}_bw"
        report.compare_subjects(ratio, name, "mooncake", "perftest", KiB=size >> 10)


def _late_acknowledgements(device: str) -> float:
    """Retransmissions after acknowledgement timeouts, of all queue pairs of this machine; 0 if not counted."""
    counters = Path("/sys/class/infiniband", device, "ports", "1", "hw_counters")
    known = [counters / "completer_retry_err", counters / "local_ack_timeout_err"]  # soft RoCE's, and Mellanox's
    return float(sum(int(path.read_text()) for path in known if path.exists()))


def _rate(move: Callable[[], float]) -> float:
    started = time.perf_counter()
    nbytes = move()
    return nbytes / (time.perf_counter() - started) / 1e9


def _perftest(program: str, device: str, gid_index: int, size: int, count: int) -> float:
    """Average GB/s of perftest between two processes. Raises ConfigError when it reports none."""
    port = _free_port()
    command = [program, "-d", device, "-x", str(gid_index), "-s", str(size), "-n", str(max(count, 5)), "-p", str(port)]
    command.append("-F")  # ignore changes of the processor's clock
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(20):  # until the server listens
                client = subprocess.run(
                    [*command, "127.0.0.1"], capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False
                )
                if client.returncode == 0 or server.poll() is not None:
                    break
                time.sleep(0.3)
            server.wait(PEER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{program} did not end within {PEER_TIMEOUT_S:g} s") from None
        finally:
            server.kill()
    rows = re.findall(rf"^\s*{size}\s+\d+\s+[\d.]+\s+([\d.]+)", client.stdout, re.MULTILINE)
    if not rows:
        raise ConfigError(f"{program} reported no rate: {(client.stderr or client.stdout).strip()[-200:]}")
    return float(rows[-1]) * 2**20 / 1e9  # its MB are MiB


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _own(pipe: Connection, block_bytes: int, num_blocks: int) -> None:
    segment = Segment.create("bench-rdma", block_bytes, num_blocks)
    segment.array[:] = 1
    server = SegmentServer(segment, "owner", ("rdma",))
    server.start()
    server.grant(range(num_blocks), EPOCH)
    pipe.send(server.address)
    with suppress(EOFError):
        pipe.recv()
    server.stop()
    segment.close()
