"""Maps a caller's keys to the keys in a pool's stores, and to the stores that should hold them.

Pure. A store sees neither namespaces nor salts, only keys that cannot be guessed without knowing both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import xxhash

from kvstore.transfer import protocol
from mooncake.errors import InvalidRequest

NAMESPACE_BYTES = 16
MIN_WIRE_BYTES, MAX_WIRE_BYTES = NAMESPACE_BYTES + 1, protocol.MAX_KEY_BYTES
MAX_KEY_BYTES = MAX_WIRE_BYTES - NAMESPACE_BYTES  # of a caller's key
_WRONG_KIND = "a key is bytes, or a str that UTF-8 can encode"

Key = str | bytes


class PoolKeys:
    """To find each other's blocks, clients need the same addresses, in any order, the same namespace and the same
    salt."""

    def __init__(self, addresses: Sequence[str], replicas: int, namespace: str, salt: str) -> None:
        """Raises InvalidRequest."""
        if not addresses:
            raise InvalidRequest("a client needs at least one store", "addresses")
        if not 1 <= replicas <= len(addresses):
            raise InvalidRequest(f"{replicas} replicas need as many stores; there are {len(addresses)}", "replicas")
        self._addresses = list(addresses)
        self._replicas = replicas
        self._prefix = _prefix(namespace, salt)

    def homes(self, wire: bytes) -> list[str]:
        """The stores that should hold this key, in order: rendezvous hashing, so that adding or removing a store
        moves only its own share of keys."""
        if len(self._addresses) == 1:
            return self._addresses
        ranked = sorted(self._addresses, key=lambda address: -xxhash.xxh3_64_intdigest(address.encode() + b"\0" + wire))
        return ranked[: self._replicas]

    def wire(self, key: Key) -> bytes:
        """The key's name in the stores. Raises InvalidRequest."""
        try:
            wire = self._prefix + (key.encode() if isinstance(key, str) else key)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest(_WRONG_KIND, "key") from None
        if not MIN_WIRE_BYTES <= len(wire) <= MAX_WIRE_BYTES:
            raise _wrong_length(len(wire))
        return wire

    def wires(self, keys: Iterable[Key]) -> list[bytes]:
        """``wire`` of each."""
        prefix = self._prefix
        try:
            wires = [prefix + (key.encode() if isinstance(key, str) else key) for key in keys]
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest(_WRONG_KIND, "key") from None
        for length in set(map(len, wires)):
            if not MIN_WIRE_BYTES <= length <= MAX_WIRE_BYTES:
                raise _wrong_length(length)
        return wires


def _wrong_length(wire_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"a key has 1 to {MAX_KEY_BYTES} bytes, got {wire_bytes - NAMESPACE_BYTES}", "key")


def _prefix(namespace: str, salt: str) -> bytes:
    fields = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in (namespace, salt))
    return hashlib.sha256(b"mooncake-pool-v1" + fields).digest()[:NAMESPACE_BYTES]
