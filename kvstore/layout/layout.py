"""The layout of a model's KV: one rank's block, and how a deployment distributes layers and heads over ranks.

A deployment splits a model's KV over pipeline stages (layers) and tensor-parallel ranks (heads), into blocks of some
number of tokens, in some type. A rank's block is a ``KVLayout`` with fewer layers and heads. Nothing here moves bytes
or knows another layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.errors import InvalidRequest
from mooncake.types import KVLayout

_SCALE_BYTES = 4
_NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2"), "int8": np.dtype("i1")}


def rows(layout: KVLayout, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A view ``[layer, K|V, head, token, row_bytes]`` of a buffer that begins with a block."""
    shape = (layout.num_layers, layout.num_kinds, layout.num_kv_heads, layout.block_tokens, layout.row_bytes)
    return block[: layout.block_bytes].reshape(shape)


def numbers(rows: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """The numbers of rows ``[…, row_bytes]``: ``[…, dim]``; bfloat16 appears as uint16."""
    return rows[..., :-_SCALE_BYTES].view(np.int8) if dtype == "int8" else rows.view(_NUMPY[dtype])


def scales(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The scales ``[…]`` of int8 rows ``[…, row_bytes]``."""
    return rows[..., -_SCALE_BYTES:].view("<f4")[..., 0]


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """How a deployment stores the KV of a model. Rank = stage · tensor_parallel + tensor rank.

    With more tensor ranks than KV heads, neighbouring ranks store the same head. With fewer, heads are distributed in
    order, as evenly as they divide. ``stages`` lists the number of layers of each pipeline stage.
    """

    stages: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    tensor_parallel: int = 1
    num_kinds: int = 2  # as in ``KVLayout``

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        counts = (*self.stages, self.num_kv_heads, self.head_dim, self.block_tokens, self.tensor_parallel)
        if not self.stages or min(counts) < 1:
            raise InvalidRequest("a KV layout needs at least one layer a stage, head, dimension, token and rank")
        if self.dtype not in _NUMPY:
            raise InvalidRequest(f"KV of type {self.dtype!r}; known: {', '.join(_NUMPY)}")

    @classmethod
    def of(cls, layout: KVLayout, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> ShardedLayout:
        """The layout of a whole model's block, split; layers are distributed as evenly as they divide."""
        cuts = [layout.num_layers * stage // pipeline_parallel for stage in range(pipeline_parallel + 1)]
        stages = tuple(after - before for before, after in pairwise(cuts))
        return cls(
            stages,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_tokens,
            layout.dtype,
            tensor_parallel,
            layout.num_kinds,
        )

    @property
    def num_layers(self) -> int:
        return sum(self.stages)

    @property
    def num_ranks(self) -> int:
        return len(self.stages) * self.tensor_parallel

    def layers(self, rank: int) -> range:
        stage = rank // self.tensor_parallel
        first = sum(self.stages[:stage])
        return range(first, first + self.stages[stage])

    def heads(self, rank: int) -> range:
        tensor_rank, degree = rank % self.tensor_parallel, self.tensor_parallel
        first = tensor_rank * self.num_kv_heads // degree
        return range(first, max((tensor_rank + 1) * self.num_kv_heads // degree, first + 1))

    def shard_name(self, rank: int) -> str:
        """Which part of the model this rank has; "" for the whole. Ranks that store the same part have the same
        name."""
        layers, heads = self.layers(rank), self.heads(rank)
        if len(layers) == self.num_layers and len(heads) == self.num_kv_heads:
            return ""
        return f"layers {layers.start}-{layers.stop}, heads {heads.start}-{heads.stop}"

    def block(self, rank: int) -> KVLayout:
        """The layout of this rank's blocks."""
        return self.box(len(self.layers(rank)), len(self.heads(rank)), self.block_tokens)

    def box(self, num_layers: int, num_heads: int, num_tokens: int) -> KVLayout:
        """A part of the block as a layout of its own."""
        return KVLayout(num_layers, num_heads, num_tokens, self.head_dim, self.dtype, num_kinds=self.num_kinds)
