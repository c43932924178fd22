"""A model over tensor parallel ranks and the cache that they share, until the end of a ``with``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.backend import CacheSize, over_ranks
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.model.parallel.tensor_parallel import TensorParallelModel
from mooncake.precision import resolve_precision


@dataclass(frozen=True)
class Ranks:
    model: TensorParallelModel
    cache: KVCache


@contextlib.contextmanager
def ranks_of(
    path: str, size: int, num_blocks: int, block_tokens: int, max_model_len: int = 256, kv_dtype: str = "float32"
) -> Iterator[Ranks]:
    """Of the float32 model at ``path``, with one thread each."""
    layout = open_checkpoint(path).kv_layout(block_tokens, kv_dtype)
    cache_size = CacheSize(layout, num_blocks, max_model_len, num_places=4)
    with contextlib.closing(over_ranks(path, resolve_precision("float32", kv_dtype), cache_size, size, 1)) as backend:
        assert isinstance(backend.model, TensorParallelModel) and isinstance(backend.cache, KVCache)
        yield Ranks(backend.model, backend.cache)
