"""A request's state: where it continues, what it has sent, and when it has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conductor.api import Delta, InferenceRequest
from conductor.journey import Journey
from conductor.lifecycle import RequestState
from conductor.retry import Failure
from mooncake.types import BeamSearch, FinishReason, PrefillReport, SampledToken, SamplingParams

EOS = 1


def journey(prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> Journey:
    tokens = np.array(prompt, dtype=np.uint32)
    return Journey.begin(InferenceRequest("r", tokens, SamplingParams(**sampling), deadline=60.0), 0.0, max_retries=1)


def said(first: int, *token_ids: int, choice: int = 0, reason: FinishReason | None = None) -> Delta:
    tokens = tuple(SampledToken(first + at, token_id) for at, token_id in enumerate(token_ids))
    return Delta(tokens, reason, choice=choice)


def test_another_attempt_goes_on_from_what_the_client_has() -> None:
    going = journey(max_tokens=8)
    assert going.tokens is going.request.tokens
    going.take(said(0, 30))
    going.take(said(1, 31, 32))
    assert going.tokens.tolist() == [5, 6, 7, 30, 31, 32]
    assert going.num_kept == 3


def test_a_request_is_new_until_an_attempt_has_failed_or_told_something() -> None:
    told, failed = journey(), journey()
    assert told.is_new
    told.take(said(0, 30))
    assert not told.is_new
    assert failed.retries.learn(Failure(frozenset({1, 11}), lost=frozenset({11}), met_nobody=True))
    assert failed.retries.count == 0
    assert not failed.is_new


def test_a_beam_search_starts_over() -> None:
    search = journey(n=2, temperature=0.0, beam_search=BeamSearch())
    search.take(said(0, 30))
    assert search.num_kept == 0
    assert search.tokens.tolist() == [5, 6, 7]


def test_tokens_that_are_told_move_the_state_once_an_attempt() -> None:
    going = journey()
    going.lifecycle.move(RequestState.PLACED)
    going.take(said(0, 30))
    going.take(said(1, 31))
    assert going.lifecycle.state is RequestState.STREAMING
    going.lifecycle.move(RequestState.PLACED)
    going.take(said(2, reason=FinishReason.STOP))
    assert going.lifecycle.state is RequestState.PLACED, "the last word alone is no token"
    assert going.is_whole


def test_an_answer_whose_last_token_was_told_is_complete_without_the_word() -> None:
    going = journey(max_tokens=3, min_tokens=1)
    going.take(said(0, EOS))
    assert going.ended_by([EOS]) is None, "too short to end, here as on the nodes"
    going.take(said(1, EOS))
    assert going.ended_by([EOS]) is FinishReason.STOP
    going.take(said(2, 30))
    assert going.ended_by([EOS]) is FinishReason.LENGTH


def test_what_ends_an_answer_is_what_the_request_says() -> None:
    for sampling, reason in (
        ({"stop_token_ids": (30,)}, FinishReason.STOP),
        ({"stop_token_ids": (30,), "ignore_eos": True}, FinishReason.STOP),
        ({}, None),
    ):
        going = journey(**sampling)
        assert going.ended_by([EOS]) is None
        going.take(said(0, 30))
        assert going.ended_by([EOS]) is reason
    deaf = journey(ignore_eos=True)
    deaf.take(said(0, EOS))
    assert deaf.ended_by([EOS]) is None


def test_one_of_several_answers_goes_on_alone_with_its_own_seed_and_tries() -> None:
    whole = journey(n=3, seed=7)
    whole.take(said(0, 30, choice=1))
    whole.take(said(1, 31, choice=1))
    whole.take(said(0, 40, choice=2))
    whole.retries.learn(Failure(frozenset({1, 11})))
    whole.summary = replace(whole.summary, prefill_node="p0")

    part = whole.part(1)
    assert (part.request.request_id, part.request.sampling.n, part.request.sampling.seed) == ("r#1", 1, 8)
    assert part.tokens.tolist() == [5, 6, 7, 30, 31]
    assert part.summary.prefill_node == "p0"
    assert part.has_report, "the prompt was counted with the first attempt"

    part.take(said(2, 32, reason=FinishReason.LENGTH))
    assert part.is_whole and not whole.is_whole
    assert whole.emitted == [[], [30, 31], [40]]
    assert not part.retries.learn(Failure(frozenset({2, 12})))
    assert whole.retries.count == 1, "what a part learns is its own"


def test_a_report_is_told_of_the_prompt_as_it_was_asked() -> None:
    """A retry's prompt includes the answer so far, and hits blocks that the request itself has stored."""
    going = journey(prompt=tuple(range(2, 12)))
    told = going.take_report(PrefillReport(prompt_tokens=14, local_cached_tokens=8, pool_cached_tokens=5))
    assert (told.prompt_tokens, told.local_cached_tokens, told.pool_cached_tokens) == (10, 8, 2)
    assert going.summary.report == told
    assert going.has_report
    told = going.take_report(PrefillReport(prompt_tokens=14, local_cached_tokens=4, blended_tokens=9))
    assert (told.local_cached_tokens, told.blended_tokens) == (4, 6)
