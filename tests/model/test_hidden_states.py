"""The last hidden states of a step's tokens, beside its logits: the fused pass writes those of the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mooncake.checkpoint import weight_shapes
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.model import CausalLM, ForwardBatch, NoHook
from mooncake.model_config import ModelConfig
from mooncake.types import KVLayout

BLOCK = 16
SHAPE: dict[str, Any] = {
    "architecture": "llama",
    "num_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_model_len": 256,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rms_eps": 1e-5,
    "tie_embeddings": False,
    "qkv_bias": False,
    "qk_norm": True,
    "sliding_window": None,
    "bos_id": 0,
    "eos_ids": (1,),
}
SHARING = {"kv_sources": (0, 1, 1, 1)}  # of the last layers only rows that are wanted are computed


def pass_of(config: ModelConfig, batch: ForwardBatch, *, is_fused: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(config).items()}
    layout = KVLayout(len(config.kv_owners), config.num_kv_heads, BLOCK, config.head_dim, "float32")
    model = CausalLM(config, weights, is_fused=is_fused)
    return model.forward(batch, KVCache(layout, 8).tensor, NoHook())


@pytest.mark.parametrize("shape", [{}, SHARING], ids=["each its own", "shared"])
@pytest.mark.parametrize("rows", [[39], [5, 39], [3, 4, 5, 39, 20], list(range(40))], ids=len)
@pytest.mark.parametrize("num_hidden", [1, 3, 40])
def test_they_are_the_rows_behind_those_with_logits(shape: dict[str, Any], rows: list[int], num_hidden: int) -> None:
    config, num_hidden = ModelConfig(**(SHAPE | shape)), min(num_hidden, len(rows))
    tokens = torch.arange(40) * 37 % 101
    whole = ForwardBatch.of_prompt(tokens, BLOCK, torch.tensor(rows))
    logits = pass_of(config, whole, is_fused=True)
    hidden = {}
    for is_fused in (True, False):
        hidden[is_fused] = torch.full((num_hidden, config.hidden_size), torch.nan)
        found = pass_of(config, replace(whole, hidden=hidden[is_fused]), is_fused=is_fused)
        torch.testing.assert_close(found, logits[: len(rows) - num_hidden], rtol=0, atol=0)
    torch.testing.assert_close(hidden[True], hidden[False], rtol=0, atol=0)
    head = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=head) * 0.2 for name, shape in weight_shapes(config).items()}
    expected = hidden[True] @ weights["lm_head.weight"].T
    torch.testing.assert_close(expected, logits[len(rows) - num_hidden :], rtol=1e-4, atol=1e-4)
