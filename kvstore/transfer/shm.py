"""Shared memory: the segment of a peer on this host, mapped into this process. Reads and writes are plain copies.

The mapping comes over the owner's unix socket as file descriptors. The socket then stays open without traffic: when
the owner dies it closes, and as long as it is open the owner knows that we may be in the middle of a copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.segment import is_sealed_size, map_shared
from kvstore.transfer import protocol, sockets
from kvstore.transfer.batch import Batch, PathFailed, Slice
from kvstore.transfer.greeting import check_welcome
from kvstore.transfer.protocol import Operation, ProtocolViolation
from mooncake.errors import DeadlineExceeded, StaleEpoch
from mooncake.types import SegmentAddress

_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)  # an int, because or-ing enum members costs more than the call


class ShmPath:
    """One mapped segment. Thread-safe; the socket closes when the last transfer has left a closed path."""

    def __init__(self, address: SegmentAddress, sock: socket.socket, segment_fd: int, grants_fd: int) -> None:
        """Takes the socket over; the caller keeps the file descriptors. Raises OSError, ValueError."""
        self._address = address
        size = address.block_bytes * address.num_blocks
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(map_shared(segment_fd, size), dtype=np.uint8)
        self._grants_map: mmap.mmap = map_shared(grants_fd, address.num_blocks * 8, writable=False)
        self._grants = memoryview(self._grants_map).cast("Q")
        self._sock = sock
        self._lock = threading.Lock()
        self._users = 0
        self._closing = threading.Event()

    @classmethod
    def open(cls, address: SegmentAddress, hello: bytes, deadline: float) -> ShmPath:
        """Raises PathFailed, StaleEpoch (another incarnation runs there) or DeadlineExceeded."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        files: list[int] = []
        try:
            sock.settimeout(sockets.time_left(deadline))
            sock.connect("\0" + address.unix_path[1:])
            sock.settimeout(sockets.time_left(deadline))
            sock.sendall(hello)
            data, files, _, _ = socket.recv_fds(sock, protocol.WELCOME_BYTES, 2)
            check_welcome(data, address)
            sock.settimeout(None)
            if len(files) != 2 or not all(map(is_sealed_size, files)):
                raise ProtocolViolation("the owner did not pass its segment")
            return cls(address, sock, *files)
        except TimeoutError:
            sock.close()
            raise DeadlineExceeded(f"{address.node_id} did not answer on its unix socket in time") from None
        except (OSError, ValueError, ProtocolViolation) as error:
            sock.close()
            raise PathFailed(f"cannot map the segment of {address.node_id}: {error}") from None
        except (PathFailed, StaleEpoch, DeadlineExceeded):
            sock.close()
            raise
        finally:
            for fd in files:
                os.close(fd)

    def run(self, batch: Batch) -> None:
        """Move what waits in the batch. Raises PathFailed when the owner is gone, DeadlineExceeded, Cancelled."""
        move = self._write if batch.operation is Operation.WRITE else self._read
        with self._in_use():
            while part := batch.take():
                try:
                    self._check_owner()
                    sockets.time_left(batch.deadline)
                    move(part)
                except StaleEpoch as error:
                    batch.give_back([part])
                    batch.refuse(error)
                    return
                except (PathFailed, DeadlineExceeded):
                    batch.give_back([part])
                    raise
                batch.done(part)
            self._check_owner()

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            idle = self._users == 0
        if idle:
            self._sock.close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """A copy that has begun must be visible to the owner as an open connection until it has ended."""
        with self._lock:
            if self._closing.is_set():
                raise PathFailed(f"the mapping of {self._address.node_id} has been closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self._closing.is_set() and self._users == 0
            if last:
                self._sock.close()

    def _write(self, part: Slice) -> None:
        for piece in part.pieces:
            wire = piece.wire
            self._check_grant(wire.block, wire.epoch)
            # numpy releases the GIL while it copies; assigning to a memoryview does not.
            np.copyto(self._range(wire.block, wire.offset, wire.length), np.frombuffer(piece.local, np.uint8))
            self._check_grant(wire.block, wire.epoch)

    def _read(self, part: Slice) -> None:
        for piece in part.pieces:
            wire = piece.wire
            np.copyto(np.frombuffer(piece.local, np.uint8), self._range(wire.block, wire.offset, wire.length))

    def _range(self, block: int, offset: int, length: int) -> npt.NDArray[np.uint8]:
        start = block * self._address.block_bytes + offset
        return self._bytes[start : start + length]

    def _check_grant(self, block: int, epoch: int) -> None:
        if epoch < 1 or self._grants[block] != epoch:
            raise StaleEpoch(f"{self._address.node_id}: block {block} is no longer granted to epoch {epoch}")

    def _check_owner(self) -> None:
        try:
            gone = self._sock.recv(1, _LOOK) == b""
        except BlockingIOError:
            return
        except OSError:
            gone = True
        if gone:
            raise PathFailed(f"{self._address.node_id} has closed its unix socket")
