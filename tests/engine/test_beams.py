"""Beam search: the tokens that transformers finds, over block tables that share what the beams share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import smollm2
from tiny_model import write_tiny_model

from mooncake import LLM, BeamSearchParams
from mooncake import SamplingParams as Wanted
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import StepOutput
from mooncake.engine.decoding.beams import Beams, Candidate
from mooncake.engine.engine import Engine
from mooncake.engine.reused_kv import ReusedKV
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepPlan
from mooncake.errors import Cancelled, InternalError, InvalidRequest, NotFinite, OutOfBlocks
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.sampling import BeamSearch, SamplingParams
from mooncake.types import FinishReason, SampledToken
from tests.engine.hash_model import (
    BLOCK,
    HashModel,
    answers,
    hash_engine,
    hash_sequence,
    random_prompt,
    reserve_filled,
    run_all,
)
from tests.engine.windowed_model import windowed_engine

WIDTH = 4


def beams(max_tokens: int = 20, n: int = WIDTH, **rules: float | bool) -> SamplingParams:
    search = BeamSearch(**rules)  # type: ignore[arg-type]
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n, beam_search=search)


def searched(prompt: list[int], sampling: SamplingParams, **settings: Any) -> dict[str, list[int]]:
    engine = hash_engine(**settings)
    engine.add(hash_sequence("r", prompt, sampling, eos_ids=(3,)))
    got = answers(run_all(engine))
    assert engine.block_pool.num_in_use == 0 and not engine.is_open("r")
    return got


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    model = write_tiny_model(folder, initializer_range=0.6)  # opinions strong enough that it ends answers by itself
    return LLM(str(folder), kv_gb=0.02, block_tokens=8, chunk_tokens=16), model


def reference(model: Any, prompt: list[int], max_tokens: int, width: int, **rules: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **rules,
    )
    eos = model.generation_config.eos_token_id
    rows = found[:, len(prompt) :].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row[:max_tokens] for row in rows]


def test_the_prompt_of_a_search_is_scored_as_that_of_any_answer(tiny: tuple[LLM, Any]) -> None:
    llm, _ = tiny
    prompt = list(range(5, 25))
    [plain] = llm.generate([prompt], Wanted(max_tokens=1, temperature=0.0, prompt_logprobs=2), use_tqdm=False)
    search = Wanted(max_tokens=6, temperature=0.0, n=3, beam_search=BeamSearch(), prompt_logprobs=2)
    [found] = llm.generate([prompt], search, use_tqdm=False)
    assert found.prompt_logprobs == plain.prompt_logprobs and len(found.outputs) == 3


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [(1, 1.0, False), (2, 0.0, False), (4, 1.0, False), (4, 1.0, True), (7, 2.0, False)],
)
def test_it_finds_what_transformers_finds(
    tiny: tuple[LLM, Any], width: int, length_penalty: float, early_stopping: bool
) -> None:
    llm, model = tiny
    for seed, length in enumerate((1, 30)):
        prompt = np.random.default_rng(seed).integers(3, 320, length).tolist()
        params = BeamSearchParams(width, 24, length_penalty=length_penalty, early_stopping=early_stopping)
        [got] = llm.beam_search(prompt, params, use_tqdm=False)
        rules = {"length_penalty": length_penalty, "early_stopping": early_stopping} if width > 1 else {}
        wanted = reference(model, prompt, 24, width, **rules)
        assert [beam.tokens for beam in got.sequences] == [prompt + answer for answer in wanted]
        assert all((beam.tokens[-1] == 2) == (beam.finish_reason is FinishReason.STOP) for beam in got.sequences)


@pytest.mark.slow
def test_it_finds_what_transformers_finds_with_a_real_model() -> None:
    with LLM("smollm2", kv_gb=0.3, threads=1) as llm:
        for text in ("The capital of France is", "1, 2, 3, 4,", "Once upon a time"):
            prompt = llm.tokenizer.encode(text).tolist()
            [got] = llm.beam_search(prompt, BeamSearchParams(WIDTH, 20), use_tqdm=False)
            wanted = reference(smollm2(), prompt, 20, WIDTH)
            assert [beam.tokens for beam in got.sequences] == [prompt + answer for answer in wanted]
            assert all(beam.text.startswith(text) for beam in got.sequences)


def test_the_beams_share_their_blocks_to_the_closed_form() -> None:
    model = HashModel()
    engine = hash_engine(model=model, chunk_tokens=0)
    prompt = random_prompt(10, 1)
    engine.add(hash_sequence("r", prompt, beams(20), eos_ids=()))
    saved = 0
    while engine.has_work:
        engine.step()
        tables = [sequence for sequence in engine._scheduler.running if sequence.blocks.block_table]
        # two beams share a block exactly if they agree in all tokens up to its end, or to where they are computed
        ends = range(BLOCK, 100, BLOCK)
        spans = [(s, min(end, s.num_computed)) for s in tables for end in ends if end - BLOCK < s.num_computed]
        needed = len({tuple(sequence.tokens[:end].tolist()) for sequence, end in spans})
        assert engine.block_pool.num_in_use == needed
        saved += len(spans) - needed
    assert saved > 0
    assert sum(tokens for _, tokens in model.batches) == len(prompt) + WIDTH * 19, "the prompt is computed once"


@pytest.mark.parametrize("settings", [{"num_blocks": 9}, {"num_blocks": 12}, {"max_sequences": 2}, {"chunk_tokens": 3}])
def test_a_tight_engine_finds_the_same(settings: dict[str, int]) -> None:
    for seed in range(4):
        prompt = random_prompt(9 + seed, seed)
        wanted = searched(prompt, beams(16))
        assert len(wanted) == WIDTH
        assert searched(prompt, beams(16), **settings) == wanted


def test_searches_and_samples_run_side_by_side() -> None:
    engine = hash_engine(num_blocks=30, max_sequences=8)
    prompts = {f"r{i}": random_prompt(6 + i, i) for i in range(5)}
    hot = SamplingParams(max_tokens=12, temperature=1.0, seed=4, n=2)
    wanted: dict[str, list[int]] = {}
    for i, (name, prompt) in enumerate(prompts.items()):
        sampling = hot if i % 2 else beams(12, n=3)
        engine.add(hash_sequence(name, prompt, sampling))
        alone = hash_engine()
        alone.add(hash_sequence(name, prompt, sampling))
        wanted |= answers(run_all(alone))
    assert answers(run_all(engine)) == wanted
    assert engine.block_pool.num_in_use == 0


@pytest.mark.parametrize(("max_tokens", "logprobs"), [(1, None), (2, 0), (12, 3), (12, 12)])
def test_a_search_goes_on_after_a_hand_off(max_tokens: int, logprobs: int | None) -> None:
    prompt, sampling = random_prompt(10, 3), replace(beams(max_tokens), logprobs=logprobs)
    source, target, whole = hash_engine(), hash_engine(chunk_tokens=0), hash_engine()
    there = hash_sequence("r", prompt, sampling, num_to_sample=1, hold_blocks=True, eos_ids=(3,))
    source.add(there)
    [output] = run_all(source)
    reserve_filled(target, hash_sequence("r", prompt, sampling, eos_ids=(3,)), source, there)
    source.abort("r")
    with pytest.raises(InvalidRequest, match="no candidates"):
        target.start_reserved("r", [SampledToken(0, output.token.token_id)])
    target.start_reserved("r", [output.token])
    whole.add(hash_sequence("r", prompt, sampling, eos_ids=(3,)))
    got, wanted = run_all(target), run_all(whole)
    assert answers(got) == answers(wanted)
    for here, elsewhere in zip(got, wanted, strict=True):
        if logprobs is None:
            assert here.token.logprob is None
        else:
            assert told(here) == pytest.approx(told(elsewhere), abs=1e-5) and len(told(here)) == 2 + 2 * logprobs
    assert source.block_pool.num_in_use == target.block_pool.num_in_use == 0


def told(output: StepOutput) -> list[float]:
    """The numbers of a token's log-probability: its own, its rank, and the tokens that were most likely."""
    logprob = output.token.logprob
    assert logprob is not None and logprob.rank > 0
    return [logprob.logprob, logprob.rank, *(number for pair in logprob.top for number in pair)]


def test_no_hand_off_takes_the_room_that_beams_wait_for() -> None:
    prompt, engine = random_prompt(10, 3), hash_engine(max_sequences=2, chunk_tokens=0)
    engine.add(hash_sequence("r", prompt, beams(12, n=3)))
    outputs = engine.step()  # two beams run, and one waits
    while engine.is_open("r"):
        with pytest.raises(OutOfBlocks):
            engine.reserve(hash_sequence("other", random_prompt(5, 1)))
        outputs += engine.step()
    assert answers(outputs) == searched(prompt, beams(12, n=3))


def steps(engine: Engine, count: int) -> list[StepOutput]:
    return [output for _ in range(count) for output in engine.step()]


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_search_that_is_aborted_or_fails_leaves_nothing(num_steps: int) -> None:
    engine = hash_engine()
    engine.add(hash_sequence("r", random_prompt(10, 0), beams(20)))
    assert steps(engine, num_steps) == []
    engine.abort("r")
    assert [type(error) for _, error in engine.take_ended()] == [Cancelled]
    engine.add(hash_sequence("r", random_prompt(10, 0), beams(20)))
    steps(engine, num_steps)
    engine.fail_all(InternalError("the step cannot be done"))
    assert [request_id for request_id, _ in engine.take_ended()] == ["r"]
    engine.block_pool.check()
    assert engine.block_pool.num_in_use == 0 and not engine.has_work and not engine.is_open("r")


@pytest.mark.parametrize("engine", [hash_engine(num_blocks=8), windowed_engine(num_pages=30)[0]])
def test_a_search_that_outgrows_the_whole_cache_fails_once(engine: Engine) -> None:
    """In the second engine beams are given up in a step that others of the search were to be computed in."""
    engine.add(hash_sequence("r", random_prompt(9, 0), beams(60, n=3)))
    assert run_all(engine) == []
    [(request_id, error)] = engine.take_ended()
    assert request_id == "r" and isinstance(error, OutOfBlocks)
    assert engine.block_pool.num_in_use == 0 and not engine.is_open("r")


class LoadsOnceAndFails:
    """A hook that fills blocks from another engine's once; a second load fails its step."""

    def __init__(self, source: KVCache, table: list[int], target: KVCache) -> None:
        self._source, self._table, self._target = source, table, target
        self._num_loads = 0

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        self._num_loads += bool(to_load)
        for block in to_load:
            self._target.memory[block.block_id] = self._source.memory[self._table[block.index]]

    def begin_step(self, plan: StepPlan) -> None:
        pass

    def before_layer(self, layer: int) -> None:
        if self._num_loads > 1:
            raise RuntimeError("out of luck")

    def after_layer(self, layer: int) -> None:
        pass

    def end_step(self, plan: StepPlan) -> None:
        pass


@pytest.mark.parametrize(("width", "num_blocks", "other_tokens"), [(1, 12, 12), (2, 9, 16)])
def test_blocks_of_a_beam_that_somebody_fills_outlive_its_search(
    width: int, num_blocks: int, other_tokens: int
) -> None:
    prompt = random_prompt(10, 0)
    source, engine = hash_engine(), hash_engine(num_blocks=num_blocks, chunk_tokens=64)
    there = hash_sequence("r", prompt, num_to_sample=1, hold_blocks=True)
    source.add(there)
    run_all(source)
    first = hash_sequence("r", prompt, beams(16, n=width), reused=ReusedKV(2))
    engine.add(first)
    hook = LoadsOnceAndFails(source.cache, there.blocks.block_table, engine.cache)  # type: ignore[arg-type]
    engine.step(hook)
    assert first.num_generated == 1 and not first.blocks.is_loading
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    for seed in (1, 2):  # who come first, need all blocks, and so make the search load its prefix once more
        engine.add(hash_sequence(f"before {seed}", random_prompt(other_tokens, seed), greedy, priority=-1))
    with pytest.raises(RuntimeError, match="out of luck"):
        run_all(engine, hook)
    filled = list(first.blocks.block_table)
    assert first.blocks.is_loading and filled
    engine.fail_all(InternalError("the step cannot be done"))
    assert ("r", InternalError) in [(request_id, type(error)) for request_id, error in engine.take_ended()]
    assert first.blocks.block_table == filled and engine.block_pool.num_in_use == len(filled)
    engine.abort("r")  # once nobody fills them any more
    engine.block_pool.check()
    assert engine.block_pool.num_in_use == 0 and engine.take_ended() == []


def test_an_answer_that_ends_outside_of_the_best_is_not_finished() -> None:
    search = Beams(BeamSearch(), 2, frozenset({3}), max_tokens=9)
    going_on = search.advance(
        [Candidate(0, 5, -0.1), Candidate(0, 6, -0.2), Candidate(0, 3, -0.3), Candidate(0, 7, -9)]
    )
    assert [candidate.token_id for candidate in going_on] == [5, 6] and search.finished == []
    search.advance([Candidate(1, 3, -0.3), Candidate(0, 8, -0.4), Candidate(0, 9, -0.5), Candidate(1, 3, -8)])
    assert [(answer.token_ids, answer.finish_reason) for answer in search.finished] == [((6, 3), FinishReason.STOP)]
    assert search.finished[0].score == pytest.approx(-0.15)


def test_what_beams_cannot_do_is_said() -> None:
    with pytest.raises(InvalidRequest, match="takes no penalties"):
        SamplingParams(n=2, beam_search=BeamSearch(), presence_penalty=1.0)
    with pytest.raises(InvalidRequest, match="n must be between"):
        SamplingParams(n=100, beam_search=BeamSearch())


class Lost(HashModel):
    """A model whose logits are not finite after the first steps."""

    def __init__(self, num_good_steps: int) -> None:
        super().__init__()
        self._num_good_steps = num_good_steps

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        logits = super().forward(batch, cache, hook)
        return logits if len(self.batches) <= self._num_good_steps else logits * torch.nan


@pytest.mark.parametrize("num_good_steps", [0, 1])
def test_logits_that_are_not_finite_end_a_search_once(num_good_steps: int) -> None:
    engine = hash_engine(model=Lost(num_good_steps))
    engine.add(hash_sequence("r", random_prompt(5, 0), beams(4)))
    assert run_all(engine) == []
    [(request_id, error)] = engine.take_ended()
    assert request_id == "r" and isinstance(error, NotFinite)
    assert engine.block_pool.num_in_use == 0 and not engine.is_open("r")


@pytest.mark.parametrize("count", [0, 5, 20])
def test_log_probabilities_of_beams_are_those_of_any_answer(tiny: tuple[LLM, Any], count: int) -> None:
    llm, _ = tiny
    prompt = list(range(5, 25))
    search = Wanted(max_tokens=4, temperature=0.0, n=3, beam_search=BeamSearch(), logprobs=count, ignore_eos=True)
    alone = Wanted(max_tokens=1, temperature=0.0, prompt_logprobs=count)
    [found] = llm.generate([prompt], search, use_tqdm=False)
    for beam in found.outputs:
        [scored] = llm.generate([prompt + beam.token_ids], alone, use_tqdm=False)
        assert scored.prompt_logprobs is not None and beam.logprobs is not None
        for place, wanted in zip(beam.logprobs, scored.prompt_logprobs[len(prompt) :], strict=True):
            assert wanted is not None
            assert [(i, each.rank) for i, each in place.items()] == [(i, each.rank) for i, each in wanted.items()]
            values = [each.logprob for each in wanted.values()]
            assert [each.logprob for each in place.values()] == pytest.approx(values, abs=1e-4)
