"""A ragged batch over a paged cache, for tests of GPU kernels on a GPU or in Triton's interpreter. Needs Triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mooncake.kernels import reference
from mooncake.kernels.gpu.attention import DevicePlan
from mooncake.kernels.gpu.triton_launch import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="the interpreter uses other tiles, and takes minutes")


def keys_read(plan: DevicePlan) -> int:
    """Tokens of keys and values that one layer reads, per KV head."""
    pieces = torch.cat([one.pieces[: int(one.num_pieces)] for one in plan.passes])
    return int((pieces[:, 5] - pieces[:, 4]).sum())


class Batch:
    """A ragged batch over a cache whose unwritten rows are NaN, so that reading them is detected."""

    def __init__(
        self,
        queries: list[int],
        contexts: list[int],
        dtype: torch.dtype = torch.float32,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_tokens: int = 16,
        seed: int = 0,
        shared_blocks: int = 0,
        num_kinds: int = 2,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        per_sequence = -(-max(contexts) // block_tokens)
        num_blocks = len(contexts) * per_sequence + 1
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        tables = order[: len(contexts) * per_sequence].view(len(contexts), per_sequence)
        if shared_blocks:
            tables = tables.clone()
            tables[:, :shared_blocks] = tables[0, :shared_blocks]
        cache = torch.full((num_blocks, 3, num_kinds, num_kv_heads, block_tokens, head_dim), float("nan"))
        for table, context in zip(tables, contexts, strict=True):
            for at in range(context):
                entry = cache[table[at // block_tokens], :, :, :, at % block_tokens]
                entry.copy_(torch.randn(entry.shape, generator=generator))
        self.cache = cache.to(dtype).to(DEVICE)
        self.layer = self.cache[:, 1]
        self.query = torch.randn(sum(queries), num_heads, head_dim, generator=generator).to(dtype).to(DEVICE)
        self.tables = tables.int().contiguous().to(DEVICE)
        self.starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32, device=DEVICE)
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
        self.scale = head_dim**-0.5

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
        return self.query, self.layer, self.tables, self.starts, self.contexts, self.scale


def check_within_rounding(batch: Batch, actual: torch.Tensor, layer: torch.Tensor) -> None:
    """Compare with the reference in float32. Over long contexts all means are small, so the error is taken relative to
    each row's deviation; bfloat16 weights cause one or two hundredths."""
    query, _, *rest = batch.arguments
    expected = reference.paged_attention(query.float(), layer.float(), *rest)
    deviation = expected.std(-1, keepdim=True)
    torch.testing.assert_close(actual.float() / deviation, expected / deviation, atol=5e-2, rtol=1e-2)
