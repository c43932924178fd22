"""How many prompt tokens fit into a step beside decodes: measured, not guessed."""

from __future__ import annotations

import pytest

from mooncake.engine.step_curve import StepCurve
from tests.engine.hash_model import HashModel, answers, hash_engine, hash_sequence, random_prompt, run_all, true_answer


def test_the_budget_is_what_the_limit_leaves() -> None:
    curve = StepCurve(limit_ms=100.0, block_tokens=16, most_tokens=512)
    assert curve.budget(0) == 512, "nobody waits"
    assert curve.budget(4) == 16, "nothing is known yet"
    for _ in range(30):
        curve.note(4, 0, 20.0)
        curve.note(4, 160, 20.0 + 160 * 0.5)
    assert curve.budget(4) == 160 // 16 * 16
    assert curve.budget(0) == 512
    assert curve.budget(5) == curve.budget(4), "the nearest that was measured"


@pytest.mark.parametrize("limit_ms", [1.0, 20.0])
def test_a_limit_that_nothing_fits_into_still_gets_on(limit_ms: float) -> None:
    curve = StepCurve(limit_ms=limit_ms, block_tokens=16, most_tokens=512)
    curve.note(4, 0, 20.0)
    curve.note(4, 160, 100.0)
    assert curve.budget(4) == 16


def test_slower_steps_make_smaller_chunks() -> None:
    curve = StepCurve(limit_ms=100.0, block_tokens=16, most_tokens=512)
    curve.note(2, 0, 20.0)
    budgets = []
    for token_ms in (0.2, 0.4, 0.8):  # a longer context makes each token dearer
        for _ in range(20):
            curve.note(2, 64, 20.0 + 64 * token_ms)
        budgets.append(curve.budget(2))
    assert budgets == sorted(budgets, reverse=True) and budgets[0] > budgets[-1]


def test_a_limit_changes_no_token_and_lets_nobody_wait_for_a_whole_prompt() -> None:
    model = HashModel()
    engine = hash_engine(model=model, chunk_tokens=64)
    limited = hash_engine(chunk_tokens=64)
    assert engine._costs.curve is None and limited._costs.curve is None
    curve = StepCurve(limit_ms=10.0, block_tokens=4, most_tokens=64)
    engine._costs.curve = curve
    engine.add(hash_sequence("short", random_prompt(4, 0)))
    outputs = [output for _ in range(3) for output in engine.step()]
    curve.note(1, 0, 2.0)
    curve.note(1, 8, 10.0)  # a millisecond a token: eight fit
    engine.add(hash_sequence("long", random_prompt(50, 1)))
    before = len(model.batches)
    outputs += run_all(engine)
    mixed = [tokens for sequences, tokens in model.batches[before:] if tokens > sequences]
    assert mixed and max(mixed) <= 64
    assert answers(outputs) == {
        "short": true_answer(random_prompt(4, 0), 12),
        "long": true_answer(random_prompt(50, 1), 12),
    }
