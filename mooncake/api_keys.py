"""API keys: what a caller shows, over HTTP and gRPC alike, and how it is compared with what is configured.

A key travels as ``Authorization: Bearer KEY``. Keys are kept as digests, so that neither a log line nor a traceback of
this module can tell one.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from hashlib import sha256

API_KEY_ENV = "MOONCAKE_API_KEY"  # one key: of servers that are configured with none, and of clients
HEADER = "authorization"  # also the name in gRPC's metadata, which has lower case only
HIDDEN = "(hidden)"  # what is shown in place of a secret


class ApiKeys:
    """The keys that open a door; with none it stands open."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, header: bytes) -> bool:
        """Whether the value of an ``Authorization`` header (b"" for none) has one of the keys. Takes the same time
        whatever it holds: all digests are compared, each in constant time."""
        scheme, _, key = header.partition(b" ")
        digest = sha256(key.strip()).digest()
        found = sum(hmac.compare_digest(digest, known) for known in self._digests)
        return not self._digests or (scheme.lower() == b"bearer" and found > 0)


def bearer(api_key: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call by whoever has this key; none for ""."""
    return ((HEADER, f"Bearer {api_key}"),) if api_key else ()


def own_api_key() -> str:
    """The key that this process's environment gives to clients; "" for none."""
    return os.environ.get(API_KEY_ENV, "")
