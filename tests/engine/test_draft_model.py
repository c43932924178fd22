"""A small model guesses for a large one: the large one's answers, whatever the small one thinks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.errors import InvalidRequest
from mooncake.types import BeamSearch

PROMPTS = [np.random.default_rng(seed).integers(3, 320, length).tolist() for seed, length in enumerate((1, 9, 40))]
SAMPLINGS = [
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.9, seed=7, ignore_eos=True, n=2),
    SamplingParams(max_tokens=12, temperature=0.0, n=3, beam_search=BeamSearch()),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, its twin, and one of another mind and shape."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("target", "twin", "stranger", "foreign")}
    write_tiny_model(made["target"], seed=1, initializer_range=0.5)
    write_tiny_model(made["twin"], seed=1, initializer_range=0.5)
    write_tiny_model(made["stranger"], seed=2, num_hidden_layers=1, hidden_size=16, initializer_range=0.5)
    write_tiny_model(made["foreign"], vocab_size=352)
    return made


def engine(folders: dict[str, Path], draft: str = "") -> LLM:
    return LLM(
        str(folders["target"]),
        kv_gb=0.01,
        block_tokens=8,
        speculative_tokens=6 if draft else 0,
        draft_model=str(folders[draft]) if draft else "",
    )


def said(llm: LLM, sampling: SamplingParams) -> list[list[list[int]]]:
    answers = [[o.token_ids for o in answer.outputs] for answer in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    assert llm.engine.block_pool.num_in_use == 0
    return answers


@pytest.mark.parametrize("draft", ["twin", "stranger"])
def test_the_answers_are_the_large_models(folders: dict[str, Path], draft: str) -> None:
    plain, guessing = engine(folders), engine(folders, draft)
    for sampling in SAMPLINGS:
        assert said(guessing, sampling) == said(plain, sampling)
    load = guessing.engine.load()
    assert load.drafted_tokens > 0
    if draft == "stranger":
        assert load.accepted_tokens < load.drafted_tokens / 2


def test_a_twin_is_believed_in_all_that_is_not_drawn(folders: dict[str, Path]) -> None:
    guessing = engine(folders, "twin")
    said(guessing, SAMPLINGS[0])
    load = guessing.engine.load()
    assert load.accepted_tokens == load.drafted_tokens > 0


def test_another_vocabulary_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="another vocabulary"):
        engine(folders, "foreign")
