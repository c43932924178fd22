"""The transfer engine: one-sided reads and writes of ranges of other nodes' segments, over the best available
transport.

For each peer it uses the first working transport in the configured order, spreads the bytes over that transport's
paths, and fails over to the next transport. It does not know what the bytes mean; callers name blocks, offsets and
epochs, and verify checksums.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from typing_extensions import Buffer

from kvstore.transfer import protocol
from kvstore.transfer.keyed import KeyedWire
from kvstore.transfer.link import RETRY_AFTER_S, Link
from kvstore.transfer.rdma.transport import RdmaTransport
from kvstore.transfer.requests import (
    ReadRange,
    Request,
    Transfer,
    TransferReport,
    WriteRange,
    cut,
)
from kvstore.transfer.scheduling.limiter import Pacer
from kvstore.transfer.scheduling.routes import TransportStats, merged
from kvstore.transfer.shm import SegmentView, ShmTransport
from kvstore.transfer.tcp import TcpTransport, connect_keyed
from kvstore.transfer.transport import Caller, Priority, Transport
from mooncake.errors import ConfigError, NodeUnavailable
from mooncake.threads import Threads
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)

MAX_PEERS = 1024  # incarnations with open paths; beyond that the longest unused idle one is closed
_HELPER_THREADS = 64  # of all links together
_PACED_SLICE_S = 0.02  # a rate limit cuts slices of this duration, so that the flow is smooth
_TICK_S = 0.020  # between two looks for late and stalled transfers: a stall shows after three (STALL_S)
FORGET_AFTER_S = 60.0  # unused for this long, a vanished peer's connections are closed
_SWEEP_S = 5.0
_IDLE_TICKS = 50  # without anything in flight, before the watch goes to sleep


class TransferEngine:
    """Moves bytes between this process's memory and segments of other processes. Every method is thread-safe.

    ``write`` and ``read`` block the calling thread until everything is moved, refused, failed or past its deadline (on
    the clock of ``time.monotonic``); ``submit`` starts any number of requests and returns at once. The memory passed
    must stay valid and unchanged until its request has ended; ``write_async`` and ``read_async`` therefore do not
    return before that, even when cancelled. ``max_mb_per_s`` limits the rate (in units of 1e6 bytes) of all reads and
    writes together; 0 means no limit. ``transports`` are names, in order of preference, or objects; one that failed is
    the last choice for ``retry_after_s``. Connections and mappings of a vanished peer are closed once unused for
    ``forget_after_s``: a mapping keeps a dead process's memory. Beyond ``max_peers`` the longest unused idle peer is
    closed. ``secret`` is what owners of segments may ask for (``transfer.secret_file``).
    """

    def __init__(
        self,
        peer_id: str,
        transports: Sequence[str | Transport] = ("shm", "tcp"),
        streams: int = 2,
        max_mb_per_s: float = 0.0,
        secret: str = "",
        retry_after_s: float = RETRY_AFTER_S,
        forget_after_s: float = FORGET_AFTER_S,
        max_peers: int = MAX_PEERS,
    ) -> None:
        name = peer_id.encode()[: protocol.MAX_PEER_ID_BYTES].decode(errors="ignore")  # peers tell us by the number
        self._caller = Caller(name, secrets.randbits(63) | 1, secret.encode())
        self._transports = [make_transport(each, streams) if isinstance(each, str) else each for each in transports]
        for transport in self._transports:
            if transport.unavailable:
                log.warning("%s: transport %s cannot be used: %s", peer_id, transport.name, transport.unavailable)
        self._retry_after_s = retry_after_s
        self._forget_after_s = forget_after_s
        self._max_peers = max_peers
        self._paced_slice: Callable[[int], int] | None = None
        self._pacer: Pacer | None = None
        if max_mb_per_s > 0:
            rate = max_mb_per_s * 1e6
            size = min(max(int(rate * _PACED_SLICE_S), 16 << 10), protocol.SLICE_BYTES)
            self._paced_slice = lambda _: size
            self._pacer = Pacer(rate, burst=size)
        self._lock = threading.Lock()  # for the links
        self._links: OrderedDict[tuple[str, int], Link] = OrderedDict()  # one per incarnation, last used last
        self._past: list[TransportStats] = []  # of earlier incarnations of linked peers
        self._helpers = Threads(_HELPER_THREADS, f"{peer_id}-transfer")
        self._watch = _Watch(self._live_links, self._sweep, min(forget_after_s, _SWEEP_S), f"{peer_id}-transfer-watch")
        self._closed = False

    @property
    def writer_id(self) -> str:
        """How owners of segments name this engine, in ``on_peer_gone`` and in reservations: unique per instance."""
        return self._caller.writer_id

    def submit(self, requests: Sequence[Request]) -> list[Transfer]:
        """Start them all; they end in any order, urgent ones first, each with its own status. Slices of different
        requests share the paths to a peer.

        Raises InvalidRequest (a range is outside its segment) or NodeUnavailable (no configured transport reaches a
        peer, or the engine is closed) before anything has been started.
        """
        links = [self._link(request.address) for request in requests]
        works = [
            cut(request, self._paced_slice or link.slice_bytes) for request, link in zip(requests, links, strict=True)
        ]
        transfers = [
            Transfer(parts, request, checksums, link.cancel)
            for request, (parts, checksums), link in zip(requests, works, links, strict=True)
        ]
        for link in links:  # all before anything moves: a caller that gets an error has its memory back
            link.check()
        for transfer, (parts, _), link in zip(transfers, works, links, strict=True):
            if parts:
                link.start(transfer, parts)
            else:
                transfer.end(transfer.started)
        return transfers

    def write(
        self,
        address: SegmentAddress,
        ranges: Sequence[WriteRange],
        deadline: float,
        priority: Priority = Priority.NORMAL,
        checksum_bytes: int = 0,
    ) -> TransferReport:
        """Write all ranges into the segment at ``address``. ``checksum_bytes``: see ``Request``.

        Raises StaleEpoch (a block is not granted to its range's epoch, or the segment's owner has restarted),
        NodeUnavailable (no transport reaches the peer), DeadlineExceeded, or InvalidRequest (a range is outside the
        segment). After any of them each range may be written completely, partly or not at all.
        """
        return self._run(Request(address, ranges, deadline, priority, checksum_bytes))

    def read(
        self,
        address: SegmentAddress,
        ranges: Sequence[ReadRange],
        deadline: float,
        priority: Priority = Priority.NORMAL,
        checksum_bytes: int = 0,
    ) -> TransferReport:
        """Fill all ranges from the segment at ``address``. Raises like ``write``. Nothing is verified: compare the
        report's checksums, which ``checksum_bytes`` requests (see ``Request``)."""
        return self._run(Request(address, ranges, deadline, priority, checksum_bytes))

    async def write_async(
        self, address: SegmentAddress, ranges: Sequence[WriteRange], deadline: float
    ) -> TransferReport:
        """``write`` on other threads. Cancelling stops the transfer after the current slices, and waits for that."""
        [transfer] = self.submit([Request(address, ranges, deadline)])
        return await transfer.wait_async()

    async def read_async(
        self,
        address: SegmentAddress,
        ranges: Sequence[ReadRange],
        deadline: float,
        priority: Priority = Priority.NORMAL,
    ) -> TransferReport:
        """``read`` on other threads. Cancelling stops the transfer after the current slices, and waits for that."""
        [transfer] = self.submit([Request(address, ranges, deadline, priority)])
        return await transfer.wait_async()

    def view(self, address: SegmentAddress, deadline: float) -> SegmentView | None:
        """The segment itself, for readers of more pieces than ranges are good for; None when it cannot be mapped.
        Close it after use. Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        for transport in self._transports:
            if isinstance(transport, ShmTransport) and transport.paths_to(address):
                return transport.view(address, self._caller, deadline)
        return None

    def connect_keyed(self, address: SegmentAddress, deadline: float) -> KeyedWire:
        """A separate connection for whole blocks by key, which bypasses the queue, the rate limit and the other
        transports. Close it after use. Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        return connect_keyed(address, self._caller, deadline)

    def register(self, memory: Buffer) -> None:
        """A hint that transfers will often use this memory: RDMA then reads and writes it without a copy."""
        view = memoryview(memory).cast("B")
        for transport in self._transports:
            transport.register(view)

    def transport_of(self, node_id: str) -> str:
        """The transport of the next transfer to or from this node, or ""."""
        with self._lock:
            found = [link.transport for (name, _), link in self._links.items() if name == node_id]
        return found[-1] if found else ""

    def stats(self) -> list[TransportStats]:
        """One entry per peer and per transport that was used, or failed, whatever the number of the peer's
        incarnations."""
        with self._lock:
            links, past = list(self._links.values()), self._past
        return merged([*past, *(entry for link in links for entry in link.stats())])

    def unavailable(self) -> dict[str, str]:
        """Configured transports that this process cannot use at all, and why."""
        return {each.name: each.unavailable for each in self._transports if each.unavailable}

    def check_usable(self) -> None:
        """Raises ConfigError where no configured transport can be used: nothing would ever reach or leave a node."""
        unavailable = self.unavailable()
        if len(unavailable) == len(self._transports):
            why = "; ".join(f"{name}: {reason}" for name, reason in unavailable.items())
            raise ConfigError(f'none of transfer.transports can be used here ({why}): add "tcp"')

    def forget(self, node_id: str) -> None:
        """Close everything open to this peer: it is gone, or will not be needed for a while."""
        with self._lock:
            dropped = [self._drop(key) for key in list(self._links) if key[0] == node_id]
        for link in dropped:
            link.close()

    def close(self) -> None:
        """Ends all connections. Running transfers fail, or end within their deadlines."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()
        self._watch.stop()
        self._helpers.shutdown(wait=False)
        for transport in self._transports:
            transport.close()

    def _run(self, request: Request) -> TransferReport:
        link = self._link(request.address)
        slices, checksums = cut(request, self._paced_slice or link.slice_bytes)
        if not slices:
            return TransferReport("", 0, 0.0)
        if len(slices) == 1 and (report := link.run_alone(slices[0])) is not None:
            return report
        transfer = Transfer(slices, request, checksums, link.cancel)
        link.run(transfer, slices)
        return transfer.result()

    def _link(self, address: SegmentAddress) -> Link:
        key = (address.node_id, address.incarnation)
        dropped: list[Link] = []
        with self._lock:
            if self._closed:
                raise NodeUnavailable("this transfer engine has been closed")
            link = self._links.get(key)
            if link is None:
                link = Link(
                    address,
                    self._transports,
                    self._caller,
                    self._helpers,
                    self._pacer,
                    self._retry_after_s,
                    self._watch.wake,
                )
                self._links[key] = link
                others = [each for each in self._links if each != key] if len(self._links) > self._max_peers else []
                if (idle := next((each for each in others if not self._links[each].is_busy), None)) is not None:
                    dropped.append(self._drop(idle))
            else:
                self._links.move_to_end(key)
                link.used_at = time.monotonic()
        for old in dropped:
            old.close()
        return link

    def _drop(self, key: tuple[str, int]) -> Link:
        """Called with the lock held."""
        link, node_id = self._links.pop(key), key[0]
        if any(name == node_id for name, _ in self._links):
            self._past = merged([*self._past, *link.stats()])
        else:
            self._past = [entry for entry in self._past if entry.node_id != node_id]
        return link

    def _sweep(self) -> None:
        with self._lock:
            unused = time.monotonic() - self._forget_after_s
            gone = [key for key, link in self._links.items() if link.used_at < unused and link.is_gone]
            dropped = [self._drop(key) for key in gone]
        for link in dropped:
            link.close()

    def _live_links(self) -> list[Link]:
        with self._lock:
            return list(self._links.values())


class _Watch:
    """A thread that checks transfers in flight; while there are none it sleeps, except for ``sweep`` from time to
    time."""

    def __init__(self, links: Callable[[], list[Link]], sweep: Callable[[], None], sweep_s: float, name: str) -> None:
        self._links = links
        self._sweep = sweep
        self._sweep_s = sweep_s
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        if not self._wanted.is_set():
            self._wanted.set()

    def stop(self) -> None:
        self._stopped.set()
        self._wanted.set()

    def _run(self) -> None:
        idle, swept_at = 0, time.monotonic()
        while not self._stopped.is_set():
            is_wanted = self._wanted.wait(self._sweep_s)
            if time.monotonic() - swept_at >= self._sweep_s:
                self._sweep()
                swept_at = time.monotonic()
            if not is_wanted:
                continue
            busy = [link.tick() for link in self._links()]
            idle = 0 if any(busy) else idle + 1
            if idle > _IDLE_TICKS:
                idle = 0
                self._wanted.clear()
                busy = [link.tick() for link in self._links()]
                if any(busy):  # one that started just before
                    self._wanted.set()
            self._stopped.wait(_TICK_S)


def make_transport(name: str, streams: int) -> Transport:
    """Raises ConfigError for an unknown name."""
    if name == "shm":
        return ShmTransport()
    if name == "tcp":
        return TcpTransport(streams)
    if name == "rdma":
        return RdmaTransport()
    raise ConfigError(f"transfer.transports: {name!r} is none of shm, rdma, tcp")
