"""A small model guesses for a large one: the large one's answers, whatever the small one thinks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.engine.engine import NO_HOOK, StepOutput
from mooncake.engine.host import EngineHost, plan_cache
from mooncake.errors import ConfigError, MooncakeError
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
    with pytest.raises(ConfigError, match="another vocabulary"):
        engine(folders, "foreign")


async def test_a_node_has_one_too(folders: dict[str, Path]) -> None:
    settings = [f"model.path='{folders['target']}'", f"decode.draft_model='{folders['twin']}'", "block.tokens=8"]
    config = load_config(None, [*settings, "decode.speculative_tokens=4", "decode.kv_gb=0.01", "decode.threads=1"])
    checkpoint = open_checkpoint(config.model.path)
    host = EngineHost(config, config.decode, checkpoint, plan_cache(config, config.decode, checkpoint))
    await host.start(NO_HOOK)
    try:
        before, found, ended = host.load().counters, [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_output(output: StepOutput | MooncakeError) -> None:
            assert isinstance(output, StepOutput)
            found.append(output.token.token_id)
            if output.finish_reason is not None:
                loop.call_soon_threadsafe(ended.set)

        prompt = np.array(PROMPTS[1], np.uint32)
        host.thread.add(host.sequence("r", prompt, len(prompt), SAMPLINGS[0], ""), on_output)
        await asyncio.wait_for(ended.wait(), 60)
        after = host.load().counters
    finally:
        await host.stop()
    assert [found] == said(engine(folders), SAMPLINGS[0])[1]
    assert after["drafts_accepted"] > before["drafts_accepted"]
