"""Preempted sequences whose blocks are kept: the same tokens, less to compute, and no place lost."""

from __future__ import annotations

import random

import pytest
from sweeps import rounds

from mooncake.engine.cache.swap import SwapSpace
from mooncake.engine.engine import Engine
from mooncake.sampling import SamplingParams
from tests.engine.hash_model import (
    BLOCK,
    answers,
    hash_engine,
    hash_sequence,
    random_life,
    random_prompt,
    run_all,
    true_answer,
)

LONG = SamplingParams(max_tokens=24, temperature=0.0)


def num_free_places(engine: Engine) -> int:
    return engine._scheduler.block_manager.swap.num_free


def test_what_was_kept_is_not_computed_again() -> None:
    prompts = {f"r{i}": random_prompt(9 + i, i) for i in range(6)}
    expected = {name: true_answer(prompt, 24) for name, prompt in prompts.items()}
    computed = {}
    for num_places in (0, 64):
        engine = hash_engine(num_blocks=12, num_places=num_places)
        # Computing is the dearer of the two, however fast this model is.
        engine._scheduler.block_manager.swap.note_prompt(1, 1e9)
        for name, prompt in prompts.items():
            engine.add(hash_sequence(name, prompt, LONG))
        assert answers(run_all(engine)) == expected
        assert engine.load().preemptions > 0
        assert num_free_places(engine) == num_places
        computed[num_places] = engine.load().computed_tokens
    needed = sum(len(prompt) + 23 for prompt in prompts.values())
    assert engine.load().swapped_blocks > 0
    assert computed[64] == needed < computed[0], "a swapped sequence was computed twice"


def test_where_there_is_no_room_it_is_computed_again() -> None:
    prompts = {f"r{i}": random_prompt(9 + i, i) for i in range(6)}
    engine = hash_engine(num_blocks=12, num_places=3)
    for name, prompt in prompts.items():
        engine.add(hash_sequence(name, prompt, LONG))
    assert answers(run_all(engine)) == {name: true_answer(prompt, 24) for name, prompt in prompts.items()}
    assert num_free_places(engine) == 3


def test_it_is_computed_again_where_that_is_cheaper() -> None:
    space = SwapSpace(first=100, num_places=8)
    assert space.allocate(1, 4) == [100], "what was never measured is tried"
    space.note_prompt(num_tokens=64, elapsed_ms=6.4)
    space.note_copies(num_blocks=1, elapsed_ms=10.0)
    assert space.allocate(2, 2 * BLOCK) == [] and space.num_free == 7
    for _ in range(80):
        space.note_copies(num_blocks=1, elapsed_ms=0.1)
    assert len(space.allocate(2, 2 * BLOCK)) == 2
    assert space.allocate(6, 1000) == [], "there is no room"


@pytest.mark.parametrize("seed", rounds(12, quick=4))
def test_no_answer_changes_and_nothing_leaks_whatever_comes_and_goes(seed: int) -> None:
    """Several answers, beams, speculation, aborts, priorities; tight blocks and tighter places."""
    rng = random.Random(seed)
    num_places = rng.choice([2, 6, 30])
    engine = hash_engine(num_blocks=rng.randint(18, 26), num_places=num_places, speculative_tokens=rng.choice([0, 4]))
    prompts = {f"r{i}": random_prompt(rng.randint(2, 30), 100 * seed + i) for i in range(12)}
    life = random_life(engine, prompts, rng)
    engine.take_ended()
    for name, tokens in life.greedy:
        assert tokens == true_answer(prompts[name], len(tokens)) and len(tokens) in (10, 24)
    assert set(prompts) - life.aborted <= set(life.answers)
    engine.block_pool.check()
    assert engine.block_pool.num_in_use == 0
    assert num_free_places(engine) == num_places
