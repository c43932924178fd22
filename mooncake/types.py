"""The values that every role uses: tokens with log-probabilities, block layouts, segments, block events, reports.

Plain frozen data. This module knows nothing of torch, gRPC, sockets or files; wire forms are in ``mooncake.rpc``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

import msgspec
import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.uint32]
"""Token ids travel as uint32 arrays below ingress, never as Python lists."""

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the chained hash that names a block together with everything before it (``mooncake.hashing``)."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    REPETITION = "repetition"  # what ``repetition_detection`` looks for
    ABORT = "abort"  # the client disconnected


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a chosen token, and of the top alternatives (most likely first). ``rank`` counts all
    tokens in that order, from 1; 0: nobody has counted."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class SampledToken(msgspec.Struct, frozen=True):
    """One generated token. ``index`` counts from 0 over the whole answer, without gaps or repeats.

    (A tuple, because there is one per sequence and step: it is created in a third of the time of a frozen dataclass.)
    """

    index: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The bytes of one block, ``[layer][K|V][kv_head][token][head_dim]``, contiguous and the same everywhere.

    A row (the last axis) of int8 codes ends with the 4 bytes of its float32 scale, so that moving a row, a head or a
    block includes its scales.

    After the model's layers there may be the hidden states that some of them took as their input, from which variants
    of the model continue: rows ``[token][hidden]``, each layer's in as many whole layers' bytes as they need.
    """

    num_layers: int  # including those that hold hidden states
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str  # "float32" | "bfloat16" | "int8"
    inputs_of: tuple[int, ...] = ()  # layers whose inputs are kept
    layers_an_input: int = 0  # layers of a block that each of them takes
    num_kinds: int = 2  # K and V; 1: keys that are also the values (multi-head latent attention)

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key or value of one head."""
        return self.head_dim * self.itemsize + (4 if self.dtype == "int8" else 0)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's range in one block (K and V together)."""
        return self.num_kinds * self.num_kv_heads * self.block_tokens * self.row_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def kv_layers(self) -> range:
        """The model's own layers."""
        return range(self.num_layers - len(self.inputs_of) * self.layers_an_input)

    def input_layers(self, layer: int) -> range:
        """The layers of a block that hold the input of ``layer``. Raises ValueError when it is not kept."""
        first = self.kv_layers.stop + self.inputs_of.index(layer) * self.layers_an_input
        return range(first, first + self.layers_an_input)


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Where a registered segment can be reached. Memory addresses never cross the wire: ranges are (segment,
    incarnation, block, offset, length) and the owner checks them.

    ``incarnation`` changes each time the owner starts, so that a message for a dead owner is refused. ``host_id`` names
    the machine; ``unix_path`` (abstract socket, starts with NUL as "@") works only there.
    """

    node_id: str
    incarnation: int
    host_id: str
    unix_path: str
    tcp_address: str  # "host:port", IPv6 as "[::1]:port"; one per network card, separated by commas
    block_bytes: int
    num_blocks: int
    rdma: bool = False  # also reachable by verbs, set up over the TCP address


class Tier(IntEnum):
    """Where a node holds a block; lower is faster."""

    DRAM = 0
    SSD = 1


class BlockEvent(NamedTuple):
    """A block became readable in a cache, or left it. ``parent`` is empty for a first block.

    ``tier`` is the fastest one that holds it now: stored again in another tier means that it has moved.
    """

    stored: bool
    key: BlockKey
    parent: bytes = b""
    tier: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one request's time went, in milliseconds of one process's monotonic clock each."""

    queue_ms: float = 0.0  # waiting at the prefill node
    load_ms: float = 0.0  # reading the reused prefix (overlaps prefill)
    prefill_ms: float = 0.0  # computing
    handoff_ms: float = 0.0  # end of prefill to commit at the decode node
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV was reused


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What one prefill did: for usage, metrics and the cost model."""

    prompt_tokens: int = 0
    local_cached_tokens: int = 0  # prefix found in the prefill node's own cache
    pool_cached_tokens: int = 0  # prefix read from the KV pool
    sent_bytes: int = 0  # to the decode node
    pool_bytes: int = 0  # to the KV pool
    transport: str = ""  # of the hand-off: "shm" | "tcp" | "rdma" | "" when there was none
    timings: Timings = field(default_factory=Timings)
    blended_tokens: int = 0  # after the prefix, blended from chunks that were computed alone: not exact
    inherited_tokens: int = 0  # after the prefix, with a variant's KV in most layers: not exact

    @property
    def cached_tokens(self) -> int:
        return self.local_cached_tokens + self.pool_cached_tokens
