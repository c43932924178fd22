"""Gemma 3n and 4: folders as publishers write them, against transformers' own models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from empty_rows import num_empty_rows
from safetensors.torch import load_file, save_file
from tiny_families import VOCAB, Published
from tiny_gemma4 import GEMMA3N, GEMMA4, LARGE, MIXTURE, WHOLE, text
from tiny_mixtures import answers, answers_of
from tiny_model import write_tokenizer
from transformers import PreTrainedModel

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ModelError, MooncakeError
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.families.gemma4 import Gemma4
from mooncake.model.load import load_model
from mooncake.precision import FLOAT32, WeightFormat

PROMPTS = [np.random.default_rng(4).integers(2, VOCAB, length).tolist() for length in (75, 1, 30, 12, 5, 50, 3, 7)]


FAMILIES = GEMMA4 | GEMMA3N


@pytest.fixture(params=FAMILIES, scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param), FAMILIES)


def greedy(folder: Published, **how: Any) -> list[list[int]]:
    return answers_of(folder.checkpoint, PROMPTS, **how)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("use_reference", [True, False], ids=["reference", "chosen"])
def test_tokens_are_theirs_one_for_one(published: Published, use_reference: bool) -> None:
    found = greedy(published, use_reference=use_reference)
    assert found == published.greedy_all(PROMPTS, found)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


@pytest.mark.parametrize("family", WHOLE)
def test_text_gets_the_tokens_of_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = Published(family, tmp_path, WHOLE)
    found = greedy(folder)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"
    assert found == folder.greedy_all(PROMPTS, found)


GROUPS = {  # windows, rows of layers with KV of their own, rows of a page, empty ones
    "small": ((0, 16), (1, 1, 2, 1, 1, 2), 4, 0),
    "mixture": ((0, *[16] * 6), (2, 2, 2, 1, 2, 2, 2, 1), 2, 0),
    "3n": ((0, 16, 16), (), 2, 0),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"num_drafts": 3}], ids=["fp32", "int8", "drafts"])
@pytest.mark.parametrize("family", GROUPS)
def test_an_engine_keeps_windows_and_finds_prefixes(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Prompts of several chunks, then second turns of which the cache has the beginning. With int8 codes the same
    whether or not layers are grouped; with drafts a model of this family makes them for itself."""
    folder = Published(family, tmp_path, FAMILIES)
    write_tokenizer(tmp_path)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"kv_gb": 0.01, "block_tokens": 8, "chunk_tokens": 24, "max_sequences": 4}
    if count := settings.get("num_drafts"):
        options |= {"speculative_tokens": count, "draft_model": str(tmp_path)}
    coded = settings.get("kv_dtype") == "int8"
    with LLM(str(tmp_path), **options, kv_dtype=settings.get("kv_dtype", "auto")) as llm:
        groups = llm.engine.config.groups
        assert (groups.windows, groups.rows, groups.num_rows, num_empty_rows(groups)) == GROUPS[family]
        found = [answer.token_ids for answer in llm.generate(PROMPTS, sampling)]
        assert coded or found == folder.greedy_all(PROMPTS, found)
        turns = [[*prompt, *answer, 7] for prompt, answer in zip(PROMPTS, found, strict=True)]
        again = llm.generate(turns, sampling)
        assert all(len(turn) < 17 or answer.cached_tokens for turn, answer in zip(turns, again, strict=True))
        following = [answer.token_ids for answer in again]
        assert coded or following == folder.greedy_all(turns, following)
    if coded:
        assert found == greedy(folder, kv_dtype="int8")


def test_narrow_weights_and_pages_are_hardly_further_off_than_theirs(published: Published) -> None:
    rows = torch.arange(40)
    batch, logits = ForwardBatch.of_prompt(2 + rows * 37 % (VOCAB - 2), 16, rows), []
    for dtype, kv_dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8")):
        cache = KVCache(published.checkpoint.kv_layout(16, kv_dtype), 4)
        logits.append(load_model(published.checkpoint, WeightFormat(dtype)).forward(batch, cache.tensor, NoHook()))
    with torch.inference_mode():
        theirs = copy.deepcopy(published.theirs).bfloat16()(batch.tokens[None]).logits[0].float()
    for narrow in logits[1:]:
        assert angle(logits[0], narrow) <= 3 * angle(logits[0], theirs)
        assert not torch.equal(logits[0], narrow)


def angle(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean of 1 - cosine, over rows."""
    return 1 - float(torch.nn.functional.cosine_similarity(one, other.float()).mean())


def test_embeddings_of_layers_stay_in_the_file(tmp_path: Path) -> None:
    """They are half of a small model: computing in float32 does not copy them."""
    folder = Published("small", tmp_path, GEMMA4)
    folder.theirs.bfloat16().save_pretrained(tmp_path)
    folder.theirs.float()
    model = load_model(folder.checkpoint, FLOAT32)
    assert isinstance(model, Gemma4) and model._inputs is not None
    assert model._inputs.table.dtype is torch.bfloat16
    found = answers(model, KVCache(folder.checkpoint.kv_layout(16, "float32"), 60), PROMPTS)
    assert found == folder.greedy_all(PROMPTS, found)


def test_steps_whose_logits_nobody_wants_end_with_the_last_layer_that_has_keys(tmp_path: Path) -> None:
    """The same keys and values, and the same logits of the rows that are wanted."""
    checkpoint = Published("small", tmp_path, GEMMA4).checkpoint
    model, tokens = load_model(checkpoint, FLOAT32), torch.arange(40) * 37 % VOCAB
    caches, found = [], []
    for wanted in (torch.arange(40), torch.tensor([7, 39]), torch.tensor([], dtype=torch.int64)):
        caches.append(KVCache(checkpoint.kv_layout(16, "float32"), 4))
        found.append(model.forward(ForwardBatch.of_prompt(tokens, 16, wanted), caches[-1].tensor, NoHook()))
    assert all(np.array_equal(caches[0].memory, cache.memory) for cache in caches)
    torch.testing.assert_close(found[1], found[0][[7, 39]])
    assert found[2].shape == (0, VOCAB)


def test_what_published_models_do_not_vary_is_read_too(tmp_path: Path) -> None:
    """Experts with another activation, and layers that are all global."""
    others: dict[str, Callable[[], PreTrainedModel]] = {
        "mixture": text("gemma4_text", **LARGE, **MIXTURE, hidden_activation="silu"),
        "global": text("gemma4_text", **{**LARGE, "layer_types": ["full_attention"] * 8}),
    }
    for family in others:
        folder = Published(family, tmp_path / family, others)
        found = greedy(folder)
        assert found == folder.greedy_all(PROMPTS, found)
    assert not folder.checkpoint.config.layer_heads, "layers that are alike take a row each"


# As published


def test_text_of_gemma3n_is_found_in_the_folder_of_the_whole_model(tmp_path: Path) -> None:
    """With the older keys of its settings, and keys and values that nobody uses."""
    folder = Published("3n", tmp_path, GEMMA3N)
    expected, wanted = folder.checkpoint.config, greedy(folder)
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_parameters": None}
    text = {key: value for key, value in (folder.tree | older).items() if value is not None}
    wrapped = {"model_type": "gemma3n", "text_config": text, "eos_token_id": text["eos_token_id"]}
    folder.rewrite(**{**dict.fromkeys(folder.tree), **wrapped})
    file = tmp_path / "model.safetensors"
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()}
    parts = ("vision_tower.conv", "audio_tower.conv", "embed_vision.embedding", "embed_audio.embedding")
    others = {f"model.{part}.weight": torch.ones(2) for part in parts}
    unused = {f"model.language_model.layers.9.self_attn.{name}.weight": torch.ones(4) for name in ("k_proj", "k_norm")}
    save_file(stored | others | unused, file)
    assert folder.checkpoint.config == expected and greedy(folder) == wanted


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx"),
        ({"altup_num_inputs": 0}, "altup_num_inputs must be positive"),
        ({"laurel_rank": 1 << 30}, "laurel_rank must be positive and at most"),
        ({"activation_sparsity_pattern": [0.5]}, "must have a share for each layer"),
        ({"activation_sparsity_pattern": [1.0] * 10}, "shares from 0 to less than 1"),
        ({"intermediate_size": [96] * 9 + [48]}, "must be the same number for each of 10 layers"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers must leave layers"),
    ],
)
def test_what_is_not_supported_of_gemma3n_is_one_sentence(
    change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    folder = Published("3n", tmp_path, GEMMA3N)
    folder.rewrite(**change)
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(str(tmp_path))


def test_it_is_the_same_in_the_keys_of_its_publisher(tmp_path: Path) -> None:
    """Which say what global layers have, and leave out what is usual; keys and values of layers that use others' are
    there and unused."""
    folder = Published("all-at-once", tmp_path, GEMMA4)
    expected = folder.checkpoint.config
    folder.rewrite(
        per_layer_config=None,
        global_head_dim=32,
        num_global_key_value_heads=1,
        rope_parameters=None,
        attention_bias=None,
    )
    assert folder.checkpoint.config == expected
    folder.rewrite(layer_types=["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 4)
    assert folder.checkpoint.config == expected, "the last layer sees everything, whatever the list says"
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    unused = {f"model.layers.7.self_attn.{name}.weight": torch.ones(4) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(stored | unused, file)
    assert folder.checkpoint.config == expected
    save_file(stored | {"model.layers.3.self_attn.v_proj.weight": torch.ones(4)}, file)
    with pytest.raises(ModelError, match=r"has the weight model\.layers\.3\.self_attn\.v_proj\.weight, which its"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_bidirectional_attention": "all"}, "lets tokens see later ones"),
        ({"attention_bias": True}, "asks for attention_bias"),
        ({"vocab_size_per_layer_input": 5}, "for 5 tokens in each layer"),
        ({"hidden_size_per_layer_input": -8}, "embeddings of -8"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be positive"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"hidden_activation": "relu"}, "asks for experts with the activation 'relu'"),
        ({"top_k_experts": 9}, "cannot use 9 of 6 experts"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers must leave layers"),
        ({"num_kv_shared_layers": 7}, "no layer with a window of all tokens has KV"),
        ({"layer_types": ["sliding_attention"]}, "each of the 8 layers"),
        ({"per_layer_config": {"3": {"head_dim": 32, "sliding_window": 4}}}, "sets sliding_window for single layers"),
        ({"per_layer_config": [1]}, "per_layer_config must have settings"),
        ({"per_layer_config": {"3": {"head_dim": 32}}}, "heads of one size"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 3}}}, "cannot share 3 KV heads"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rotates heads by 'yarn'"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "scales its positions"),
        ({"final_logit_softcapping": -1.0}, "must be a positive number or null"),
        ({"max_position_embeddings": 0}, "at most"),
        ({"num_hidden_layers": 10**9}, "num_layers of the model must be between"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_one_sentence(
    whole: Published, change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    tree = whole.tree
    whole.rewrite(**change)
    try:
        with pytest.raises(ModelError, match=sentence):
            open_checkpoint(str(whole.folder))
    finally:
        whole.rewrite(**{**dict.fromkeys(change), **tree})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = Published("all-at-once", tmp_path_factory.mktemp("whole"), GEMMA4)
    write_tokenizer(folder.folder)
    return folder


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel_size": 2}, "tensor parallelism is not for Gemma 3n and 4"),
        ({"pipeline_parallel_size": 2}, "stages are for the Llama family"),
        ({"context_parallel_size": 2}, "context parallel ranks are not for Gemma 3n and 4"),
    ],
    ids=["tensor", "pipeline", "context"],
)
def test_what_computes_only_models_of_equal_layers_says_so(
    whole: Published, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MooncakeError, match=sentence):
        LLM(str(whole.folder), kv_gb=0.01, **options)
