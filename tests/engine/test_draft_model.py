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
from mooncake.engine.backend import CacheSize, on_cpu
from mooncake.engine.draft_model import DraftModel
from mooncake.engine.engine import NO_HOOK, Engine, EngineConfig, StepOutput
from mooncake.engine.host import EngineHost, plan_cache
from mooncake.engine.kv_cache import KVCache
from mooncake.engine.sequence import Sequence
from mooncake.errors import ConfigError, MooncakeError
from mooncake.hashing import Chain
from mooncake.model.load import load_model
from mooncake.precision import resolve_precision
from mooncake.types import BeamSearch

PROMPTS = [np.random.default_rng(seed).integers(3, 320, length).tolist() for seed, length in enumerate((1, 9, 40))]
SAMPLINGS = [
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.9, seed=7, ignore_eos=True, n=2),
    SamplingParams(max_tokens=12, temperature=0.0, n=3, beam_search=BeamSearch()),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, its twin, one of another mind and shape, and one that has learned 64 positions, with its twin."""
    names = ("target", "twin", "stranger", "foreign", "short", "short-twin")
    made = {name: tmp_path_factory.mktemp(name) for name in names}
    write_tiny_model(made["target"], seed=1, initializer_range=0.5)
    write_tiny_model(made["twin"], seed=1, initializer_range=0.5)
    write_tiny_model(made["stranger"], seed=2, num_hidden_layers=1, hidden_size=16, initializer_range=0.5)
    write_tiny_model(made["foreign"], vocab_size=352)
    for name in ("short", "short-twin"):
        write_tiny_model(made[name], "gpt2", seed=1, max_position_embeddings=64, initializer_range=0.5)
    return made


def engine(folders: dict[str, Path], draft: str = "", target: str = "target") -> LLM:
    return LLM(
        str(folders[target]),
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


@pytest.mark.parametrize(("target", "draft"), [("short", "short-twin"), ("target", "short")])
def test_nothing_is_guessed_beyond_the_context_of_the_small_model(
    folders: dict[str, Path], target: str, draft: str
) -> None:
    sampling = SamplingParams(max_tokens=62, temperature=0.0, ignore_eos=True)
    plain, guessing = engine(folders, target=target), engine(folders, draft, target)
    assert said(guessing, sampling) == said(plain, sampling)
    assert guessing.engine.load().drafted_tokens > 0
    if draft == "short-twin":
        assert guessing.engine.load().accepted_tokens == guessing.engine.load().drafted_tokens


def test_a_small_model_that_fails_costs_its_guesses_alone(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_checkpoint(str(folders["twin"]))
    backend = on_cpu(checkpoint, resolve_precision("float32"), CacheSize(checkpoint.kv_layout(8, "float32"), 100, 256))
    drafter = DraftModel(load_model(checkpoint, "float32", max_model_len=32), backend.cache, 6, max_model_len=256)
    config = EngineConfig(8, max_model_len=256, speculative_tokens=6)
    engine = Engine(backend.model, KVCache(checkpoint.kv_layout(8, "float32"), 100), config, draft_model=drafter)
    found: dict[str, list[int]] = {}
    for name, prompt in zip("abc", PROMPTS, strict=True):
        tokens = np.array(prompt, np.uint32)
        engine.add(Sequence(name, tokens, len(tokens), SAMPLINGS[0], Chain(b"seed"), eos_ids=(), max_model_len=256))
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output.token.token_id)
    plain = LLM(str(folders["twin"]), kv_gb=0.01, block_tokens=8)
    assert [[found[name]] for name in "abc"] == said(plain, SAMPLINGS[0]) and not engine.take_ended()
    assert caplog.text.count("the draft model has failed") == 1


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
