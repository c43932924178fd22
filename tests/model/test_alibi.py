"""The families with ALiBi: folders as publishers write them, against transformers' own models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from context_pair import Pair
from safetensors.torch import load_file, save_file
from tiny_alibi import ALIBI
from tiny_families import NEW_TOKENS, VOCAB, Published
from tiny_mixtures import answers
from tiny_model import write_tokenizer
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from mooncake import LLM, BeamSearchParams, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ModelError
from mooncake.families.alibi import alibi_slopes
from mooncake.kernels import choose_kernels, reference
from mooncake.model.load import load_model
from mooncake.model.parallel.context_plan import Method
from mooncake.precision import FLOAT32

PROMPTS = [np.random.default_rng(4).integers(2, VOCAB, length).tolist() for length in (150, 1, 30, 12, 5, 50, 3, 7)]
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=ALIBI, scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param), ALIBI)


@pytest.mark.parametrize("use_reference", [True, False], ids=["reference", "chosen"])
def test_tokens_are_theirs_one_for_one(published: Published, use_reference: bool) -> None:
    """Prompts in chunks, then all in one batch."""
    kernels = reference if use_reference else choose_kernels()
    model = load_model(published.checkpoint, FLOAT32, kernels=kernels)
    found = answers(model, KVCache(published.checkpoint.kv_layout(16, "float32"), 60), PROMPTS)
    assert found == published.greedy_all(PROMPTS, found)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


def test_without_slopes_they_are_others(published: Published) -> None:
    """Otherwise the tokens above would be no evidence of them."""
    checkpoint, tokens = published.checkpoint, []
    layout = checkpoint.kv_layout(16, "float32")
    for config in (checkpoint.config, replace(checkpoint.config, alibi_slopes=())):
        checkpoint.config = config
        tokens.append(answers(load_model(checkpoint, FLOAT32), KVCache(layout, 60), PROMPTS[:1]))
    assert tokens[0] != tokens[1]


def test_cached_prefixes_and_beams_change_nothing(tmp_path: Path) -> None:
    published = Published("bloom", tmp_path, ALIBI)
    write_tokenizer(tmp_path)
    prompts = [PROMPTS[0], PROMPTS[0][:130] + PROMPTS[3], PROMPTS[0][:40]]
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=16, chunk_tokens=32) as llm:
        for _ in range(2):
            for prompt in prompts:
                [found] = llm.generate([prompt], GREEDY, use_tqdm=False)
                assert found.token_ids == published.greedy(prompt)
        [beams] = llm.beam_search(prompts[1], BeamSearchParams(3, 8, ignore_eos=True), use_tqdm=False)
    ids = torch.tensor([prompts[1]])
    rules = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    wanted = published.theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **rules)
    assert [beam.tokens for beam in beams.sequences] == wanted.tolist()


def test_over_context_parallel_ranks_heads_are_parted(tmp_path: Path) -> None:
    published = Published("bloom", tmp_path, ALIBI)
    write_tokenizer(tmp_path)
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=16, chunk_tokens=128, context_parallel_size=2) as llm:
        found = [each.token_ids for each in llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)]
    assert found == published.greedy_all(PROMPTS[:3], found)
    with pytest.raises(ModelError, match="layers with ALiBi go by heads over context parallel ranks, not by"):
        Pair(str(tmp_path), 2, Method.PASS_KV)
    with pytest.raises(ModelError, match="cannot be parted among 3 ranks, which a sliding window or ALiBi needs"):
        Pair(str(tmp_path), 3)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 32, 71, 112])
def test_slopes_are_those_of_the_paper(num_heads: int) -> None:
    """What transformers adds to the second key."""
    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), theirs)


def test_bloom_is_the_same_in_the_keys_and_names_of_its_publisher(tmp_path: Path) -> None:
    published = Published("bloom", tmp_path, ALIBI)
    expected = published.checkpoint.config
    published.rewrite(hidden_size=None, n_embed=96, n_head=None, num_attention_heads=8, seq_length=2048, n_inner=None)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    checkpoint = published.checkpoint
    assert checkpoint.config == expected and expected.max_model_len == 2048
    found = answers(load_model(checkpoint, FLOAT32), KVCache(checkpoint.kv_layout(16, "float32"), 60), PROMPTS[2:3])
    assert found == [published.greedy(PROMPTS[2])]


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "adds to what norms give"),
        ("bloom", {"n_head": 10**9}, "no slopes of ALiBi for 1000000000 heads"),
        ("bloom", {"n_head": 0}, "no slopes of ALiBi for 0 heads"),
    ],
)
def test_what_is_not_supported_is_one_sentence(
    family: str, change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    Published(family, tmp_path, ALIBI).rewrite(**change)
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(str(tmp_path))
