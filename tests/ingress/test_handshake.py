"""TLS handshakes with a client that is quicker than the server, as in another process on an idle machine."""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from pathlib import Path
from typing import cast

import pytest
import uvloop
from certificates import make_certificate

from conductor.ingress.handshake import Handshakes, TlsProtocol

CLIENT = """
import socket, ssl, sys
context = ssl.create_default_context(cafile=sys.argv[2])
for _ in range(50):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as plain:
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            secure.sendall(b"hello")
            assert secure.recv(10) == b"hello"
"""


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_a_quick_client_is_not_lost(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    certificate, key = make_certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def serve() -> int | None:
        handshakes = Handshakes(context, 30)

        def connected() -> TlsProtocol:
            time.sleep(0.01)  # the client's first words are here before anything is done about the connection
            return TlsProtocol(Echo(), handshakes, lambda: True)

        server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, str(port), str(certificate))
        status = await client.wait()
        server.close()
        return status

    assert run(serve()) == 0
