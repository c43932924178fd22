"""A model over tensor parallel ranks and the cache that they share, until the end of a ``with``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.backends.backend import BackendSpec, CacheSize, Processes, over_ranks
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.model.parallel.tensor_parallel import TensorParallelModel
from mooncake.precision import resolve_precision


@dataclass(frozen=True)
class Ranks:
    model: TensorParallelModel
    cache: KVCache


@contextlib.contextmanager
def ranks_of(path: str, size: int, num_blocks: int, block_tokens: int, max_model_len: int = 256) -> Iterator[Ranks]:
    """Of the float32 model at ``path``, with one thread each."""
    checkpoint, precision = open_checkpoint(path), resolve_precision("float32")
    cache_size = CacheSize(checkpoint.kv_layout(block_tokens, "float32"), num_blocks, max_model_len, num_places=4)
    processes = Processes(tensor=size, threads=1)
    spec = BackendSpec(checkpoint, precision, cache_size, processes=processes, context=max_model_len)
    with contextlib.closing(over_ranks(spec)) as backend:
        assert isinstance(backend.model, TensorParallelModel) and isinstance(backend.cache, KVCache)
        yield Ranks(backend.model, backend.cache)
