"""The families with ALiBi: folders as publishers write them, against transformers' own models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from context_pair import Pair
from greedy import NEW_TOKENS
from safetensors.torch import load_file, save_file
from tiny_alibi import ALIBI
from tiny_families import VOCAB, Published
from tiny_mixtures import answers_of
from tiny_model import write_tokenizer
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from mooncake import LLM, BeamSearchParams, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ModelError
from mooncake.families.alibi import alibi_slopes
from mooncake.model.parallel.context_plan import Method

PROMPTS = [np.random.default_rng(4).integers(2, VOCAB, length).tolist() for length in (150, 1, 30, 12, 5, 50, 3, 7)]
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=ALIBI, scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param), ALIBI)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("use_reference", [True, False], ids=["reference", "chosen"])
def test_tokens_are_theirs_one_for_one(published: Published, use_reference: bool) -> None:
    """Prompts in chunks, then all in one batch."""
    found = answers_of(published.checkpoint, PROMPTS, use_reference=use_reference)
    assert found == published.greedy_all(PROMPTS, found)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


def test_without_slopes_they_are_others(published: Published) -> None:
    """Otherwise the tokens above would be no evidence of them."""
    checkpoint, tokens = published.checkpoint, []
    for config in (checkpoint.config, replace(checkpoint.config, alibi_slopes=())):
        checkpoint.config = config
        tokens.append(answers_of(checkpoint, PROMPTS))
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
    """What transformers adds to the second key of two."""
    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), theirs)
    theirs = -build_mpt_alibi_tensor(num_heads, 2, alibi_bias_max=16)[:, 0, 0]
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads, 16.0)), theirs)


def test_mpt_says_how_steep_its_slopes_are(tmp_path: Path) -> None:
    """Which transformers builds for any number, but does not read from the configuration."""
    published = Published("mpt", tmp_path, ALIBI)
    build = published.theirs.transformer.build_mpt_alibi_tensor
    published.theirs.transformer.build_mpt_alibi_tensor = partial(build, alibi_bias_max=16)
    before = published.checkpoint.digest
    published.rewrite(attn_config={"alibi_bias_max": 16})
    checkpoint = published.checkpoint
    assert checkpoint.digest != before, "blocks of one are not those of the other"
    found = answers_of(checkpoint, PROMPTS)
    assert found == published.greedy_all(PROMPTS, found)


def test_mpts_heads_may_share_keys_and_its_layers_have_biases(tmp_path: Path) -> None:
    """Which transformers' MPT does not know: its heads have copies of the same keys and values."""
    published, file = Published("mpt", tmp_path, ALIBI), tmp_path / "model.safetensors"
    stored = load_file(file)
    with torch.no_grad():
        for name, module in published.theirs.transformer.named_modules():
            if not name.endswith(("norm_1", "norm_2", "norm_f", "proj", "Wqkv")):
                continue
            module.bias = torch.nn.Parameter(torch.randn(module.weight.shape[0]) * 0.3)
            for kind, values in (("weight", module.weight), ("bias", module.bias)):
                if name.endswith("Wqkv"):
                    shared = values[96:].view(2, 2, 3, 16, -1)[:, :, :1]  # of two heads, each with a group of three
                    values[96:] = shared.expand(-1, -1, 3, -1, -1).reshape(values[96:].shape)
                    values = torch.cat([values[:96], shared.reshape(64, *values.shape[1:])])
                stored[f"transformer.{name}.{kind}"] = values.clone()
    save_file(stored, file)
    attention = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
    published.rewrite(no_bias=False, attn_config=attention)
    checkpoint = published.checkpoint
    found = answers_of(checkpoint, PROMPTS)
    assert checkpoint.config.num_kv_heads == 2 and found == published.greedy_all(PROMPTS, found)
    published.rewrite(attn_config=attention | {"attn_type": "multiquery_attention"})
    with pytest.raises(ModelError, match=r"attn\.Wqkv\.\w+ has the shape"):
        open_checkpoint(str(tmp_path))


def test_bloom_is_the_same_in_the_keys_and_names_of_its_publisher(tmp_path: Path) -> None:
    published = Published("bloom", tmp_path, ALIBI)
    expected = published.checkpoint.config
    published.rewrite(hidden_size=None, n_embed=96, n_head=None, num_attention_heads=8, seq_length=2048, n_inner=None)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    checkpoint = published.checkpoint
    assert checkpoint.config == expected and expected.max_model_len == 2048
    found = answers_of(checkpoint, PROMPTS[2:3])
    assert found == [published.greedy(PROMPTS[2])]


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "adds to what norms give"),
        ("bloom", {"n_head": 10**9}, "no slopes of ALiBi for 1000000000 heads"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "asks for qk_ln"),
        ("mpt", {"attn_config": {"alibi": False}}, "learned positions in place of ALiBi"),
        ("mpt", {"attn_config": {"rope": True}}, "asks for rope"),
        ("mpt", {"attn_config": {"attn_type": "none"}}, "asks for the attn_type 'none'"),
        ("mpt", {"attn_config": {"attn_type": "grouped_query_attention"}}, "attn_config lacks kv_n_heads"),
        ("mpt", {"attn_config": {"clip_qkv": -1}}, "clip_qkv must be a positive number or null"),
        ("mpt", {"attn_config": {"alibi_bias_max": 0}}, "no slopes of ALiBi for 6 heads and a largest bias of 0"),
        ("mpt", {"attn_config": {"sliding_window_size": 20}}, "asks for a sliding_window_size"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "asks for a logit_scale"),
        ("mpt", {"norm_type": "rmsnorm"}, "asks for the norm_type 'rmsnorm'"),
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "asks for MLPs other than MPT's"),
        ("mpt", {"no_bias": False}, "lacks the weight transformer.norm_f.bias"),
        ("bloom", {"n_head": 0}, "no slopes of ALiBi for 0 heads"),
    ],
)
def test_what_is_not_supported_is_one_sentence(
    family: str, change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    Published(family, tmp_path, ALIBI).rewrite(**change)
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(str(tmp_path))
