"""Names of blocks: a SHA-256 chain over token ids.

``key_0 = H(seed || tokens_0)``, ``key_i = H(key_{i-1} || tokens_i)`` with the tokens as little-endian uint32. The seed
holds everything that makes KV bytes differ for equal tokens: the scheme's version, the KV fingerprint (weights, dtype,
layout, block size) and the tenant's salt. So equal keys mean equal bytes, in every process and on every machine.
A cryptographic hash costs nothing beside prefill and leaves no collisions for a tenant to aim at. Long chains are
hashed by one call into OpenSSL where the small C++ file beside can be built: the conductor names every prompt.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mooncake.native import BuildFailed, load_native
from mooncake.types import BlockKey, KVLayout, TokenIds

SCHEME = b"mooncake-block-v1"
KEY_BYTES = 32
LONG_CHAIN = 16  # blocks from which one native call is worth it
_OPENSSL = (b"libcrypto.so.3", b"libcrypto.so.1.1", b"libcrypto.so")


def kv_fingerprint(weights_digest: str, layout: KVLayout) -> str:
    """Identity of the KV bytes that a model produces (hex, 32 characters): weights, dtype, layout and block size."""
    text = (
        f"{weights_digest}|L{layout.num_layers}|H{layout.num_kv_heads}|B{layout.block_tokens}"
        f"|D{layout.head_dim}|{layout.dtype}"
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def chain_seed(fingerprint: str, salt: str = "") -> bytes:
    """The parent of every first block of one model and tenant (32 bytes)."""
    fields = b"".join(len(part).to_bytes(4, "little") + part for part in (fingerprint.encode(), salt.encode()))
    return hashlib.sha256(SCHEME + fields).digest()


def extend_chain(parent: bytes, tokens: TokenIds, block_tokens: int) -> list[BlockKey]:
    """Keys of the full blocks of ``tokens``, given the key (or seed) before them. A partial last block has no key."""
    num_full = len(tokens) // block_tokens
    data = np.ascontiguousarray(tokens[: num_full * block_tokens], dtype="<u4").tobytes()
    size = block_tokens * 4
    if num_full >= LONG_CHAIN and (native := _native_chain()) is not None:
        keys = ctypes.create_string_buffer(num_full * KEY_BYTES)
        native(parent, len(parent), data, size, num_full, keys)
        packed = keys.raw
        return [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]
    return extend_chain_plainly(parent, data, size)


def extend_chain_plainly(parent: bytes, data: bytes, size: int) -> list[BlockKey]:
    """The definition: blocks of ``size`` bytes, one after the other."""
    keys: list[BlockKey] = []
    for start in range(0, len(data), size):
        parent = hashlib.sha256(parent + data[start : start + size]).digest()
        keys.append(BlockKey(parent))
    return keys


@functools.cache
def _native_chain() -> Callable[[bytes, int, bytes, int, int, ctypes.Array[ctypes.c_char]], None] | None:
    """``extend_chain`` of hashing.cpp, or None where it cannot be built or OpenSSL is not found."""
    try:
        library = load_native("hashing", Path(__file__).with_name("hashing.cpp"))
    except BuildFailed:
        return None  # the definition serves as well, in twice the time
    if not any(library.find_sha256(name) for name in _OPENSSL):
        return None
    chain = library.extend_chain
    chain.restype = None
    chain.argtypes = (
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    )
    found: Callable[[bytes, int, bytes, int, int, ctypes.Array[ctypes.c_char]], None] = chain
    return found


def prepare() -> None:
    """Build and load what long chains use, before anybody waits for it."""
    _native_chain()
