"""Positions beyond the trained context: tables bit for bit, and answers token for token, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ConfigError, ModelError
from mooncake.families.rope_settings import read_rope
from mooncake.model.rope import rope_tables
from mooncake.model_config import Settings

TRAINED = 64  # tokens
NEW_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.4, 2.0],
    "long_factor": [1.2, 1.9, 5.0, 16.0],
}
YARNS: dict[str, dict[str, Any]] = {
    "qwen": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "other betas": {"factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 64, "beta_slow": 2.5},
    "whole": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "sharpness given": {"factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 0.75},
    "two scales": {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    "one scale": {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.7},
    "no stretch": {"factor": 1.0, "original_max_position_embeddings": 4096},
    "no ramp": {"factor": 2.0, "original_max_position_embeddings": 7, "beta_fast": 1.0},
    "length left out": {"factor": 2.0},
    "nulls": {"factor": 2.0, "attention_factor": None, "beta_fast": None, "beta_slow": None, "truncate": None},
}


def their_tables(config: LlamaConfig, num_positions: int, seq_len: int | None = None) -> list[torch.Tensor]:
    frequencies, sharpness = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu", seq_len)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    return [angles.cos() * sharpness, angles.sin() * sharpness]


@pytest.mark.parametrize("theta", [10_000.0, 1e6])
@pytest.mark.parametrize("parameters", YARNS.values(), ids=YARNS)
def test_yarns_tables_are_theirs_to_the_bit(parameters: dict[str, Any], theta: float) -> None:
    rope = {"rope_type": "yarn", "rope_theta": theta, **parameters}
    ours = read_rope(Settings({"max_position_embeddings": 8192, "rope_parameters": rope}, "config.json"), 64)
    # A truncate of null is none of transformers' values: it means what is left out means.
    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={key: value for key, value in rope.items() if (key, value) != ("truncate", None)},
    )
    tables = rope_tables(64, 3000, ours.theta, ours.scaling)
    for table, expected in zip(tables, their_tables(theirs, 3000), strict=True):
        assert torch.equal(table, expected)


@pytest.mark.parametrize("changes", [{}, {"attention_factor": 1.5}, {"factor": 2.0}], ids=["ratio", "given", "factor"])
@pytest.mark.parametrize("asked", [0, TRAINED, TRAINED + 1], ids=["no wish", "short", "long"])
def test_longropes_tables_are_theirs_to_the_bit(changes: dict[str, Any], asked: int, tmp_path: Path) -> None:
    rope = {"rope_theta": 10_000.0, **LONGROPE, **changes}
    shape = {"max_position_embeddings": 4096, "original_max_position_embeddings": TRAINED}
    write_tiny_model(tmp_path, rope_parameters=rope, **shape)
    ours = open_checkpoint(str(tmp_path), asked).config
    theirs = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=rope, **shape)
    tables = rope_tables(8, 4096, ours.rope_theta, ours.rope_scaling)
    for table, expected in zip(tables, their_tables(theirs, 4096, asked), strict=True):
        assert torch.equal(table, expected)


def their_answer(theirs: Any, prompt: list[int]) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 300, length).tolist() for length in lengths]


def answers(folder: Path, asked: list[list[int]], max_model_len: int = 0, **options: Any) -> list[tuple[int, ...]]:
    with LLM(str(folder), kv_gb=0.02, block_tokens=16, max_model_len=max_model_len, **options) as llm:
        return [tuple(answer.token_ids) for answer in llm.generate(asked, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"])
def test_a_stretched_model_answers_as_theirs_beyond_what_it_was_trained_with(family: str, tmp_path: Path) -> None:
    changes = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2} if family == "qwen3_moe" else {}
    theirs = write_tiny_model(
        tmp_path, family, rope_parameters={"rope_theta": 10_000.0, **YARN}, initializer_range=0.2, **changes
    )
    config = open_checkpoint(str(tmp_path)).config
    assert config.max_model_len == 4 * TRAINED
    asked = prompts(200, 5, 90)
    found = answers(tmp_path, asked, chunk_tokens=32)
    assert found == [their_answer(theirs, prompt) for prompt in asked]
    assert len({token for answer in found for token in answer}) > 6


@pytest.fixture(scope="module", params=["llama", "phi3", "part of a phi3"])
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("longrope")
    rope, family = {"rope_theta": 10_000.0, **LONGROPE}, request.param.split()[-1]
    if request.param == "part of a phi3":
        rope |= {name: LONGROPE[name][:3] for name in ("short_factor", "long_factor")} | {"partial_rotary_factor": 0.75}
    shape = {"max_position_embeddings": 512, "original_max_position_embeddings": TRAINED}
    return folder, write_tiny_model(folder, family, rope_parameters=rope, initializer_range=0.2, **shape)


def test_a_context_within_the_trained_length_has_the_short_factors(long: tuple[Path, Any]) -> None:
    folder, theirs = long
    asked = prompts(TRAINED - NEW_TOKENS, 5, 30)
    found = answers(folder, asked)
    assert found == answers(folder, asked, TRAINED) == [their_answer(theirs, prompt) for prompt in asked]
    assert found != answers(folder, asked, TRAINED + 1)


def test_a_longer_context_has_the_long_factors_for_every_sequence(long: tuple[Path, Any]) -> None:
    """transformers switches to them once a sequence is longer, and recomputes its keys. Our keys are in a shared cache:
    a short sequence uses the long factors, too."""
    folder, theirs = long
    asked = prompts(300, TRAINED + 1, 5)
    found = answers(folder, asked, 512, chunk_tokens=32)
    assert found == answers(folder, asked, 400)
    assert found[:2] == [their_answer(theirs, prompt) for prompt in asked[:2]]
    rotary, short = theirs.model.rotary_emb, theirs.model.rotary_emb.original_inv_freq.clone()
    theirs(torch.tensor([[1] * (TRAINED + 1)]))  # it keeps the long frequencies
    rotary.original_inv_freq.copy_(rotary.inv_freq)
    assert found[2] == their_answer(theirs, asked[2])
    rotary.original_inv_freq.copy_(short)
    assert found[2] != their_answer(theirs, asked[2])


@pytest.mark.slow
def test_ranks_have_the_factors_of_the_context_that_was_asked_for(long: tuple[Path, Any]) -> None:
    """Also where the cache holds less than that."""
    folder, _ = long
    [prompt] = prompts(20)
    block_bytes = open_checkpoint(str(folder)).kv_layout(16, "float32").block_bytes
    options = {"kv_gb": 3 * block_bytes / 1e9, "block_tokens": 16, "max_model_len": 512}
    found = []
    for size in (1, 2):
        with LLM(str(folder), tensor_parallel_size=size, **options) as llm:
            assert llm.max_model_len == 48 < TRAINED
            found.append(llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids)
    assert found[0] == found[1]
    assert tuple(found[0]) == answers(folder, [prompt], 512)[0] != answers(folder, [prompt])[0]


def test_a_draft_model_has_the_factors_of_the_context_too(long: tuple[Path, Any]) -> None:
    folder, _ = long
    options = {"kv_gb": 0.02, "block_tokens": 16, "max_model_len": 512}
    with LLM(str(folder), draft_model=str(folder), speculative_tokens=4, **options) as llm:
        llm.generate(prompts(300), GREEDY, use_tqdm=False)
        load = llm.engine.load()
    assert load.accepted_tokens == load.drafted_tokens > 0


def test_the_context_ends_where_the_factors_do(long: tuple[Path, Any]) -> None:
    folder, _ = long

    def context(asked: int) -> int:
        return open_checkpoint(str(folder), asked).config.context(asked)

    assert [context(asked) for asked in (0, 20, TRAINED, TRAINED + 1, 512)] == [TRAINED, 20, TRAINED, TRAINED + 1, 512]
    with pytest.raises(ConfigError, match="the context of the model 512 tokens"):
        context(513)
    settled = open_checkpoint(str(folder), 100).config
    assert settled.for_context(settled.max_model_len) == settled.for_context(0) == settled


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_kv_of_other_rotations_has_another_name(tmp_path: Path) -> None:
    """Everything that affects the rotation of keys is in the digest, from which block names are derived."""
    write_tiny_model(tmp_path, rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"})
    ways: list[dict[str, Any]] = [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "default", "rope_theta": 20_000.0},
        {"rope_type": "linear", "factor": 4.0},
        YARN,
        YARN | {"factor": 2.0},
        YARN | {"beta_fast": 20.0},
        YARN | {"beta_slow": 2.0},
        YARN | {"truncate": False},
        YARN | {"attention_factor": 1.0},
        YARN | {"original_max_position_embeddings": 32},
        LONGROPE | {"original_max_position_embeddings": TRAINED},
        LONGROPE | {"original_max_position_embeddings": TRAINED, "attention_factor": 1.0},
        LONGROPE | {"original_max_position_embeddings": TRAINED, "short_factor": [1.0] * 4},
    ]
    digests = []
    for way in ways:
        edit(tmp_path, rope_parameters=way)
        digests.append(open_checkpoint(str(tmp_path)).digest)
    edit(tmp_path, rope_parameters=ways[-1])
    digests.append(open_checkpoint(str(tmp_path), 100).digest)
    assert len(set(digests)) == len(ways) + 1
    assert open_checkpoint(str(tmp_path), 200).digest == digests[-1], "the same factors"
    assert open_checkpoint(str(tmp_path), 20).digest == digests[-2]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no factor": ({"rope_type": "yarn"}, "'yarn' needs a positive factor"),
    "factor nan": (YARN | {"factor": float("nan")}, "needs a positive factor"),
    "factor too large": (YARN | {"factor": 1e300}, "needs a positive factor"),
    "length zero": (YARN | {"original_max_position_embeddings": 0}, "needs a positive original_max_position"),
    "length one": (YARN | {"original_max_position_embeddings": 1}, "needs original_max_position_embeddings above 1"),
    "theta": (YARN | {"rope_theta": 1.0}, "needs a rope_theta above 1"),
    "beta below zero": (YARN | {"beta_fast": -2}, "needs a positive beta_fast"),
    "sharpness a word": (YARN | {"attention_factor": "much"}, "attention_factor must be a number"),
    "too few divisors": (LONGROPE | {"long_factor": [1.0] * 3}, "needs 4 numbers as long_factor"),
    "a divisor of zero": (LONGROPE | {"short_factor": [1.0, 0.0, 1.0, 1.0]}, "needs a positive short_factor"),
    "no divisors": ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "needs 4 numbers as long_factor"),
    "part of a head": ({"rope_type": "default", "partial_rotary_factor": 0.5}, "only a part of each head"),
}


@pytest.mark.parametrize(("rope", "sentence"), WRONG.values(), ids=WRONG)
def test_a_scaling_that_is_wrong_is_one_sentence(rope: dict[str, Any], sentence: str) -> None:
    settings = Settings({"max_position_embeddings": 256, "rope_parameters": rope}, "config.json")
    with pytest.raises(ModelError, match=sentence) as refused:
        read_rope(settings, 8)
    assert "\n" not in refused.value.message


def test_a_length_that_nothing_can_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="max_position_embeddings must be between"):
        read_rope(Settings({"max_position_embeddings": 10**400}, "config.json"), 8)
