"""Preempted sequences whose blocks are kept: the same tokens, less to compute, and no place lost."""

from __future__ import annotations

import random

import pytest

from mooncake.engine.cache.swap import SwapSpace
from mooncake.engine.engine import Engine
from mooncake.types import BeamSearch, SamplingParams
from tests.engine.hash_model import (
    BLOCK,
    answers,
    hash_engine,
    hash_sequence,
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
        engine._scheduler.block_manager.swap.note_prompt(
            1, 1e9
        )  # computing is the dearer of the two, however fast this model is
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


@pytest.mark.parametrize("seed", range(12))
def test_no_answer_changes_and_nothing_leaks_whatever_comes_and_goes(seed: int) -> None:
    """Several answers, beams, speculation, aborts, priorities; tight blocks and tighter places."""
    rng = random.Random(seed)
    num_places = rng.choice([2, 6, 30])
    engine = hash_engine(num_blocks=rng.randint(18, 26), num_places=num_places, speculative_tokens=rng.choice([0, 4]))
    prompts = {f"r{i}": random_prompt(rng.randint(2, 30), 100 * seed + i) for i in range(12)}
    aborted, outputs, names = set(), [], list(prompts)
    searches = set()
    while names or engine.has_work:
        if names and rng.random() < 0.5:
            name = names.pop()
            sampling = LONG
            if rng.random() < 0.3:
                sampling = SamplingParams(max_tokens=10, temperature=0.0, n=3)
            elif rng.random() < 0.2:
                sampling = SamplingParams(max_tokens=6, temperature=0.0, n=2, beam_search=BeamSearch())
                searches.add(name)
            engine.add(hash_sequence(name, prompts[name], sampling, priority=rng.randint(0, 2)))
        if rng.random() < 0.05:
            victim = rng.choice(list(prompts))
            engine.abort(victim)
            aborted.add(victim)
        outputs += engine.step()
    engine.take_ended()
    got = answers(outputs)
    for name, tokens in got.items():
        request = name.partition("#")[0]
        if request not in aborted | searches:
            assert tokens == true_answer(prompts[request], len(tokens)) and len(tokens) in (10, 24)
    assert set(prompts) - aborted <= set(got)
    engine.block_pool.check()
    assert engine.block_pool.num_in_use == 0
    assert num_free_places(engine) == num_places
