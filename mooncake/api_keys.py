"""API keys: what a caller presents, over HTTP and gRPC alike, and how it is compared with the configured ones.

A key travels as ``Authorization: Bearer KEY``. Keys are stored as digests, so that neither a log line nor a traceback
of this module can reveal one.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from hashlib import sha256

from mooncake.errors import InvalidRequest

API_KEY_ENV = "MOONCAKE_API_KEY"  # one key: for servers that are configured with none, and for clients
HEADER = "authorization"  # also the metadata key in gRPC, which is lower-case
HIDDEN = "(hidden)"  # shown instead of a secret
KEY_WORDS = "1 to 512 characters of visible ASCII"
_KEY = re.compile(r"[!-~]{1,512}")


class ApiKeys:
    """The accepted keys; with none, everyone is admitted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, header: bytes) -> bool:
        """Whether the value of an ``Authorization`` header (b"" for none) has one of the keys. Takes the same time
        whatever the value: all digests are compared, each in constant time."""
        scheme, _, key = header.partition(b" ")
        digest = sha256(key.strip()).digest()
        found = sum(hmac.compare_digest(digest, known) for known in self._digests)
        return not self._digests or (scheme.lower() == b"bearer" and found > 0)


def is_key(text: str) -> bool:
    """Whether it can travel in a header as it is."""
    return _KEY.fullmatch(text) is not None


def bearer(api_key: str) -> tuple[tuple[str, str], ...]:
    """Call metadata for this key; none for "". Raises InvalidRequest, which does not tell the key."""
    if not api_key:
        return ()
    if not is_key(api_key):
        raise InvalidRequest(f"an API key is {KEY_WORDS}: is there a line break in it?", "api_key")
    return ((HEADER, f"Bearer {api_key}"),)


def own_api_key() -> str:
    """The key that this process's environment sets for clients; "" for none."""
    return os.environ.get(API_KEY_ENV, "")
