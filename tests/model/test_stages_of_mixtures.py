"""Latent attention, mixtures of experts and other families, in pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_mixtures import BLOCK_TOKENS, MIXTURES, NUM_BLOCKS, PROMPTS, Published, answers
from tiny_model import write_tiny_model

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.decoder import Decoder
from mooncake.model.load import load_model
from mooncake.model.pages import SharedMemory
from mooncake.model.parallel.pieces import PieceCost, Span, equal_length
from mooncake.model.parallel.pipeline import PipelineModel
from mooncake.precision import FLOAT32, resolve_precision

ONE_OF_ALL = [pytest.param(name, marks=() if name == "deepseek-v3" else pytest.mark.slow) for name in MIXTURES]


def three_pieces(spans: Sequence[Span], costs: Sequence[PieceCost]) -> list[int]:
    return equal_length(spans, 3)


@pytest.mark.parametrize("name", ONE_OF_ALL)
def test_stages_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Steps are cut into pieces that are computed side by side."""
    published = Published(name, tmp_path)
    layout = published.checkpoint.kv_layout(BLOCK_TOKENS, "float32")
    memory = SharedMemory.create(NUM_BLOCKS * layout.block_bytes)
    model = PipelineModel(
        published.folder, resolve_precision("float32"), memory, layout, NUM_BLOCKS, 2, threads=1, cut=three_pieces
    )
    try:
        found = answers(model, KVCache(layout, NUM_BLOCKS, memory.bytes.data))
        assert model.last_step is not None and model.last_step.bytes_between[0] > 0
    finally:
        model.close()
        memory.close()
    assert found == published.greedy_all(PROMPTS, found)


OTHERS: dict[str, dict[str, object]] = {
    "granite": {},
    "olmo2": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20},
    "hunyuan_v1_dense": {},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20},
    "glm4": {"attention_bias": True},
    "cohere": {"logit_scale": 0.25},
}


@pytest.mark.parametrize("name", [*MIXTURES, *OTHERS])
def test_what_leaves_a_stage_is_all_that_the_next_one_needs(name: str, tmp_path: Path) -> None:
    """In one process, to the bit; and no stage reads another's layers."""
    if name in MIXTURES:
        checkpoint = Published(name, tmp_path).checkpoint
    else:
        write_tiny_model(tmp_path, name, **OTHERS[name])
        checkpoint = open_checkpoint(str(tmp_path))
    num_layers = checkpoint.config.num_layers
    first, last = (load_model(checkpoint, FLOAT32, layers=layers) for layers in (range(1), range(1, num_layers)))
    assert isinstance(first, Decoder) and isinstance(last, Decoder)
    layout = checkpoint.kv_layout(BLOCK_TOKENS, "float32")
    whole, cache = KVCache(layout, NUM_BLOCKS), KVCache(layout, NUM_BLOCKS)
    batch = ForwardBatch.of_prompt(torch.tensor(PROMPTS[0]), BLOCK_TOKENS, torch.tensor([69, 3]))
    wanted = load_model(checkpoint, FLOAT32).forward(batch, whole.tensor, NoHook())
    between = torch.empty(len(PROMPTS[0]), checkpoint.config.hidden_size)
    assert first.forward(batch, cache.tensor, NoHook(), None, between).shape == (0, checkpoint.config.vocab_size)
    assert not cache.tensor[:, 1:].any(), "the first stage has computed another's layer"
    assert torch.equal(last.forward(batch, cache.tensor, NoHook(), between), wanted)
    assert torch.equal(cache.tensor, whole.tensor)
