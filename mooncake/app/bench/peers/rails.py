"""Network paths with adjustable speed: TCP relays in a separate process, each with a token bucket.

Bytes arrive unchanged or not at all. For the benchmark and the tests of several paths to a peer.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType

from kvstore.transfer.scheduling.limiter import TokenBucket
from mooncake.errors import NodeUnavailable

CHUNK_BYTES = 32 << 10
BUFFER_BYTES = 128 << 10  # per socket; larger buffers would hide the limit
START_TIMEOUT_S = 30.0


class Rails:
    """``with Rails(target, 4, bytes_per_s) as rails``: ``rails.addresses`` are the addresses of four relays to
    ``target``."""

    def __init__(self, target: tuple[str, int], number: int, bytes_per_s: float) -> None:
        self.addresses: list[str] = []
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, target, number, bytes_per_s), daemon=True)

    def __enter__(self) -> Rails:
        self._process.start()
        if not self._control.poll(START_TIMEOUT_S):
            self._process.kill()
            raise NodeUnavailable("the relays do not start")
        self.addresses = [f"127.0.0.1:{port}" for port in self._control.recv()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()

    def set_rate(self, index: int, bytes_per_s: float) -> None:
        self._ask("rate", index, bytes_per_s)

    def kill(self, index: int) -> None:
        """Break the relay's connections and refuse new ones."""
        self._ask("kill", index, 0.0)

    def freeze(self, index: int) -> None:
        """Stop forwarding silently."""
        self._ask("freeze", index, 0.0)

    def _ask(self, what: str, index: int, value: float) -> None:
        self._control.send((what, index, value))
        self._control.recv()


@dataclass(eq=False)
class _Relay:
    listener: socket.socket
    bucket: TokenBucket
    lock: threading.Lock = field(default_factory=threading.Lock)
    sockets: list[socket.socket] = field(default_factory=list)
    moving: threading.Event = field(default_factory=threading.Event)


def _run(control: Connection, target: tuple[str, int], number: int, bytes_per_s: float) -> None:
    relays: list[_Relay] = []
    for _ in range(number):
        listener = socket.create_server(("127.0.0.1", 0))
        relay = _Relay(listener, _bucket(bytes_per_s))
        relay.moving.set()
        relays.append(relay)
        threading.Thread(target=_accept, args=(relay, target), daemon=True).start()
    control.send([relay.listener.getsockname()[1] for relay in relays])
    with contextlib.suppress(EOFError):
        while True:
            what, index, value = control.recv()
            _obey(relays[index], what, value)
            control.send(True)


def _obey(relay: _Relay, what: str, value: float) -> None:
    if what == "rate":
        with relay.lock:
            relay.bucket = _bucket(value)
    elif what == "freeze":
        relay.moving.clear()
    else:
        for sock in [relay.listener, *relay.sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _bucket(bytes_per_s: float) -> TokenBucket:
    return TokenBucket(bytes_per_s, 2 * CHUNK_BYTES, time.monotonic())


def _accept(relay: _Relay, target: tuple[str, int]) -> None:
    with contextlib.suppress(OSError):
        while True:
            near, _ = relay.listener.accept()
            far = socket.create_connection(target)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                    sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
            relay.sockets += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(relay, *ends), daemon=True).start()


def _pump(relay: _Relay, source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            relay.moving.wait()
            while wait_s := _wait(relay, len(data)):
                time.sleep(wait_s)
            sink.sendall(data)
    for sock in (source, sink):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _wait(relay: _Relay, size: int) -> float:
    with relay.lock:
        return relay.bucket.try_take(size, time.monotonic())
