"""Blocking stream sockets with a deadline, and nothing above them.

The sockets stay in blocking mode and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO), because a Python timeout
makes a socket non-blocking, which turns MSG_WAITALL off and costs a poll for every call.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence

from mooncake.errors import DeadlineExceeded

_TIMEVAL = struct.Struct("@ll")
_FOREVER = _TIMEVAL.pack(0, 0)
_IOV_MAX = 1024


class PeerClosed(ConnectionError):
    """The other side closed the connection."""


def time_left(deadline: float) -> float:
    """Seconds until a monotonic deadline. Raises DeadlineExceeded when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the deadline of the transfer is past")
    return left


def tune(sock: socket.socket) -> None:
    """No Nagle; and a peer whose host vanished is noticed within half a minute even while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive(sock: socket.socket, size: int, deadline: float) -> bytearray:
    """Exactly ``size`` bytes. Raises PeerClosed, DeadlineExceeded or another OSError."""
    data = bytearray(size)
    receive_into(sock, [memoryview(data)], deadline)
    return data


def receive_when_it_comes(sock: socket.socket, size: int, timeout_s: float) -> bytearray:
    """Wait for ever for the first byte, then ``timeout_s`` for the rest. Raises like ``receive``."""
    data = bytearray(size)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _FOREVER)
    received = sock.recv_into(data)
    if received == 0:
        raise PeerClosed("the peer closed the connection")
    if received < size:
        receive_into(sock, [memoryview(data)[received:]], time.monotonic() + timeout_s)
    return data


def receive_into(sock: socket.socket, parts: Sequence[memoryview], deadline: float) -> None:
    """Fill all ``parts`` (bytes, none empty), in order. Raises like ``receive``."""
    waiting = list(parts)
    while waiting:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(time_left(deadline)))
        try:
            if len(waiting) == 1:
                received = sock.recv_into(waiting[0], 0, socket.MSG_WAITALL)
            else:
                received = sock.recvmsg_into(waiting[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise DeadlineExceeded("the peer sent nothing until the deadline") from None
        if received == 0:
            raise PeerClosed("the peer closed the connection")
        waiting = _after(waiting, received)


def send_all(sock: socket.socket, parts: Sequence[memoryview], deadline: float) -> None:
    """Send all ``parts`` (bytes), in order. Raises DeadlineExceeded or another OSError."""
    waiting = list(parts)
    while waiting:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(time_left(deadline)))
        try:
            sent = sock.sendmsg(waiting[:_IOV_MAX])
        except BlockingIOError:
            raise DeadlineExceeded("the peer took nothing until the deadline") from None
        waiting = _after(waiting, sent)


def _timeval(timeout_s: float) -> bytes:
    micros = max(1000, int(timeout_s * 1e6))  # zero would mean for ever
    return _TIMEVAL.pack(*divmod(micros, 1_000_000))


def _after(parts: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of ``parts`` after ``moved`` bytes. Mostly nothing: the kernel moves whole batches."""
    for index, part in enumerate(parts):
        if moved < len(part):
            return [part[moved:], *parts[index + 1 :]]
        moved -= len(part)
    return []
