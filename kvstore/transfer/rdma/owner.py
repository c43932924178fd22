"""The owner's side of RDMA: the segment as registered memory, one queue pair per peer, one memory window per granted
block.

No key for writing outlives a grant. Keys of the registered regions only allow reads; the right to write is a memory
window over one block, opened for one queue pair when its peer names the epoch that the block is granted to, and closed
by ``revoke``. So once ``revoke`` has returned no write lands in those blocks, whatever a late or malicious writer does,
and nothing needs quarantine. The device enforces all this; the owner's processor sees neither reads nor writes, and
learns of written bytes only when a peer reports them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from kvstore.pointers import address_of
from kvstore.transfer.protocol import MAX_RANGES
from kvstore.transfer.rdma.find import VerbsUnavailable
from kvstore.transfer.rdma.link import (
    KEY,
    MESSAGE_BYTES,
    NO_WINDOW,
    REFUSED,
    REGION_TABLE,
    WINDOW_REQUEST,
)
from kvstore.transfer.rdma.verbs import (
    Access,
    Completion,
    Device,
    Endpoint,
    QueuePair,
    Registration,
    Status,
    VerbsFailed,
    Window,
)
from kvstore.transfer.transport import PathFailed
from mooncake.errors import InvalidRequest

log = logging.getLogger(__name__)

REGION_BYTES = 32 << 20  # the GIL is held while one region is pinned
MAX_REGIONS = 768  # so that their keys fit the answer to a peer
PIN_TIMEOUT_S = 60.0  # for the whole segment
_RECEIVES = 64  # reports that may accumulate while the owner is busy
_SEND_DEPTH = 4 * MAX_RANGES  # an answer and its windows, and earlier ones still unacknowledged
_JOIN_TIMEOUT_S = 5.0


class RdmaExporter:
    """Exports one segment over verbs. Thread-safe. ``attach`` waits for the segment to be registered."""

    name = "rdma"

    def __init__(self, memory: memoryview, block_bytes: int, grants: memoryview) -> None:
        """``grants[block]`` is the epoch that may write a block, 0 for none. Raises PathFailed, saying in one line
        why verbs cannot be used here."""
        try:
            self.device = Device()
        except VerbsUnavailable as error:
            raise PathFailed(str(error)) from None
        if not self.device.has_windows:
            self.device.close()
            raise PathFailed(f"RDMA device {self.device.name} has no type 2 memory windows to fence writers with")
        self._memory = memory
        self._grants = grants
        self._block_bytes = block_bytes
        self._base = address_of(memory)
        self._region_bytes = _region_bytes(memory.nbytes, block_bytes)
        self._regions: list[Registration] = []
        self._pinned = threading.Event()
        self._failure = ""
        self._closing = False
        self._lock = threading.Lock()
        self._attachments: set[RdmaAttachment] = set()
        self._bytes_in = 0  # of attachments that have ended
        self._pinner = threading.Thread(target=self._pin, name="rdma-pin", daemon=True)
        self._pinner.start()

    @property
    def bytes_in(self) -> int:
        """Bytes that peers have reported as written."""
        with self._lock:
            return self._bytes_in + sum(each.bytes_in for each in self._attachments)

    def attach(self, request: bytes, on_broken: Callable[[], object]) -> RdmaAttachment:
        """Connect a queue pair to the peer's. Raises InvalidRequest, or PathFailed."""
        try:
            peer = Endpoint.unpack(request)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        if not self._pinned.wait(PIN_TIMEOUT_S) or self._failure or self._closing:
            raise PathFailed(self._failure or "the segment is not registered")
        try:
            attachment = RdmaAttachment(self, peer, on_broken)
        except VerbsFailed as error:
            raise PathFailed(str(error)) from None
        with self._lock:
            self._attachments.add(attachment)
        return attachment

    def revoke(self, block_ids: Iterable[int]) -> None:
        """After this returns no write lands in these blocks, unless they are granted again.

        Set their grants to 0 first. If a device refuses to close a window, the peer's connection is closed instead.
        """
        blocks = tuple(block_ids)
        with self._lock:
            attachments = list(self._attachments)
        for attachment in attachments:
            attachment.close_windows(blocks)

    def close(self) -> None:
        self._closing = True
        self._pinner.join()
        with self._lock:
            attachments = list(self._attachments)
        for attachment in attachments:
            attachment.close()
        for region in self._regions:
            region.close()
        self.device.close()

    def _pin(self) -> None:
        """Register the segment region by region, so that other threads can run in between."""
        try:
            for start in range(0, self._memory.nbytes, self._region_bytes):
                if self._closing:
                    break
                size = min(self._region_bytes, self._memory.nbytes - start)
                access = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.BIND_WINDOWS
                self._regions.append(self.device.register(self._base + start, size, access))
        except VerbsFailed as error:
            self._failure = str(error)
            log.warning("rdma is configured, but not offered here: %s", error)
        self._pinned.set()

    def _table(self) -> bytes:
        """What a peer must know of the regions."""
        keys = b"".join(KEY.pack(region.rkey) for region in self._regions)
        return REGION_TABLE.pack(self._base, self._region_bytes, self._block_bytes, len(self._regions), 0) + keys

    def _open_window(self, queue_pair: QueuePair, block: int, epoch: int) -> Window | None:
        """None when the block is not granted to this epoch. Raises VerbsFailed."""
        if not 0 <= block < len(self._grants) or epoch < 1 or self._grants[block] != epoch:
            return None
        start = block * self._block_bytes
        region = self._regions[start // self._region_bytes]
        return Window(queue_pair, region, self._base + start, self._block_bytes)

    def _ended(self, attachment: RdmaAttachment) -> None:
        with self._lock:
            if attachment in self._attachments:
                self._attachments.discard(attachment)
                self._bytes_in += attachment.bytes_in


class RdmaAttachment:
    """One peer's queue pair. Its own thread answers the peer's requests for windows."""

    def __init__(self, exporter: RdmaExporter, peer: Endpoint, on_broken: Callable[[], object]) -> None:
        """``on_broken`` is called when the queue pair has broken, which the peer cannot notice by itself: on the
        thread of the attachment, or of ``close_windows``. Raises VerbsFailed."""
        self.bytes_in = 0
        self._exporter = exporter
        self._windows: dict[int, tuple[int, Window]] = {}  # block -> (epoch, window)
        self._lock = threading.Lock()  # for the windows: whoever opens one must see an earlier revoke
        self._closing = threading.Event()
        self._closed = False
        self._on_broken = on_broken
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._messages: npt.NDArray[np.uint8] = np.zeros(2 * MESSAGE_BYTES, np.uint8)
        self._registered: list[Registration] = []
        device = exporter.device
        self._queue_pair: QueuePair | None = None
        try:
            self._queue_pair = QueuePair(device, _SEND_DEPTH, _RECEIVES)
            start = address_of(self._messages.data)
            for place in (start, start + MESSAGE_BYTES):
                self._registered.append(device.register(place, MESSAGE_BYTES, Access.LOCAL_WRITE))
            self._queue_pair.connect(peer, Access.REMOTE_READ | Access.REMOTE_WRITE)
            self._queue_pair.watch(self._wake_read)
            for _ in range(_RECEIVES):  # one buffer for all: a peer makes one request at a time
                self._queue_pair.post_receive(0, self._registered[0])
        except VerbsFailed:
            self._dismantle()
            raise
        self.reply = self._queue_pair.endpoint.pack() + exporter._table()
        self._thread = threading.Thread(target=self._serve, name="rdma-peer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._closed:
                return
            os.write(self._wake_write, b"x")
        self._thread.join(_JOIN_TIMEOUT_S)

    def close_windows(self, blocks: Iterable[int]) -> None:
        """After this returns the peer cannot write into any of these blocks, even if that costs the whole queue
        pair."""
        try:
            with self._lock:
                for block in blocks:
                    if block in self._windows:
                        self._windows.pop(block)[1].close()
        except VerbsFailed as error:
            log.warning("%s; closing the peer's queue pair", error)
            self.close()  # on its own thread, the only one that may touch it
            self._on_broken()

    def _serve(self) -> None:
        pair = self._queue_pair
        assert pair is not None
        try:
            while not self._closing.is_set():
                for completion in pair.wait(None):
                    self._handle(completion, pair)
        except VerbsFailed as error:
            log.info("an RDMA peer's queue pair has ended: %s", error)
        finally:
            self._dismantle()
            self._exporter._ended(self)
            if not self._closing.is_set():
                self._on_broken()

    def _handle(self, completion: Completion, pair: QueuePair) -> None:
        """Raises VerbsFailed when the queue pair is broken: nothing lands through it any more."""
        if completion.status != Status.SUCCESS:
            raise VerbsFailed(f"status {completion.status}")
        if not completion.is_received:
            return
        if completion.has_immediate:
            self.bytes_in += completion.immediate
        else:
            self._answer(pair, self._messages[: completion.nbytes].tobytes())
        pair.post_receive(0, self._registered[0])

    def _answer(self, pair: QueuePair, question: bytes) -> None:
        """Open the permitted windows, and send their keys."""
        if not question or len(question) % WINDOW_REQUEST.size:
            raise VerbsFailed(f"a peer asks for windows with {len(question)} bytes")
        keys = b"".join(KEY.pack(self._key(pair, *row)) for row in WINDOW_REQUEST.iter_unpack(question))
        self._messages[MESSAGE_BYTES : MESSAGE_BYTES + len(keys)] = np.frombuffer(keys, np.uint8)
        pair.post_message(0, self._registered[1], len(keys))

    def _key(self, pair: QueuePair, block: int, epoch: int) -> int:
        with self._lock:
            before = self._windows.get(block)
            if before is not None and before[0] == epoch:
                return before[1].rkey
            try:
                window = self._exporter._open_window(pair, block, epoch)
            except VerbsFailed as error:
                log.warning("%s", error)
                return NO_WINDOW
            if window is None:
                return REFUSED
            if before is not None:
                before[1].close()
            self._windows[block] = (epoch, window)
            return window.rkey

    def _dismantle(self) -> None:
        """Windows before the queue pair they are bound to."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _, window in self._windows.values():
                try:
                    window.close()
                except VerbsFailed as error:
                    log.warning("%s", error)
            self._windows.clear()
            if self._queue_pair is not None:
                self._queue_pair.close()
            for registered in self._registered:
                registered.close()
            os.close(self._wake_read)
            os.close(self._wake_write)


def _region_bytes(total: int, block_bytes: int) -> int:
    """A whole number of blocks, so that no block is in two regions, and few enough regions."""
    blocks = max(1, REGION_BYTES // block_bytes, -(-total // (MAX_REGIONS * block_bytes)))
    return blocks * block_bytes
