"""An HTTP server that is asked from an event loop, with the events of its answers as they come.

It knows nothing of what is asked. Each request has a connection of its own, as that of a client of its own would be.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from mooncake.api_keys import bearer, own_api_key
from mooncake.errors import ConfigError, InternalError, NodeUnavailable
from mooncake.tls import CA_CERTS_ENV, own_tls

READ_BYTES = 1 << 16
MOST_UNREAD = 4 << 20  # bytes of an event, or of another answer
OK = 200

OnEvent = Callable[[bytes], None]
"""Called with the data of each event of a stream."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes  # but for the events of a stream


class HttpServer:
    def __init__(self, url: str, name: str = "") -> None:
        """Errors call it ``name``, or by its URL. Raises ConfigError for what is not the address of an HTTP server, and
        for unusable files of ``own_tls``."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = name or self.url
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address of a server: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"a server's address is http://HOST:PORT, got {url!r}")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._netloc, self._path = parts.netloc.rpartition("@")[2], parts.path
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            tls = own_tls()
            self._tls = tls.context() if tls else ssl.create_default_context()

    async def get(self, path: str, timeout_s: float = 30.0) -> Reply:
        """Raises like ``post``."""
        return await self._ask("GET", path, b"", _Response(None), timeout_s)

    async def post(self, path: str, body: bytes, on_event: OnEvent, timeout_s: float) -> Reply:
        """``body`` is JSON. Raises NodeUnavailable when the server cannot be reached, hangs up or takes longer,
        InternalError when it does not speak HTTP, or without an end."""
        return await self._ask("POST", path, body, _Response(on_event), timeout_s)

    async def _ask(self, method: str, path: str, body: bytes, response: _Response, timeout_s: float) -> Reply:
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        )
        head += "".join(f"{name}: {value}\r\n" for name, value in bearer(own_api_key()))
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
                try:
                    writer.write(head.encode() + b"\r\n" + body)
                    await response.read(reader)
                finally:
                    writer.close()
        except TimeoutError:
            raise NodeUnavailable(f"{self.name} did not answer within {timeout_s:g} s") from None
        except ssl.SSLError as error:
            what = f"there is no TLS with {self.name}: {error.reason}; {CA_CERTS_ENV} names the certificates to trust"
            raise NodeUnavailable(what) from None
        except OSError as error:
            raise NodeUnavailable(f"{self.name} cannot be asked: {error}") from None
        except httptools.HttpParserError as error:
            raise InternalError(f"{self.name} does not speak HTTP: {error}") from None
        return Reply(response.status, response.unread)


class _Response:
    """Takes a response apart as it comes; a protocol of httptools."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self.status = 0
        self.unread = b""
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._is_complete = False

    async def read(self, reader: asyncio.StreamReader) -> None:
        while not self._is_complete:
            data = await reader.read(READ_BYTES)
            if not data:
                raise ConnectionResetError("it hung up before the end of its answer")
            self._parser.feed_data(data)
            if len(self.unread) > MOST_UNREAD:
                raise InternalError(f"it sent more than {MOST_UNREAD >> 20} MiB that are no event")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.unread += body
        if self.status == OK and self._on_event is not None:
            *events, self.unread = self.unread.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                for line in event.split(b"\n"):
                    if line.startswith(b"data:"):
                        self._on_event(line.removeprefix(b"data:").strip())

    def on_message_complete(self) -> None:
        self._is_complete = True
