"""Reuse that ends within a block: the same answers, with the tokens computed that differ and no others."""

from __future__ import annotations

import random
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import rounds

from mooncake.engine.cache.block_contents import BlockContents
from mooncake.engine.engine import Engine
from mooncake.hashing import Chain
from mooncake.sampling import SamplingParams
from mooncake.types import BlockKey
from tests.engine.hash_model import (
    BLOCK,
    HashModel,
    answers,
    hash_engine,
    hash_sequence,
    random_life,
    random_prompt,
    run_all,
    true_answer,
)
from tests.engine.windowed_model import HYBRID, LOCAL, windowed_engine
from tests.engine.windowed_model import true_answer as windowed_answer

ONE = SamplingParams(max_tokens=1, temperature=0.0)


def tokens_of(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint32)


@given(
    st.dictionaries(st.binary(min_size=1, max_size=3), st.lists(st.sampled_from([0, 1, 256, 1 << 24]), max_size=6)),
    st.sets(st.binary(min_size=1, max_size=3)),
    st.lists(st.sampled_from([0, 1, 256, 1 << 24]), max_size=6),
)
def test_the_block_found_agrees_with_most_tokens(
    held: dict[bytes, list[int]], removed: set[bytes], asked: list[int]
) -> None:
    contents = BlockContents()
    for key, tokens in held.items():
        contents.add(b"parent", tokens_of(tokens), BlockKey(key))
    for key in removed:
        contents.remove(BlockKey(key))
    left = {key: tokens for key, tokens in held.items() if key not in removed}

    def num_equal(tokens: list[int]) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, asked, strict=False))))

    found, count = contents.longest(b"parent", tokens_of(asked))
    assert count == max(map(num_equal, left.values()), default=0)
    assert found is None if count == 0 else num_equal(left[found]) == count
    assert contents.longest(b"another", tokens_of(asked)) == (None, 0) and len(contents) == len(left)


def cached_of(engine: Engine, prompt: list[int]) -> int:
    """How many tokens of the prompt are found; the answer is right."""
    sequence = hash_sequence("asked", prompt, ONE)
    engine.add(sequence)
    assert answers(run_all(engine)) == {"asked": true_answer(prompt, 1)}
    return sequence.num_cached_tokens


@pytest.mark.parametrize("num_equal", [0, 3, 8, 9, 11, 12, 14])
def test_a_prompt_that_parts_from_another_within_a_block_computes_what_differs(num_equal: int) -> None:
    model = HashModel()
    engine = hash_engine(model=model)
    prompt = random_prompt(15, 0)
    cached_of(engine, prompt)
    model.batches.clear()
    other = prompt[:num_equal] + [(token + 1) % 97 for token in prompt[num_equal:]] + random_prompt(10, 1)
    assert cached_of(engine, other) == num_equal
    assert sum(tokens for _, tokens in model.batches) == len(other) - num_equal
    assert cached_of(engine, prompt) == 14, "the first one's block has changed"


def test_of_a_repeated_prompt_one_token_is_computed() -> None:
    engine = hash_engine()
    for length in range(1, 3 * BLOCK + 2):
        prompt = random_prompt(length, length)
        assert [cached_of(engine, prompt) for _ in range(3)] == [0, length - 1, length - 1]


def test_one_block_is_kept_for_prompts_that_end_alike() -> None:
    """The longest one; shorter ones are its beginnings."""
    engine = hash_engine()
    prompt = random_prompt(7, 0)
    for length in (7, 6, 5, 7):
        cached_of(engine, prompt[:length])
    assert engine.block_pool.num_cached == 2


def test_what_was_evicted_is_not_copied() -> None:
    engine = hash_engine(num_blocks=6)
    prompt = random_prompt(7, 0)
    cached_of(engine, prompt)
    cached_of(engine, random_prompt(24, 1))
    assert cached_of(engine, prompt) == 0


def test_a_part_that_was_copied_outlives_one_that_was_not() -> None:
    engine = hash_engine(num_blocks=3)
    first, second = random_prompt(3, 0), random_prompt(3, 1)
    for prompt in (first, second, [*first[:2], 96]):
        cached_of(engine, prompt)
    assert cached_of(engine, [*first, 5]) == 3, "evicted in place of the second one"


def test_a_block_may_be_evicted_for_others_of_the_step_that_copies_it() -> None:
    """Four prompts begin like the cached one, and need every block."""
    engine = hash_engine(num_blocks=16, chunk_tokens=64)
    prompt = random_prompt(7, 0)
    cached_of(engine, prompt)
    others = {f"r{i}": prompt[:6] + random_prompt(8, 1 + i) for i in range(4)}
    for name, other in others.items():
        engine.add(hash_sequence(name, other, ONE))
    assert answers(run_all(engine)) == {name: true_answer(other, 1) for name, other in others.items()}
    assert engine.block_pool.num_in_use == 0


@pytest.mark.parametrize("windows", [HYBRID, LOCAL], ids=["hybrid", "local"])
def test_layers_with_a_window_copy_their_pages(windows: tuple[int, ...]) -> None:
    engine, _ = windowed_engine(windows)
    prompt = random_prompt(31, 0)
    for num_equal, cached in ((31, 0), (30, 30), (29, 29), (25, 25), (3, 3)):
        asked = prompt[:num_equal] + random_prompt(3, num_equal)
        sequence = hash_sequence("asked", asked, ONE)
        engine.add(sequence)
        assert answers(run_all(engine)) == {"asked": windowed_answer(asked, 1, windows)}
        assert sequence.num_cached_tokens == cached
    assert engine.block_pool.num_in_use == 0


def test_another_tenant_shares_no_part() -> None:
    engine = hash_engine()
    prompt = random_prompt(3, 0)
    cached_of(engine, prompt)
    sequence = hash_sequence("other", prompt, ONE)
    sequence.chain = Chain(b"another seed")
    engine.add(sequence)
    run_all(engine)
    assert sequence.num_cached_tokens == 0


@pytest.mark.parametrize("round_", rounds(12, quick=4))
def test_a_random_life_of_prompts_that_begin_alike(round_: int) -> None:
    rng = random.Random(round_)
    stem = random_prompt(40, round_)
    prompts = {f"r{i}": stem[: rng.randint(1, 40)] + random_prompt(rng.randint(1, 6), i) for i in range(40)}
    engine = hash_engine(num_blocks=rng.choice([20, 30, 64]), num_places=rng.choice([0, 10]), max_sequences=5)
    life = random_life(engine, prompts, rng)
    for name, tokens in life.greedy:
        assert tokens == true_answer(prompts[name], len(tokens))
    assert engine.block_pool.num_in_use == 0
