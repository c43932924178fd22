"""Models with sliding windows whose layers keep only their windows: the tokens of transformers, from fewer pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from empty_rows import num_empty_rows
from greedy import greedy
from sharing_model import GRAPHS, whole_prompt_logits, write_sharing_model
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.model.llama import CausalLM
from mooncake.model.reading.weights import load_weights
from mooncake.page_groups import groups_of

BLOCK, WINDOW, NEW = 8, 16, 24
SHAPE: dict[str, Any] = {"sliding_window": WINDOW, "num_hidden_layers": 6, "hidden_size": 64, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": SHAPE,
    "gemma2": SHAPE | {"query_pre_attn_scalar": 16},  # every second layer sees a window
    "gemma3_text": SHAPE | {"query_pre_attn_scalar": 16, "num_hidden_layers": 13},  # all but every sixth
    "gpt_oss": SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.4},
    "llama4_text": SHAPE | {"num_local_experts": 4, "attention_chunk_size": WINDOW, "initializer_range": 0.2},  # chunks
}
GROUPS = {
    **{"mistral": ((16,), 0), "gemma2": ((0, 16), 0), "gemma3_text": ((0, *[16] * 6), 1), "gpt_oss": ((0, 16), 0)},
    "llama4_text": ((0, *[16] * 5), 0),
}
"""Windows, empty rows."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """Family, folder and transformers' own."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, write_tiny_model(folder, request.param, **FAMILIES[request.param])


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(3, 300, length).tolist() for length in lengths]


def theirs(model: Any, prompts: list[list[int]], guesses: list[list[int]]) -> list[list[int]]:
    return [greedy(model, prompt, NEW, guess) for prompt, guess in zip(prompts, guesses, strict=True)]


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    return [answer.token_ids for answer in llm.generate(prompts, sampling)]


def test_tokens_are_those_of_transformers(model: tuple[str, Path, Any]) -> None:
    family, folder, reference = model
    llm = LLM(str(folder), kv_gb=0.01, block_tokens=BLOCK, chunk_tokens=24)
    groups = llm.engine.config.groups
    assert (groups.windows, num_empty_rows(groups)) == GROUPS[family]
    asked = prompts(3, 40, 90, 161)
    found = answers(llm, asked)
    assert found == theirs(reference, asked, found)
    turns = [[*prompt, *answer, 7] for prompt, answer in zip(asked, found, strict=True)]
    found = answers(llm, turns)
    assert found == theirs(reference, turns, found)
    again = llm.generate(turns, SamplingParams(max_tokens=1, temperature=0.0))
    assert [answer.cached_tokens for answer in again] == [len(turn) - 1 for turn in turns]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("graph", ["character", "last of each kind"])
def test_llamas_with_windows_and_shared_keys_in_both_passes(graph: str, is_fused: bool, tmp_path: Path) -> None:
    """Several groups of those layers that have keys and values, against plain torch over whole prompts."""
    weights = write_sharing_model(tmp_path, GRAPHS[graph])
    checkpoint = open_checkpoint(str(tmp_path))
    config = checkpoint.config
    groups = groups_of(config, config.max_model_len)
    assert groups.num_groups > 1 and len(groups.places) == GRAPHS[graph].num_owners
    model = CausalLM(config, load_weights(checkpoint, "float32"), is_fused=is_fused)
    cache = KVCache(groups.page_layout(checkpoint.kv_layout(4, "float32")), 300)
    engine = Engine(model, cache, EngineConfig(4, chunk_tokens=12, max_model_len=config.max_model_len, groups=groups))
    asked = dict(zip("abcd", prompts(1, 9, 40, 101), strict=True))
    for name, prompt in asked.items():
        tokens = np.array(prompt, np.uint32)
        sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True).for_engine()
        engine.add(Sequence(name, tokens, len(prompt), sampling, Chain(b"s"), eos_ids=(), max_model_len=256))
    found: dict[str, list[int]] = {name: [] for name in asked}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append(output.token.token_id)
    for name, prompt in asked.items():
        whole = torch.tensor(prompt + found[name])
        best = whole_prompt_logits(weights, GRAPHS[graph], whole).argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == found[name]
    engine.block_pool.check()
