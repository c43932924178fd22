"""What blocks and tenants may be named. The store checks it, and its client before it packs a name into a frame."""

from __future__ import annotations

from kvstore.transfer.protocol import MAX_KEY_BYTES
from mooncake.errors import InvalidRequest
from mooncake.types import BlockKey

MAX_TENANT_BYTES = 128


def checked_key(key: bytes) -> BlockKey:
    """Raises InvalidRequest."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise InvalidRequest(f"a block key has 1 to {MAX_KEY_BYTES} bytes, got {len(key)}", "key")
    return BlockKey(key)


def checked_parent(parent: bytes) -> bytes:
    """Raises InvalidRequest."""
    if len(parent) > MAX_KEY_BYTES:
        raise InvalidRequest(f"a block key has at most {MAX_KEY_BYTES} bytes, got {len(parent)}", "parent")
    return parent


def checked_tenant(name: str) -> str:
    """Raises InvalidRequest."""
    if len(name.encode()) > MAX_TENANT_BYTES:
        raise InvalidRequest(f"a tenant's name has at most {MAX_TENANT_BYTES} bytes", "tenant")
    return name
