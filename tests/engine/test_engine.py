"""The engine over a model that notices every mistake in paging."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from sweeps import rounds

from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.reused_kv import ReusedKV
from mooncake.engine.scheduler import MAX_SCORED
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepPlan
from mooncake.errors import (
    Cancelled,
    ContextTooLong,
    HandoffFailed,
    InternalError,
    InvalidRequest,
    KVLoadFailed,
    NotFinite,
    OutOfBlocks,
    Overloaded,
)
from mooncake.hashing import Chain, extend_chain
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.repetition import Repetitions
from mooncake.sampling import BeamSearch, RepetitionDetection, SamplingParams, ThinkingBudget
from mooncake.types import FinishReason, SampledToken
from tests.engine.hash_model import (
    BLOCK,
    GREEDY,
    LAYOUT,
    VOCAB,
    HashConfig,
    HashModel,
    answers,
    hash_engine,
    hash_sequence,
    logits_after,
    random_prompt,
    reserve_filled,
    run_all,
    running_checksums,
    true_answer,
)


def is_empty(engine: Engine) -> bool:
    engine.block_pool.check()
    return engine.block_pool.num_in_use == 0 and not engine.has_work


@pytest.mark.parametrize("chunk_tokens", [0, 3, 4, 8, 64])
def test_many_prompts_at_once_get_the_answers_they_get_alone(chunk_tokens: int) -> None:
    engine = hash_engine(chunk_tokens=chunk_tokens, max_sequences=5)
    prompts = {f"r{i}": random_prompt(length, i) for i, length in enumerate([1, 3, 4, 5, 8, 17, 31, 32, 33])}
    for name, prompt in prompts.items():
        engine.add(hash_sequence(name, prompt))
    outputs = run_all(engine)
    assert answers(outputs) == {name: true_answer(prompt, 12) for name, prompt in prompts.items()}
    assert [output.finish_reason for output in outputs].count(FinishReason.LENGTH) == len(prompts)
    assert is_empty(engine)


def test_a_chunk_ends_on_a_block_border_and_decodes_go_on_beside_it() -> None:
    model = HashModel()
    engine = hash_engine(model=model, chunk_tokens=10)
    engine.add(hash_sequence("short", random_prompt(2, 0)))
    engine.step()
    engine.add(hash_sequence("long", random_prompt(21, 1)))
    engine.step()
    engine.step()
    engine.step()
    assert model.batches == [(1, 2), (2, 1 + 8), (2, 1 + 8), (2, 1 + 5)]


def test_whole_prompts_are_never_cut() -> None:
    model = HashModel()
    engine = hash_engine(model=model, chunk_tokens=0, max_model_len=100)
    for i in range(3):
        engine.add(hash_sequence(f"r{i}", random_prompt(45, i), SamplingParams(max_tokens=1, temperature=0.0)))
    run_all(engine)
    assert model.batches == [(2, 90), (1, 45)]


def test_a_second_turn_finds_the_blocks_of_the_first() -> None:
    engine = hash_engine()
    prompt = random_prompt(10, 0)
    engine.add(hash_sequence("turn-1", prompt))
    [first] = answers(run_all(engine)).values()
    second_prompt = prompt + first + random_prompt(5, 1)
    sequence = hash_sequence("turn-2", second_prompt)
    engine.add(sequence)
    assert answers(run_all(engine)) == {"turn-2": true_answer(second_prompt, 12)}
    computed = len(prompt) + len(first) - 1  # the last token of an answer is never computed
    assert sequence.num_cached_tokens == computed == 21


def test_of_a_prompt_that_is_cached_as_a_whole_only_the_last_token_is_computed_and_into_a_copy() -> None:
    engine = hash_engine()
    prompt = random_prompt(16, 0)
    engine.add(hash_sequence("first", prompt))
    run_all(engine)
    shared = engine.block_pool.take_prefix(extend_chain(b"seed", np.array(prompt, np.uint32), BLOCK), 4)
    again = hash_sequence("again", prompt)
    engine.add(again)
    outputs = engine.step()
    assert again.num_cached_tokens == 15
    assert engine.load().copied_blocks == 1
    assert again.blocks.block_table[:3] == shared[:3] and again.blocks.block_table[3] != shared[3]
    engine.cache.memory[shared[3]] ^= 0xFF  # who still reads there is seen
    assert answers(outputs + run_all(engine)) == {"again": true_answer(prompt, 12)}


def test_where_there_is_no_room_for_a_copy_the_last_block_is_computed_again() -> None:
    engine = hash_engine(num_blocks=4)
    prompt = random_prompt(15, 0)
    answer = true_answer(prompt, 2)
    engine.add(hash_sequence("first", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
    run_all(engine)
    sequence = hash_sequence(
        "again", [*prompt, answer[0]], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    )
    for _ in range(2):
        engine.add(sequence)
        assert answers(run_all(engine)) == {sequence.request_id: answer[1:]}
        assert sequence.num_cached_tokens == 12
        sequence = hash_sequence("once more", [*prompt, answer[0]], sequence.sampling)


def test_another_salt_shares_nothing() -> None:
    engine = hash_engine()
    prompt = random_prompt(16, 0)
    engine.add(hash_sequence("mine", prompt))
    run_all(engine)
    other = Sequence(
        "other", np.array(prompt, np.uint32), 16, GREEDY, Chain(b"other seed"), eos_ids=(), max_model_len=200
    )
    engine.add(other)
    run_all(engine)
    assert other.num_cached_tokens == 0


@pytest.mark.parametrize("num_blocks", [9, 12, 20])
def test_running_out_of_blocks_changes_no_token(num_blocks: int) -> None:
    engine = hash_engine(num_blocks=num_blocks)
    prompts = {f"r{i}": random_prompt(7 + i, i) for i in range(6)}
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    for name, prompt in prompts.items():
        engine.add(hash_sequence(name, prompt, sampling))
    got = answers(run_all(engine))
    assert got == {name: true_answer(prompt, 20) for name, prompt in prompts.items()}
    assert engine.load().preemptions > 0 or num_blocks == 20
    assert is_empty(engine)


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_after_preemption() -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, seed=7, repetition_penalty=1.2)
    prompts = {f"r{i}": random_prompt(7 + i, i) for i in range(6)}
    alone: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        engine = hash_engine()
        engine.add(hash_sequence(name, prompt, sampling))
        alone |= answers(run_all(engine))
    for num_blocks, is_tight in ((64, False), (10, True)):
        engine = hash_engine(num_blocks=num_blocks)
        for name, prompt in prompts.items():
            engine.add(hash_sequence(name, prompt, sampling))
        assert answers(run_all(engine)) == alone
        assert (engine.load().preemptions > 0) == is_tight


def test_an_answer_that_was_begun_elsewhere_is_continued() -> None:
    prompt = random_prompt(6, 0)
    sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=3, frequency_penalty=0.5)
    engine = hash_engine()
    engine.add(hash_sequence("whole", prompt, sampling))
    [whole] = answers(run_all(engine)).values()
    for done in (1, 5, 11):
        engine = hash_engine()
        engine.add(hash_sequence("rest", prompt + whole[:done], sampling, num_prompt=6))
        outputs = run_all(engine)
        assert outputs[0].token.index == done
        assert answers(outputs) == {"rest": whole[done:]}


def test_a_sequence_that_outgrows_the_whole_cache_fails_alone() -> None:
    engine = hash_engine(num_blocks=6)
    engine.add(hash_sequence("big", random_prompt(10, 0), SamplingParams(max_tokens=50, temperature=0.0)))
    engine.add(hash_sequence("small", random_prompt(4, 1)))
    got = answers(run_all(engine))
    assert got["small"] == true_answer(random_prompt(4, 1), 12)
    [(name, error)] = engine.take_ended()
    assert name == "big" and isinstance(error, OutOfBlocks) and "raise kv_gb" in error.message
    assert is_empty(engine)


def test_what_can_never_run_is_refused_at_once() -> None:
    engine = hash_engine(num_blocks=4, max_waiting=1)
    with pytest.raises(OutOfBlocks, match="the whole cache has 4"):
        engine.add(hash_sequence("r", random_prompt(17, 0)))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.add(hash_sequence("r", [VOCAB]))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        engine.add(hash_sequence("r", [1], SamplingParams(logit_bias=((VOCAB, 1.0),))))
    with pytest.raises(ContextTooLong):
        engine.add(hash_sequence("r", random_prompt(200, 0), max_model_len=300))
    with pytest.raises(ContextTooLong, match="200 tokens leave no room for an answer: max_model_len and kv_gb allow"):
        hash_sequence("r", random_prompt(200, 0))
    with pytest.raises(InvalidRequest, match="complete already"):
        hash_sequence("r", random_prompt(20, 0), num_prompt=8)
    engine.add(hash_sequence("r", [1]))
    with pytest.raises(InvalidRequest, match="here already"):
        engine.add(hash_sequence("r", [1]))
    with pytest.raises(Overloaded):
        engine.add(hash_sequence("another", [1]))


def test_an_aborted_sequence_leaves_nothing_behind_in_any_state() -> None:
    engine = hash_engine(max_sequences=1)
    engine.add(hash_sequence("running", random_prompt(9, 0)))
    engine.add(hash_sequence("waiting", random_prompt(9, 1)))
    engine.step()
    for name in ("running", "waiting", "running", "never seen"):
        engine.abort(name)
    assert [(name, type(error)) for name, error in engine.take_ended()] == [
        ("running", Cancelled),
        ("waiting", Cancelled),
    ]
    assert is_empty(engine)


def test_held_blocks_stay_until_the_request_is_aborted() -> None:
    engine = hash_engine()
    engine.add(hash_sequence("r", random_prompt(9, 0), num_to_sample=1, hold_blocks=True))
    [output] = run_all(engine)
    assert output.finish_reason is FinishReason.LENGTH
    assert engine.block_pool.num_in_use == 3
    engine.abort("r")
    engine.abort("r")
    assert is_empty(engine) and not engine.take_ended()


def test_eos_and_stop_ids_end_an_answer_but_not_before_min_tokens() -> None:
    prompt = random_prompt(5, 0)
    free = true_answer(prompt, 12)
    eos, stop = free[3], free[5]
    assert eos not in free[:3] and stop not in free[:5]

    def run(sampling: SamplingParams) -> tuple[list[int], FinishReason | None]:
        engine = hash_engine()
        engine.add(hash_sequence("r", prompt, sampling, eos_ids=(eos,)))
        outputs = run_all(engine)
        return [output.token.token_id for output in outputs], outputs[-1].finish_reason

    assert run(GREEDY) == (free[:4], FinishReason.STOP)
    ignoring = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert run(ignoring) == (free, FinishReason.LENGTH)
    stopping = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    assert run(stopping) == (free[:6], FinishReason.STOP)
    tokens, _ = run(SamplingParams(max_tokens=12, temperature=0.0, min_tokens=6))
    assert tokens[:3] == free[:3] and eos not in tokens[:6]


def run_alone(prompt: list[int], sampling: SamplingParams) -> tuple[list[int], FinishReason | None]:
    engine = hash_engine()
    engine.add(hash_sequence("r", prompt, sampling))
    outputs = run_all(engine)
    return [output.token.token_id for output in outputs], outputs[-1].finish_reason


def test_an_answer_that_loops_ends_but_not_before_min_tokens() -> None:
    """The hash model does not loop by itself: two tokens are all that it may choose from."""
    prompt = random_prompt(5, 0)
    narrow = SamplingParams(max_tokens=60, temperature=0.0, allowed_token_ids=(5, 6))
    free, _ = run_alone(prompt, narrow)
    wanted = RepetitionDetection(max_pattern_size=2, min_count=3)
    ends = [end for end in range(1, 61) if Repetitions(wanted, np.array(free[:end])).are_enough]
    assert len(ends) > 1

    looking = replace(narrow, repetition_detection=wanted)
    assert run_alone(prompt, looking) == (free[: ends[0]], FinishReason.REPETITION)
    patient = replace(looking, min_tokens=ends[0] + 1)
    assert run_alone(prompt, patient) == (free[: ends[1]], FinishReason.REPETITION)
    blind = replace(narrow, repetition_detection=RepetitionDetection(2, 61))
    assert run_alone(prompt, blind) == (free, FinishReason.LENGTH)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_a_reasoning_is_closed_when_its_budget_is_used_up_and_only_then(num_tokens: int) -> None:
    prompt, end = random_prompt(5, 0), 90
    unwilling = SamplingParams(max_tokens=20, temperature=0.0, logit_bias=((end, -100.0),))
    free, _ = run_alone(prompt, unwilling)

    def run(budget: ThinkingBudget, sampling: SamplingParams = unwilling) -> list[int]:
        return run_alone(prompt, replace(sampling, thinking_budget=budget))[0]

    thought = run(ThinkingBudget(num_tokens, end))
    assert thought[: num_tokens + 1] == [*free[:num_tokens], end] and thought.count(end) == 1

    begin = free[2]
    assert begin not in free[:2]
    assert run(ThinkingBudget(num_tokens, end, begin))[: num_tokens + 4] == [*free[: num_tokens + 3], end]
    unused = next(token for token in range(VOCAB) if token not in free)
    assert run(ThinkingBudget(num_tokens, end, unused)) == free, "an answer without reasoning was cut"

    narrow = SamplingParams(max_tokens=20, temperature=0.0, allowed_token_ids=(5, 6))
    assert run(ThinkingBudget(0, end), narrow) == run_alone(prompt, narrow)[0], "what is forbidden was forced"


# Copy on write


def answers_alone(prompt: list[int], sampling: SamplingParams) -> dict[str, list[int]]:
    """Each answer when requested alone with its own seed."""
    alone = {}
    for i in range(sampling.num_answers):
        engine = hash_engine()
        name = f"r#{i}" if i else "r"
        engine.add(hash_sequence(name, prompt, replace(sampling, n=1, best_of=0, seed=sampling.seed + i)))
        [alone[name]] = answers(run_all(engine)).values()
    return alone


@pytest.mark.parametrize(("num_prompt", "num_answers"), [(10, 4), (8, 4), (3, 2), (13, 8)])
def test_answers_of_one_prompt_share_its_blocks_until_they_write(num_prompt: int, num_answers: int) -> None:
    model = HashModel()
    engine = hash_engine(model=model, chunk_tokens=0)
    prompt = random_prompt(num_prompt, 0)
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=num_answers)
    engine.add(hash_sequence("r", prompt, sampling))
    outputs = engine.step()
    assert len(outputs) == num_answers, "every answer's first token comes from the prompt's last row"
    assert engine.block_pool.num_in_use == -(-num_prompt // BLOCK)
    outputs += engine.step()
    full, partial = divmod(num_prompt, BLOCK)
    assert engine.block_pool.num_in_use == full + num_answers
    outputs += run_all(engine)
    assert sum(tokens for _, tokens in model.batches) == num_prompt + num_answers * 8  # the prompt once
    assert answers(outputs) == answers_alone(prompt, sampling)
    load = engine.load()
    assert (load.forks, load.shared_blocks) == (num_answers - 1, (num_answers - 1) * full)
    assert load.copied_blocks == (num_answers - 1 if partial else 0)  # the last to write finds the block its own
    assert is_empty(engine)


def test_answers_without_room_to_run_wait_for_it() -> None:
    engine = hash_engine(max_sequences=2)
    prompt = random_prompt(10, 0)
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=5)
    engine.add(hash_sequence("r", prompt, sampling))
    assert answers(run_all(engine)) == answers_alone(prompt, sampling)
    assert is_empty(engine)


def test_answers_survive_each_others_preemption() -> None:
    engine = hash_engine(num_blocks=9)
    prompt = random_prompt(10, 0)
    sampling = SamplingParams(max_tokens=20, temperature=1.1, top_k=20, seed=9, n=4)
    engine.add(hash_sequence("r", prompt, sampling))
    assert answers(run_all(engine)) == answers_alone(prompt, sampling)
    assert engine.load().preemptions > 0
    assert is_empty(engine)


def test_one_answer_of_several_ends_alone_and_all_end_together() -> None:
    engine = hash_engine()
    prompt = random_prompt(10, 0)
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=3)
    engine.add(hash_sequence("r", prompt, sampling))
    engine.step()
    engine.step()
    engine.end_choice("r", 1)
    engine.end_choice("r", 1)
    got = answers(run_all(engine))
    alone = answers_alone(prompt, sampling)
    assert got["r"] == alone["r"][-len(got["r"]) :] and "r#1" not in got and not engine.take_ended()
    assert is_empty(engine)
    engine.add(hash_sequence("again", prompt, sampling))
    engine.step()
    engine.step()
    engine.abort("again")
    assert {request_id for request_id, _ in engine.take_ended()} == {"again"}
    assert is_empty(engine) and not engine.is_open("again")


# Hand-offs


def hand_off(source: Engine, target: Engine, prompt: list[int], sampling: SamplingParams, name: str = "r") -> None:
    """A hand-off between prefill and decode, without the network."""
    there = hash_sequence(name, prompt, sampling, num_to_sample=1, hold_blocks=True)
    source.add(there)
    outputs = sorted(run_all(source), key=lambda output: output.choice)
    reserve_filled(target, hash_sequence(name, prompt, sampling), source, there)
    source.abort(name)
    target.start_reserved(name, [output.token for output in outputs])


def test_a_sequence_goes_on_in_another_engine_as_if_nothing_had_happened() -> None:
    source, target = hash_engine(), hash_engine(num_blocks=40)
    sampling = SamplingParams(max_tokens=15, temperature=0.9, seed=5)
    prompts = {f"r{i}": random_prompt(length, i) for i, length in enumerate([1, 4, 7, 16, 30])}
    for name, prompt in prompts.items():
        hand_off(source, target, prompt, sampling, name)
    got = answers(run_all(target))
    for name, prompt in prompts.items():
        alone = hash_engine()
        alone.add(hash_sequence(name, prompt, sampling))
        assert got[name] == answers(run_all(alone))[name]
    assert is_empty(source) and is_empty(target)


@pytest.mark.parametrize("max_sequences", [8, 2])
def test_several_answers_go_on_after_one_hand_off(max_sequences: int) -> None:
    model = HashModel()
    source, target = hash_engine(), hash_engine(model=model, max_sequences=max_sequences)
    prompt = random_prompt(10, 0)
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=4)
    hand_off(source, target, prompt, sampling)
    assert target.block_pool.num_in_use == 3
    assert answers(run_all(target)) == answers_alone(prompt, sampling)
    assert target.load().shared_blocks == (min(4, max_sequences) - 1) * 2
    if max_sequences == 8:
        assert sum(tokens for _, tokens in model.batches) == 4 * 8, "decode computed nothing of the prompt"
    assert is_empty(source) and is_empty(target)


def test_a_second_hand_off_sends_only_what_is_not_there() -> None:
    source, target = hash_engine(), hash_engine()
    prompt = random_prompt(18, 0)
    hand_off(source, target, prompt, GREEDY)
    [first] = answers(run_all(target)).values()
    second = prompt + first + random_prompt(6, 1)
    reservation = target.reserve(hash_sequence("again", second))
    assert reservation.first_block == 29 // BLOCK and len(reservation.block_ids) == 9 - 7
    target.cancel_reserved("again")
    hand_off(source, target, second, GREEDY)
    assert answers(run_all(target)) == {"r": true_answer(second, 12)}


def test_a_first_token_that_ends_the_answer_ends_it() -> None:
    engine = hash_engine()
    engine.reserve(hash_sequence("r", random_prompt(5, 0), eos_ids=(9,)))
    engine.start_reserved("r", [SampledToken(0, 9)])
    assert engine.has_work
    [output] = engine.step()
    assert output.finish_reason is FinishReason.STOP
    assert is_empty(engine)


def test_reserved_blocks_are_given_back_by_cancelling_alone() -> None:
    engine = hash_engine(num_blocks=8)
    engine.reserve(hash_sequence("r", random_prompt(20, 0)))
    assert not engine.has_work
    engine.abort("r")  # the writer may still be writing
    assert engine.block_pool.num_in_use == 5
    with pytest.raises(OutOfBlocks):
        engine.reserve(hash_sequence("other", random_prompt(20, 1)))
    engine.cancel_reserved("r")
    engine.cancel_reserved("r")
    assert is_empty(engine)
    with pytest.raises(HandoffFailed):
        engine.start_reserved("r", [SampledToken(0, 1)])


def test_a_stalled_engine_says_so_and_goes_on_once_there_is_room() -> None:
    engine = hash_engine(num_blocks=8)
    engine.reserve(hash_sequence("reserved", random_prompt(20, 0)))
    engine.add(hash_sequence("waiting", random_prompt(16, 1)))
    assert engine.step() == [] and engine.is_stalled
    engine.cancel_reserved("reserved")
    assert answers(run_all(engine)) == {"waiting": true_answer(random_prompt(16, 1), 12)}


# Blocks that come from elsewhere


class Pool:
    """A hook that loads blocks from another engine's cache, layer by layer, and can be made to fail."""

    def __init__(self, source: Engine, target: Engine, fail_at: tuple[str, int] | None = None) -> None:
        self.source, self.target, self.fail_at = source, target, fail_at
        self.loads: dict[str, list[BlockToLoad]] = {}
        self.pending: list[tuple[str, int, int]] = []
        self.steps: list[list[tuple[str, int, int]]] = []

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        self.loads[sequence.request_id] = to_load
        for block in to_load:
            [source_id] = self.source.block_pool.take_prefix([block.key], 1)
            self.source.block_pool.release([source_id])
            self.pending.append((sequence.request_id, source_id, block.block_id))

    def begin_step(self, plan: StepPlan) -> None:
        self.steps.append([(entry.sequence.request_id, entry.first, entry.num_tokens) for entry in plan.entries])

    def before_layer(self, layer: int) -> None:
        name, fail_layer = self.fail_at or ("", -1)
        if layer == fail_layer and any(load[0] == name for load in self.pending):
            self.fail_at = None
            self.pending = [load for load in self.pending if load[0] != name]
            raise KVLoadFailed("the link broke", (name,))
        for _, source_id, block_id in self.pending:
            self.target.cache.tensor[block_id, layer] = self.source.cache.tensor[source_id, layer]
        if layer == 1:
            self.pending = []

    def after_layer(self, layer: int) -> None:
        pass

    def end_step(self, plan: StepPlan) -> None:
        pass


def filled_engine(prompt: list[int]) -> Engine:
    engine = hash_engine()
    engine.add(hash_sequence("fill", prompt))
    run_all(engine)
    return engine


def test_a_prefix_is_loaded_and_only_the_rest_is_computed() -> None:
    prompt = random_prompt(23, 0)
    source, target = filled_engine(prompt), hash_engine()
    hook = Pool(source, target)
    sequence = hash_sequence("r", prompt, reused=ReusedKV(4))
    target.add(sequence)
    assert answers(run_all(target, hook)) == {"r": true_answer(prompt, 12)}
    assert [block.index for block in hook.loads["r"]] == [0, 1, 2, 3]
    assert hook.steps[0] == [("r", 16, 7)]
    assert sequence.num_cached_tokens == 0
    target.add(hash_sequence("again", prompt, reused=ReusedKV(5)))
    run_all(target, hook)
    assert hook.loads["again"] == []  # its own cache is nearer


def test_the_last_token_is_computed_even_when_everything_could_be_loaded() -> None:
    prompt = random_prompt(16, 0)
    source, target = filled_engine(prompt), hash_engine()
    hook = Pool(source, target)
    target.add(hash_sequence("r", prompt, reused=ReusedKV(4)))
    assert answers(run_all(target, hook)) == {"r": true_answer(prompt, 12)}
    assert hook.steps[0] == [("r", 15, 1)]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("recover", [Engine.rewind_failed, lambda engine, error: engine.rewind("r")])
def test_a_load_that_fails_costs_time_only(layer: int, recover: Callable[[Engine, KVLoadFailed], object]) -> None:
    prompt, other = random_prompt(23, 0), random_prompt(14, 1)
    source, target = filled_engine(prompt), hash_engine(chunk_tokens=64)
    hook = Pool(source, target, fail_at=("r", layer))
    target.add(hash_sequence("other", other))
    outputs = target.step(hook)
    target.add(hash_sequence("r", prompt, reused=ReusedKV(4)))
    with pytest.raises(KVLoadFailed) as raised:
        target.step(hook)
    recover(target, raised.value)
    outputs += run_all(target, hook)
    assert answers(outputs) == {"r": true_answer(prompt, 12), "other": true_answer(other, 12)}
    assert hook.loads["r"] == []  # admitted again, to compute it all
    assert is_empty(target)


def test_a_failed_load_of_one_does_not_lose_the_load_of_another() -> None:
    prompts = {"a": random_prompt(23, 0), "b": random_prompt(19, 1)}
    source = hash_engine()
    for name, prompt in prompts.items():
        source.add(hash_sequence(name, prompt))
    run_all(source)
    target = hash_engine(chunk_tokens=64)
    hook = Pool(source, target, fail_at=("a", 1))
    for name, prompt in prompts.items():
        target.add(hash_sequence(name, prompt, reused=ReusedKV(4)))
    with pytest.raises(KVLoadFailed) as raised:
        target.step(hook)
    assert target.rewind_failed(raised.value) == ["a"]
    assert target.rewind_failed(KVLoadFailed("of nobody", ("nobody",))) == []
    assert answers(run_all(target, hook)) == {name: true_answer(prompt, 12) for name, prompt in prompts.items()}


def test_blocks_of_an_answer_that_somebody_fills_outlive_its_end() -> None:
    """One answer of two gives way, and is to load its prefix once more when it is no longer wanted."""
    prompt = random_prompt(10, 0)
    source, engine = filled_engine(prompt), hash_engine(num_blocks=12, chunk_tokens=64)
    hook = Pool(source, engine)
    first = hash_sequence("r", prompt, SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=2), reused=ReusedKV(2))
    engine.add(first)
    engine.step(hook)
    engine.end_choice("r", 1)
    for seed in (1, 2):  # who come first, and need all blocks
        sampling = SamplingParams(max_tokens=24, temperature=0.0)
        engine.add(hash_sequence(f"before {seed}", random_prompt(12, seed), sampling, priority=-1))
    hook.fail_at = ("r", 0)
    with pytest.raises(KVLoadFailed):
        run_all(engine, hook)
    filled = list(first.blocks.block_table)
    assert first.blocks.is_loading and filled and first.num_preemptions
    engine.end_choice("r", 0)
    assert first.blocks.block_table == filled and not engine.is_open("r") and not engine.take_ended()
    engine.block_pool.check()
    assert engine.block_pool.num_in_use >= len(filled)
    engine.abort("r")  # once nobody fills them any more
    assert not engine.take_ended()
    run_all(engine, hook)
    assert is_empty(engine)


def test_without_a_hook_nothing_can_be_loaded() -> None:
    engine = hash_engine()
    engine.add(hash_sequence("r", random_prompt(9, 0), reused=ReusedKV(2)))
    with pytest.raises(KVLoadFailed):
        engine.step()
    engine.rewind("r")
    assert answers(run_all(engine)) == {"r": true_answer(random_prompt(9, 0), 12)}


# Load


def test_the_load_adds_up() -> None:
    engine = hash_engine(num_blocks=16, max_sequences=2)
    for i in range(3):
        engine.add(hash_sequence(f"r{i}", random_prompt(9, i)))
    engine.step()
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting) == (2, 1)
    assert load.blocks_free + load.blocks_cached + load.blocks_in_use == load.blocks_total == 16
    assert load.context_tokens == sum(s.num_tokens for s in engine._scheduler.running)
    run_all(engine)
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.context_tokens) == (0, 0, 0, 0)
    engine.drop_cached()
    assert engine.load().blocks_free == 16


# Everything at once


@pytest.mark.parametrize("round_", rounds(6, quick=2))
def test_a_random_life_of_an_engine_ends_with_right_answers_and_no_block_missing(round_: int) -> None:
    """Arrivals, aborts, hand-offs and loads that fail, in an engine that is short of blocks."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    shared = random_prompt(24, 0)
    source = filled_engine(shared + random_prompt(40, 1))
    engine = hash_engine(num_blocks=30, chunk_tokens=int(random.choice([0, 4, 12])), max_sequences=6)
    hook = Pool(source, engine)
    sampling = SamplingParams(max_tokens=10, temperature=1.0, seed=11)
    prompts: dict[str, list[int]] = {}
    gone: set[str] = set()
    got: dict[str, list[int]] = {}
    for turn in range(300):
        if turn < 200 and random.random() < 0.4:
            name = f"r{turn}"
            prompt = shared[: int(random.integers(1, 25))] + random_prompt(int(random.integers(0, 9)), turn)
            prompts[name] = prompt
            if random.random() < 0.3:
                try:
                    hand_off(filled_engine(prompt), engine, prompt, sampling, name)
                except OutOfBlocks:
                    del prompts[name]
            else:
                known = len(shared) // BLOCK if prompt[: len(shared)] == shared else 0
                engine.add(hash_sequence(name, prompt, sampling, reused=ReusedKV(known)))
                if known and random.random() < 0.5:
                    hook.fail_at = (name, int(random.integers(0, 2)))
        if prompts and random.random() < 0.05:
            name = str(random.choice(list(prompts)))
            engine.abort(name)
            gone.add(name)
        if engine.has_work:
            try:
                outputs = engine.step(hook)
            except KVLoadFailed as error:
                assert engine.rewind_failed(error) == list(error.request_ids)
                continue
            for name, tokens in answers(outputs).items():
                got.setdefault(name, []).extend(tokens)
        engine.block_pool.check()
    for name, tokens in answers(run_all(engine, hook)).items():
        got.setdefault(name, []).extend(tokens)
    for name, prompt in prompts.items():
        alone = hash_engine()
        alone.add(hash_sequence(name, prompt, sampling))
        [wanted] = answers(run_all(alone)).values()
        tokens = got.get(name, [])
        assert tokens == (wanted[: len(tokens)] if name in gone else wanted)
    assert is_empty(engine)


# Log-probabilities of prompts


@pytest.mark.parametrize("settings", [{"chunk_tokens": 0}, {"chunk_tokens": 3}, {"num_blocks": 12}])
def test_every_token_of_a_prompt_is_scored_once(settings: dict[str, int]) -> None:
    engine = hash_engine(**settings)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=2)
    prompts = {f"r{i}": random_prompt(length, i) for i, length in enumerate([1, 2, 9, 17])}
    for again in ("", "again "):  # nothing is skipped when the prompt is cached
        for name, prompt in prompts.items():
            engine.add(hash_sequence(again + name, prompt, sampling))
        outputs = run_all(engine)
        for name, prompt in prompts.items():
            first, *others = [output for output in outputs if output.request_id == again + name]
            assert [output.prompt_logprobs for output in others] == [None] * 5
            assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(prompt) - 1
            for place, score in enumerate(first.prompt_logprobs, 1):
                logits = logits_after(running_checksums(prompt[:place])).astype(np.float64)
                wanted = logits - np.log(np.exp(logits).sum())
                assert score.logprob == pytest.approx(wanted[prompt[place]])
                assert score.top[0][1] == pytest.approx(wanted.max()) and len(score.top) == 2
    assert is_empty(engine)


class CountsRows:
    """Finds all tokens equally likely, and notes the rows of logits of each step."""

    def __init__(self) -> None:
        self.config = HashConfig()
        self.rows: list[int] = []

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        self.rows.append(len(batch.logit_rows))
        return torch.zeros(len(batch.logit_rows), VOCAB)


@pytest.mark.parametrize(
    "settings", [{"chunk_tokens": 0}, {"chunk_tokens": 1500}, {"chunk_tokens": 1500, "block": 700}]
)
def test_no_step_has_more_rows_of_logits_than_there_is_memory_for(settings: dict[str, int]) -> None:
    block, model = settings.pop("block", 4), CountsRows()
    config = EngineConfig(block, settings["chunk_tokens"], max_sequences=8, max_model_len=1600)
    engine = Engine(model, KVCache(replace(LAYOUT, block_tokens=block), 5600 // block), config)
    scored, plain = SamplingParams(max_tokens=1, prompt_logprobs=0), SamplingParams(max_tokens=1)
    prompts = {f"r{i}": random_prompt(length, i) for i, length in enumerate([1400, 900, 1300, 400])}
    for name, prompt in prompts.items():
        engine.add(hash_sequence(name, prompt, scored, max_model_len=1600))
    engine.add(hash_sequence("plain", random_prompt(100, 9), plain))
    outputs = run_all(engine)
    assert max(model.rows) <= max(MAX_SCORED, block) + 5
    assert outputs[0].request_id == "plain", "who needs no such rows does not wait for those who do"
    assert [output.request_id for output in outputs[1:]] == sorted(prompts)
    for output in outputs[1:]:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompts[output.request_id]) - 1
    assert is_empty(engine)


# Who comes first


def test_lower_priorities_run_first_and_give_way_last() -> None:
    engine = hash_engine(max_sequences=2, num_blocks=9)
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    prompts = {f"r{i}": random_prompt(7, i) for i in range(4)}
    priorities = {"r0": 5, "r1": 5, "r2": -1, "r3": 0}
    engine.add(hash_sequence("r0", prompts["r0"], sampling, priority=5))
    outputs = engine.step()
    for name in ("r1", "r2", "r3"):
        engine.add(hash_sequence(name, prompts[name], sampling, priority=priorities[name]))
    outputs += run_all(engine)
    assert answers(outputs) == {name: true_answer(prompt, 20) for name, prompt in prompts.items()}
    ends = [output.request_id for output in outputs if output.finish_reason is not None]
    assert ends.index("r2") < ends.index("r3") < ends.index("r1")
    assert engine.load().preemptions > 0 and ends[0] == "r2", "the one that was there first gave way"


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    model = HashModel()
    engine = hash_engine(model=model, chunk_tokens=16, max_model_len=400, num_blocks=200)
    engine.add(hash_sequence("long", random_prompt(160, 0), max_model_len=400))
    outputs = engine.step()
    for i in range(3):
        engine.add(hash_sequence(f"short{i}", random_prompt(4, i + 1)))
    outputs += run_all(engine)
    firsts = {output.request_id: place for place, output in reversed(list(enumerate(outputs)))}
    assert all(firsts[f"short{i}"] < firsts["long"] for i in range(3))
    got = answers(outputs)
    assert got["long"] == true_answer(random_prompt(160, 0), 12)
    prefilling = [tokens - sequences for sequences, tokens in model.batches if tokens > sequences]
    assert sum(prefilling[:8]) >= 8 * (16 - 5), "what the short ones could not use went to the long one"


# Interrupts, and steps that fail


def test_an_interrupt_anywhere_while_a_request_is_added_leaves_nothing_of_it() -> None:
    engine = hash_engine()
    engine.add(hash_sequence("other", random_prompt(5, 1)))
    num_lines, is_added = 0, False
    while not is_added:
        left = num_lines

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if "/engine/" not in frame.f_code.co_filename or "undo_add" in frame.f_code.co_name:
                return None
            left -= event in ("line", "return")
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            engine.add(hash_sequence("r", random_prompt(9, 0)))
            is_added = True
        except KeyboardInterrupt:
            engine.abort("r")
            assert not engine.is_open("r") and engine.load().waiting == 1
        finally:
            sys.settrace(before)
        num_lines += 1
    assert num_lines > 20
    expected = {"other": true_answer(random_prompt(5, 1), 12), "r": true_answer(random_prompt(9, 0), 12)}
    assert answers(run_all(engine)) == expected and is_empty(engine)


def test_several_answers_whose_first_step_fails_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = hash_engine()
    engine.add(hash_sequence("r", random_prompt(5, 0), SamplingParams(n=3, max_tokens=4)))
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(engine._processor._sampler, "sample", lambda *_: 1 // 0)
        engine.step()
    engine.fail_all(InternalError("the step failed"))
    assert engine.take_ended()[0][0] == "r" and not engine.is_open("r") and is_empty(engine)


# Logits that are not finite

POISON = -7  # for a token's value


class Sick(HashModel):
    """A model whose logits are not finite for a context that contains poison."""

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        logits = super().forward(batch, cache, hook)
        starts = batch.query_starts.tolist()
        for row, place in enumerate(batch.logit_rows.tolist()):
            owner = next(b for b in range(batch.num_sequences) if starts[b] <= place < starts[b + 1])
            held = cache[batch.block_tables[owner].long(), 0, 0, 0].reshape(-1)[: int(batch.positions[place]) + 1]
            if (held == POISON).any():
                logits[row] = torch.nan
        return logits


def sick_engine(first_prompt: list[int], **settings: int) -> Engine:
    """Has ``first_prompt`` in its cache, with poison in the second block."""
    engine = hash_engine(model=Sick(), **settings)
    engine.add(hash_sequence("before", first_prompt))
    run_all(engine)
    keys = hash_sequence("before", first_prompt).chain.keys(np.array(first_prompt, np.uint32), BLOCK)
    [_, block, *_] = held = engine.block_pool.take_prefix(keys, len(keys))
    engine.block_pool.release(held)
    engine.cache.tensor[block, 0, 0, 0, 1] = POISON
    engine.block_pool.take_events()
    return engine


def beams(width: int) -> SamplingParams:
    return SamplingParams(max_tokens=6, temperature=0.0, n=width, beam_search=BeamSearch())


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=2),
        SamplingParams(max_tokens=12, temperature=1.0, seed=1, n=3),
        beams(3),
    ],
    ids=["greedy", "told how likely", "three answers", "beams"],
)
@pytest.mark.parametrize("settings", [{}, {"chunk_tokens": 4}, {"speculative_tokens": 4}], ids=str)
def test_poison_in_a_cached_block_costs_its_readers_alone(sampling: SamplingParams, settings: dict[str, int]) -> None:
    ill, well = random_prompt(17, 0), random_prompt(9, 1)
    engine = sick_engine(ill, **settings)
    engine.add(hash_sequence("well", well))
    outputs = engine.step()
    engine.add(hash_sequence("ill", ill, sampling))
    outputs += run_all(engine)
    assert answers(outputs) == {"well": true_answer(well, 12)}
    ended = engine.take_ended()
    assert {(name, type(error)) for name, error in ended} == {("ill", NotFinite)}
    assert sum(not event.stored for event in engine.block_pool.take_events()) == 4
    engine.add(hash_sequence("again", ill))
    assert answers(run_all(engine)) == {"again": true_answer(ill, 12)}
    assert engine.take_ended() == [] and not engine.is_open("ill") and is_empty(engine)


def test_poison_in_a_block_that_was_copied_in_part_costs_one_answer() -> None:
    prompt = random_prompt(7, 0)
    engine = hash_engine(model=Sick())
    one = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add(hash_sequence("before", prompt, one))
    [output] = run_all(engine)
    chain, tokens = Chain(b"seed"), np.array(prompt, np.uint32)
    [part] = extend_chain(chain.parent(chain.keys(tokens, BLOCK), 1, BLOCK), tokens[4:], 3)
    engine.cache.tensor[engine.block_pool.find(part), 0, 0, 0, 1] = POISON
    for name, cached in ("ill", 7), ("well", 0):
        sequence = hash_sequence(name, [*prompt, output.token.token_id], one)
        engine.add(sequence)
        outputs = run_all(engine)
        assert sequence.num_cached_tokens == cached
    assert answers(outputs) == {"well": true_answer(prompt, 2)[1:]}
    assert [name for name, _ in engine.take_ended()] == ["ill"] and is_empty(engine)
    assert not engine.block_pool.has(part)


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_poison_in_the_middle_of_a_prompt_ends_it(prompt_logprobs: int | None) -> None:
    """At once if every token's logits are requested, else with its last chunk."""
    engine = hash_engine(model=Sick(), chunk_tokens=4)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=prompt_logprobs, n=2)
    engine.add(hash_sequence("ill", random_prompt(17, 0), sampling))
    engine.step()
    engine.cache.tensor[:, 0, 0, 0, 1] = POISON
    num_steps = 0
    while engine.has_work:
        assert engine.step() == []
        num_steps += 1
    assert num_steps == (4 if prompt_logprobs is None else 1)
    assert {type(error) for _, error in engine.take_ended()} == {NotFinite}
    assert not engine.is_open("ill") and engine.match(hash_sequence("x", random_prompt(17, 0)).block_keys) == 0
    assert is_empty(engine)
