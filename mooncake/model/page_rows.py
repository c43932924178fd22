"""Addresses rows of a paged cache by slot. A row is the bytes of one token's key or value in one head, of any type."""

from __future__ import annotations

import torch


def row_numbers(cache_layer: torch.Tensor, slots: torch.Tensor, kinds: slice = slice(0, 2)) -> torch.Tensor:
    """Int64 ``[T, kinds, Hkv]``: which of ``page_rows`` hold the keys (kind 0) and values (1) in ``slots`` [T].

    The same for every layer. Torch copies rows several times faster by these numbers than by blocks and offsets.
    """
    _, num_kinds, num_heads, block_tokens, width = cache_layer.shape
    block, kind, head, token = (stride // width for stride in cache_layer.stride()[:4])
    numbers = (slots // block_tokens * block + slots % block_tokens * token)[:, None, None]
    return numbers + torch.arange(num_kinds)[kinds, None] * kind + torch.arange(num_heads) * head


def page_rows(cache_layer: torch.Tensor) -> torch.Tensor:
    """``[rows, row width]``: the layer's memory, from its first row on."""
    width = cache_layer.shape[-1]
    behind = cache_layer.untyped_storage().nbytes() // cache_layer.element_size() - cache_layer.storage_offset()
    return cache_layer.as_strided((behind // width, width), (width, 1))
