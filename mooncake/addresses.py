"""Addresses as people and messages write them: ``"host:port"``, with brackets around an IPv6 host. Pure text: it knows
neither sockets nor gRPC."""

from __future__ import annotations

import codecs

from mooncake.errors import InvalidRequest

# Python encodes each host so that it connects to, and loads the codec for the first one. Two threads that try in vain,
# for want of a file descriptor, would leave it unknown, and the process without new connections, for ever.
codecs.lookup("idna")


def join_address(host: str, port: int) -> str:
    """``"host:port"``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[::1]:port"`` to its parts."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_address(address: str) -> str:
    """Returns an address from outside: a person, a message. Raises InvalidRequest for an invalid one, also None."""
    host, _, port = str(address).rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise InvalidRequest(f"an address is HOST:PORT, such as 127.0.0.1:50051; got {address!r}", "address")
    return address
