"""TLS in front of a protocol: the client's handshake comes first, takes a place, and has a limited time.

An event loop's own TLS server gives every client that connects a minute, and does not know how many there are. It
knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast


class Handshakes:
    """Those in progress at one listening socket."""

    def __init__(self, context: ssl.SSLContext, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._open: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def start(self, transport: asyncio.Transport, inner: asyncio.Protocol) -> None:
        """``inner`` is connected once the handshake has succeeded; otherwise the connection ends."""
        task = asyncio.get_running_loop().create_task(self._shake_hands(transport, inner), name="TLS handshake")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    def close(self) -> None:
        """End the connections of those in progress."""
        for task in self._open:
            task.cancel()

    async def _shake_hands(self, transport: asyncio.Transport, inner: asyncio.Protocol) -> None:
        early = _Early()
        loop = asyncio.get_running_loop()
        try:
            secure = await loop.start_tls(
                transport, early, self._context, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # no TLS, no certificate that we accept, nothing in time, or gone
            transport.abort()
            return
        if secure is None or early.has_ended:
            return
        inner.connection_made(secure)
        secure.set_protocol(inner)
        if early.data:
            inner.data_received(bytes(early.data))


class _Early(asyncio.Protocol):
    """Keeps what arrives together with the end of the handshake."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.has_ended = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended = True


class TlsProtocol(asyncio.Protocol):
    """The beginning of one connection. Without room it is closed at once: saying why would take a handshake, too."""

    def __init__(self, inner: asyncio.Protocol, handshakes: Handshakes, has_room: Callable[[], bool]) -> None:
        self._inner = inner
        self._handshakes = handshakes
        self._has_room = has_room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        if self._has_room():
            plain.pause_reading()  # until the handshake begins
            self._handshakes.start(plain, self._inner)
        else:
            plain.abort()
