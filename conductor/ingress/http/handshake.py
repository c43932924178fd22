"""TLS in front of a protocol: the client's handshake comes first, takes a place, and has a limited time.

An event loop's own TLS server gives every client that connects a minute, and does not know how many there are. It
knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast


class Handshakes:
    """Those in progress at one listening socket."""

    def __init__(self, context: ssl.SSLContext, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._open: dict[asyncio.Task[None], float] = {}  # when they began; oldest first

    def __len__(self) -> int:
        return len(self._open)

    def start(self, transport: asyncio.Transport, inner: asyncio.Protocol) -> None:
        """``inner`` is connected once the handshake has succeeded; otherwise the connection ends.

        The socket gets another transport. ``loop.start_tls`` would keep this one, but uvloop reads from it before that
        begins, and the client's first words are lost.
        """
        try:
            client = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:  # no descriptor is left
            return
        finally:
            transport.abort()  # closes only its own descriptor
        task = asyncio.get_running_loop().create_task(self._shake_hands(client, inner), name="TLS handshake")
        self._open[task] = time.monotonic()
        task.add_done_callback(lambda ended: self._open.pop(ended, None))

    def end_one(self, age_s: float) -> bool:
        """Whether there was one of this age to end, so that its place is free."""
        task = next(iter(self._open), None)
        if task is None or time.monotonic() - self._open[task] < age_s:
            return False
        del self._open[task]
        task.cancel()
        return True

    def close(self) -> None:
        """End the connections of those in progress."""
        for task in list(self._open):
            task.cancel()

    async def _shake_hands(self, client: socket.socket, inner: asyncio.Protocol) -> None:
        try:
            client.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: inner, client, ssl=self._context, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # no TLS, no certificate that we accept, nothing in time, or gone
            client.close()
        except asyncio.CancelledError:
            client.close()
            raise


class TlsProtocol(asyncio.Protocol):
    """The beginning of one connection. Without room it is closed at once: saying why would take a handshake, too."""

    def __init__(self, inner: asyncio.Protocol, handshakes: Handshakes, has_room: Callable[[], bool]) -> None:
        self._inner = inner
        self._handshakes = handshakes
        self._has_room = has_room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        if self._has_room():
            self._handshakes.start(plain, self._inner)
        else:
            plain.abort()
