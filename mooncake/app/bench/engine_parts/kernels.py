"""The kernel part of ``mooncake bench engine``: the limits of this machine, and decode attention alone.

Measurements are seconds per repetition. Figures to be compared are measured alternately, so that a machine whose speed
changes from second to second affects all of them. It must not know about sequences, scheduling or other engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from mooncake.app.bench.shared.timing import in_turns
from mooncake.checkpoint import weight_shapes
from mooncake.kernels import choose_kernels, reference
from mooncake.kernels.cpu import CpuKernels
from mooncake.model_config import ModelConfig

READ_BYTES = 512 << 20
SPIN_S = 0.03  # after a call torch's threads spin this long, and would slow the next measurement
GEMM_SIZE = 2048
CONTIGUOUS_LAYERS = 8  # more KV than the last-level cache holds, so each pass reads memory, as a step does


class Memory:
    """A buffer larger than any cache."""

    num_bytes = READ_BYTES

    def __init__(self) -> None:
        columns = 4096
        self._matrix = torch.ones(READ_BYTES // 4 // columns, columns)
        self._vector = torch.ones(columns)

    def read_s(self) -> float:
        """Seconds to read it once, by the faster of two methods."""
        ways = {"sum": lambda: self._matrix.sum(), "product": lambda: self._matrix.mv(self._vector)}
        return min(seconds for (seconds,) in _in_turns(ways, 1, warm_up=False).values())


def gemm_s(dtype: torch.dtype, reps: int) -> tuple[tuple[float, ...], float]:
    """Seconds of a square matrix product, and its floating-point operations."""
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    return _in_turns({"": lambda: left @ right}, reps)[""], 2.0 * GEMM_SIZE**3


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that a decode step of one token reads. An embedding table used only for look-ups, and experts
    that the token does not use, do not count."""
    sizes = {name: torch.Size(shape).numel() for name, shape in weight_shapes(config).items()}
    for name in sizes:
        if ".experts." in name:
            sizes[name] = sizes[name] * config.experts_per_token // config.num_experts
    if not config.tie_embeddings:
        del sizes["model.embed_tokens.weight"]
    return itemsize * sum(sizes.values())


def decode_attention_s(
    cache: torch.Tensor, num_heads: int, batch: int, context: int, reps: int
) -> dict[str, tuple[float, ...]]:
    """Seconds of one layer's decode attention: ours over pages, and torch's over contiguous KV and over gathered pages.

    ``cache`` is a paged cache ``[N, layers, K|V, Hkv, block_tokens, D]``; pages are spread over all of it. torch's is
    ``scaled_dot_product_attention`` called in the faster of two ways, one with the queries of a group as rows of one
    product.
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
    ours = _attention(query, cache, layers, tables, starts, contexts)

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
    times = _in_turns(ways, reps, SPIN_S)
    return {name: tuple(s / layers for s in taken) for name, taken in times.items()}


def shared_prefix_s(
    cache: torch.Tensor, num_heads: int, batch: int, prefix: int, own: int, reps: int
) -> dict[str, tuple[float, ...]]:
    """Seconds of one layer's decode attention over sequences with a common prefix of ``prefix`` tokens and ``own``
    tokens each: with block tables that share the prefix's blocks, and with a copy of the prefix per sequence."""
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
    tables = {"shared": together, "copies": copies}
    ways = {name: _attention(query, cache, layers, ids, starts, contexts) for name, ids in tables.items()}
    return {name: tuple(s / layers for s in taken) for name, taken in _in_turns(ways, reps).items()}


def drawing_s(
    ours: Callable[[], object], logits: torch.Tensor, temperature: float, top_p: float, reps: int
) -> dict[str, tuple[float, ...]]:
    """Seconds to draw a token from each row of ``logits`` [B, V]: ours, and in torch, where top-p takes a sort."""

    def drawn() -> torch.Tensor:
        if top_p >= 1.0:
            return torch.multinomial((logits / temperature).softmax(-1), 1)
        ordered, token_ids = (logits / temperature).sort(dim=-1, descending=True)
        weights = ordered.softmax(-1)
        weights[weights.cumsum(-1) - weights >= top_p] = 0.0
        return token_ids.gather(-1, torch.multinomial(weights, 1))

    return _in_turns({"ours": ours, "torch": drawn}, reps, SPIN_S)


def _attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    layers: int,
    tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
) -> Callable[[], None]:
    """Attention over each of the layers: only the kernel, which a forward pass also calls from C++."""
    kernels, scale = choose_kernels(), reference.head_dim_of(cache[:, 0]) ** -0.5
    given = [(query, cache[:, layer], tables, starts, contexts, scale) for layer in range(layers)]
    calls: list[Callable[[], torch.Tensor]]
    if isinstance(kernels, CpuKernels):
        calls = [kernels.ready_attention(*arguments) for arguments in given]
    else:
        calls = [partial(kernels.paged_attention, *arguments) for arguments in given]

    def run() -> None:
        for call in calls:
            call()

    return run


def _fill(cache: torch.Tensor, tables: torch.Tensor, layers: int, head_dim: int) -> None:
    """Write random rows into these blocks."""
    blocks = tables.flatten().long()
    for layer in range(layers):
        rows = torch.randn(len(blocks), *cache.shape[2:5], head_dim)
        cache[blocks, layer] = reference.as_page_rows(rows, cache.dtype)


def _gather(cache_layer: torch.Tensor, tables: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the sequences, contiguous: [B, Hkv, context, D] each; they may be the same."""
    pages = cache_layer[tables.long()]  # [B, M, K|V, Hkv, block_tokens, D]
    if pages.dtype is torch.int8:
        pages = reference.from_page_rows(pages)
    kinds = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :context].contiguous()
    return kinds[0], kinds[-1]


def _sdpa_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one token per sequence, with the query heads of a group as rows over their KV head."""
    rows = query.view(len(query), key.shape[1], -1, query.shape[2]).to(key.dtype)  # [B, Hkv, G, D]
    return torch.nn.functional.scaled_dot_product_attention(rows, key, value)


def _in_turns(
    ways: Mapping[str, Callable[[], object]], reps: int, pause_s: float = 0.0, *, warm_up: bool = True
) -> dict[str, tuple[float, ...]]:
    with torch.inference_mode():
        return in_turns(ways, reps, pause_s=pause_s, warm_up=warm_up)
