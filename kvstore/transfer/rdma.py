"""RDMA: slices travel as one-sided writes and reads between registered memory, past the owner's processor.

A path is one queue pair, set up over a TCP connection that then stays silent: it ends when either side does. To read,
a peer gets keys of the whole segment. To write, it asks over the queue pair for a memory window a granted block, and
the owner closes the window when it takes the grant back; so an epoch fences these writes as strictly as those over
TCP. A key that has become void breaks the queue pair; the path then connects anew once, asks again, and so learns
whether the grant is gone. Memory that was not registered is copied through memory that was.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.transfer.protocol import MAX_RANGES, SLICE_BYTES, Operation
from kvstore.transfer.rdma_verbs import (
    Access,
    Completion,
    Device,
    Endpoint,
    QueuePair,
    Registration,
    Status,
    VerbsFailed,
    VerbsUnavailable,
    address_of,
)
from kvstore.transfer.tcp import attach
from kvstore.transfer.transport import Caller, PathFailed, Piece, Slice, Work
from mooncake.errors import DeadlineExceeded, StaleEpoch
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)

WINDOW = 4  # slices on their way in one queue pair
MAX_REFUSALS = 2  # void keys that one ``carry`` mends by connecting anew
REGISTER_BYTES = 32 << 20  # a piece: the interpreter stands still while one is pinned

REGION_TABLE = struct.Struct("<QQIHH")  # base address, bytes a region, bytes a block, number of regions, zero
KEY = struct.Struct("<I")
WINDOW_REQUEST = struct.Struct("<IQ")  # block, epoch
REFUSED = 0  # in place of a window's key: the block is not granted to this epoch
NO_WINDOW = 0xFFFFFFFF  # the owner's device gives no more windows
MESSAGE_BYTES = MAX_RANGES * WINDOW_REQUEST.size

_SEND_DEPTH = WINDOW * MAX_RANGES + 16
_REQUEST_TAG, _REPLY_TAG, _NOTICE_TAG = 0, 1, 2
_FIRST_SLICE_TAG = 16

Attach = Callable[[bytes, float], tuple[socket.socket, bytes]]
"""Sends a request over a new control connection before the deadline; the owner's answer and the connection."""


class RdmaTransport:
    """The transport ``rdma``. ``unavailable`` says in one line why this process cannot use it, or is empty."""

    name = "rdma"
    max_slice_bytes = SLICE_BYTES

    def __init__(self, device: str = "") -> None:
        """``device``: by name; the first one that has an active port when it is empty."""
        self.unavailable = ""
        self._device: Device | None = None
        self._memory: _RegisteredMemory | None = None
        try:
            self._device = Device(device)
            self._memory = _RegisteredMemory(self._device)
        except VerbsUnavailable as error:
            self.unavailable = str(error)

    def paths_to(self, address: SegmentAddress) -> int:
        return 1 if self._device is not None and address.rdma else 0

    def open(self, address: SegmentAddress, caller: Caller, index: int, deadline: float) -> RdmaPath:
        """Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        if self._device is None or self._memory is None:
            raise PathFailed(self.unavailable)
        path = RdmaPath(
            self._device,
            self._memory,
            address,
            lambda request, deadline: attach(address, caller, self.name, request, deadline),
        )
        path.connect(deadline)
        return path

    def register(self, memory: memoryview) -> None:
        """Pins the memory in the background, for as long as this transport lives. Until then it is copied."""
        if self._memory is not None:
            self._memory.add(memory)

    def close(self) -> None:
        if self._device is not None and self._memory is not None:
            self._memory.close()
            self._device.close()


class RdmaPath:
    """One queue pair to one segment."""

    window_bytes = WINDOW * SLICE_BYTES

    def __init__(self, device: Device, memory: _RegisteredMemory, address: SegmentAddress, attach: Attach) -> None:
        self._device = device
        self._memory = memory
        self._address = address
        self._attach = attach
        self._link: _Link | None = None
        self._cutting = threading.Lock()  # between ``cut`` and the end of a link
        self._is_cut = False
        self._staging: list[_Staging] = []
        self._flights: deque[_Flight] = deque()  # every slice that is taken and not over, the oldest first
        self._next_tag = _FIRST_SLICE_TAG
        self._moved_bytes = 0
        self._unannounced_bytes = 0  # written, and the owner not told

    @property
    def progress(self) -> int:
        return self._moved_bytes

    @property
    def queue_pair(self) -> QueuePair:
        """For tests that break it."""
        assert self._link is not None
        return self._link.queue_pair

    @property
    def window_keys(self) -> dict[int, tuple[int, int]]:
        """Block -> (epoch, key) of the windows that are open to us; for tests that spoil them."""
        assert self._link is not None
        return self._link.windows

    def connect(self, deadline: float) -> None:
        """Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        link = _Link.open(self._device, self._address, self._attach, deadline)
        with self._cutting:
            self._link = link
            if not self._is_cut:
                return
        self._disconnect()
        raise PathFailed(f"the path to {self._address.node_id} was cut")

    def carry(self, work: Work) -> None:
        refusals = 0
        try:
            while True:
                try:
                    self._drive(work)
                    return
                except _KeyRefused as error:
                    refusals += 1
                    if refusals > MAX_REFUSALS:
                        raise PathFailed(str(error)) from None
                    self._disconnect()
                    self.connect(min(flight.part.deadline for flight in self._flights))
                    for flight in self._flights:
                        flight.is_posted = False
        except BaseException as error:
            self._disconnect()  # from here on nothing touches the local memory of what is given back
            parts = [flight.part for flight in self._flights]
            for flight in self._flights:
                self._let_go(flight)
            self._flights.clear()
            work.give_back(parts)
            if isinstance(error, (VerbsFailed, StaleEpoch)):  # stale: the owner that we came back to is another one
                raise PathFailed(f"{self._address.node_id}: {error}") from None
            raise

    def cut(self) -> None:
        with self._cutting:
            self._is_cut = True
            if self._link is not None:
                self._link.cut()

    def close(self) -> None:
        self._disconnect()
        for staging in self._staging:
            staging.close()
        self._staging.clear()

    def _disconnect(self) -> None:
        with self._cutting:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def _drive(self, work: Work) -> None:
        """Raises _KeyRefused, VerbsFailed, PathFailed, DeadlineExceeded."""
        if self._link is None:
            raise PathFailed(f"the path to {self._address.node_id} is closed")
        link = self._link
        for flight in list(self._flights):  # after a reconnection
            if not flight.is_posted:
                self._post(flight, link, work)
        while True:
            while len(self._flights) < WINDOW and (part := work.take()) is not None:
                flight = _Flight(part)
                self._flights.append(flight)
                self._post(flight, link, work)
            if not self._flights:
                self._announce(link)
                return
            self._take_completions(link, work)

    def _post(self, flight: _Flight, link: _Link, work: Work) -> None:
        """Start a slice, or see it refused."""
        part = flight.part
        if part.operation is Operation.WRITE:
            try:
                self._open_windows(part, link, work)
            except StaleEpoch as error:
                self._flights.remove(flight)
                work.refuse(part, error)
                return
        strips = [self._local(piece) for piece in part.pieces]
        if None in strips:
            self._stage(flight)
        flight.tag = self._next_tag
        self._next_tag += 1
        runs = _merge(
            [
                (*local, *link.remote(piece.wire.block, piece.wire.offset, part.operation), piece.wire.length)
                for piece, local in zip(part.pieces, flight.locals_or(strips), strict=True)
            ]
        )
        post = link.queue_pair.post_write if part.operation is Operation.WRITE else link.queue_pair.post_read
        for index, (address, lkey, remote, rkey, nbytes) in enumerate(runs):
            post(flight.tag, address, lkey, nbytes, remote, rkey, index == len(runs) - 1)
        flight.is_posted = True

    def _local(self, piece: Piece) -> tuple[int, int] | None:
        return self._memory.find(address_of(piece.local), piece.local.nbytes)

    def _stage(self, flight: _Flight) -> None:
        """Give the slice memory of ours to travel through; what is written is copied there now."""
        if flight.staging is None:
            for staging in self._staging:
                if not staging.is_busy:
                    break
            else:
                staging = _Staging(self._device)
                self._staging.append(staging)
            staging.is_busy = True
            flight.staging = staging
        flight.staging.fit(flight.part.nbytes)
        if flight.part.operation is Operation.WRITE:
            flight.staging.fill(flight.part)

    def _let_go(self, flight: _Flight) -> None:
        if flight.staging is not None:
            flight.staging.is_busy = False
            flight.staging = None

    def _open_windows(self, part: Slice, link: _Link, work: Work) -> None:
        """Have a key for every block of a write. Raises StaleEpoch when the owner refuses one."""
        wanted = {piece.wire.block: piece.wire.epoch for piece in part.pieces}
        if len({(piece.wire.block, piece.wire.epoch) for piece in part.pieces}) != len(wanted):
            raise StaleEpoch("one slice names two epochs of one block")
        missing = [(block, epoch) for block, epoch in wanted.items() if not link.has_window(block, epoch)]
        if not missing:
            return
        link.ask_for_windows(missing)
        while link.reply is None:
            self._take_completions(link, work, part.deadline)
        keys = link.take_reply(len(missing))
        for (block, epoch), key in zip(missing, keys, strict=True):
            if key == NO_WINDOW:
                raise PathFailed(f"{self._address.node_id} has no more memory windows")
            if key == REFUSED:
                raise StaleEpoch(f"{self._address.node_id}: block {block} is not granted to epoch {epoch}")
            link.windows[block] = (epoch, key)

    def _take_completions(self, link: _Link, work: Work, deadline: float = float("inf")) -> None:
        """Sleep until something has ended, and account for it."""
        deadline = min([deadline, *(flight.part.deadline for flight in self._flights)])
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{self._address.node_id}: RDMA was not done by the deadline")
        found = link.queue_pair.wait(left)
        if not found:
            link.check_alive()
        for completion in found:
            self._account(completion, link, work)

    def _account(self, completion: Completion, link: _Link, work: Work) -> None:
        if completion.status == Status.REMOTE_ACCESS:
            raise _KeyRefused(f"{self._address.node_id} does not accept a memory key (status {completion.status})")
        if completion.status != Status.SUCCESS:
            raise PathFailed(f"the queue pair to {self._address.node_id} broke (status {completion.status})")
        if completion.is_received:
            link.received(completion.nbytes)
            return
        if completion.tag < _FIRST_SLICE_TAG:
            return
        flight = self._flights[0]
        if flight.tag != completion.tag:  # slices end in the order in which they were posted
            raise PathFailed(f"a completion of slice {completion.tag} where {flight.tag} was due")
        part = flight.part
        if part.operation is Operation.WRITE:
            self._unannounced_bytes += part.nbytes
        elif flight.staging is not None:
            flight.staging.drain(part)
        self._flights.popleft()
        self._let_go(flight)
        self._moved_bytes += part.nbytes
        work.done(part)

    def _announce(self, link: _Link) -> None:
        """Tell the owner how much was written: it cannot see one-sided writes. Nobody waits for this to arrive."""
        if self._unannounced_bytes:
            link.queue_pair.post_notice(_NOTICE_TAG, min(self._unannounced_bytes, 0xFFFFFFFF), signal=False)
            self._unannounced_bytes = 0


class _KeyRefused(Exception):
    """The owner's device refused a key: its window was closed, or the key was never right."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A slice on its way."""

    part: Slice
    tag: int = 0
    is_posted: bool = False
    staging: _Staging | None = None

    def locals_or(self, strips: list[tuple[int, int] | None]) -> list[tuple[int, int]]:
        """(address, key) of the local memory of each piece: in the staging memory, or where it lies."""
        if self.staging is not None:
            return self.staging.places(self.part)
        return [strip for strip in strips if strip is not None]


class _Link:
    """One connected queue pair, the control connection that it lives as long as, and the keys that came over it."""

    def __init__(self, node_id: str, queue_pair: QueuePair) -> None:
        """Takes the queue pair over."""
        self.queue_pair = queue_pair
        self.windows: dict[int, tuple[int, int]] = {}  # block -> (epoch, key)
        self.reply: bytes | None = None
        self._node_id = node_id
        self._sock: socket.socket | None = None
        self._messages: npt.NDArray[np.uint8] = np.zeros(2 * MESSAGE_BYTES, np.uint8)
        self._registered: list[Registration] = []
        self._base = self._region_bytes = self._block_bytes = 0
        self._read_keys: tuple[int, ...] = ()

    @classmethod
    def open(cls, device: Device, address: SegmentAddress, attach: Attach, deadline: float) -> _Link:
        """Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        try:
            link = cls(address.node_id, QueuePair(device, _SEND_DEPTH, 2))
        except VerbsFailed as error:
            raise PathFailed(str(error)) from None
        try:
            sock, answer = attach(link.queue_pair.endpoint.pack(), deadline)
            link._sock = sock
            link._learn(answer, address)
            link.queue_pair.connect(Endpoint.unpack(answer[: Endpoint.SIZE]), access=0)
            link.queue_pair.watch(sock.fileno())
            start = address_of(link._messages.data)
            for place in (start, start + MESSAGE_BYTES):
                link._registered.append(device.register(place, MESSAGE_BYTES, Access.LOCAL_WRITE))
            link.queue_pair.post_receive(_REPLY_TAG, link._registered[1])
        except (VerbsFailed, ValueError) as error:
            link.close()
            raise PathFailed(f"{address.node_id}: {error}") from None
        except BaseException:
            link.close()
            raise
        return link

    def remote(self, block: int, offset: int, operation: Operation) -> tuple[int, int]:
        """(address, key) of a place in the segment. Verbs name it by address; the key bounds what it reaches."""
        start = block * self._block_bytes + offset
        key = self.windows[block][1] if operation is Operation.WRITE else self._read_keys[start // self._region_bytes]
        return self._base + start, key

    def has_window(self, block: int, epoch: int) -> bool:
        window = self.windows.get(block)
        return window is not None and window[0] == epoch

    def ask_for_windows(self, wanted: list[tuple[int, int]]) -> None:
        """The answer comes as ``reply``. One question at a time. Raises VerbsFailed."""
        question = b"".join(WINDOW_REQUEST.pack(block, epoch) for block, epoch in wanted)
        self._messages[: len(question)] = np.frombuffer(question, np.uint8)
        self.queue_pair.post_message(_REQUEST_TAG, self._registered[0], len(question))

    def received(self, nbytes: int) -> None:
        self.reply = self._messages[MESSAGE_BYTES : MESSAGE_BYTES + nbytes].tobytes()
        self.queue_pair.post_receive(_REPLY_TAG, self._registered[1])

    def take_reply(self, count: int) -> list[int]:
        """Raises PathFailed for an answer to something else."""
        reply, self.reply = self.reply or b"", None
        if len(reply) != count * KEY.size:
            raise PathFailed(f"{self._node_id} answers {count} questions for windows with {len(reply)} bytes")
        return [key for (key,) in KEY.iter_unpack(reply)]

    def check_alive(self) -> None:
        """Raises PathFailed when the owner has gone, or ``cut`` was called."""
        assert self._sock is not None
        news = select.poll()
        news.register(self._sock, select.POLLIN | select.POLLRDHUP)
        if news.poll(0):
            raise PathFailed(f"{self._node_id} has closed its control connection")

    def cut(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The queue pair first: while the connection is open the owner may still count on us."""
        self.queue_pair.close()
        for registered in self._registered:
            registered.close()
        self._registered.clear()
        if self._sock is not None:
            self._sock.close()

    def _learn(self, answer: bytes, address: SegmentAddress) -> None:
        """Raises ValueError unless the answer describes the segment of this address."""
        table = answer[Endpoint.SIZE :]
        if len(table) < REGION_TABLE.size:
            raise ValueError("an RDMA answer that is too short")
        self._base, self._region_bytes, self._block_bytes, count, _ = REGION_TABLE.unpack_from(table)
        keys = table[REGION_TABLE.size :]
        total = address.block_bytes * address.num_blocks
        if self._block_bytes != address.block_bytes or len(keys) != count * KEY.size:
            raise ValueError("an RDMA answer about another segment")
        if self._region_bytes % self._block_bytes or count != -(-total // max(1, self._region_bytes)):
            raise ValueError("an RDMA answer whose regions do not make up the segment")
        self._read_keys = tuple(key for (key,) in KEY.iter_unpack(keys))


class _Staging:
    """Registered memory of ours for one slice at a time."""

    def __init__(self, device: Device) -> None:
        self.is_busy = False
        self._device = device
        self._bytes: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._registered: Registration | None = None

    def fit(self, nbytes: int) -> None:
        """Raises VerbsFailed."""
        if self._bytes.nbytes < nbytes:
            self.close()
            self._bytes = np.zeros(max(nbytes, SLICE_BYTES), np.uint8)
            start, size = address_of(self._bytes.data), self._bytes.nbytes
            self._registered = self._device.register(start, size, Access.LOCAL_WRITE)

    def places(self, part: Slice) -> list[tuple[int, int]]:
        assert self._registered is not None
        places: list[tuple[int, int]] = []
        address = self._registered.address
        for piece in part.pieces:
            places.append((address, self._registered.lkey))
            address += piece.wire.length
        return places

    def fill(self, part: Slice) -> None:
        start = 0
        for piece in part.pieces:
            np.copyto(self._bytes[start : start + piece.wire.length], np.frombuffer(piece.local, np.uint8))
            start += piece.wire.length

    def drain(self, part: Slice) -> None:
        start = 0
        for piece in part.pieces:
            np.copyto(np.frombuffer(piece.local, np.uint8), self._bytes[start : start + piece.wire.length])
            start += piece.wire.length

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered = None


class _RegisteredMemory:
    """Local memory that slices can travel from and to without a copy. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted, beside ``_pieces``
        self._pieces: list[Registration] = []
        self._kept: list[memoryview] = []  # so that the memory outlives its registration
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def add(self, memory: memoryview) -> None:
        thread = threading.Thread(target=self._pin, args=(memory,), name="rdma-register", daemon=True)
        with self._lock:
            self._kept.append(memory)
            self._threads.append(thread)
        thread.start()

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(address, local key), or None for memory that is not inside one registered piece."""
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            piece = self._pieces[index]
        return (address, piece.lkey) if address + nbytes <= piece.address + piece.nbytes else None

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        with self._lock:
            pieces, self._pieces, self._starts = self._pieces, [], []
        for piece in pieces:
            piece.close()
        self._kept.clear()

    def _pin(self, memory: memoryview) -> None:
        start, nbytes = address_of(memory), memory.nbytes
        for offset in range(0, nbytes, REGISTER_BYTES):
            if self._closing.is_set():
                return
            try:
                piece = self._device.register(start + offset, min(REGISTER_BYTES, nbytes - offset), Access.LOCAL_WRITE)
            except VerbsFailed as error:
                log.warning("%s; what lies there is copied", error)
                return
            with self._lock:
                index = bisect.bisect_left(self._starts, piece.address)
                self._starts.insert(index, piece.address)
                self._pieces.insert(index, piece)


Run = tuple[int, int, int, int, int]
"""Local address and key, remote address and key, bytes."""


def _merge(runs: list[Run]) -> list[Run]:
    """The same with neighbours joined that lie next to each other on both sides under the same keys."""
    merged: list[Run] = []
    for local, lkey, remote, rkey, nbytes in runs:
        if merged:
            before = merged[-1]
            size = before[4]
            if (before[0] + size, before[1], before[2] + size, before[3]) == (local, lkey, remote, rkey):
                merged[-1] = (before[0], lkey, before[2], rkey, size + nbytes)
                continue
        merged.append((local, lkey, remote, rkey, nbytes))
    return merged
