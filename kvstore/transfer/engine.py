"""The transfer engine: one-sided reads and writes of ranges of other nodes' segments, over the best transport there is.

For each peer it takes the first transport of the configured order that works: shared memory on the same host, else
TCP. When one fails in the middle of a batch the next one carries the rest. It must not know what the bytes mean;
whoever calls it names blocks, offsets and epochs, and verifies checksums.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.segment import host_id
from kvstore.transfer import protocol
from kvstore.transfer.batch import Batch, PathFailed, ReadRange, Slice, WriteRange, plan_read, plan_write
from kvstore.transfer.limiter import Pacer
from kvstore.transfer.protocol import Operation
from kvstore.transfer.server import peer_name
from kvstore.transfer.shm import ShmPath
from kvstore.transfer.sockets import time_left
from kvstore.transfer.tcp import TcpPath
from mooncake.errors import DeadlineExceeded, NodeUnavailable
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)

MAX_PEERS = 1024
RETRY_AFTER_S = 10.0  # a transport that failed is the last choice for so long
OPEN_TIMEOUT_S = 2.0  # for a transport to come up while there is another to try
_EWMA_WEIGHT = 0.2
_RATE_SAMPLE_BYTES = 64 << 10  # smaller batches measure latency, not rate
_CALLER_THREADS = 16
_HELPER_THREADS = 32
_PACED_SLICE_S = 0.02  # a rate limit makes slices of so much time, so that the flow is smooth


@dataclass(frozen=True, slots=True)
class TransferReport:
    """How one batch travelled. ``transport`` is the one that finished it ("" for an empty batch)."""

    transport: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TransportStats:
    """One transport to one peer, since the peer was first met."""

    node_id: str
    transport: str
    nbytes: int
    gb_per_s: float  # moving average over batches, 1e9 bytes
    failures: int
    is_current: bool  # carried the last batch


@dataclass(slots=True)
class _Record:
    """What is known of one transport to one peer."""

    nbytes: int = 0
    gb_per_s: float = 0.0
    failures: int = 0
    avoid_until: float = 0.0

    def moved(self, nbytes: int, seconds: float) -> None:
        self.nbytes += nbytes
        if nbytes >= _RATE_SAMPLE_BYTES and seconds > 0:
            rate = nbytes / seconds / 1e9
            self.gb_per_s = rate if self.gb_per_s == 0 else self.gb_per_s + _EWMA_WEIGHT * (rate - self.gb_per_s)


@dataclass(slots=True)
class _Peer:
    address: SegmentAddress
    records: dict[str, _Record]
    lock: threading.Lock = field(default_factory=threading.Lock)  # of opening and closing paths
    shm: ShmPath | None = None
    tcp: TcpPath | None = None
    current: str = ""

    def close(self) -> None:
        with self.lock:
            if self.shm is not None:
                self.shm.close()
            if self.tcp is not None:
                self.tcp.close()


class TransferEngine:
    """Moves bytes between this process's memory and segments of other processes. Every method is thread-safe.

    ``write`` and ``read`` block the calling thread until all is moved, refused, failed or past its deadline (on the
    clock of ``time.monotonic``). The memory given must not change or go away meanwhile; ``write_async`` and
    ``read_async`` therefore do not return before the transfer has ended, also when they are cancelled.
    ``max_mb_per_s`` caps the bytes a second (in units of 1e6) of all its reads and writes together; 0 for no cap.
    """

    def __init__(
        self,
        peer_id: str,
        transports: tuple[str, ...] = ("shm", "tcp"),
        streams: int = 2,
        max_mb_per_s: float = 0.0,
    ) -> None:
        self._incarnation = secrets.randbits(63) | 1
        self._peer_id = peer_id
        self._host_id = host_id()
        self._transports = transports
        self._streams = streams
        self._slice_bytes = protocol.SLICE_BYTES
        self._pacer: Pacer | None = None
        if max_mb_per_s > 0:
            rate = max_mb_per_s * 1e6
            self._slice_bytes = min(max(int(rate * _PACED_SLICE_S), 16 << 10), protocol.SLICE_BYTES)
            self._pacer = Pacer(rate, burst=self._slice_bytes)
        self._lock = threading.Lock()  # of the peers and their records
        self._peers: OrderedDict[tuple[str, int], _Peer] = OrderedDict()
        self._helpers = ThreadPoolExecutor(_HELPER_THREADS, thread_name_prefix=f"{peer_id}-transfer")
        self._callers = ThreadPoolExecutor(_CALLER_THREADS, thread_name_prefix=f"{peer_id}-transfer-call")
        self._closed = False

    @property
    def writer_id(self) -> str:
        """How owners of segments name this engine, in ``on_peer_gone`` and in reservations: unique to its life."""
        return peer_name(self._peer_id, self._incarnation)

    def write(
        self,
        address: SegmentAddress,
        ranges: Sequence[WriteRange],
        deadline: float,
        cancelled: threading.Event | None = None,
    ) -> TransferReport:
        """Put all ranges into the segment at ``address``. Setting ``cancelled`` ends it early.

        Raises StaleEpoch (a block is not granted to its range's epoch, or the segment's owner has restarted),
        NodeUnavailable (no transport reaches the peer), DeadlineExceeded, Cancelled, or InvalidRequest (a range is
        outside the segment). After any of them each range may be written, half written or not at all.
        """
        return self._run(address, self._write_batch(address, ranges, deadline, cancelled))

    def read(
        self,
        address: SegmentAddress,
        ranges: Sequence[ReadRange],
        deadline: float,
        cancelled: threading.Event | None = None,
    ) -> TransferReport:
        """Fill all ranges from the segment at ``address``. Raises like ``write``; nothing read is verified."""
        return self._run(address, self._read_batch(address, ranges, deadline, cancelled))

    async def write_async(
        self, address: SegmentAddress, ranges: Sequence[WriteRange], deadline: float
    ) -> TransferReport:
        """``write`` in a thread. Cancelling ends the transfer at the next slice, and waits for that."""
        return await self._run_async(address, self._write_batch(address, ranges, deadline, None))

    async def read_async(self, address: SegmentAddress, ranges: Sequence[ReadRange], deadline: float) -> TransferReport:
        """``read`` in a thread. Cancelling ends the transfer at the next slice, and waits for that."""
        return await self._run_async(address, self._read_batch(address, ranges, deadline, None))

    def transport_of(self, node_id: str) -> str:
        """The transport that carried the last batch to or from this node, or ""."""
        with self._lock:
            found = [peer.current for (name, _), peer in self._peers.items() if name == node_id]
        return found[-1] if found else ""

    def stats(self) -> list[TransportStats]:
        """One entry for each transport that was tried with each peer."""
        with self._lock:
            peers = list(self._peers.values())
        return [
            TransportStats(
                peer.address.node_id, name, record.nbytes, record.gb_per_s, record.failures, name == peer.current
            )
            for peer in peers
            for name, record in peer.records.items()
            if record.nbytes or record.failures
        ]

    def forget(self, node_id: str) -> None:
        """Close what is open to this peer: it is gone, or will not be spoken to for a while."""
        with self._lock:
            dropped = [self._peers.pop(key) for key in list(self._peers) if key[0] == node_id]
        for peer in dropped:
            peer.close()

    def close(self) -> None:
        """Ends all connections. Transfers that are running fail, or end within their deadlines."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()
        self._helpers.shutdown(wait=False)
        self._callers.shutdown(wait=False)

    def _write_batch(
        self, address: SegmentAddress, ranges: Sequence[WriteRange], deadline: float, cancelled: threading.Event | None
    ) -> Batch:
        return self._batch(Operation.WRITE, plan_write(address, ranges, self._slice_bytes), deadline, cancelled)

    def _read_batch(
        self, address: SegmentAddress, ranges: Sequence[ReadRange], deadline: float, cancelled: threading.Event | None
    ) -> Batch:
        return self._batch(Operation.READ, plan_read(address, ranges, self._slice_bytes), deadline, cancelled)

    def _batch(
        self, operation: Operation, slices: list[Slice], deadline: float, cancelled: threading.Event | None
    ) -> Batch:
        return Batch(operation, slices, deadline, self._pacer, cancelled or threading.Event())

    async def _run_async(self, address: SegmentAddress, batch: Batch) -> TransferReport:
        if self._closed:
            raise NodeUnavailable("this transfer engine has been closed")
        future = asyncio.get_running_loop().run_in_executor(self._callers, self._run, address, batch)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            batch.cancelled.set()
            await asyncio.wait([future])  # the caller's memory is in use until then
            future.exception()
            raise

    def _run(self, address: SegmentAddress, batch: Batch) -> TransferReport:
        started = time.monotonic()
        if batch.is_finished:
            return TransferReport("", 0, 0.0)
        peer = self._peer(address)
        reasons: list[str] = []
        choices = self._choices(peer)
        for index, name in enumerate(choices):
            is_last = index == len(choices) - 1
            try:
                self._run_over(peer, name, batch, is_last)
                if batch.refused is not None:
                    raise batch.refused
                return TransferReport(name, batch.moved_bytes, time.monotonic() - started)
            except PathFailed as failure:
                reasons.append(f"{name}: {failure}")
                self._note_failure(peer, name, str(failure), is_last)
        raise NodeUnavailable("; ".join(reasons) or f"no configured transport reaches {address.node_id}")

    def _run_over(self, peer: _Peer, name: str, batch: Batch, is_last: bool) -> None:
        """Raises PathFailed, DeadlineExceeded, Cancelled or StaleEpoch."""
        path = self._path(peer, name, batch.deadline, is_last)
        record = peer.records[name]
        before, started = batch.moved_bytes, time.monotonic()
        peer.current = name
        try:
            path.run(batch)
        except PathFailed:
            self._retire(peer, path)
            raise
        finally:
            with self._lock:
                record.moved(batch.moved_bytes - before, time.monotonic() - started)

    def _retire(self, peer: _Peer, path: ShmPath | TcpPath) -> None:
        """A mapping whose owner is gone is of no use; broken TCP connections have been closed by their path."""
        with peer.lock:
            if peer.shm is path:
                peer.shm = None
                path.close()

    def _choices(self, peer: _Peer) -> list[str]:
        """Usable transports in the configured order; those that failed lately come last."""
        address, now = peer.address, time.monotonic()
        usable = {
            "shm": bool(address.unix_path) and address.host_id == self._host_id,
            "tcp": bool(address.tcp_address),
        }
        names = [name for name in self._transports if usable.get(name, False)]
        return sorted(names, key=lambda name: peer.records[name].avoid_until > now)

    def _path(self, peer: _Peer, name: str, deadline: float, is_last: bool) -> ShmPath | TcpPath:
        """The open path, opened now if need be. Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        if not peer.lock.acquire(timeout=time_left(deadline)):
            raise DeadlineExceeded(f"{peer.address.node_id}: another thread has been connecting until the deadline")
        try:
            hello = protocol.pack_hello(peer.address.incarnation, self._peer_id, self._incarnation)
            if name == "tcp":
                peer.tcp = peer.tcp or TcpPath(peer.address, hello, self._streams, self._helpers)
                return peer.tcp
            peer.shm = peer.shm or _open_shm(peer.address, hello, deadline, is_last)
            return peer.shm
        finally:
            peer.lock.release()

    def _note_failure(self, peer: _Peer, name: str, reason: str, is_last: bool) -> None:
        record = peer.records[name]
        if not is_last:
            log.warning("%s: %s does not work (%s); using another transport", peer.address.node_id, name, reason)
        with self._lock:
            record.failures += 1
            record.avoid_until = time.monotonic() + RETRY_AFTER_S

    def _peer(self, address: SegmentAddress) -> _Peer:
        key = (address.node_id, address.incarnation)
        dropped: list[_Peer] = []
        with self._lock:
            if self._closed:
                raise NodeUnavailable("this transfer engine has been closed")
            if key not in self._peers:
                self._peers[key] = _Peer(address, {name: _Record() for name in self._transports})
            self._peers.move_to_end(key)
            while len(self._peers) > MAX_PEERS:
                dropped.append(self._peers.popitem(last=False)[1])
            peer = self._peers[key]
        for old in dropped:
            old.close()
        return peer


def _open_shm(address: SegmentAddress, hello: bytes, deadline: float, is_last: bool) -> ShmPath:
    """An owner that does not answer must not eat the time that another transport could use."""
    soon = deadline if is_last else min(deadline, time.monotonic() + OPEN_TIMEOUT_S)
    try:
        return ShmPath.open(address, hello, soon)
    except DeadlineExceeded as error:
        if soon < deadline:
            raise PathFailed(error.message) from None
        raise


__all__: Sequence[str] = ("ReadRange", "TransferEngine", "TransferReport", "TransportStats", "WriteRange")
