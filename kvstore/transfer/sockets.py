"""Blocking stream sockets with a deadline, and nothing above them.

The sockets stay in blocking mode and the kernel does the timing (SO_RCVTIMEO, SO_SNDTIMEO), because a Python timeout
makes a socket non-blocking, which turns MSG_WAITALL off and costs a poll per call. The timeouts are set once, to
TICK_S: a thread that wakes checks its deadline, and only the last tick before it costs calls to shorten it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from mooncake.errors import DeadlineExceeded

TICK_S = 1.0
UNHEARD_MS = 20_000  # after which a connection has ended whose peer acknowledges nothing
_TICK_US = 1_000_000

_TIMEVAL = struct.Struct("@ll")
_IOV_MAX = 1024
_WAITALL = int(socket.MSG_WAITALL)
_MORE = int(socket.MSG_MORE)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_TCP_INFO_BYTES = 136
_TCP_INFO_MOVED = struct.Struct("@120xQQ")  # bytes acked, bytes received: <linux/tcp.h>


class PeerClosed(ConnectionError):
    """The other side closed the connection."""


def time_left(deadline: float) -> float:
    """Seconds until a monotonic deadline. Raises DeadlineExceeded when none are left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the deadline of the transfer is past")
    return left


def tune(sock: socket.socket) -> None:
    """Disable Nagle, and notice a vanished host within half a minute even while nothing is sent.

    Within a host nothing is congested or lost, so the simplest congestion control is used, which every kernel has: BBR,
    the default of many systems, paces packets by its estimate of the rate, and moves half as much.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)
    if sock.getpeername()[0] == sock.getsockname()[0]:
        with contextlib.suppress(AttributeError, OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def keep_alive(sock: Any) -> None:
    """``sock``: a TCP socket, or its wrapper in an event loop."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The last one is for what was sent, and is not acknowledged: the others do not count then.
    options = ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", UNHEARD_MS)
    for name, value in options:
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bound_to(host: str) -> socket.socket:
    """A TCP socket that can listen, at a free port of this host. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


class Wire:
    """One blocking socket. One thread at a time, except for ``moved_bytes``, ``say_end`` and ``shut``."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(None)
        self._ticks = {socket.SO_RCVTIMEO: 0, socket.SO_SNDTIMEO: 0}  # microseconds
        self._set_tick(socket.SO_RCVTIMEO, _TICK_US)
        self._set_tick(socket.SO_SNDTIMEO, _TICK_US)

    def receive(self, size: int, deadline: float) -> bytearray:
        """Exactly ``size`` bytes. Raises PeerClosed, DeadlineExceeded or another OSError."""
        data = bytearray(size)
        self.receive_into([memoryview(data)], deadline)
        return data

    def receive_when_it_comes(self, into: memoryview, timeout_s: float) -> None:
        """Wait without limit for the first byte, then ``timeout_s`` for the rest. Raises like ``receive``."""
        while True:
            try:
                received = self.sock.recv_into(into, 0, _WAITALL)
                break
            except BlockingIOError:  # a tick
                continue
        if received == 0:
            raise PeerClosed("the peer closed the connection")
        if received < len(into):
            self.receive_into([into[received:]], time.monotonic() + timeout_s)

    def receive_into(self, parts: Sequence[memoryview], deadline: float) -> None:
        """Fill all ``parts`` (bytes, none empty), in order. Raises like ``receive``."""
        waiting = parts
        while waiting:
            self._arm(socket.SO_RCVTIMEO, deadline)
            try:
                if len(waiting) == 1:
                    received = self.sock.recv_into(waiting[0], 0, _WAITALL)
                else:
                    received = self.sock.recvmsg_into(waiting[:_IOV_MAX], 0, _WAITALL)[0]
            except BlockingIOError:
                continue
            if received == 0:
                raise PeerClosed("the peer closed the connection")
            waiting = _after(waiting, received)

    def send(self, parts: Sequence[memoryview | bytes], deadline: float, more: bool = False) -> None:
        """Send all ``parts`` (bytes), in order; ``more`` means that more follows at once. Raises like ``receive``."""
        waiting: Sequence[memoryview | bytes] = parts
        while waiting:
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self.sock.sendmsg(waiting[:_IOV_MAX], (), _MORE if more else 0)
            except BlockingIOError:
                continue
            waiting = _after(waiting, sent)

    @property
    def moved_bytes(self) -> int:
        """Bytes received, and sent bytes acknowledged by the peer, since the connection began."""
        try:
            acked, received = _TCP_INFO_MOVED.unpack(
                self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            )
        except (OSError, struct.error):  # closed, or a kernel without these counters
            return 0
        return int(acked) + int(received)

    def say_end(self) -> None:
        """The peer sees the end of what we send, and decides when to end its side. From any thread."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """Wake whoever waits on this socket; its own thread closes it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()

    def _arm(self, option: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left >= TICK_S:
            if self._tick(option) != _TICK_US:
                self._set_tick(option, _TICK_US)
        elif left <= 0:
            raise DeadlineExceeded("the deadline of the transfer is past")
        elif not left / 8 <= self._tick(option) / 1e6 <= left:
            self._set_tick(option, max(1000, int(left / 2 * 1e6)))  # zero would mean no timeout

    def _tick(self, option: int) -> int:
        return self._ticks[option]

    def _set_tick(self, option: int, micros: int) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
        self._ticks[option] = micros


def has_ended(sock: socket.socket) -> bool:
    """Whether the peer has closed it, or it is broken; reads nothing from it. Never blocks."""
    try:
        return sock.recv(1, _LOOK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _after(parts: Sequence[memoryview | bytes], moved: int) -> list[memoryview]:
    """The rest of ``parts`` after ``moved`` bytes. Usually empty: the kernel moves whole batches."""
    if moved == sum(map(len, parts)):
        return []
    for index, part in enumerate(parts):
        if moved < len(part):
            return [memoryview(part)[moved:], *(memoryview(rest) for rest in parts[index + 1 :])]
        moved -= len(part)
    return []
