"""A storm's nemesis: a schedule of faults drawn from a seed, and the hands that do them to processes from outside."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import mmap
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from redis_process import RedisProcess

PIDFD_GETFD = 438  # its system call's number, on every architecture
STARTED_S = 25.0  # after this long a process has read all its code, on a busy machine too
ROTTEN_BYTES = 200  # changed at once


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"  # as an operator does: SIGTERM
    PAUSE = "pause"
    CUT = "cut connections of"
    NO_FILES = "no file descriptors for"
    NO_DISK = "no disk space for"
    ROT_DISK = "rotten disk of"
    ROT_MEMORY = "rotten memory of"
    TO_PREFILL = "to prefill"
    TO_DECODE = "to decode"


WEIGHTS = {
    Kind.KILL: 6,
    Kind.STOP: 3,
    Kind.PAUSE: 5,
    Kind.CUT: 5,
    Kind.NO_FILES: 1,
    Kind.NO_DISK: 2,
    Kind.ROT_DISK: 2,
    Kind.ROT_MEMORY: 2,
    Kind.TO_PREFILL: 1,
    Kind.TO_DECODE: 1,
}
LASTS_S = {  # from, to
    Kind.PAUSE: (0.5, 15.0),
    Kind.NO_FILES: (0.5, 5.0),
    Kind.NO_DISK: (1.0, 8.0),
}
OF_STORES = {Kind.NO_DISK, Kind.ROT_DISK, Kind.ROT_MEMORY}
OF_COMPUTING = {Kind.TO_PREFILL, Kind.TO_DECODE}
OF_REDIS = {Kind.KILL, Kind.PAUSE}


@dataclass(frozen=True, slots=True)
class Fault:
    """``amount``: seconds that it lasts, or the share of a node's connections."""

    at_s: float
    kind: Kind
    node: str
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:5.1f} s: {self.kind} {self.node}" + (f" ({self.amount:.2f})" if self.amount else "")


def schedule(
    rng: random.Random, seconds: float, every_s: float, nodes: Sequence[str], stores: Sequence[str]
) -> list[Fault]:
    """What happens when, a fault every ``every_s`` on average. After ``seconds`` nothing of it lasts, save restarts."""
    faults = []
    at_s = rng.uniform(0.5, 2.0)
    while at_s < seconds:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        anybody = [*nodes, *stores, "conductor", *(["redis"] if kind in OF_REDIS else [])]
        node = rng.choice(stores if kind in OF_STORES else nodes if kind in OF_COMPUTING else anybody)
        amount = rng.choice([0.2, 0.5, 1.0]) if kind is Kind.CUT else 0.0
        if kind in LASTS_S:
            least, most = map(math.log, LASTS_S[kind])
            amount = min(math.exp(rng.uniform(least, most)), seconds - at_s)
        faults.append(Fault(round(at_s, 2), kind, node, round(amount, 2)))
        at_s += rng.expovariate(1 / every_s)
    return faults


class Nemesis:
    """``pids``: of running processes, by node. ``ssds``: folders, by store. ``tell`` is called with each fault."""

    def __init__(
        self,
        rng: random.Random,
        pids: Callable[[], Mapping[str, int]],
        set_role: Callable[[str, str], Awaitable[None]],
        redis: RedisProcess,
        ssds: Mapping[str, Path],
        tell: Callable[[Fault], None],
    ) -> None:
        self._rng, self._pids, self._set_role = rng, pids, set_role
        self._redis, self._ssds, self._tell = redis, ssds, tell

    async def rage(self, faults: Sequence[Fault]) -> None:
        """Returns when the last one is over."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as lasting:
            for fault in faults:
                await asyncio.sleep(began + fault.at_s - loop.time())
                self._tell(fault)
                lasting.create_task(self._do(fault))

    async def _do(self, fault: Fault) -> None:
        """Nothing happens to a process that is not running, and no shortage to one that is still reading its code."""
        if fault.kind in OF_COMPUTING:
            await self._set_role(fault.node, fault.kind.removeprefix("to "))
            return
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            end = self._hit_redis(fault.kind) if fault.node == "redis" else self._hit(fault)
            try:
                await asyncio.sleep(fault.amount if fault.kind in LASTS_S else 0)
            finally:
                end()

    def _hit_redis(self, kind: Kind) -> Callable[[], None]:
        if kind is Kind.PAUSE:
            self._redis.signal(signal.SIGSTOP)
            return lambda: self._redis.signal(signal.SIGCONT)
        self._redis.stop()
        self._redis.start()
        return _nothing

    def _hit(self, fault: Fault) -> Callable[[], None]:
        """Returns what ends it. Raises ProcessLookupError or FileNotFoundError when the process has ended."""
        pid = self._pids().get(fault.node, 0)
        if not pid:
            return _nothing
        match fault.kind:
            case Kind.KILL:
                os.kill(pid, signal.SIGKILL)
            case Kind.STOP:
                os.kill(pid, signal.SIGTERM)
            case Kind.PAUSE:
                os.kill(pid, signal.SIGSTOP)
                return lambda: os.kill(pid, signal.SIGCONT)
            case Kind.CUT:
                cut_connections(pid, self._rng, fault.amount)
            case Kind.ROT_DISK:
                rot_files(self._ssds[fault.node], self._rng)
            case Kind.ROT_MEMORY:
                rot_slots(pid, self._rng)
            case Kind.NO_FILES if _age_s(pid) > STARTED_S:
                return limit(pid, resource.RLIMIT_NOFILE)
            case Kind.NO_DISK if _age_s(pid) > STARTED_S:
                return limit(pid, resource.RLIMIT_FSIZE)
        return _nothing


def _nothing() -> None:
    pass


def _age_s(pid: int) -> float:
    return time.time() - Path(f"/proc/{pid}").stat().st_mtime


def limit(pid: int, what: int) -> Callable[[], None]:
    """From now on a process gets no more of it: files, or bytes in them. Returns what ends that."""
    _, most = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (0, most))

    def end() -> None:
        resource.prlimit(pid, what, (most, most))

    return end


def cut_connections(pid: int, rng: random.Random, share: float) -> None:
    """As if the network, or whoever is at the other end, had closed them."""
    pidfd = os.pidfd_open(pid)
    try:
        for link in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda link: int(link.name)):
            with contextlib.suppress(OSError):  # it has been closed, or never was connected
                if str(link.readlink()).startswith("socket:") and rng.random() < share:
                    _shut(pidfd, int(link.name))
    finally:
        os.close(pidfd)


def _shut(pidfd: int, fd: int) -> None:
    """Raises OSError for what is no connection."""
    ours = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, fd, 0)
    if ours < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=ours) as connection:
        if connection.family in (socket.AF_INET, socket.AF_UNIX) and connection.getpeername():
            connection.shutdown(socket.SHUT_RDWR)


def rot_files(folder: Path, rng: random.Random) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
        _rot(path, rng)


def rot_slots(pid: int, rng: random.Random) -> None:
    """The memory of a store's slots, which it shares with whoever reads them."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:mooncake-store" in str(link.readlink()):
            _rot(link, rng)
            return


def _rot(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        for _ in range(ROTTEN_BYTES):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
