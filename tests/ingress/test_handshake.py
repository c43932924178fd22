"""TLS handshakes with a client that is quicker than the server, as in another process on an idle machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from certificates import make_certificate

from conductor.ingress.http.handshake import Handshakes, TlsProtocol

Run = Callable[[Coroutine[Any, Any, Any]], Any]

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


LOOPS = pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])


@pytest.fixture
def context(tmp_path: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's, and its certificate."""
    certificate, key = make_certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


@contextlib.contextmanager
def one_more_file() -> Iterator[None]:
    """One more descriptor can be had, and no second one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@LOOPS
def test_without_descriptors_a_connection_ends_and_nothing_else_does(
    run: Run, context: tuple[ssl.SSLContext, Path]
) -> None:
    async def serve() -> None:
        loop, failures = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, failure: failures.append(failure))
        handshakes = Handshakes(context[0], 30)
        server = await loop.create_server(lambda: TlsProtocol(Echo(), handshakes, lambda: True), "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as client:  # the kernel's, not taken yet
            client.setblocking(False)
            with one_more_file():
                async with asyncio.timeout(10):
                    assert await loop.sock_recv(client, 1) == b""
        assert not [failure for failure in failures if "accept" not in failure["message"]]  # of the listening socket
        assert len(handshakes) == 0
        server.close()

    run(serve())


@LOOPS
def test_a_quick_client_is_not_lost(run: Run, context: tuple[ssl.SSLContext, Path]) -> None:
    async def serve() -> int | None:
        handshakes = Handshakes(context[0], 30)

        def connected() -> TlsProtocol:
            time.sleep(0.01)  # the client's first words are here before anything is done about the connection
            return TlsProtocol(Echo(), handshakes, lambda: True)

        server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, str(port), str(context[1]))
        status = await client.wait()
        server.close()
        return status

    assert run(serve()) == 0
