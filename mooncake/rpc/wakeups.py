"""Has an event loop take all of gRPC's wake-ups in one pass, however slow its passes are.

Its thread writes a byte to a socket for each event, and each pass of the loop reads one byte and handles all events. A
loop whose passes are slow falls behind: after some 280 bytes the socket is full, the thread stands still in its write,
and from then on gRPC gets one event through per pass. Here each pass reads all bytes that are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any

_reading = threading.Lock()  # several loops of a process may read from the same socket


@contextlib.contextmanager
def all_wakeups_read() -> Iterator[None]:
    """Make channels and servers within it: gRPC listens to its socket from the first one of a loop on."""
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    add_reader = loop.add_reader

    def add(source: socket.socket, callback: Callable[..., object], *args: object) -> None:
        add_reader(source, _read_all, source, callback, *args)

    loop.add_reader = add
    try:
        yield
    finally:
        del loop.add_reader


def _read_all(source: socket.socket, handle: Callable[..., object], *args: object) -> None:
    """``handle`` reads one byte and handles all events so far. It is called for each, because one that fails, at an
    event of a loop that has been closed, leaves those behind it to the next byte."""
    with _reading:
        waiting = int.from_bytes(fcntl.ioctl(source, termios.FIONREAD, bytes(4)), sys.byteorder)
        for _ in range(waiting):  # none if another loop has read them
            handle(*args)
