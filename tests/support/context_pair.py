"""One model alone and over context-parallel ranks, to be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.load import load_model
from mooncake.model.parallel.context_parallel import ContextParallelModel, Setup, shape_of
from mooncake.model.parallel.context_plan import ContextPlan, Method
from mooncake.precision import FLOAT32

BLOCK_TOKENS = 16


class Pair:
    """One model alone and over ranks, each with a cache."""

    def __init__(self, model: str, size: int, method: Method | None = None, max_model_len: int = 0) -> None:
        self.checkpoint = open_checkpoint(model)
        limit = max_model_len or self.checkpoint.config.max_model_len
        self.alone = load_model(self.checkpoint, FLOAT32, limit)
        self.setup = Setup(size, model, 0, limit, FLOAT32, "float32", threads=1, method=method)
        self.over_ranks = ContextParallelModel(self.alone, self.setup, self.checkpoint)
        layout = self.checkpoint.kv_layout(BLOCK_TOKENS, "float32")
        self.caches = [KVCache(layout, limit // BLOCK_TOKENS) for _ in range(2)]

    def logits(self, tokens: torch.Tensor, first: int, hook: LayerHook | None = None) -> list[torch.Tensor]:
        """Logits of the last token and two others; tokens before ``first`` are in the caches."""
        count = len(tokens) - first
        whole = ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor([count - 1, count // 3, count // 3]))
        batch = replace(
            whole,
            tokens=tokens[first:],
            positions=whole.positions[first:],
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            slots=whole.slots[first:],
        )
        models = (self.alone, NoHook()), (self.over_ranks, hook or NoHook())
        return [
            model.forward(batch, cache.tensor, told) for (model, told), cache in zip(models, self.caches, strict=True)
        ]

    def check(
        self, tokens: torch.Tensor, first: int, method: Method, atol: float = 1e-5, kv_atol: float = 1e-5
    ) -> None:
        """Compare logits and the first rank's cache, and check the bytes sent."""
        alone, together = self.logits(tokens, first)
        assert torch.equal(together.argmax(-1), alone.argmax(-1))
        torch.testing.assert_close(together, alone, rtol=0, atol=atol)
        torch.testing.assert_close(self.caches[1].tensor, self.caches[0].tensor, rtol=0, atol=kv_atol)
        report = self.over_ranks.report
        assert report is not None and set(report.methods) == {method}
        plan = ContextPlan.of(self.setup.size, np.array([0, len(tokens) - first]), np.array([len(tokens)]))
        sent_bytes = plan.sent_bytes(method, shape_of(self.checkpoint, self.setup))
        assert report.sent_bytes == len(report.methods) * sent_bytes > 0


@contextmanager
def pair(model: str, size: int, method: Method | None = None, max_model_len: int = 0) -> Iterator[Pair]:
    both = Pair(model, size, method, max_model_len)
    try:
        yield both
    finally:
        both.over_ranks.close()


def some_tokens(count: int, vocab: int = 300) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(count).integers(3, vocab, count))
