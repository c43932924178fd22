"""Steps started before the previous one is collected: the same tokens, and no block has two owners."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sweeps import rounds

from mooncake.engine.contract import AsyncModel, StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.loop import EngineThread
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepPlan
from mooncake.errors import InternalError, KVLoadFailed, MooncakeError, OutOfBlocks
from mooncake.sampling import SamplingParams
from mooncake.types import FinishReason
from tests.engine.hash_model import (
    GREEDY,
    HashModel,
    answers,
    hash_engine,
    hash_sequence,
    random_prompt,
    reserve_filled,
    run_all,
    true_answer,
)
from tests.engine.lazy_model import LazyModel, late_or_not, lazy_engine


def alone(name: str, prompt: list[int], sampling: SamplingParams, **settings: object) -> dict[str, list[int]]:
    engine = hash_engine()
    engine.add(hash_sequence(name, prompt, sampling, **settings))
    return answers(run_all(engine))


def assert_empty(engine: Engine, model: LazyModel) -> None:
    engine.block_pool.check()
    assert engine.block_pool.num_in_use == 0 and not engine.has_work and not model.pending


class Watch:
    """A hook that checks the engine's contract: every step begins and ends before the next one begins."""

    wants_layers = False

    def __init__(self) -> None:
        self.begun: list[str] | None = None
        self.raises_at_begin: list[Exception] = []
        self.raises_at_end: list[Exception] = []

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        pass

    def begin_step(self, plan: StepPlan) -> None:
        if self.raises_at_begin and not self.begun:
            raise self.raises_at_begin.pop()
        assert all(entry.sequence.state == "running" for entry in plan.entries)
        assert all(entry.first == entry.sequence.num_computed for entry in plan.entries)
        self.begun = [entry.sequence.request_id for entry in plan.entries]

    def end_step(self, plan: StepPlan) -> None:
        assert self.begun is not None and {entry.sequence.request_id for entry in plan.entries} <= set(self.begun)
        assert all(entry.sequence.num_computed == entry.first + entry.num_tokens for entry in plan.entries)
        assert all(entry.sequence.blocks.block_table for entry in plan.entries)
        self.begun = None
        if self.raises_at_end:
            raise self.raises_at_end.pop()

    def before_layer(self, layer: int) -> None:
        pass

    def after_layer(self, layer: int) -> None:
        pass


def test_models_that_can_start_steps_are_told_from_others() -> None:
    assert isinstance(LazyModel(), AsyncModel) and not isinstance(HashModel(), AsyncModel)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=3)])
def test_overlapped_decodes_get_the_tokens_they_get_alone(sampling: SamplingParams) -> None:
    engine, model = lazy_engine()
    prompts = {f"r{i}": random_prompt(length, i) for i, length in enumerate([1, 3, 4, 5, 8, 17, 31])}
    for name, prompt in prompts.items():
        engine.add(hash_sequence(name, prompt, sampling))
    got = answers(run_all(engine, Watch()))
    assert got == {name: tokens for n, p in prompts.items() for name, tokens in alone(n, p, sampling).items()}
    assert model.num_started >= 11 and model.num_overlapped >= model.num_started - 7  # after each admission one is not
    assert_empty(engine, model)


def test_the_next_step_is_started_before_this_one_is_collected() -> None:
    engine, model = lazy_engine()
    engine.add(hash_sequence("r", random_prompt(5, 0), SamplingParams(max_tokens=4, temperature=0.0)))
    engine.step()
    assert model.num_started == 0
    assert len(engine.step()) == 1
    assert model.num_started == 2 and len(model.pending) == 1
    assert len(engine.step()) == 1
    [last] = engine.step()
    assert last.finish_reason is FinishReason.LENGTH
    assert model.num_started == 3, "it certainly ended: nothing was started behind"
    assert_empty(engine, model)


def test_an_answer_that_stops_costs_one_token_that_nobody_gets_and_its_blocks_stay_until_then() -> None:
    prompt = random_prompt(6, 0)
    free = true_answer(prompt, 12)
    stop = free[5]
    assert stop not in free[:5]
    engine, model = lazy_engine()
    engine.add(hash_sequence("r", prompt, GREEDY, eos_ids=(stop,)))
    outputs: list[StepOutput] = []
    while not any(output.finish_reason for output in outputs):
        outputs += engine.step(Watch())
    assert answers(outputs) == {"r": free[:6]} and not engine.is_open("r")
    assert engine.has_work and len(model.pending) == 1 and engine.block_pool.num_in_use == 3
    engine.add(hash_sequence("r", prompt, GREEDY))  # the name is free again
    assert engine.step() == [] and engine.block_pool.num_in_use == 0
    assert answers(run_all(engine)) == {"r": free}
    assert_empty(engine, model)


def test_who_waits_is_let_in_at_the_next_step() -> None:
    engine, model = lazy_engine()
    engine.add(hash_sequence("first", random_prompt(5, 0), SamplingParams(max_tokens=30, temperature=0.0)))
    outputs = [output for _ in range(4) for output in engine.step()]
    engine.add(hash_sequence("second", random_prompt(5, 1)))
    outputs += engine.step()  # what is under way
    assert not model.pending
    assert {output.request_id for output in engine.step()} == {"first", "second"}


def test_who_waits_in_vain_does_not_hold_the_others_up() -> None:
    engine, model = lazy_engine(max_sequences=1)
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    engine.add(hash_sequence("first", random_prompt(5, 0), sampling))
    engine.add(hash_sequence("second", random_prompt(5, 1), sampling))
    for _ in range(20):
        engine.step()
    assert model.num_overlapped >= 18
    run_all(engine)
    assert_empty(engine, model)


def hand_over(
    engine: Engine, name: str, prompt: list[int], sampling: SamplingParams, eos: tuple[int, ...] = ()
) -> list[int]:
    """Hand over a prompt that another engine has computed; its bytes are in place at once. Returns its blocks."""
    source = hash_engine()
    there = hash_sequence(name, prompt, sampling, num_to_sample=1, hold_blocks=True, eos_ids=eos)
    source.add(there)
    outputs = sorted(run_all(source), key=lambda output: output.choice)
    reservation = reserve_filled(engine, hash_sequence(name, prompt, sampling, eos_ids=eos), source, there)
    engine.start_reserved(name, [output.token for output in outputs])
    return reservation.block_ids


def test_a_sequence_that_is_handed_over_joins_without_a_pause() -> None:
    engine, model = lazy_engine()
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    engine.add(hash_sequence("first", random_prompt(5, 0), sampling))
    outputs = [output for _ in range(4) for output in engine.step()]
    before = model.num_started - model.num_overlapped
    prompts = {f"r{i}": random_prompt(6 + i, i + 1) for i in range(3)}
    for name, prompt in prompts.items():
        hand_over(engine, name, prompt, sampling)
        outputs += engine.step()
    outputs += run_all(engine)
    assert model.num_started - model.num_overlapped == before
    assert answers(outputs) == {n: true_answer(p, 40) for n, p in {"first": random_prompt(5, 0), **prompts}.items()}
    assert_empty(engine, model)


def test_blocks_of_a_step_under_way_are_given_to_nobody() -> None:
    """However a sequence leaves: another node writes into free blocks before the step is computed."""
    for how in ("stop", "abort", "end_choice", "held"):
        prompt = random_prompt(9, 0)
        free = true_answer(prompt, 12)
        engine, model = lazy_engine(num_blocks=12)
        stop = () if how in ("abort", "end_choice") else (free[2],)
        engine.add(hash_sequence("r", prompt, GREEDY, eos_ids=stop, hold_blocks=how == "held"))
        engine.add(hash_sequence("other", random_prompt(5, 1), SamplingParams(max_tokens=20, temperature=0.0)))
        outputs = []
        while len(answers(outputs).get("r", [])) < 3:
            outputs += engine.step()
        [step] = model.pending
        if how == "end_choice":
            engine.end_choice("r", 0)
        elif how != "stop":
            engine.abort("r")
        written = hand_over(engine, "new", random_prompt(8, 2), GREEDY)
        assert written and not set(written) & step.touched, how
        outputs += run_all(engine)
        assert answers(outputs)["new"] == true_answer(random_prompt(8, 2), 12)
        assert answers(outputs)["other"] == true_answer(random_prompt(5, 1), 20)
        assert_empty(engine, model)


@pytest.mark.parametrize("what", ["tokens", "end_step"])
def test_a_step_that_fails_ends_its_sequences_and_the_engine_works_on(what: str) -> None:
    engine, model = lazy_engine()
    hook = Watch()
    for i in range(3):
        engine.add(hash_sequence(f"r{i}", random_prompt(5, i), SamplingParams(max_tokens=30, temperature=0.0)))
    for _ in range(5):
        engine.step(hook)
    if what == "tokens":
        model.fails = 1
    else:
        hook.raises_at_end.append(RuntimeError("the hook"))
    with pytest.raises(RuntimeError):
        engine.step(hook)
    assert not model.pending, "nothing is under way any more"
    engine.fail_all(InternalError("as the loop does"))
    assert {name for name, _ in engine.take_ended()} == {"r0", "r1", "r2"}
    hook.begun = None
    run_all(engine, hook)  # what was told before
    assert_empty(engine, model)
    engine.add(hash_sequence("r0", random_prompt(5, 0)))
    assert answers(run_all(engine, hook)) == {"r0": true_answer(random_prompt(5, 0), 12)}
    assert_empty(engine, model)


@pytest.mark.parametrize("is_late", [True, False])
def test_logits_that_are_not_finite_end_their_own_sequence_alone(is_late: bool) -> None:
    engine, model = lazy_engine(LazyModel(is_late=[is_late]))
    hook = Watch()
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    for i in range(3):
        engine.add(hash_sequence(f"r{i}", random_prompt(5, i), sampling))
    outputs = [output for _ in range(5) for output in engine.step(hook)]
    model.compute_all()
    model.spoils = True  # the first row
    outputs += engine.step(hook)
    model.compute_all()
    model.spoils = False
    outputs += run_all(engine, hook)
    assert [name for name, _ in engine.take_ended()] == ["r0"]
    told = answers(outputs)
    assert [told[f"r{i}"] for i in (1, 2)] == [true_answer(random_prompt(5, i), 30) for i in (1, 2)]
    assert_empty(engine, model)
    engine.add(hash_sequence("r0", random_prompt(5, 0)))
    assert answers(run_all(engine, hook)) == {"r0": true_answer(random_prompt(5, 0), 12)}
    assert_empty(engine, model)


def test_a_hook_may_abandon_a_step_that_is_under_way() -> None:
    engine, model = lazy_engine()
    hook = Watch()
    engine.add(hash_sequence("r", random_prompt(5, 0)))
    outputs = engine.step(hook) + engine.step(hook)
    hook.raises_at_begin.append(KVLoadFailed("not now"))
    with pytest.raises(KVLoadFailed):
        engine.step(hook)
    assert engine.rewind_failed(KVLoadFailed("not now")) == [] and not model.pending
    outputs += run_all(engine, hook)
    assert answers(outputs) == {"r": true_answer(random_prompt(5, 0), 12)}
    assert_empty(engine, model)


def test_the_thread_of_an_engine_tells_everybody_of_a_failure_and_goes_on() -> None:
    engine, model = lazy_engine()
    thread = EngineThread(engine)
    thread.start()
    told: dict[str, list[StepOutput | MooncakeError]] = {"r0": [], "r1": [], "r2": []}
    long = SamplingParams(max_tokens=150, temperature=0.0)

    def fail_later(output: StepOutput | MooncakeError) -> None:
        told["r0"].append(output)
        if len(told["r0"]) == 5:
            model.fails = 1

    thread.add(hash_sequence("r1", random_prompt(5, 1), long), told["r1"].append)
    thread.add(hash_sequence("r0", random_prompt(5, 0), long), fail_later)
    while not (told["r0"] and isinstance(told["r0"][-1], MooncakeError)):
        thread.call(lambda engine: None).result(timeout=10)
    done: list[StepOutput | MooncakeError] = told["r2"]
    thread.add(hash_sequence("r2", random_prompt(5, 2)), done.append)
    while not (done and isinstance(done[-1], StepOutput) and done[-1].finish_reason):
        thread.call(lambda engine: None).result(timeout=10)
    thread.stop()
    assert all(isinstance(told[name][-1], InternalError) for name in ("r0", "r1"))
    assert answers([o for o in done if isinstance(o, StepOutput)]) == {"r2": true_answer(random_prompt(5, 2), 12)}
    assert_empty(engine, model)


SAMPLINGS = (
    GREEDY,
    GREEDY,
    SamplingParams(max_tokens=25, temperature=1.0, seed=11),
    SamplingParams(max_tokens=18, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5),
    SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=3),
    SamplingParams(max_tokens=10, temperature=1.0, repetition_penalty=1.3, seed=7),
    SamplingParams(max_tokens=10, temperature=0.0, min_tokens=4),
    SamplingParams(max_tokens=10, temperature=0.0, logprobs=2),
)


@pytest.mark.parametrize("round_", rounds(6, quick=2))
def test_a_random_life_gives_the_tokens_of_an_engine_that_never_overlaps(round_: int) -> None:
    """Computed and handed-over prompts, several answers, stops, aborts, and too few blocks."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    max_async_sequences = int(random.choice([3, 1000]))
    engine, model = lazy_engine(
        LazyModel(max_async_sequences, late_or_not(random)),
        num_blocks=int(random.choice([24, 30, 60])),
        chunk_tokens=int(random.choice([0, 4, 12])),
        max_sequences=int(random.choice([4, 8])),
    )
    hook = Watch()
    wanted: dict[str, list[int]] = {}
    requests: list[str] = []
    gone: set[str] = set()
    got: dict[str, list[int]] = {}
    finished: set[str] = set()

    def take(outputs: list[StepOutput]) -> None:
        for name, tokens in answers(outputs).items():
            got.setdefault(name, []).extend(tokens)
        finished.update(output.request_id for output in outputs if output.finish_reason)

    held: set[str] = set()
    for turn in range(250):
        if turn < 180 and random.random() < 0.3:
            name = f"r{turn}"
            prompt = random_prompt(int(random.integers(1, 25)), int(random.integers(0, 40)))
            sampling = SAMPLINGS[int(random.integers(len(SAMPLINGS)))]
            eos = tuple(random.integers(0, 97, 6).tolist())
            expected = alone(name, prompt, sampling, eos_ids=eos)
            hold = bool(sampling.n == 1 and random.random() < 0.2)
            if random.random() < 0.4:
                try:
                    hand_over(engine, name, prompt, sampling, eos)
                except OutOfBlocks:
                    continue
            else:
                engine.add(hash_sequence(name, prompt, sampling, eos_ids=eos, hold_blocks=hold))
                held |= {name} if hold else set()
            wanted |= expected
            requests.append(name)
        if requests and random.random() < 0.06:
            name = str(random.choice(requests))
            engine.abort(name)
            gone.add(name)
        if requests and random.random() < 0.03:
            name = str(random.choice(requests))
            engine.end_choice(name, 0)
            gone.add(name)
        for name in held & finished:
            if random.random() < 0.5:
                engine.abort(name)
        if engine.has_work:
            take(engine.step(hook))
        engine.block_pool.check()
    take(run_all(engine, hook))
    for name in held:
        engine.abort(name)
    for name, tokens in wanted.items():
        mine = got.get(name, [])
        assert mine == (tokens[: len(mine)] if name.split("#")[0] in gone else tokens), name
    assert_empty(engine, model)
    assert model.num_overlapped > 0 or max_async_sequences < 1000


def test_guesses_are_made_as_before() -> None:
    engine, model = lazy_engine(speculative_tokens=4)
    prompt = random_prompt(9, 0)
    engine.add(hash_sequence("r", prompt, replace(GREEDY, max_tokens=40)))
    assert answers(run_all(engine)) == {"r": true_answer(prompt, 40)}
    assert_empty(engine, model)
