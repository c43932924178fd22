"""Names of blocks: a SHA-256 chain over token ids.

``key_0 = H(seed || tokens_0)``, ``key_i = H(key_{i-1} || tokens_i)`` with the tokens as little-endian uint32. The seed
holds everything that makes KV bytes differ for equal tokens: the scheme's version, the KV fingerprint (weights, dtype,
layout, block size) and the tenant's salt. So equal keys mean equal bytes, in every process and on every machine.
A cryptographic hash costs nothing beside prefill and leaves no collisions for a tenant to aim at.
"""

from __future__ import annotations

import hashlib

import numpy as np

from mooncake.types import BlockKey, KVLayout, TokenIds

SCHEME = b"mooncake-block-v1"


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
    keys: list[BlockKey] = []
    for start in range(0, num_full * size, size):
        digest = hashlib.sha256(parent)
        digest.update(data[start : start + size])
        parent = digest.digest()
        keys.append(BlockKey(parent))
    return keys
