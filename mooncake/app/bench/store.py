"""``mooncake bench store``: put, get and exists through ``kvstore.Client``, over TCP and over shared memory.

Compared, alternately, with Mooncake's own store (``put_from``, ``get_into``; it has no checksums, ours are verified on
both sides) and with the limits, a bare socket and a memory copy. The store and the other end of the socket are separate
processes; every block crosses between processes.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from rich.progress import Progress

import kvstore
from kvstore.node import StoreNode
from mooncake.app.bench.peers.process import PeerProcess
from mooncake.app.bench.peers.spawned import spawned
from mooncake.app.bench.report import Report, tell, told
from mooncake.app.bench.shared.bare_socket import BareSocket, serve
from mooncake.app.bench.shared.memory import Memory, pages, random_pages
from mooncake.app.bench.shared.timing import median_us, repeated
from mooncake.app.cli.flags import Flags, names
from mooncake.config import load_config
from mooncake.errors import InternalError
from mooncake.prefault import prefault

POOL_BYTES = 2 << 30  # the same as the other store's
MEMORY_BYTES = 256 << 20  # of the client, which blocks are put from and read into; as many stored bytes are read
EXISTS = 250
BATCH = 16
MAX_REMOVED = 4096  # keys per call
OURS, THEIRS, SOCKET, COPY = "ours", "mooncake-store", "socket", "memcpy"
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
SCRIPT = Path(__file__).with_name("peers") / "store_script.py"
NOTES = (
    f"GB = 1e9 bytes; one caller, one block per call except in batches; {MEMORY_BYTES >> 20} MiB of stored blocks are "
    f"read in turn into as much memory, and as much is put into a store of {POOL_BYTES >> 30} GiB; copy and socket "
    "have as much memory at both ends: more than caches hold",
    "ours is the store with its default configuration and blocks of the given size; blocks put in a turn are removed "
    "before the next one, in both stores, and each turn begins with a warm-up call",
    "socket: a request of nine bytes and the block back, or the block and a byte back; neither checksums nor keys",
    "ours: xxh3 computed by the writer and verified by the reader, over TCP also at seal; the other store has none",
)


@dataclass(frozen=True, slots=True)
class Options:
    mooncake_python: str
    transports: tuple[str, ...]
    seconds: float
    reps: int
    seed: int
    json: Path | None


class Answer(msgspec.Struct):
    calls: int
    seconds: float
    p50_us: float


class Subject(Protocol):
    name: str

    def turn(self, operation: str, size: int, seconds: float) -> Answer | None:
        """Repeat the operation for ``seconds``; None when the subject does not have it."""
        ...


def main(args: list[str]) -> None:
    """Raises ConfigError, NodeUnavailable when a peer does not start, Cancelled after Ctrl-C."""
    options = parse(args)
    config = told(options, "mooncake_python", "transports", peer=bool(options.mooncake_python))
    report = Report("store", config, options.seed, notes=list(NOTES))
    with report.measuring("store") as shown:
        measure(options, report, shown)
    compare(report)
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench store", __doc__)
    add = flags.add
    flags.mooncake_python()
    flags.transports("tcp,shm", "our transports, each measured")
    add("--seconds", type=float, default=0.4, help="seconds per repetition")
    flags.reps(4, "turns of each")
    flags.seed()
    flags.json_file()
    flags.quick()
    given = flags.read(args)
    if given.quick:
        given.seconds, given.reps = 0.02, 1
    transports = names("--transports", given.transports, ("tcp", "shm"))
    return Options(given.mooncake_python, transports, given.seconds, given.reps, given.seed, given.json)


def measure(options: Options, report: Report, shown: Progress) -> None:
    with ExitStack() as stack:
        tell(shown, "starting")
        memory = random_pages(MEMORY_BYTES, options.seed)
        others: list[Subject] = []
        if options.mooncake_python:
            peer = PeerProcess(THEIRS, [options.mooncake_python, str(SCRIPT)])
            others.append(_Theirs(stack.enter_context(peer)))
        others.append(_Socket(stack.enter_context(spawned(tuple, _drain, is_killed=True)), memory))
        others.append(_Copy(memory))
        for size in SIZES:
            with ExitStack() as of_size:
                address = of_size.enter_context(spawned(str, _keep, size, is_killed=True))
                ours = [of_size.enter_context(_Ours(t, address, memory)) for t in options.transports]
                operations = ["get", "put", "get batch"] + ["exists"] * (size == SIZES[0])
                for rep, operation in itertools.product(range(options.reps), operations):
                    for subject in [*ours, *others]:
                        tell(shown, f"{subject.name}: {operation} {size >> 10} KiB, {rep + 1}/{options.reps}")
                        answer = subject.turn(operation, size, options.seconds)
                        if answer is not None:
                            _add(report, subject.name, operation, size, answer)


def _add(report: Report, name: str, operation: str, size: int, answer: Answer) -> None:
    if operation == "exists":
        report.add_value(name, f"exists, {EXISTS} keys", "us", answer.p50_us)
        return
    moved = answer.calls * size * (BATCH if operation == "get batch" else 1)
    report.add_value(name, operation, "GB/s", moved / answer.seconds / 1e9, more_is_better=True, KiB=size >> 10)
    report.add_value(name, f"{operation}, one call", "us", answer.p50_us, KiB=size >> 10)


def compare(report: Report) -> None:
    for size in SIZES:
        label = f"{size >> 20}MiB" if size >= 1 << 20 else f"{size >> 10}KiB"
        for operation in ("get", "put"):
            for ratio, ours, theirs in (
                (f"{operation}_{label}_vs_mooncake", f"{OURS} tcp", THEIRS),
                (f"{operation}_{label}_vs_socket", f"{OURS} tcp", SOCKET),
                (f"socket_{operation}_{label}_vs_mooncake", SOCKET, THEIRS),
                (f"memcpy_{operation}_{label}_vs_mooncake", COPY, THEIRS),
                (f"shm_{operation}_{label}_vs_mooncake", f"{OURS} shm", THEIRS),
                (f"shm_{operation}_{label}_vs_memcpy", f"{OURS} shm", COPY),
            ):
                report.compare_subjects(ratio, operation, ours, theirs, KiB=size >> 10)
    name = f"exists, {EXISTS} keys"
    for label, transport in (("", "tcp"), ("shm_", "shm")):
        report.compare_subjects(f"{label}exists_250_time_vs_mooncake", name, f"{OURS} {transport}", THEIRS)


# The subjects


class _Ours:
    """A client in this process, on its own event loop."""

    def __init__(self, transport: str, address: str, memory: Memory) -> None:
        self.name = f"{OURS} {transport}"
        self._transport = transport
        self._address = address
        self._memory = memory
        self._loop = asyncio.new_event_loop()
        self._puts = 0
        self._stored: set[str] = set()  # keys to remove before the next turn
        self._keys: list[str] = []  # of what the operation reads
        self._views: list[Memory] = []  # of the blocks in memory

    def __enter__(self) -> _Ours:
        transports = ("tcp",) if self._transport == "tcp" else ("shm", "tcp")  # the default on the same host
        connecting = kvstore.Client.connect(self._address, transports=transports, namespace=self._transport)
        self._client = self._loop.run_until_complete(connecting)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def turn(self, operation: str, size: int, seconds: float) -> Answer | None:
        return self._loop.run_until_complete(self._turn(operation, size, seconds))

    async def _turn(self, operation: str, size: int, seconds: float) -> Answer:
        call = await self._prepare(operation, size)
        await call(0)  # warm-up
        taken: list[float] = []
        started = time.perf_counter()
        while not taken or time.perf_counter() < started + seconds:
            began = time.perf_counter()
            await call(len(taken))
            taken.append(time.perf_counter() - began)
        return Answer(len(taken), time.perf_counter() - started, median_us(taken))

    async def _prepare(self, operation: str, size: int) -> Callable[[int], Awaitable[None]]:
        """Store what the operation reads, and only that; returns a call of it, by the call's number in the turn."""
        while self._stored:
            await self._client.remove([self._stored.pop() for _ in range(min(len(self._stored), MAX_REMOVED))])
        self._views = [self._memory[at : at + size] for at in range(0, MEMORY_BYTES, size)]
        num_keys = {"exists": EXISTS, "put": 0}.get(operation, len(self._views))
        self._keys = [f"{operation} {number}" for number in range(num_keys)]
        for number, key in enumerate(self._keys):
            await self._put(key, 0 if operation == "exists" else number)
        calls = {"exists": self._exists, "put": self._put_next, "get": self._get, "get batch": self._get_batch}
        return calls[operation]

    async def _put(self, key: str, number: int) -> None:
        if not await self._client.put(key, self._views[number % len(self._views)]):
            raise InternalError("a block was not stored")
        self._stored.add(key)

    async def _put_next(self, number: int) -> None:
        self._puts += 1
        await self._put(f"put {self._puts}", number)

    async def _exists(self, number: int) -> None:
        if not all(await self._client.exists(self._keys)):
            raise InternalError("a block was not there")

    async def _get(self, number: int) -> None:
        at = number % len(self._views)
        if await self._client.get_into(self._keys[at], self._views[at]) != len(self._views[at]):
            raise InternalError("a block was not there")

    async def _get_batch(self, number: int) -> None:
        which = [(number * BATCH + i) % len(self._views) for i in range(BATCH)]
        into = [self._views[at] for at in which]
        if await self._client.get_batch_into([self._keys[at] for at in which], into) != [len(view) for view in into]:
            raise InternalError("a block was not there")


class _Copy:
    name = COPY

    def __init__(self, memory: Memory) -> None:
        self._source = memory
        self._target = pages(memory.nbytes)
        self._target.fill(0)

    def turn(self, operation: str, size: int, seconds: float) -> Answer | None:
        if operation not in ("get", "put"):
            return None

        def copy(at: int) -> None:
            np.copyto(self._target[at : at + size], self._source[at : at + size])

        return _at_all_places(copy, size, seconds)


class _Socket:
    name = SOCKET

    def __init__(self, address: tuple[str, int], memory: Memory) -> None:
        self._socket = BareSocket(address, memory.data)

    def turn(self, operation: str, size: int, seconds: float) -> Answer | None:
        if operation not in ("get", "put"):
            return None
        call = self._socket.read if operation == "get" else self._socket.write
        return _at_all_places(lambda at: call(at, size), size, seconds)


def _at_all_places(call: Callable[[int], None], size: int, seconds: float) -> Answer:
    """Repeat ``call`` for ``seconds``, at one offset of the memory after the other."""
    places = MEMORY_BYTES // size
    call(0)  # warm-up
    taken, elapsed_s = repeated(lambda number: call(number % places * size), seconds)
    return Answer(len(taken), elapsed_s, median_us(taken))


class _Theirs:
    """``store_script.py`` under Mooncake's Python."""

    def __init__(self, peer: PeerProcess) -> None:
        self.name = peer.name
        self._peer = peer

    def turn(self, operation: str, size: int, seconds: float) -> Answer | None:
        if operation == "get batch":
            return None
        return self._peer.ask({"operation": operation, "size": size, "seconds": seconds}, Answer)


def _drain(control: Connection) -> None:
    """The other end of the bare socket."""
    memory = random_pages(MEMORY_BYTES, 0).data
    listener = socket.create_server(("127.0.0.1", 0))
    control.send(listener.getsockname())
    serve(listener, memory)


def _keep(control: Connection, block_bytes: int) -> None:
    """Run a store node with the default configuration, and send its address."""

    async def run() -> None:
        size = f"store.dram_gb={POOL_BYTES / 1e9 + 1e-6}"
        node = StoreNode(load_config(None, [size]), block_bytes, join_cluster=False)
        await node.start()
        await asyncio.to_thread(prefault, node.segment.array)
        control.send(node.control_address)
        await asyncio.get_running_loop().create_future()

    asyncio.run(run())
