"""A small model drafts for a large one: the answers are the large one's, whatever the drafts are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.engine.backends.backend import BackendSpec, CacheSize, draft_on, on_cpu
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import NO_HOOK, CausalModel, EngineConfig, StepOutput
from mooncake.engine.decoding.draft_model import DraftModel
from mooncake.engine.engine import Engine
from mooncake.engine.hosting.host import EngineHost, HostPlan
from mooncake.engine.sequence import Sequence
from mooncake.errors import ConfigError, MooncakeError
from mooncake.events import EventLog
from mooncake.hashing import Chain
from mooncake.in_process.answers import DraftTokens
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.model.load import load_model
from mooncake.precision import FLOAT32, resolve_precision
from mooncake.sampling import BeamSearch

PROMPTS = [np.random.default_rng(seed).integers(3, 320, length).tolist() for seed, length in enumerate((1, 9, 40))]
SAMPLINGS = [
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.9, seed=7, ignore_eos=True, n=2),
    SamplingParams(max_tokens=12, temperature=0.0, n=3, beam_search=BeamSearch()),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model and its twin, one with other weights and shape, and one with 64 positions and its twin."""
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
    plain, drafting = engine(folders), engine(folders, draft)
    for sampling in SAMPLINGS:
        assert said(drafting, sampling) == said(plain, sampling)
    load = drafting.engine.load()
    assert load.drafted_tokens > 0
    if draft == "stranger":
        assert load.accepted_tokens < load.drafted_tokens / 2


def test_a_twin_is_believed_in_all_that_is_not_drawn(folders: dict[str, Path]) -> None:
    drafting = engine(folders, "twin")
    assert drafting.draft_tokens == DraftTokens(0, 0)
    said(drafting, SAMPLINGS[0])
    told = drafting.draft_tokens
    assert told.accepted == told.proposed > 0


@pytest.mark.parametrize(("target", "draft"), [("short", "short-twin"), ("target", "short")])
def test_nothing_is_drafted_beyond_the_context_of_the_small_model(
    folders: dict[str, Path], target: str, draft: str
) -> None:
    sampling = SamplingParams(max_tokens=62, temperature=0.0, ignore_eos=True)
    plain, drafting = engine(folders, target=target), engine(folders, draft, target)
    assert said(drafting, sampling) == said(plain, sampling)
    assert drafting.engine.load().drafted_tokens > 0
    if draft == "short-twin":
        assert drafting.engine.load().accepted_tokens == drafting.engine.load().drafted_tokens


def test_a_small_model_that_fails_costs_its_drafts_alone(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_checkpoint(str(folders["twin"]))
    size = CacheSize(checkpoint.kv_layout(8, "float32"), 100, 256)
    backend = on_cpu(BackendSpec(checkpoint, resolve_precision("float32"), size))
    drafter = DraftModel(load_model(checkpoint, FLOAT32, max_model_len=32), backend.cache, 6, max_model_len=256)
    config = EngineConfig(8, max_model_len=256, speculative_tokens=6)
    engine = Engine(backend.model, KVCache(checkpoint.kv_layout(8, "float32"), 100), config, draft_model=drafter)
    found: dict[str, list[int]] = {}
    for name, prompt in zip("abc", PROMPTS, strict=True):
        tokens = np.array(prompt, np.uint32)
        engine.add(
            Sequence(
                name, tokens, len(tokens), SAMPLINGS[0].for_engine(), Chain(b"seed"), eos_ids=(), max_model_len=256
            )
        )
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output.token.token_id)
    plain = LLM(str(folders["twin"]), kv_gb=0.01, block_tokens=8)
    assert [[found[name]] for name in "abc"] == said(plain, SAMPLINGS[0]) and not engine.take_ended()
    assert caplog.text.count("the draft model has failed") == 1


class Counting:
    """A model, and how many tokens it was given each time."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.sizes: list[int] = []

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        self.sizes.append(len(batch.tokens))
        return self._model.forward(batch, cache, hook)


def drafter_on(folder: Path, chunk_tokens: int, num_blocks: int = 40) -> tuple[DraftModel, Counting]:
    checkpoint = open_checkpoint(str(folder))
    size = CacheSize(checkpoint.kv_layout(8, "float32"), num_blocks, 256)
    backend = on_cpu(BackendSpec(checkpoint, resolve_precision("float32"), size))
    model = Counting(backend.model)
    return DraftModel(model, backend.cache, 4, 256, chunk_tokens), model


def sequence_of(name: str, tokens: list[int]) -> Sequence:
    given = np.array(tokens, np.uint32)
    return Sequence(name, given, len(given), SAMPLINGS[0].for_engine(), Chain(b"seed"), eos_ids=(), max_model_len=256)


def test_a_long_prompt_is_read_in_parts_and_by_one_of_its_answers(folders: dict[str, Path]) -> None:
    prompt = np.random.default_rng(5).integers(3, 320, 50).tolist()
    whole, _ = drafter_on(folders["twin"], 0)
    parted, model = drafter_on(folders["twin"], 16)
    first, second, other = (
        sequence_of(name, tokens) for name, tokens in zip("abc", [prompt, prompt, prompt[:-3]], strict=True)
    )
    drafts = [parted.propose(first) for _ in range(4)]
    assert drafts == [[], [], [], whole.propose(sequence_of("w", prompt))] and drafts[-1]
    assert model.sizes == [16, 16, 16, 2, 1, 1, 1]
    model.sizes.clear()
    assert parted.propose(first) == drafts[-1], "asked again about the same tokens"
    model.sizes.clear()
    assert parted.propose(second) == drafts[-1] and model.sizes == [2, 1, 1, 1]
    model.sizes.clear()
    assert parted.propose(other) == whole.propose(sequence_of("o", prompt[:-3])) and model.sizes[0] == 7
    for _ in range(10):  # its drafts are accepted
        for token in parted.propose(first)[:2]:
            first.append(token)
    assert parted.propose(first) == whole.propose(sequence_of("end", first.tokens.tolist()))


def test_a_name_that_comes_again_is_another_sequence(folders: dict[str, Path]) -> None:
    drafter, _ = drafter_on(folders["twin"], 0)
    for prompt in (PROMPTS[2], PROMPTS[1], PROMPTS[2]):
        fresh, _ = drafter_on(folders["twin"], 0)
        assert drafter.propose(sequence_of("r", prompt)) == fresh.propose(sequence_of("r", prompt)) != []


def test_whoever_was_asked_about_last_stays_when_there_is_no_room(folders: dict[str, Path]) -> None:
    drafter, model = drafter_on(folders["twin"], 0)  # 320 tokens
    prompts = [np.random.default_rng(seed).integers(3, 320, 100).tolist() for seed in range(6)]
    sequences = [sequence_of(str(i), prompt) for i, prompt in enumerate(prompts)]
    fresh = [drafter_on(folders["twin"], 0)[0].propose(sequence) for sequence in map(sequence_of, "012345", prompts)]
    assert [drafter.propose(sequence) for sequence in sequences] == fresh
    model.sizes.clear()
    assert drafter.propose(sequences[-1]) == fresh[-1] and max(model.sizes) == 1
    assert drafter.propose(sequences[0]) == fresh[0] and max(model.sizes) > 90
    too_long = sequence_of("7", np.random.default_rng(7).integers(3, 320, 250).tolist())
    tight, _ = drafter_on(folders["twin"], 0, num_blocks=20)
    assert tight.propose(too_long) == [] and not tight._drafted and tight._pool.num_in_use == 0
    drafter._pool.check()


def test_its_cache_takes_no_more_memory_than_the_large_ones(folders: dict[str, Path]) -> None:
    layout = open_checkpoint(str(folders["target"])).kv_layout(8, "float32")
    for num_blocks in (4, 1000):
        page = replace(layout, num_layers=1)  # as where layers see windows
        drafter = draft_on("cpu", str(folders["twin"]), "float32", CacheSize(page, num_blocks, 64), 320, 4, 0)
        one, draft = 8, 1
        assert drafter._pool.num_blocks == max(num_blocks // layout.num_layers, one) + draft


def test_another_vocabulary_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="another vocabulary"):
        engine(folders, "foreign")


async def test_a_node_has_one_too(folders: dict[str, Path]) -> None:
    settings = [f"model.path='{folders['target']}'", f"decode.draft_model='{folders['twin']}'", "block.tokens=8"]
    config = load_config(None, [*settings, "decode.speculative_tokens=4", "decode.kv_gb=0.01", "decode.threads=1"])
    checkpoint = open_checkpoint(config.model.path)
    host = await EngineHost.open(HostPlan(config, config.decode, checkpoint), EventLog(1))
    host.run(NO_HOOK)
    try:
        before, found, ended = host.load().counters, [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_output(output: StepOutput | MooncakeError) -> None:
            assert isinstance(output, StepOutput)
            found.append(output.token.token_id)
            if output.finish_reason is not None:
                loop.call_soon_threadsafe(ended.set)

        prompt = np.array(PROMPTS[1], np.uint32)
        host.thread.add(host.sequence("r", prompt, len(prompt), SAMPLINGS[0].for_engine(), host.chain()), on_output)
        await asyncio.wait_for(ended.wait(), 60)
        after = host.load().counters
    finally:
        await host.stop()
    assert [found] == said(engine(folders), SAMPLINGS[0])[1]
    assert after["drafts_accepted"] > before["drafts_accepted"]
