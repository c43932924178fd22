"""Layers with a window release pages that no later token sees: the same answers, with the expected number of pages."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows

import pytest

from mooncake.engine.engine import Engine
from mooncake.engine.sequence import SequenceState
from mooncake.page_groups import PageGroups, page_key, plan_groups
from mooncake.sampling import SamplingParams
from tests.engine.hash_model import BLOCK, answers, hash_sequence, random_life, random_prompt, run_all
from tests.engine.windowed_model import HYBRID, LOCAL, true_answer, windowed_engine

WINDOW = 6


@pytest.mark.parametrize("windows", [HYBRID, LOCAL], ids=["hybrid", "local"])
@pytest.mark.parametrize("chunk_tokens", [0, 3, 8, 64])
def test_answers_are_those_of_a_model_that_keeps_everything(windows: Rows[int], chunk_tokens: int) -> None:
    engine, _ = windowed_engine(windows, chunk_tokens=chunk_tokens, max_sequences=3)
    prompts = {f"r{i}": random_prompt(length, i) for i, length in enumerate([1, 4, 5, 9, 31, 32, 33])}
    for name, prompt in prompts.items():
        engine.add(hash_sequence(name, prompt))
    assert answers(run_all(engine)) == {name: true_answer(prompt, 12, windows) for name, prompt in prompts.items()}
    assert engine.block_pool.num_in_use == 0


@pytest.mark.parametrize(
    ("windows", "rows", "num_groups"),
    [(HYBRID, (2, 1, 1, 1, 2, 1), 2), (HYBRID, (1, 2, 2, 2, 1, 2), 5), (LOCAL, (1, 3, 2), 1)],
)
def test_layers_of_several_rows_keep_what_is_theirs(windows: Rows[int], rows: Rows[int], num_groups: int) -> None:
    engine, model = windowed_engine(windows, num_pages=120 * num_groups, rows=rows)
    assert engine.config.groups.num_groups == num_groups and engine.config.groups.rows == rows
    prompts = {f"r{i}": random_prompt(length, i) for i, length in enumerate([1, 5, 31, 33, 60, 80])}
    expected = {name: true_answer(prompt, 12, windows) for name, prompt in prompts.items()}
    computed = []
    for _ in range(2):
        for name, prompt in prompts.items():
            engine.add(hash_sequence(name, prompt))
        assert answers(run_all(engine)) == expected
        computed.append(model.num_tokens)
    assert computed[1] < 2 * computed[0], "nothing was found in the cache"


@pytest.mark.parametrize(("windows", "num_kept", "num_windowed"), [(HYBRID, 1, 2), (LOCAL, 0, 1)])
def test_a_sequence_holds_the_pages_that_the_formula_has(windows: Rows[int], num_kept: int, num_windowed: int) -> None:
    engine, _ = windowed_engine(windows)
    sequence = hash_sequence("r", random_prompt(29, 0), SamplingParams(max_tokens=90, temperature=0.0))
    engine.add(sequence)
    while engine.has_work:
        engine.step()
        n = sequence.num_computed
        if sequence.state is SequenceState.RUNNING and sequence.is_decoding:
            blocks, first = -(-n // BLOCK), max(n - WINDOW, 0) // BLOCK
            assert len(sequence.blocks.pages) == num_kept * blocks + num_windowed * (blocks - first)
            assert len(sequence.blocks.pages) == engine.config.groups.num_pages(n, BLOCK)
            assert engine.block_pool.num_in_use == len(sequence.blocks.pages)


def test_a_prompt_holds_no_more_than_a_window_and_a_chunk() -> None:
    engine, _ = windowed_engine(LOCAL, chunk_tokens=8)
    sequence = hash_sequence("r", random_prompt(180, 0))
    engine.add(sequence)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.block_pool.num_in_use)
    assert most == engine.config.groups.most_pages(0, 8, BLOCK) == 5


def test_many_more_sequences_fit() -> None:
    """With the same context and the same memory."""
    running = {}
    for windows in (LOCAL, (0,) * len(LOCAL)):
        engine, _ = windowed_engine(windows, num_pages=100, max_sequences=40, chunk_tokens=80)
        for i in range(20):
            engine.add(hash_sequence(f"r{i}", random_prompt(70, i), SamplingParams(max_tokens=30, temperature=0.0)))
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, engine.load().running)
        running[windows] = most
    assert running[LOCAL] >= 3 * running[(0,) * len(LOCAL)] > 0


# What is found in the cache


def answer_again(engine: Engine, name: str, prompt: list[int], windows: Rows[int]) -> int:
    """Check its answer; returns how many tokens of the prompt were cached."""
    sequence = hash_sequence(name, prompt)
    engine.add(sequence)
    assert answers(run_all(engine)) == {name: true_answer(prompt, 12, windows)}
    return sequence.num_cached_tokens


@pytest.mark.parametrize("windows", [HYBRID, LOCAL], ids=["hybrid", "local"])
def test_a_second_turn_goes_on_where_the_first_ended(windows: Rows[int]) -> None:
    engine, _ = windowed_engine(windows)
    prompt = random_prompt(50, 0)
    assert answer_again(engine, "first", prompt, windows) == 0
    longer = [*prompt, *true_answer(prompt, 12, windows), *random_prompt(9, 1)]
    assert answer_again(engine, "second", longer, windows) == 61


@pytest.mark.parametrize("length", [48, 49, 51])
def test_of_a_prompt_that_is_cached_as_a_whole_only_the_end_is_computed(length: int) -> None:
    engine, model = windowed_engine(HYBRID)
    prompt = random_prompt(length, 0)
    answer_again(engine, "first", prompt, HYBRID)
    before = model.num_tokens
    assert answer_again(engine, "again", prompt, HYBRID) == length - 1
    assert model.num_tokens - before == 1 + 11


@pytest.mark.parametrize("windows", [HYBRID, LOCAL], ids=["hybrid", "local"])
@pytest.mark.parametrize("hole", [3, 7, 9, 10, 11])
def test_a_prefix_is_as_long_as_all_groups_can_go_on_behind_it(windows: Rows[int], hole: int) -> None:
    """One page of a window is evicted; the prefix ends before it, or after the window that needs it."""
    engine, _ = windowed_engine(windows)
    prompt = random_prompt(12 * BLOCK, 0)
    answer_again(engine, "first", prompt, windows)
    probe = hash_sequence("probe", [*prompt, *random_prompt(6, 1)])
    probe.extend_keys(BLOCK)
    group = engine.config.groups.num_groups - 1
    assert engine.block_pool.discard(page_key(probe.block_keys[hole], group))
    # After block 12 the next token, or the recomputed last one, sees from token 42 on: block 10.
    expected = 12 if hole < 10 else hole
    assert answer_again(engine, "second", probe.tokens.tolist(), windows) == expected * BLOCK


def test_the_hit_rule_is_that_of_a_search_over_all_borders() -> None:
    """Compared with a direct search, with random pages missing."""
    rng = random.Random(5)
    engine, _ = windowed_engine(HYBRID)
    prompt = random_prompt(20 * BLOCK, 0)
    groups, pool = engine.config.groups, engine.block_pool
    for number in range(60):
        engine.drop_cached()
        probe = hash_sequence(f"r{number}", prompt)
        engine.add(probe)
        run_all(engine)
        keys = probe.block_keys[:20]
        missing = {(rng.randrange(groups.num_groups), rng.randrange(20)) for _ in range(rng.randint(0, 6))}
        for group, index in missing:
            pool.discard(page_key(keys[index], group))
        there = {(g, i) for g in range(groups.num_groups) for i in range(20) if pool.has(page_key(keys[i], g))}
        assert engine._scheduler.block_manager.match(keys) == max(
            c for c in range(21) if seen_behind(c, groups) <= there
        )


def seen_behind(num_blocks: int, groups: PageGroups) -> set[tuple[int, int]]:
    """(group, block) of all pages visible to the last of ``num_blocks`` blocks or the token after it."""
    last = num_blocks * BLOCK - 1
    return {
        (group, index)
        for group, window in enumerate(groups.windows)
        for index in range(num_blocks)
        if not window or (index + 1) * BLOCK > last - window + 1
    }


# Whatever comes and goes


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("windows", "rows"), [(HYBRID, ()), (LOCAL, ()), (HYBRID, (2, 1, 1, 1, 2, 1))], ids=["hybrid", "local", "rows"]
)
@pytest.mark.parametrize("seed", range(8))
def test_no_answer_changes_and_nothing_leaks(windows: Rows[int], rows: Rows[int], seed: int) -> None:
    """Several answers, beams, speculation, aborts, priorities, prompts that begin alike; tight pages and places."""
    rng = random.Random(seed)
    least = 18 * plan_groups(windows, 200, rows).num_groups
    engine, _ = windowed_engine(
        windows,
        rows=rows,
        num_pages=rng.randint(least, least + 12),
        num_places=rng.choice([0, 6, 60]),
        chunk_tokens=rng.choice([3, 8, 16]),
        speculative_tokens=rng.choice([0, 4]),
    )
    places = engine._scheduler.block_manager.swap.num_free
    heads = [random_prompt(rng.randint(8, 30), seed * 10 + i) for i in range(2)]
    prompts = {
        f"r{i}": [*rng.choice(heads)[: rng.randint(4, 30)], *random_prompt(rng.randint(1, 14), 100 * seed + i)]
        for i in range(12)
    }
    life = random_life(engine, prompts, rng)
    assert not [name for name, _ in engine.take_ended() if name not in life.aborted]
    for name, tokens in life.greedy:
        assert tokens == true_answer(prompts[name], len(tokens), windows) and len(tokens) in (10, 24)
    assert engine.block_pool.num_in_use == 0
    assert engine._scheduler.block_manager.swap.num_free == places


@pytest.mark.parametrize("windows", [(0, 24, 24), (24, 24)], ids=["hybrid", "local"])
def test_prompts_that_share_a_window_get_on_though_pages_are_lacking(windows: Rows[int]) -> None:
    """A page that one prompt releases is still held by another, so it gets no new one in exchange."""
    num_lacks = 0
    for seed in range(6):
        rng = random.Random(seed)
        needed = plan_groups(windows, 200).num_needed(45, 8, BLOCK)
        engine, _ = windowed_engine(windows, num_pages=needed + rng.randint(0, 3))
        head = random_prompt(120, seed)
        prompts = {f"r{i}": [*head, *random_prompt(rng.randint(10, 50), 100 * seed + i)] for i in range(5)}
        outputs, names = [], list(prompts)
        while names or engine.has_work:
            if names and rng.random() < 0.3:
                name = names.pop()
                engine.add(hash_sequence(name, prompts[name]))
            outputs += engine.step()
            assert not (engine.is_stalled and engine.has_work)
            num_lacks += any(
                len(sequence.blocks.tables[-1]) * BLOCK < min(sequence.num_computed + 8, sequence.num_tokens)
                for sequence in engine._scheduler.running
            )
        assert answers(outputs) == {name: true_answer(prompt, 12, windows) for name, prompt in prompts.items()}
        assert engine.block_pool.num_in_use == 0
    assert num_lacks, "nothing was lacking"
