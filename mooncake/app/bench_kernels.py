"""What this machine can do at most, and decode attention alone: ``mooncake bench engine`` below the engine.

Each measurement is seconds a repetition. It must not know about sequences, scheduling or other engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mooncake.checkpoint import ModelConfig, weight_shapes
from mooncake.kernels import choose_kernels, reference

READ_BYTES = 512 << 20
GEMM_SIZE = 2048
CONTIGUOUS_LAYERS = 8  # so many layers of KV do not fit into a last-level cache: each pass reads memory, as a step does


def read_s(reps: int) -> tuple[tuple[float, ...], int]:
    """Seconds to read memory once, the faster of two ways at each repetition, and how many bytes that was."""
    columns = 4096
    matrix = torch.ones(READ_BYTES // 4 // columns, columns)
    vector = torch.ones(columns)
    ways = [_timed(matrix.sum, reps), _timed(lambda: matrix.mv(vector), reps)]
    return tuple(map(min, *ways)), READ_BYTES


def gemm_s(dtype: torch.dtype, reps: int) -> tuple[tuple[float, ...], float]:
    """Seconds of a square matrix product, and its floating-point operations."""
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    return _timed(lambda: left @ right, reps), 2.0 * GEMM_SIZE**3


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that one decode step reads: all but an embedding table of which only rows are looked up."""
    sizes = {name: torch.Size(shape).numel() for name, shape in weight_shapes(config).items()}
    if not config.tie_embeddings:
        del sizes["model.embed_tokens.weight"]
    return itemsize * sum(sizes.values())


def decode_attention_s(
    cache: torch.Tensor, num_heads: int, batch: int, context: int, reps: int
) -> dict[str, tuple[float, ...]]:
    """Seconds of one layer's decode attention: ours over pages, and torch's over contiguous KV and over gathered pages.

    ``cache`` is a paged cache ``[N, layers, 2, Hkv, block_tokens, D]``; pages are taken from all over it. Queries of a
    group are rows of one product in the better of two ways to call ``scaled_dot_product_attention``.
    """
    num_blocks, num_layers, _, _, block_tokens, _ = cache.shape
    head_dim = reference.head_dim_of(cache[:, 0])
    per_sequence = -(-context // block_tokens)
    layers = min(num_layers, CONTIGUOUS_LAYERS)
    tables = torch.randperm(num_blocks)[: batch * per_sequence].view(batch, per_sequence).int()
    _fill(cache, tables, layers, head_dim)
    query = torch.randn(batch, num_heads, head_dim)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    contexts = torch.full((batch,), context, dtype=torch.int32)
    contiguous = [_gather(cache[:, layer], tables, context) for layer in range(layers)]
    kernels, scale = choose_kernels(), head_dim**-0.5

    def ours() -> None:
        for layer in range(layers):
            kernels.paged_attention(query, cache[:, layer], tables, starts, contexts, scale)

    def sdpa_groups() -> None:
        for key, value in contiguous:
            one_token = query.unsqueeze(2).to(key.dtype)
            torch.nn.functional.scaled_dot_product_attention(one_token, key, value, enable_gqa=True)

    def sdpa_rows() -> None:
        for key, value in contiguous:
            _sdpa_rows(query, key, value)

    def gather_sdpa() -> None:
        for layer in range(layers):
            _sdpa_rows(query, *_gather(cache[:, layer], tables, context))

    ways = {"ours": ours, "sdpa_groups": sdpa_groups, "sdpa_rows": sdpa_rows, "gather_sdpa": gather_sdpa}
    return {name: tuple(s / layers for s in _timed(way, reps)) for name, way in ways.items()}


def shared_prefix_s(
    cache: torch.Tensor, num_heads: int, batch: int, prefix: int, own: int, reps: int
) -> dict[str, tuple[float, ...]]:
    """Seconds of one layer's decode attention of sequences that begin with the same ``prefix`` tokens and have ``own``
    more each: with tables that share the prefix's blocks, and with tables that hold a copy of it each."""
    num_blocks, num_layers, _, _, block_tokens, _ = cache.shape
    head_dim = reference.head_dim_of(cache[:, 0])
    shared, rest = prefix // block_tokens, -(-own // block_tokens)
    layers = min(num_layers, CONTIGUOUS_LAYERS)
    copies = torch.randperm(num_blocks)[: batch * (shared + rest)].view(batch, -1).int()
    together = torch.cat([copies[:1, :shared].expand(batch, -1), copies[:, shared:]], dim=1).contiguous()
    _fill(cache, copies, layers, head_dim)
    query = torch.randn(batch, num_heads, head_dim)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    contexts = torch.full((batch,), shared * block_tokens + own, dtype=torch.int32)
    kernels, scale = choose_kernels(), head_dim**-0.5

    def attend(tables: torch.Tensor) -> None:
        for layer in range(layers):
            kernels.paged_attention(query, cache[:, layer], tables, starts, contexts, scale)

    ways = {"shared": together, "copies": copies}
    return {
        name: tuple(s / layers for s in _timed(lambda tables=tables: attend(tables), reps))  # type: ignore[misc]
        for name, tables in ways.items()
    }


def _fill(cache: torch.Tensor, tables: torch.Tensor, layers: int, head_dim: int) -> None:
    """Random rows in these blocks."""
    blocks = tables.flatten().long()
    for layer in range(layers):
        rows = torch.randn(len(blocks), *cache.shape[2:5], head_dim)
        cache[blocks, layer] = reference.as_page_rows(rows, cache.dtype)


def _gather(cache_layer: torch.Tensor, tables: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the sequences, contiguous: [B, Hkv, context, D] each."""
    pages = cache_layer[tables.long()]  # [B, M, 2, Hkv, block_tokens, D]
    if pages.dtype is torch.int8:
        pages = reference.from_page_rows(pages)
    key, value = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :context].contiguous()
    return key, value


def _sdpa_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one token a sequence, the query heads of a group as rows over their KV head."""
    rows = query.view(len(query), key.shape[1], -1, query.shape[2]).to(key.dtype)  # [B, Hkv, G, D]
    return torch.nn.functional.scaled_dot_product_attention(rows, key, value)


def _timed(work: Callable[[], object], reps: int) -> tuple[float, ...]:
    """Seconds a repetition, after one that does not count."""
    times = []
    with torch.inference_mode():
        work()
        for _ in range(reps):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return tuple(times)
