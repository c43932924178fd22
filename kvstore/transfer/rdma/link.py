"""A queue pair connected to a segment's owner, and the keys received over it: of regions, and of windows for blocks.

It lives as long as the TCP connection it was set up over. The wire forms of both sides are defined here. It knows
nothing of slices.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.pointers import address_of
from kvstore.transfer.protocol import MAX_RANGES, Operation
from kvstore.transfer.rdma.verbs import Access, Device, Endpoint, QueuePair, Registration, VerbsFailed
from kvstore.transfer.transport import PathFailed
from mooncake.types import SegmentAddress

REGION_TABLE = struct.Struct("<QQIHH")  # base address, bytes per region, bytes per block, number of regions, zero
KEY = struct.Struct("<I")
WINDOW_REQUEST = struct.Struct("<IQ")  # block, epoch
REFUSED = 0  # instead of a window's key: the block is not granted to this epoch
NO_WINDOW = 0xFFFFFFFF  # the owner's device has no more windows
MESSAGE_BYTES = MAX_RANGES * WINDOW_REQUEST.size

REQUEST_TAG, REPLY_TAG, NOTICE_TAG = 0, 1, 2
FIRST_SLICE_TAG = 16

Attach = Callable[[bytes, float], tuple[socket.socket, bytes]]
"""Sends a request over a new control connection before the deadline; the owner's answer and the connection."""


class LinkBroken(PathFailed):
    """The owner's device refused a key or acknowledged nothing, or the owner ended the link. It may be well, and accept
    a new one."""


class Link:
    """A connected queue pair, the control connection that bounds its life, and the keys received over it."""

    def __init__(self, node_id: str, queue_pair: QueuePair) -> None:
        """Takes ownership of the queue pair."""
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
    def open(cls, device: Device, address: SegmentAddress, attach: Attach, send_depth: int, deadline: float) -> Link:
        """Raises PathFailed, StaleEpoch or DeadlineExceeded."""
        try:
            link = cls(address.node_id, QueuePair(device, send_depth, 2))
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
            link.queue_pair.post_receive(REPLY_TAG, link._registered[1])
        except (VerbsFailed, ValueError) as error:
            link.close()
            raise PathFailed(f"{address.node_id}: {error}") from None
        except BaseException:
            link.close()
            raise
        return link

    def remote(self, block: int, offset: int, operation: Operation) -> tuple[int, int]:
        """(address, key) of a place in the segment. Verbs use addresses; the key limits what can be reached."""
        start = block * self._block_bytes + offset
        key = self.windows[block][1] if operation is Operation.WRITE else self._read_keys[start // self._region_bytes]
        return self._base + start, key

    def has_window(self, block: int, epoch: int) -> bool:
        window = self.windows.get(block)
        return window is not None and window[0] == epoch

    def ask_for_windows(self, wanted: list[tuple[int, int]]) -> None:
        """The answer arrives as ``reply``. One request at a time. Raises VerbsFailed."""
        question = b"".join(WINDOW_REQUEST.pack(block, epoch) for block, epoch in wanted)
        self._messages[: len(question)] = np.frombuffer(question, np.uint8)
        self.queue_pair.post_message(REQUEST_TAG, self._registered[0], len(question))

    def received(self, nbytes: int) -> None:
        self.reply = self._messages[MESSAGE_BYTES : MESSAGE_BYTES + nbytes].tobytes()
        self.queue_pair.post_receive(REPLY_TAG, self._registered[1])

    def take_reply(self, count: int) -> list[int]:
        """Raises PathFailed for an answer to something else."""
        reply, self.reply = self.reply or b"", None
        if len(reply) != count * KEY.size:
            raise PathFailed(f"{self._node_id} answers {count} questions for windows with {len(reply)} bytes")
        return [key for (key,) in KEY.iter_unpack(reply)]

    @property
    def is_gone(self) -> bool:
        """Whether the owner has closed its control connection, or ``cut`` was called."""
        assert self._sock is not None
        news = select.poll()
        news.register(self._sock, select.POLLIN | select.POLLRDHUP)
        return bool(news.poll(0))

    def check_alive(self) -> None:
        """Raises LinkBroken when the owner has gone, has lost the queue pair, or ``cut`` was called."""
        if self.is_gone:
            raise LinkBroken(f"{self._node_id} has closed its control connection")

    def cut(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The queue pair first: while the connection is open the owner may still rely on us."""
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
