"""What one gRPC port may cost its process: how many connections and streams there are, and how long silent ones stay.

Without these, connections that nobody authenticated could take every file descriptor of a process, and with them its
other ports.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from mooncake.errors import Overloaded


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Of one listening port."""

    max_connections: int = 8192  # at once, twice the most nodes; at most a quarter of the process's file descriptors
    max_connection_streams: int = 4096  # calls of one connection at once; more wait in their client
    max_streams: int = 16384  # streaming calls at once, of all connections; more are refused
    handshake_s: float = 30.0  # for a connection to begin speaking
    idle_s: float = 600.0  # without a call; clients here leave earlier by themselves
    ping_after_s: float = 60.0  # of silence, as of a host that is gone but has a call open
    ping_s: float = 20.0  # for the answer to arrive

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """gRPC's own names of them."""
        return (
            ("grpc.max_allowed_incoming_connections", share_of_files(self.max_connections)),
            ("grpc.max_concurrent_streams", self.max_connection_streams),
            ("grpc.server_handshake_timeout_ms", int(self.handshake_s * 1e3)),
            ("grpc.max_connection_idle_ms", int(self.idle_s * 1e3)),
            *pings(self.ping_after_s, self.ping_s),
        )


def pings(after_s: float, answer_s: float) -> tuple[tuple[str, int], ...]:
    """gRPC's options for a peer that is silent while a call is open: it is pinged, and given up without an answer.

    With grpc.keepalive_timeout_ms alone gRPC awaits the answer for a minute, the default of its other time-out.
    """
    return (
        ("grpc.keepalive_time_ms", int(after_s * 1e3)),
        ("grpc.keepalive_timeout_ms", int(answer_s * 1e3)),
        ("grpc.http2.ping_timeout_ms", int(answer_s * 1e3)),
    )


def share_of_files(most: int) -> int:
    """``most`` connections of one port, or a quarter of the files that this process may open, if that is less."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 4)


class OpenStreams:
    """Counts the streaming calls of a server: each holds memory for as long as its client likes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_open = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Raises Overloaded when there are too many."""
        if self._num_open >= self._most:
            raise Overloaded(f"{self._num_open} streams are open here already")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
