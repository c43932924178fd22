"""Sending memory over a socket without copying it first: its pages go through a pipe into the socket's queue.

The kernel reads the pages when the other side takes them in, so the memory must keep its bytes until the other side
has said that it has them; and after a failure what arrives is what the memory holds by then. That is good enough where
the receiver checks checksums after it has closed its ears, as the owners of segments do when they seal and commit.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Sequence
from errno import EAGAIN, EINTR

import numpy as np

from kvstore.transfer.sockets import Wire

PIPE_BYTES = 1 << 20  # what an unprivileged process may have

_F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ
_SPLICE_F_NONBLOCK = 2


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Splicer:
    """A pipe for one socket. One thread at a time."""

    def __init__(self) -> None:
        """Raises OSError where this cannot be had."""
        library = ctypes.CDLL(None, use_errno=True)
        try:
            self._vmsplice = library.vmsplice
        except AttributeError:
            raise OSError("this system has no vmsplice") from None
        self._vmsplice.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._vmsplice.restype = ctypes.c_ssize_t
        self._out, self._in = os.pipe()
        try:
            fcntl.fcntl(self._in, _F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            self.close()
            raise

    def send(self, wire: Wire, parts: Sequence[memoryview], deadline: float) -> None:
        """Send all ``parts`` (bytes), in order. After an error neither the pipe nor the socket is of use any more.

        Raises DeadlineExceeded or another OSError.
        """
        for part in parts:
            address, left = _address_of(part), part.nbytes
            while left:
                taken = self._fill(address, left)
                address, left = address + taken, left - taken
                self._drain(wire, taken, deadline)

    def close(self) -> None:
        for end in (self._out, self._in):
            with contextlib.suppress(OSError):
                os.close(end)

    def _fill(self, address: int, size: int) -> int:
        """The pipe is empty: it takes at least one page."""
        vector = _IoVector(address, size)
        while (taken := self._vmsplice(self._in, ctypes.addressof(vector), 1, _SPLICE_F_NONBLOCK)) < 0:
            if ctypes.get_errno() != EINTR:
                raise OSError(ctypes.get_errno(), "vmsplice")
        return int(taken)

    def _drain(self, wire: Wire, size: int, deadline: float) -> None:
        target = wire.sock.fileno()
        while size:
            wire.arm_sending(deadline)
            try:
                size -= os.splice(self._out, target, size)
            except OSError as error:
                if error.errno != EAGAIN:  # that one is the socket's timeout: look at the deadline
                    raise


def _address_of(part: memoryview) -> int:
    """Also of read-only memory, which ctypes refuses."""
    return int(np.frombuffer(part, dtype=np.uint8).ctypes.data)
