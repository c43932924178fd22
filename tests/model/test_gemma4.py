"""Gemma 4: folders as publishers write them, against transformers' own models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_families import VOCAB, Published
from tiny_gemma4 import GEMMA4, WHOLE
from tiny_mixtures import answers

from mooncake.engine.cache.kv_cache import KVCache
from mooncake.kernels import choose_kernels, reference
from mooncake.model.load import load_model

PROMPTS = [np.random.default_rng(4).integers(2, VOCAB, length).tolist() for length in (75, 1, 30, 12, 5, 50, 3, 7)]


@pytest.fixture(params=GEMMA4, scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param), GEMMA4)


def greedy(folder: Published, use_reference: bool = False) -> list[list[int]]:
    kernels = reference if use_reference else choose_kernels()
    model = load_model(folder.checkpoint, "float32", kernels=kernels)
    return answers(model, KVCache(folder.checkpoint.kv_layout(16, "float32"), 60), PROMPTS)


@pytest.mark.parametrize("use_reference", [True, False], ids=["reference", "chosen"])
def test_tokens_are_theirs_one_for_one(published: Published, use_reference: bool) -> None:
    found = greedy(published, use_reference)
    assert found == [published.greedy(prompt) for prompt in PROMPTS]
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


@pytest.mark.parametrize("family", WHOLE)
def test_text_gets_the_tokens_of_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = Published(family, tmp_path, WHOLE)
    wanted = [folder.greedy(prompt) for prompt in PROMPTS]
    assert len({token for tokens in wanted for token in tokens}) >= 6, "a model that repeats itself proves nothing"
    assert greedy(folder) == wanted
