"""A request's state: where it continues, what it has sent, and when it has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conductor.api import Delta, InferenceRequest
from conductor.dispatch.lifecycle import RequestState
from conductor.dispatch.request_progress import RequestProgress
from conductor.dispatch.retry import Failure
from mooncake.sampling import BeamSearch, SamplingParams
from mooncake.types import FinishReason, PrefillReport, SampledToken

EOS = 1


def progress(prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> RequestProgress:
    tokens = np.array(prompt, dtype=np.uint32)
    return RequestProgress.begin(
        InferenceRequest("r", tokens, SamplingParams(**sampling), deadline=60.0), 0.0, max_retries=1
    )


def delta(first: int, *token_ids: int, choice: int = 0, reason: FinishReason | None = None) -> Delta:
    tokens = tuple(SampledToken(first + at, token_id) for at, token_id in enumerate(token_ids))
    return Delta(tokens, reason, choice=choice)


def test_a_retry_continues_after_the_tokens_the_client_has() -> None:
    request = progress(max_tokens=8)
    assert request.tokens is request.request.tokens
    request.add(delta(0, 30))
    request.add(delta(1, 31, 32))
    assert request.tokens.tolist() == [5, 6, 7, 30, 31, 32]
    assert request.num_kept == 3


def test_a_request_is_new_until_an_attempt_has_failed_or_a_token_was_sent() -> None:
    sent, failed = progress(), progress()
    assert sent.is_new
    sent.add(delta(0, 30))
    assert not sent.is_new
    assert failed.retries.learn(Failure(frozenset({1, 11}), lost=frozenset({11}), was_never_accepted=True))
    assert failed.retries.count == 0
    assert not failed.is_new


def test_a_beam_search_starts_over() -> None:
    search = progress(n=2, temperature=0.0, beam_search=BeamSearch())
    search.add(delta(0, 30))
    assert search.num_kept == 0
    assert search.tokens.tolist() == [5, 6, 7]


def test_the_first_token_of_each_attempt_moves_the_state_to_streaming() -> None:
    request = progress()
    request.lifecycle.move(RequestState.PLACED)
    request.add(delta(0, 30))
    request.add(delta(1, 31))
    assert request.lifecycle.state is RequestState.STREAMING
    request.lifecycle.move(RequestState.PLACED)
    request.add(delta(2, reason=FinishReason.STOP))
    assert request.lifecycle.state is RequestState.PLACED, "a finish reason alone is no token"
    assert request.is_complete


def test_an_answer_that_lost_only_its_finish_reason_is_complete() -> None:
    request = progress(max_tokens=3, min_tokens=1)
    request.add(delta(0, EOS))
    assert request.missing_finish_reason([EOS]) is None, "too short to end, here as on the nodes"
    request.add(delta(1, EOS))
    assert request.missing_finish_reason([EOS]) is FinishReason.STOP
    request.add(delta(2, 30))
    assert request.missing_finish_reason([EOS]) is FinishReason.LENGTH


def test_the_missing_finish_reason_follows_the_stop_tokens_of_the_request() -> None:
    for sampling, reason in (
        ({"stop_token_ids": (30,)}, FinishReason.STOP),
        ({"stop_token_ids": (30,), "ignore_eos": True}, FinishReason.STOP),
        ({}, None),
    ):
        request = progress(**sampling)
        assert request.missing_finish_reason([EOS]) is None
        request.add(delta(0, 30))
        assert request.missing_finish_reason([EOS]) is reason
    ignoring = progress(ignore_eos=True)
    ignoring.add(delta(0, EOS))
    assert ignoring.missing_finish_reason([EOS]) is None


def test_one_of_several_answers_continues_with_its_own_seed_and_retries() -> None:
    whole = progress(n=3, seed=7)
    whole.add(delta(0, 30, choice=1))
    whole.add(delta(1, 31, choice=1))
    whole.add(delta(0, 40, choice=2))
    whole.retries.learn(Failure(frozenset({1, 11})))
    whole.summary = replace(whole.summary, prefill_node="p0")

    part = whole.for_choice(1)
    assert (part.request.request_id, part.request.sampling.n, part.request.sampling.seed) == ("r#1", 1, 8)
    assert part.tokens.tolist() == [5, 6, 7, 30, 31]
    assert part.summary.prefill_node == "p0"
    assert part.has_report, "the prompt was counted with the first attempt"

    part.add(delta(2, 32, reason=FinishReason.LENGTH))
    assert part.is_complete and not whole.is_complete
    assert whole.emitted == [[], [30, 31], [40]]
    assert not part.retries.learn(Failure(frozenset({2, 12})))
    assert whole.retries.count == 1, "what a part learns is its own"


def test_the_first_report_is_kept_in_terms_of_the_original_prompt() -> None:
    """A retry's prompt includes the answer so far, and hits blocks that the request itself has stored."""
    request = progress(prompt=tuple(range(2, 12)))
    sent = request.add_report(PrefillReport(prompt_tokens=14, local_cached_tokens=8, pool_cached_tokens=5))
    assert (sent.prompt_tokens, sent.local_cached_tokens, sent.pool_cached_tokens) == (10, 8, 2)
    assert request.summary.report == sent
    assert request.has_report
    sent = request.add_report(PrefillReport(prompt_tokens=14, local_cached_tokens=4, blended_tokens=9))
    assert (sent.local_cached_tokens, sent.blended_tokens) == (4, 6)
