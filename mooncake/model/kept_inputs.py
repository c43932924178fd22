"""Hidden states kept in the cache: the inputs of some layers, stored after the KV of all layers of a block.

A model that continues from them (``CausalLM.recompute``) need not compute the layers before. This module does not know
whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mooncake.errors import InternalError
from mooncake.model.batch import LayerHook


class KeptInputs:
    """Keeps the inputs of the layers ``of``, in a model of ``num_layers``."""

    def __init__(self, of: Sequence[int], num_layers: int) -> None:
        self._of = tuple(of)
        self._num_layers = num_layers

    def check(self, cache: torch.Tensor, hidden_size: int) -> None:
        """Check that the cache has room for them, because writing does not. Raises InternalError."""
        if not self._of:
            return
        room = -(-cache.shape[4] * hidden_size // cache.stride(1))
        if cache.shape[1] < self._num_layers + len(self._of) * room:
            raise InternalError("the cache has no room for the hidden states that the model keeps")

    def write(self, layer: int, hidden: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        """``hidden`` [T, hidden] is the input of ``layer`` for the tokens in ``slots``."""
        if layer in self._of:
            rows = input_rows(cache, self._num_layers, self._of.index(layer), hidden.shape[1])
            block_tokens = cache.shape[4]
            rows[slots // block_tokens, slots % block_tokens] = hidden.to(cache.dtype)

    def tell(self, hook: LayerHook, cache: torch.Tensor) -> None:
        """Report that they are written, for all tokens of the step. For loading and sending they are layers like any
        other."""
        if self._of and hook.wants_layers:
            for layer in range(self._num_layers, cache.shape[1]):
                hook.before_layer(layer)
                hook.after_layer(layer)


def input_rows(cache: torch.Tensor, num_layers: int, place: int, hidden_size: int) -> torch.Tensor:
    """``[N, block_tokens, hidden]``, a view: the inputs of the layer at index ``place`` of the kept ones."""
    num_blocks, _, _, _, block_tokens, _ = cache.shape
    block_stride, layer_stride = cache.stride()[:2]
    room = -(-block_tokens * hidden_size // layer_stride) * layer_stride
    first = cache.storage_offset() + num_layers * layer_stride + place * room
    return cache.as_strided((num_blocks, block_tokens, hidden_size), (block_stride, hidden_size, 1), first)
