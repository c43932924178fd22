"""Speculation: the same answers, sampled or greedy, in fewer steps; and it stops by itself when it does not pay."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from mooncake.engine.decoding.draft_payoff import DraftPayoff
from mooncake.engine.decoding.speculation import PromptLookup
from mooncake.sampling import SamplingParams
from mooncake.types import FinishReason
from tests.engine.hash_model import (
    BLOCK,
    VOCAB,
    HashModel,
    answers,
    hash_engine,
    hash_sequence,
    logits_after,
    random_prompt,
    run_all,
    running_checksums,
    true_answer,
)


class Oracle(PromptLookup):
    """The first tokens of each draft are right, the others wrong."""

    def __init__(self, whole: dict[str, list[int]], right: int, wrong: int) -> None:
        super().__init__(right + wrong)
        self._whole = whole
        self._right = right
        self._wrong = wrong

    def propose(self, sequence: Any) -> list[int]:
        super().propose(sequence)  # keeps its memory
        rest = self._whole[sequence.request_id][sequence.num_generated :]
        wrong = [(token + 1) % VOCAB for token in rest[self._right : self._right + self._wrong]]
        return rest[: self._right] + wrong


def with_oracle(sampling: SamplingParams, right: int, wrong: int, **settings: int) -> tuple[Any, HashModel, Any]:
    """Answers with speculation, the model that made them, and answers without."""
    prompts = {f"r{i}": random_prompt(length, i) for i, length in enumerate([2, 7, 8, 19])}
    plain = hash_engine()
    for name, prompt in prompts.items():
        plain.add(hash_sequence(name, prompt, sampling))
    wanted = answers(run_all(plain))
    model = HashModel()
    engine = hash_engine(model=model, speculative_tokens=4, **settings)
    engine._propose = Oracle(wanted, right, wrong).propose
    for name, prompt in prompts.items():
        engine.add(hash_sequence(name, prompt, sampling))
    got = answers(run_all(engine))
    assert engine.block_pool.num_in_use == 0
    assert engine.load().drafted_tokens > 0
    return got, model, wanted


HOT = SamplingParams(max_tokens=24, temperature=1.2, top_p=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.2)


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=24, temperature=0.0), HOT], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("right", "wrong"), [(3, 0), (0, 3), (2, 2), (9, 0)])
def test_drafts_right_or_wrong_change_no_token(sampling: SamplingParams, right: int, wrong: int) -> None:
    got, model, wanted = with_oracle(sampling, right, wrong)
    assert got == wanted
    decodes = [batch for batch in model.batches if batch[0] == 4]
    if right == 9:
        assert len(decodes) <= 4, "24 tokens, ten of them a step"


@pytest.mark.parametrize("num_blocks", [11, 13, 16])
def test_drafts_take_no_block_from_anyone(num_blocks: int) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    got, _, wanted = with_oracle(sampling, 2, 2, num_blocks=num_blocks)
    assert got == wanted


def test_blocks_of_rejected_drafts_are_freed() -> None:
    engine = hash_engine(speculative_tokens=16)
    wrong = list(range(16))
    engine._propose = lambda sequence: (PromptLookup(16).propose(sequence), wrong)[1]
    engine.add(hash_sequence("r", random_prompt(5, 0)))
    outputs = engine.step()
    while engine.has_work:
        outputs += engine.step()
        engine.block_pool.check()
        for sequence in engine._scheduler.running:
            assert len(sequence.blocks.block_table) == -(-sequence.num_computed // BLOCK)
    assert answers(outputs) == {"r": true_answer(random_prompt(5, 0), 12)}


def test_an_answer_ends_where_it_ends_also_within_a_draft() -> None:
    prompt = random_prompt(6, 0)
    free = true_answer(prompt, 12)
    engine = hash_engine(speculative_tokens=16)
    engine._propose = Oracle({"r": free}, 11, 0).propose
    engine.add(hash_sequence("r", prompt, eos_ids=(free[5],)))
    outputs = run_all(engine)
    assert answers(outputs)["r"] == free[:6]
    assert outputs[-1].finish_reason is FinishReason.STOP
    engine.add(hash_sequence("r", prompt, SamplingParams(max_tokens=7, temperature=0.0)))
    outputs = run_all(engine)
    assert answers(outputs)["r"] == free[:7] and outputs[-1].finish_reason is FinishReason.LENGTH


def test_several_answers_speculate_over_shared_blocks() -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3)
    prompt = random_prompt(10, 0)
    plain = hash_engine()
    plain.add(hash_sequence("r", prompt, sampling))
    wanted = answers(run_all(plain))
    engine = hash_engine(speculative_tokens=4)
    engine._propose = Oracle(wanted, 2, 1).propose
    engine.add(hash_sequence("r", prompt, sampling))
    assert answers(run_all(engine)) == wanted
    assert engine.block_pool.num_in_use == 0


def share(tokens: list[int], temperature: float) -> np.ndarray:
    weights = np.exp(logits_after(running_checksums(tokens)).astype(np.float64) / temperature)
    return weights / weights.sum()


def chi_square(drawn: list[int], probabilities: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; tokens expected fewer than five times count as one."""
    counts = np.bincount(drawn, minlength=VOCAB).astype(float)
    common = probabilities * len(drawn) >= 5
    expected = np.append(probabilities[common], probabilities[~common].sum()) * len(drawn)
    observed = np.append(counts[common], counts[~common].sum())
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def test_drawn_tokens_have_the_models_distribution() -> None:
    """For the draft token, and for the one after an accepted one."""
    prompt, temperature = random_prompt(6, 0), 0.25
    first = int(share(prompt, temperature).argmax())
    draft_token = int(share([*prompt, first], temperature).argmax())
    engine = hash_engine(speculative_tokens=2, max_sequences=64, num_blocks=256)
    engine._propose = lambda sequence: (PromptLookup(2).propose(sequence), [draft_token])[1]
    outputs = []
    for seed in range(1500):
        engine.add(hash_sequence(f"r{seed}", prompt, SamplingParams(max_tokens=3, temperature=temperature, seed=seed)))
        if seed % 50 == 49:
            outputs += run_all(engine)
    drawn = [tokens for tokens in answers(outputs).values() if tokens[0] == first]
    after_draft = [tokens[2] for tokens in drawn if tokens[1] == draft_token]
    assert len(after_draft) > 50 and engine.load().accepted_tokens > 0
    for tokens, probabilities in (
        ([tokens[1] for tokens in drawn], share([*prompt, first], temperature)),
        (after_draft, share([*prompt, first, draft_token], temperature)),
    ):
        statistic, degrees = chi_square(tokens, probabilities)
        assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def test_what_came_before_is_looked_up() -> None:
    lookup = PromptLookup(5)
    sequence = hash_sequence("r", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    assert lookup.propose(sequence) == [4, 5, 6, 7]
    sequence.append(4)
    assert lookup.propose(sequence) == [5, 6, 7, 1]
    assert sequence.draft_memory is not None
    sequence.draft_memory.note_verified(4, 4, sequence.num_tokens)
    assert lookup.propose(sequence) == [5, 6, 7, 1, 2], "longer after a draft that came true"
    sequence.append(9)
    assert lookup.propose(sequence) == []


def test_drafts_that_are_rejected_become_rare() -> None:
    lookup = PromptLookup(4)
    sequence = hash_sequence("r", [1, 2, 3] * 5, SamplingParams(max_tokens=150, temperature=0.0))
    asked = 0
    for _ in range(40):
        if draft := lookup.propose(sequence):
            asked += 1
            assert sequence.draft_memory is not None
            sequence.draft_memory.note_verified(len(draft), 0, sequence.num_tokens)
        sequence.append([1, 2, 3][sequence.num_tokens % 3])
    assert 1 <= asked <= 5


def test_drafts_rest_where_they_do_not_pay_and_are_tried_again() -> None:
    payoff = DraftPayoff()
    payoff.note(2, 2, False, 10.0)
    for _ in range(DraftPayoff.MIN_STEPS):
        payoff.note(2, 3, True, 10.0)
    assert payoff.allows_drafts, "half a token more for the same time"
    for _ in range(DraftPayoff.MIN_STEPS * 3):
        payoff.note(2, 2, True, 20.0)
        if not payoff.allows_drafts:
            break
    assert not payoff.allows_drafts
    for _ in range(DraftPayoff.FIRST_PAUSE):
        payoff.note(2, 2, False, 10.0)
    assert payoff.allows_drafts


def test_a_size_without_a_measure_gets_a_step_without_drafts() -> None:
    payoff = DraftPayoff()
    payoff.note(1, 2, True, 10.0)
    assert not payoff.allows_drafts
    payoff.note(1, 1, False, 8.0)
    for _ in range(DraftPayoff.MAX_AGE - 1):
        assert payoff.allows_drafts
        payoff.note(1, 2, True, 10.0)
    payoff.note(1, 2, True, 10.0)
    assert not payoff.allows_drafts, "the measure is old"
    payoff.note(1, 1, False, 8.0)
    assert payoff.allows_drafts


class Slow(Oracle):
    """Proposes every time and is always right, but takes much longer than a step."""

    def propose(self, sequence: Any) -> list[int]:
        draft = super().propose(sequence)
        time.sleep(0.02)
        return draft


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_drafter_that_takes_longer_than_it_saves_rests(num_sequences: int) -> None:
    prompts = {f"r{i}": random_prompt(5, i) for i in range(num_sequences)}
    whole = {name: true_answer(prompt, 60) for name, prompt in prompts.items()}
    engine = hash_engine(speculative_tokens=1, num_blocks=128)
    engine._propose = engine._costs.timed(Slow(whole, right=1, wrong=0).propose)
    for name, prompt in prompts.items():
        engine.add(hash_sequence(name, prompt, SamplingParams(max_tokens=60, temperature=0.0)))
    assert answers(run_all(engine)) == whole
    assert num_sequences <= engine.load().drafted_tokens <= num_sequences * (DraftPayoff.MIN_STEPS + 2)
