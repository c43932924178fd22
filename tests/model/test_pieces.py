"""How a step is cut for a pipeline, and its predicted time. Pure arithmetic."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.model.parallel.pieces import (
    LEAST_TOKENS,
    CostFit,
    PieceCost,
    Span,
    cut_spans,
    equal_cost,
    equal_length,
    fastest,
    guessed_cost,
    predicted_ms,
    timetable,
)
from mooncake.model_config import ModelConfig

COST = PieceCost(piece_ms=0.0, token_ms=1.0, square_ms=1e-3)
spans_of_any_step = st.lists(st.builds(Span, st.integers(0, 5000), st.integers(1, 700)), min_size=1, max_size=6)


def test_pieces_of_a_prompt_cost_the_same_and_so_get_shorter() -> None:
    prompt = [Span(0, 4096)]
    cuts = equal_cost(prompt, [COST, COST], 8)
    lengths = [end - begin for begin, end in pairwise(cuts)]
    costs = [COST.of(piece) for piece in cut_spans(prompt, cuts)]
    assert cuts[0] == 0 and cuts[-1] == 4096 and len(lengths) == 8
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 2 * lengths[-1]
    token_at_the_end_ms = COST.token_ms + 2 * 4096 * COST.square_ms
    assert max(costs) - min(costs) < 1.01 * token_at_the_end_ms, "off by more than a token"


@given(spans_of_any_step, st.integers(1, 40))
def test_cuts_cover_a_step_in_order_and_no_piece_costs_more_than_its_share(spans: list[Span], count: int) -> None:
    cuts = equal_cost(spans, [COST], count)
    pieces = cut_spans(spans, cuts)
    assert cuts == sorted(set(cuts)) and len(pieces) <= count
    assert [sum(span.count for span in piece) for piece in pieces] == [end - begin for begin, end in pairwise(cuts)]
    whole = COST.of(spans)
    assert sum(COST.of(piece) for piece in pieces) == pytest.approx(whole)
    a_token_ms = COST.token_ms + 2 * 5700 * COST.square_ms
    assert all(COST.of(piece) <= whole / count + a_token_ms for piece in pieces)
    # each token is where it was: the pieces of a sequence follow each other
    ends = {index: span.first for index, span in enumerate(spans)}
    flat = iter([part for piece in pieces for part in piece])
    for index, span in enumerate(spans):
        while ends[index] < span.first + span.count:
            part = next(flat)
            assert part.first == ends[index]
            ends[index] += part.count
    assert next(flat, None) is None


def test_a_cached_prefix_counts_as_context() -> None:
    """As in SGLang's rule: runtime(L + x) - runtime(L) = runtime of the first piece."""
    cuts = equal_cost([Span(10_000, 1000)], [COST], 2)
    assert cuts[1] == pytest.approx(500, abs=15) and cuts[1] > 500
    without_attention = PieceCost(5.0, 1.0, 0.0)
    assert equal_cost([Span(10_000, 1000)], [without_attention], 4) == [0, 250, 500, 750, 1000]
    assert equal_length([Span(10_000, 600), Span(0, 400)], 4) == [0, 250, 500, 750, 1000]


def test_a_timetable_is_that_of_a_pipeline() -> None:
    """k equal pieces on p stages take T (k + p - 1) / (k p); a slow piece delays those after it."""
    table = timetable(np.full((2, 8), 10.0))
    assert table[-1, -1, 1] == 90
    table = timetable(np.array([[1.0, 5.0, 1.0], [1.0, 1.0, 1.0]]))
    assert table[1].tolist() == [[1, 2], [6, 7], [7, 8]]


def test_as_many_pieces_as_end_first() -> None:
    long, decodes = [Span(0, 4096)], [Span(100 * place, 1) for place in range(4 * LEAST_TOKENS)]
    dear = [PieceCost(100.0, 0.1, 0.0)] * 2
    cheap = [PieceCost(0.1, 0.1, 0.0)] * 2
    assert fastest(decodes, cheap) == [0, len(decodes)], "the weights would be read once a piece"
    assert fastest([Span(0, LEAST_TOKENS)], cheap) == [0, LEAST_TOKENS]
    assert len(fastest(long, dear)) - 1 < len(fastest(long, cheap)) - 1
    for costs in (dear, cheap):
        chosen = fastest(long, costs)
        ends = {n: timetable(predicted_ms(long, equal_cost(long, costs, n), costs))[-1, -1, 1] for n in (1, 4, 16)}
        assert timetable(predicted_ms(long, chosen, costs))[-1, -1, 1] <= min(ends.values())


CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_model_len=8192,
    rms_eps=1e-5,
    rope_theta=1e5,
    rope_scaling=None,
    tie_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    sliding_window=None,
    bos_id=1,
    eos_ids=(2,),
)


def test_a_guess_is_the_operations_of_products_and_attention() -> None:
    """SmolLM2: 212 M operations per token for products, 34.6 k per pair of tokens for attention."""
    cost = guessed_cost(CONFIG, 30, threads=1)
    assert cost.square_ms / cost.token_ms == pytest.approx(34.56e3 / 212.3e6, rel=0.01)


def test_costs_are_learnt_from_what_pieces_took() -> None:
    real = PieceCost(4.0, 0.9, 2.5e-4)
    fit = CostFit(guessed_cost(CONFIG, 15, threads=1))
    random = np.random.default_rng(0)
    for _ in range(12):
        pieces = cut_spans([Span(0, 4096)], equal_cost([Span(0, 4096)], [fit.cost], 8))
        fit.note(pieces, [real.of(piece) * random.normal(1, 0.03) for piece in pieces])
    for piece in ([Span(0, 1000)], [Span(3500, 300)], [Span(0, 64), Span(500, 64)]):
        assert fit.cost.of(piece) == pytest.approx(real.of(piece), rel=0.1)
    known = fit.cost
    fit.note([[Span(300, 1)] * 200], [50.0])
    assert fit.cost == known, "a decode step is no measure of a prompt's pieces"


def test_what_short_prompts_do_not_tell_stays_in_proportion() -> None:
    """If products turn out to be four times as slow as assumed, attention is assumed to be, too."""
    guess = guessed_cost(CONFIG, 15, threads=1)
    fit = CostFit(guess)
    for length in (40, 64, 100, 80):
        fit.note([[Span(0, length)]], [4 * guess.of([Span(0, length)])])
    assert fit.cost.of([Span(0, 4096)]) == pytest.approx(4 * guess.of([Span(0, 4096)]), rel=0.1)
    assert min(fit.cost.piece_ms, fit.cost.token_ms, fit.cost.square_ms) >= 0
