"""Names of blocks: a chain of BLAKE2s hashes (RFC 7693) over token ids.

``key_0 = H(seed || H(tokens_0))``, ``key_i = H(key_{i-1} || H(tokens_i))`` with the tokens as little-endian uint32. The
seed holds everything that makes KV bytes differ for equal tokens: the scheme's version, the KV fingerprint (weights,
dtype, layout, block size), the tenant's salt and the adapter. So equal keys mean equal bytes, in every process and on
every machine, and with a cryptographic hash no tenant can construct collisions. If an adapter acts only on the end of a
prompt, its chain is a branch of the model's own (``Chain``). Contents are hashed separately from the chain, so that C++
(``hashing.cpp``) hashes many blocks at once with vector instructions: naming the blocks of a prompt of 16,000 tokens
takes the conductor less time than placing it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from mooncake.errors import InvalidRequest
from mooncake.native import BuildFailed, load_native
from mooncake.types import BlockKey, KVLayout, TokenIds

SCHEME = b"mooncake-block-v2"
KEY_BYTES = 32
LONG_CHAIN = 4  # blocks from which a native call is worthwhile

_SALT = re.compile(r"[!-~]{0,128}")  # as long as vLLM's, in what base64 and others write

log = logging.getLogger(__name__)


def check_salt(salt: str) -> None:
    """One that a user chose; "" is none. Raises InvalidRequest."""
    if not _SALT.fullmatch(salt):
        raise InvalidRequest("cache_salt takes at most 128 visible ASCII characters", "cache_salt")


def kv_fingerprint(content: str, layout: KVLayout, shard: str = "") -> str:
    """Identity of the KV bytes that a model produces (hex, 32 characters). ``content`` identifies the numbers (the
    weights' digest and precision), the rest their arrangement (dtype, layout, block size, which hidden states are
    stored with them, and the part of the model that a ``shard`` has). Whoever knows the content can name the same KV
    in any layout."""
    text = (
        f"{content}|L{layout.num_layers}|H{layout.num_kv_heads}|B{layout.block_tokens}"
        f"|D{layout.head_dim}|{layout.dtype}"
    )
    if layout.inputs_of:
        text += f"|E{','.join(map(str, layout.inputs_of))}"
    if layout.num_kinds == 1:
        text += "|K"
    if shard:
        text += f"|{shard}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def chain_seed(fingerprint: str, salt: str = "", adapter: str = "") -> bytes:
    """The parent of every first block of one model, tenant and adapter that acts on the whole prompt (its digest;
    "": none) (32 bytes)."""
    parts = (fingerprint, salt, adapter) if adapter else (fingerprint, salt)
    fields = b"".join(len(part).to_bytes(4, "little") + part for part in map(str.encode, parts))
    return hashlib.sha256(SCHEME + fields).digest()


def chunk_seed(fingerprint: str, salt: str = "") -> bytes:
    """The parent of every first block of a text chunk that was computed with nothing before it, for use at any
    position of a prompt (32 bytes). Never that of a prompt, although a prompt's first chunk has the same KV."""
    return hashlib.sha256(chain_seed(fingerprint, salt) + b"chunk").digest()


@dataclass(frozen=True, slots=True)
class Chain:
    """What determines the names of one sequence's blocks, besides its tokens.

    An adapter that acts only from token ``start`` on leaves the KV before it as the base model's: blocks entirely
    before ``start`` have the same names as without an adapter. The block in which it starts to act has a parent made
    from the last of those, the adapter and ``start``, because a block's tokens do not always determine where in it an
    adapter starts: an invocation may reach into the next block.
    """

    seed: bytes  # the parent of the first block
    adapter: str = ""  # digest of one that starts to act after the first token; "": none
    start: int = 0  # the token where it does

    @classmethod
    def of(cls, fingerprint: str, salt: str = "", adapter: str = "", start: int = 0) -> Chain:
        """For one model, tenant and adapter (its digest; "": none), which acts from token ``start`` on."""
        if adapter and start:
            return cls(chain_seed(fingerprint, salt), adapter, start)
        return cls(chain_seed(fingerprint, salt, adapter))

    def keys(self, tokens: TokenIds, block_tokens: int) -> list[BlockKey]:
        """Of the full blocks of ``tokens``."""
        keys: list[BlockKey] = []
        self.extend(keys, tokens, block_tokens)
        return keys

    def parent(self, keys: list[BlockKey], index: int, block_tokens: int) -> bytes:
        """What the name of block ``index`` is made from, besides its own tokens."""
        parent = keys[index - 1] if index else self.seed
        if self.adapter and index == self.start // block_tokens:
            begins = struct.pack("<Q", self.start) + self.adapter.encode()
            parent = hashlib.blake2s(parent + begins, person=b"adapter").digest()
        return parent

    def extend(self, keys: list[BlockKey], tokens: TokenIds, block_tokens: int) -> None:
        """Append to ``keys``, the keys of the first blocks of ``tokens``, those of its other full blocks."""
        num_shared = self.start // block_tokens
        if len(keys) < num_shared:
            rest = tokens[len(keys) * block_tokens : num_shared * block_tokens]
            keys += extend_chain(keys[-1] if keys else self.seed, rest, block_tokens)
            if len(keys) < num_shared:
                return
        parent = self.parent(keys, len(keys), block_tokens)
        keys += extend_chain(parent, tokens[len(keys) * block_tokens :], block_tokens)


def extend_chain(parent: bytes, tokens: TokenIds, block_tokens: int) -> list[BlockKey]:
    """Keys of the full blocks of ``tokens``, given the key (or seed) before them. A partial last block has no key."""
    num_full = len(tokens) // block_tokens
    data = np.ascontiguousarray(tokens[: num_full * block_tokens], dtype="<u4")
    size = block_tokens * 4
    if num_full >= LONG_CHAIN and len(parent) == KEY_BYTES and (native := _native_chain()) is not None:
        keys = ctypes.create_string_buffer(num_full * KEY_BYTES)
        native(parent, data.ctypes.data, size, num_full, keys)
        return cast("list[BlockKey]", list(struct.unpack("32s" * num_full, keys)))
    return extend_chain_plainly(parent, data.tobytes(), size)


def extend_chain_plainly(parent: bytes, data: bytes, size: int) -> list[BlockKey]:
    """The reference: blocks of ``size`` bytes, one after another."""
    keys: list[BlockKey] = []
    for start in range(0, len(data), size):
        content = hashlib.blake2s(data[start : start + size]).digest()
        parent = hashlib.blake2s(parent + content).digest()
        keys.append(BlockKey(parent))
    return keys


@functools.cache
def _native_chain() -> Callable[[bytes, int, int, int, ctypes.Array[ctypes.c_char]], None] | None:
    """``extend_chain`` of hashing.cpp, or None if it cannot be built."""
    try:
        library = load_native("hashing", Path(__file__).with_name("hashing.cpp"))
    except BuildFailed as error:
        log.warning("naming blocks in Python, several times slower: %s", error)
        return None
    chain = library.extend_chain
    chain.restype = None
    chain.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    found: Callable[[bytes, int, int, int, ctypes.Array[ctypes.c_char]], None] = chain
    return found


def prepare() -> None:
    """Build and load what long chains use, before anyone waits for it."""
    _native_chain()
