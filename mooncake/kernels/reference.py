"""What every kernel computes, in plain torch: the definition that faster versions are tested against.

Letters for shapes, here and in every kernel file:

    B  sequences in the batch      Hq   query heads          N  blocks of the paged cache
    T  tokens in the batch         Hkv  key and value heads  M  longest block table, in blocks
    D  head size                   G    Hq / Hkv             P  positions of the RoPE tables

``cache_layer`` is one layer of the paged cache, ``[N, 2, Hkv, block_tokens, D]``, usually a strided view. ``slots[t]``
is ``block_id * block_tokens + offset``. Tokens of sequence b are ``query_starts[b] ≤ t < query_starts[b + 1]``: the
last ones of its ``context_lens[b]`` tokens. Sums are float32 whatever the inputs are. Nothing here knows about models.
"""

from __future__ import annotations

import torch


class Linear:
    """``x @ weight.T + bias`` for ``weight`` ``[out, in]``; ``rows`` reads the same matrix as an embedding table."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of ``weight``, ``[T, in]``, for int64 ``indices`` ``[T]``."""
        return torch.nn.functional.embedding(indices, self.weight)


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A linear layer over these weights, in whatever form is fast; ``weight`` need not be kept."""
    return Linear(weight, bias)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis (Zhang and Sennrich 2019)."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def add_rms_norm(residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``residual += update``, in place; returns rms_norm(residual)."""
    residual.add_(update)
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[T, 2 * I]``, gate first; returns ``[T, I]`` (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


def rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate ``[T, H, D]``, element i with element i + D/2 (RoFormer, in the rotate-half form).

    ``cos`` and ``sin`` are float32 ``[P, D/2]``.
    """
    cos_t, sin_t = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos_t - second * sin_t, second * cos_t + first * sin_t], dim=-1)
    return turned.to(heads.dtype)


def write_kv(key: torch.Tensor, value: torch.Tensor, cache_layer: torch.Tensor, slots: torch.Tensor) -> None:
    """Put ``key`` and ``value``, ``[T, Hkv, D]``, where ``slots`` says."""
    block_tokens = cache_layer.shape[3]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    cache_layer[blocks, 0, :, offsets] = key.to(cache_layer.dtype)
    cache_layer[blocks, 1, :, offsets] = value.to(cache_layer.dtype)


def rope_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache_layer: torch.Tensor,
    slots: torch.Tensor,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """What lies between the fused projection and attention: norms of query and key heads if given, RoPE, cache write.

    ``qkv`` is ``[T, (Hq + 2 * Hkv) * D]``: all query heads, then key heads, then value heads; it may be overwritten.
    Returns the queries, ``[T, Hq, D]``, possibly a view of ``qkv``.
    """
    num_kv_heads, head_dim = cache_layer.shape[2], cache_layer.shape[4]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, query_norm, eps), rms_norm(key, key_norm, eps)
    write_kv(rope(key, cos, sin, positions), value, cache_layer, slots)
    return rope(query, cos, sin, positions)


def paged_attention(
    query: torch.Tensor,
    cache_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of ``query`` ``[T, Hq, D]`` over each sequence's own context; returns ``[T, Hq, D]``.

    Query head h reads key and value head ``h // G``. With ``window`` w > 0 a token sees itself and the w - 1 before it.
    """
    output = torch.empty_like(query)
    num_heads, num_kv_heads = query.shape[1], cache_layer.shape[2]
    group = num_heads // num_kv_heads
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    for b, context in enumerate(contexts):
        first, last = starts[b], starts[b + 1]
        num_blocks = -(-context // cache_layer.shape[3])
        pages = cache_layer[block_tables[b, :num_blocks].long()]  # [n, 2, Hkv, block_tokens, D]
        key, value = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].float()  # [Hkv, context, D] each
        queries = query[first:last].float().reshape(-1, num_kv_heads, group, query.shape[2])  # [t, Hkv, G, D]
        scores = torch.einsum("tkgd,ksd->kgts", queries, key) * scale
        scores.masked_fill_(~_visible(context, last - first, window), float("-inf"))
        mixed = torch.einsum("kgts,ksd->tkgd", scores.softmax(-1), value)
        output[first:last] = mixed.flatten(1, 2).to(query.dtype)
    return output


def _visible(context: int, num_queries: int, window: int) -> torch.Tensor:
    """Bool [num_queries, context]: which context token each of the last ``num_queries`` tokens sees."""
    query_at = torch.arange(context - num_queries, context).unsqueeze(1)
    key_at = torch.arange(context)
    seen = key_at <= query_at
    return seen & (key_at > query_at - window) if window else seen
