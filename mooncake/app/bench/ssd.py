"""``mooncake bench ssd``: the SSD tier, compared with fio on the same disk, alternately and both with O_DIRECT.

Ours saves blocks with checksums and headers until they are durable, then loads them in random order and verifies them.
fio writes and reads the same amount in pieces of the same size, unverified and always from the same buffer, which stays
in a processor cache. A loop of the same system calls over as much memory as ours shows how much fio gains by that.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kvstore.checksum import range_checksums
from kvstore.eviction import make_policy
from kvstore.ssd.reads import READ_THREADS
from kvstore.ssd.record import BlockHeader
from kvstore.ssd.tier import SsdTier
from mooncake.app.bench.report import Report, tell, told
from mooncake.app.cli.flags import Flags
from mooncake.errors import ConfigError, InternalError
from mooncake.types import BlockKey

OURS, FIO, LOOP = "ours", "fio", "loop"
RANGES = 32  # checksums per block, one for each layer of a model
FIO_S = 300.0  # limit on one run of fio
SIZES_KIB = (256, 1024, 4096)
NOTES = (
    "GB = 1e9 bytes of blocks; ours: group commit with fdatasync, an xxh3 a layer verified after each read; "
    "writes of fio are sequential and end with fsync, reads of both are random with the same depth; loop: one thread, "
    "one system call per block, from its own memory",
)


@dataclass(frozen=True, slots=True)
class Options:
    path: Path | None
    megabytes: int
    reps: int
    seed: int
    fio: str
    json: Path | None


class _Job(msgspec.Struct):
    read: dict[str, object]
    write: dict[str, object]


class _FioOutput(msgspec.Struct):
    jobs: list[_Job]


def main(args: list[str]) -> None:
    """Raises ConfigError, InternalError when fio fails, Cancelled after Ctrl-C."""
    options = parse(args)
    turns = {LOOP: _loop, OURS: _ours}
    if options.fio:
        turns = {FIO: _fio, **turns}
    report = Report("ssd", told(options, "path", "fio"), options.seed, notes=list(NOTES))
    with report.measuring("ssd") as shown, _folder_in(options.path) as place:
        for kib in SIZES_KIB:
            for rep in range(options.reps):
                tell(shown, f"{kib} KiB, {rep + 1}/{options.reps}")
                for who, turn in turns.items():
                    for what, rate in zip(("write", "read"), turn(options, place, kib << 10), strict=True):
                        report.add_value(who, what, "GB/s", rate, more_is_better=True, KiB=kib)
            for what in ("read", "write"):
                for peer in [who for who in turns if who != OURS]:
                    report.compare_subjects(f"{what}_{kib}KiB_vs_{peer}", what, OURS, peer, KiB=kib)
    for what in ("read", "write"):
        if (ratio := report.ratios.get(f"{what}_1024KiB_vs_{FIO}")) is not None:
            report.ratios[f"{what}_vs_{FIO}"] = ratio
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench ssd", __doc__)
    add = flags.add
    add(
        "--path",
        type=Path,
        metavar="DIR",
        help="a directory on the disk to measure; default: the system's temporary directory",
    )
    add("--megabytes", type=int, default=256, help="MB per repetition")
    flags.reps(5, "turns of each")
    add("--fio", default=shutil.which("fio") or "", metavar="PATH", help="path of fio; '' for none")
    flags.seed()
    flags.json_file()
    flags.quick()
    given = flags.read(args)
    if given.quick:
        given.megabytes, given.reps = 16, 1
    if given.path is not None and not given.path.is_dir():
        raise ConfigError(f"--path {given.path} is not a directory")
    if given.fio and shutil.which(given.fio) is None:
        raise ConfigError(f"--fio: there is no program {given.fio!r}; '' does without")
    return Options(given.path, max(8, given.megabytes), given.reps, given.seed, given.fio, given.json)


@contextmanager
def _folder_in(path: Path | None) -> Iterator[Path]:
    """A temporary folder in ``path``. Raises ConfigError when none can be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="mooncake-bench-ssd-", dir=path)
    except OSError as error:
        raise ConfigError(f"cannot write in {path or tempfile.gettempdir()}: {error.strerror}") from None
    with folder as place:
        yield Path(place)


def _ours(options: Options, place: Path, size: int) -> tuple[float, float]:
    return asyncio.run(_through_the_tier(options, place / "tier", size))


async def _through_the_tier(options: Options, place: Path, size: int) -> tuple[float, float]:
    """GB/s of saving until durable, and of loading in random order."""
    count = (options.megabytes << 20) // size
    rng = np.random.default_rng(options.seed)
    memory = memoryview(mmap.mmap(-1, count * size))
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(rng.bytes(count * size), np.uint8)
    slots = [memory[i * size : (i + 1) * size] for i in range(count)]
    headers = [
        BlockHeader(BlockKey(i.to_bytes(32, "big")), b"", "", size, range_checksums(slot, RANGES))
        for i, slot in enumerate(slots)
    ]
    tier = await SsdTier.open(place, 4 * count * size + (1 << 30), make_policy("lru", count), size)
    try:
        started = time.perf_counter()
        saved = await asyncio.gather(*(tier.save(h, slot) for h, slot in zip(headers, slots, strict=True)))
        write_s = time.perf_counter() - started
        if not all(saved):
            raise InternalError("the SSD tier did not take every block")
        order = [int(i) for i in rng.permutation(count)]
        started = time.perf_counter()
        await asyncio.gather(*(tier.load(headers[index].key, slots[index]) for index in order))
        read_s = time.perf_counter() - started
    finally:
        await tier.close()
        shutil.rmtree(place)
    return count * size / write_s / 1e9, count * size / read_s / 1e9


def _fio(options: Options, place: Path, size: int) -> tuple[float, float]:
    path = place / "fio.bin"
    common = [
        options.fio,
        "--name=job",
        f"--filename={path}",
        "--direct=1",
        f"--bs={size}",
        f"--size={options.megabytes}M",
        "--output-format=json",
        "--fallocate=posix",
    ]
    try:
        write = _run([*common, "--rw=write", "--ioengine=psync", "--end_fsync=1"])
        read = _run([*common, "--rw=randread", "--ioengine=libaio", f"--iodepth={READ_THREADS}"])
    finally:
        path.unlink(missing_ok=True)
    return _rate(write.write), _rate(read.read)


def _run(command: list[str]) -> _Job:
    try:
        done = subprocess.run(command, capture_output=True, timeout=FIO_S, check=False)
    except subprocess.TimeoutExpired:
        raise InternalError(f"fio did not end within {FIO_S:g} s") from None
    if done.returncode != 0:
        raise InternalError(f"fio failed: {done.stderr.decode(errors='replace').strip()[:200]}")
    return msgspec.json.decode(done.stdout, type=_FioOutput).jobs[0]


def _rate(counts: dict[str, object]) -> float:
    return float(str(counts["io_bytes"])) / max(float(str(counts["runtime"])), 1) / 1e6


def _loop(options: Options, place: Path, size: int) -> tuple[float, float]:
    """GB/s of one thread with one system call per block."""
    path, total = place / "loop.bin", options.megabytes << 20
    memory = memoryview(mmap.mmap(-1, total))
    np.frombuffer(memory, np.uint8)[:] = 1
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, total)
        offsets = range(0, total - size + 1, size)
        started = time.perf_counter()
        for offset in offsets:
            os.pwrite(fd, memory[offset : offset + size], offset)
        os.fsync(fd)
        write_s = time.perf_counter() - started
        order = np.random.default_rng(options.seed).permutation(len(offsets))
        started = time.perf_counter()
        for index in order:
            offset = offsets[int(index)]
            os.preadv(fd, [memory[offset : offset + size]], offset)
        read_s = time.perf_counter() - started
    finally:
        os.close(fd)
        path.unlink()
    return len(offsets) * size / write_s / 1e9, len(offsets) * size / read_s / 1e9
