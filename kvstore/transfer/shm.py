"""Shared memory: the segment of a peer on this host, mapped into this process. Reads and writes are plain copies.

The mapping comes over the owner's unix socket as file descriptors. The socket then stays open without traffic: it
closes when the owner dies, and while it is open the owner knows that we may be in the middle of a copy.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.segment import host_id, is_sealed_size, map_shared
from kvstore.transfer import protocol
from kvstore.transfer.greeting import check_welcome
from kvstore.transfer.native import copy
from kvstore.transfer.protocol import Operation, ProtocolViolation
from kvstore.transfer.sockets import has_ended, time_left
from kvstore.transfer.tcp import stale_epoch
from kvstore.transfer.transport import Caller, PathFailed, Slice, Work
from mooncake.errors import DeadlineExceeded, MooncakeError, StaleEpoch
from mooncake.prefault import prefault_in_background
from mooncake.types import SegmentAddress

PATHS = 2  # threads that copy to or from one segment at a time: more would only compete for memory bandwidth


class ShmTransport:
    """Maps each segment once, whatever the number of its paths. Thread-safe."""

    name = "shm"
    unavailable = ""
    max_slice_bytes = protocol.MAX_FRAME_BYTES

    def __init__(self) -> None:
        self._host_id = host_id()
        self._lock = threading.Lock()  # for the table and its users; not held while an owner answers
        self._places: dict[tuple[str, int], _Place] = {}

    def paths_to(self, address: SegmentAddress) -> int:
        return PATHS if address.unix_path and address.host_id == self._host_id else 0

    def open(self, address: SegmentAddress, caller: Caller, index: int, deadline: float) -> ShmPath:
        """Raises PathFailed, StaleEpoch (another incarnation runs there) or DeadlineExceeded."""
        key = (address.node_id, address.incarnation)
        with self._lock:
            place = self._places.get(key)
            if place is None or place.is_broken:
                place = self._places[key] = _Place()
            place.users += 1
        try:
            mapping = place.mapped(address, caller, deadline)
        except BaseException:
            self._leave(key, place)
            raise
        return ShmPath(mapping, lambda: self._leave(key, place))

    def view(self, address: SegmentAddress, caller: Caller, deadline: float) -> SegmentView:
        """Like ``open``, for callers that copy by themselves."""
        return SegmentView(self.open(address, caller, 0, deadline))

    def register(self, memory: memoryview) -> None:
        """Nothing to do: any memory can be copied."""

    def close(self) -> None:
        """Nothing is kept besides the paths."""

    def _leave(self, key: tuple[str, int], place: _Place) -> None:
        with self._lock:
            place.users -= 1
            if place.users == 0:
                place.close()
                if self._places.get(key) is place:
                    del self._places[key]


class _Place:
    """Where one segment is mapped once its owner has answered. Only those that want this segment wait for it."""

    def __init__(self) -> None:
        self.users = 0  # paths, and those about to open one
        self._lock = threading.Lock()  # two paths must not map the same segment
        self._mapping: _Mapping | None = None

    @property
    def is_broken(self) -> bool:
        return self._mapping is not None and self._mapping.is_broken

    def mapped(self, address: SegmentAddress, caller: Caller, deadline: float) -> _Mapping:
        """Raises like ``_map``."""
        if not self._lock.acquire(timeout=time_left(deadline)):
            raise _no_answer(address)
        try:
            if self._mapping is None:
                self._mapping = _map(address, caller, deadline)
            return self._mapping
        finally:
            self._lock.release()

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.sock.close()


class _Mapping:
    """One segment in this process's memory. Its socket closes when the last path has left its place."""

    def __init__(self, address: SegmentAddress, sock: socket.socket, segment_fd: int, grants_fd: int) -> None:
        """Takes ownership of the socket; the caller keeps the file descriptors. Raises OSError, ValueError."""
        self.address = address
        self.sock = sock
        self.is_broken = False  # copies in progress may finish, but no new one may start
        size = address.block_bytes * address.num_blocks
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(map_shared(segment_fd, size), dtype=np.uint8)
        prefault_in_background(self.bytes)
        self._grants_map: mmap.mmap = map_shared(grants_fd, address.num_blocks * 8, writable=False)
        self.grants = memoryview(self._grants_map).cast("Q")

    def check_owner(self) -> None:
        """Raises PathFailed when the owner is gone."""
        if has_ended(self.sock):
            self.is_broken = True
            raise PathFailed(f"{self.address.node_id} has closed its unix socket")


class ShmPath:
    """One thread's use of a mapped segment."""

    window_bytes = protocol.SLICE_BYTES

    def __init__(self, mapping: _Mapping, leave: Callable[[], None]) -> None:
        self.mapping = mapping
        self._leave: Callable[[], None] | None = leave
        self._is_cut = False

    @property
    def progress(self) -> None:
        """A copy does not stall: at most its thread waits for a processor."""

    @property
    def is_gone(self) -> bool:
        return has_ended(self.mapping.sock)

    def carry(self, work: Work) -> None:
        """One slice at a time; nothing is ever in flight."""
        while part := work.take():
            try:
                self.mapping.check_owner()
                if self._is_cut:
                    raise PathFailed(f"the mapping of {self.mapping.address.node_id} has been closed")
                time_left(part.deadline)
                refusal: MooncakeError | None = None
                if part.operation is Operation.WRITE:
                    refusal = self._write(part)
                else:
                    self._read(part)
                self.mapping.check_owner()
            except BaseException:
                work.give_back([part])
                raise
            if refusal is not None:
                work.refuse(part, refusal)
            else:
                work.done(part)

    def cut(self) -> None:
        self._is_cut = True

    def close(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _write(self, part: Slice) -> MooncakeError | None:
        grants, target, size = self.mapping.grants, self.mapping.bytes, self.mapping.address.block_bytes
        for (block, offset, length, epoch), local in part.pieces:
            if epoch < 1 or grants[block] != epoch:
                return stale_epoch(self.mapping.address.node_id, block, epoch)
            start = block * size + offset
            copy(target[start : start + length], np.frombuffer(local, np.uint8))
            if grants[block] != epoch:
                return stale_epoch(self.mapping.address.node_id, block, epoch)
        return None

    def _read(self, part: Slice) -> None:
        source, size = self.mapping.bytes, self.mapping.address.block_bytes
        for (block, offset, length, _), local in part.pieces:
            start = block * size + offset
            copy(np.frombuffer(local, np.uint8), source[start : start + length])


class SegmentView:
    """A peer's segment in this process's memory, for reading. Not to be used after ``close``."""

    def __init__(self, path: ShmPath) -> None:
        self._path = path
        self.bytes: npt.NDArray[np.uint8] = path.mapping.bytes[:]
        self.bytes.flags.writeable = False

    def check(self) -> None:
        """Raises PathFailed when the owner is gone: what was read before may then not have been its memory any more."""
        self._path.mapping.check_owner()

    def close(self) -> None:
        self._path.close()


def _map(address: SegmentAddress, caller: Caller, deadline: float) -> _Mapping:
    """Raises PathFailed, StaleEpoch (another incarnation runs there) or DeadlineExceeded."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    files: list[int] = []
    try:
        sock.settimeout(time_left(deadline))
        sock.connect("\0" + address.unix_path[1:])
        sock.settimeout(time_left(deadline))
        sock.sendall(protocol.pack_hello(address.incarnation, caller.name, caller.incarnation))
        data, files, _, _ = socket.recv_fds(sock, protocol.WELCOME_BYTES, 2)
        if len(data) != protocol.WELCOME_BYTES:
            raise PathFailed(f"{address.node_id} closed the connection")
        check_welcome(protocol.unpack_welcome(data), address)
        sock.settimeout(None)
        if len(files) != 2 or not all(map(is_sealed_size, files)):
            raise ProtocolViolation("the owner did not pass its segment")
        return _Mapping(address, sock, *files)
    except TimeoutError:
        sock.close()
        raise _no_answer(address) from None
    except (OSError, ValueError, ProtocolViolation) as error:
        sock.close()
        raise PathFailed(f"cannot map the segment of {address.node_id}: {error}") from None
    except (PathFailed, StaleEpoch, DeadlineExceeded):
        sock.close()
        raise
    finally:
        for fd in files:
            os.close(fd)


def _no_answer(address: SegmentAddress) -> DeadlineExceeded:
    return DeadlineExceeded(f"{address.node_id} did not answer on its unix socket in time")
