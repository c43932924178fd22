"""Reaching a cluster from a command: a client, and what to do when nobody answers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from mooncake.client import Client
from mooncake.errors import NodeUnavailable
from mooncake.rpc.server import split_address


@contextlib.contextmanager
def reach(address: str) -> Iterator[Client]:
    """A client for one command. When nobody listens at ``address``, NodeUnavailable says how to start a cluster."""
    with Client(address) as client:
        try:
            yield client
        except NodeUnavailable:
            if _is_listening(address):
                raise
            raise NodeUnavailable(
                f"no cluster answers at {address}; start one with `mooncake serve`, or name another with --address"
            ) from None


def _is_listening(address: str) -> bool:
    try:
        with socket.create_connection(split_address(address), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False
