"""The practical limit of what moves bytes over TCP: the fewest system calls, without checksums or keys.

A request of nine bytes, and the payload in one call on each side.
"""

from __future__ import annotations

import socket
import struct

from kvstore.transfer.sockets import tune

_REQUEST = struct.Struct("<?II")  # is_read, offset, bytes


class BareSocket:
    """Reads and writes the memory of another process (``serve``) into and from ``memory``, at the same offsets."""

    def __init__(self, address: tuple[str, int], memory: memoryview) -> None:
        self._memory = memory
        self._sock = socket.create_connection(address)
        tune(self._sock)

    def close(self) -> None:
        self._sock.close()

    def read(self, start: int, size: int) -> None:
        self._sock.sendall(_REQUEST.pack(True, start, size))
        self._sock.recv_into(self._memory[start : start + size], size, socket.MSG_WAITALL)

    def write(self, start: int, size: int) -> None:
        self._sock.sendall(_REQUEST.pack(False, start, size), socket.MSG_MORE)
        self._sock.sendall(self._memory[start : start + size])
        self._sock.recv(1)


def serve(listener: socket.socket, memory: memoryview) -> None:
    """The other end, for one connection after the other, for ever."""
    while True:
        sock, _ = listener.accept()
        tune(sock)
        while request := sock.recv(_REQUEST.size, socket.MSG_WAITALL):
            is_read, start, size = _REQUEST.unpack(request)
            if is_read:
                sock.sendall(memory[start : start + size])
            else:
                sock.recv_into(memory[start : start + size], size, socket.MSG_WAITALL)
                sock.sendall(b"k")
