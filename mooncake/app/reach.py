"""Connecting a command to a cluster, with helpful errors."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from mooncake.addresses import split_address
from mooncake.api_keys import API_KEY_ENV
from mooncake.client import Client
from mooncake.errors import NodeUnavailable, Unauthenticated


@contextlib.contextmanager
def reach(address: str) -> Iterator[Client]:
    """A client for one command. Raises the same errors as ``telling_what_to_do``."""
    with Client(address) as client, telling_what_to_do(address):
        yield client


@contextlib.contextmanager
def telling_what_to_do(address: str) -> Iterator[None]:
    """Adds to NodeUnavailable how to start a cluster if none listens at ``address``, and to Unauthenticated where the
    API key is read from."""
    try:
        yield
    except Unauthenticated as error:
        where = f"{API_KEY_ENV}, or conductor.api_keys of the configuration"
        raise Unauthenticated(f"{error.message}; commands take the key of {where}") from None
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
