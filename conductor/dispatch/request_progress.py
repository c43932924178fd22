"""Progress of one request, over all its attempts: the tokens the client has, where a retry continues, the summary.

Pure. ``lifecycle`` is the table of its states, ``retry`` keeps what its failures have taught, ``dispatcher`` runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from conductor.api import Delta, InferenceRequest, RequestSummary
from conductor.dispatch.lifecycle import Lifecycle, RequestState, request_lifecycle
from conductor.dispatch.retry import Retries
from conductor.placement.scheduler import Placement
from mooncake.errors import MooncakeError
from mooncake.repetition import Repetitions
from mooncake.types import FinishReason, PrefillReport, TokenIds


@dataclass(slots=True)
class RequestProgress:
    """One owner: the dispatcher."""

    request: InferenceRequest
    started_at: float  # s
    lifecycle: Lifecycle[RequestState]
    retries: Retries
    emitted: list[list[int]]  # by answer: token ids that the client has received
    ended: set[int] = field(default_factory=set)  # answers that are complete or no longer wanted
    summary: RequestSummary = field(default_factory=RequestSummary)
    has_report: bool = False  # a whole one
    early_report: PrefillReport | None = None  # the last, as it came
    has_prompt_logprobs: bool = False
    error: MooncakeError | None = None  # the last attempt's

    @classmethod
    def begin(cls, request: InferenceRequest, now: float, max_retries: int) -> Self:
        answers: list[list[int]] = [[] for _ in range(request.sampling.num_answers)]
        return cls(request, now, request_lifecycle(request.request_id), Retries(max_retries), answers)

    def for_choice(self, choice: int) -> Self:
        """One of several answers as a request of its own. Its prompt has already been counted and reported."""
        request = replace(
            self.request,
            request_id=f"{self.request.request_id}#{choice}",
            sampling=self.request.sampling.for_answer(choice),
        )
        return type(self)(
            request,
            self.started_at,
            request_lifecycle(request.request_id),
            replace(self.retries),
            emitted=[list(self.emitted[choice])],
            summary=self.summary,
            has_report=True,
            has_prompt_logprobs=self.has_prompt_logprobs,
            error=self.error,
        )

    @property
    def is_new(self) -> bool:
        """Whether no attempt has failed and no token was sent. Otherwise it was admitted and counted before, and is
        no longer refused because of a mere prediction."""
        return not (self.retries.has_failed or self.num_emitted)

    @property
    def is_complete(self) -> bool:
        return len(self.ended) == len(self.emitted)

    @property
    def is_beam_search(self) -> bool:
        """A beam search emits nothing before its end, so a retry always starts over."""
        return self.request.sampling.beam_search is not None

    @property
    def num_emitted(self) -> int:
        """Tokens of the longest answer."""
        return max(map(len, self.emitted))

    @property
    def num_kept(self) -> int:
        """Tokens of the answer that a retry continues from."""
        return 0 if self.is_beam_search else self.num_emitted

    @property
    def tokens(self) -> TokenIds:
        """Prompt tokens of the next attempt: several answers only start together."""
        if not self.num_kept:
            return self.request.tokens
        return np.concatenate([self.request.tokens, np.array(self.emitted[0], dtype=np.uint32)])

    def placed(self, placement: Placement) -> None:
        """An attempt starts there."""
        self.lifecycle.move(RequestState.PLACED)
        self.summary = replace(
            self.summary,
            prefill_node=placement.prefill.node_id,
            decode_node=placement.decode.node_id if placement.decode else "",
            retries=self.retries.count,
            predicted_ttft_ms=self.summary.predicted_ttft_ms or placement.predicted_ttft_ms,
        )

    def add(self, delta: Delta) -> None:
        """A delta is about to go to the client."""
        if delta.tokens:
            if self.lifecycle.state is RequestState.PLACED:
                self.lifecycle.move(RequestState.STREAMING)
            self.emitted[delta.choice] += [token.token_id for token in delta.tokens]
        self.has_prompt_logprobs |= delta.prompt_logprobs is not None
        if delta.finish_reason is not None:
            self.ended.add(delta.choice)

    def add_report(self, report: PrefillReport, is_early: bool = False) -> PrefillReport:
        """Keep the first whole report: a retry would also find what this request itself has stored. The numbers are
        those of the original prompt, which may be shorter than what was computed."""
        if is_early:
            self.early_report = report
        prompt = len(self.request.tokens)
        local = min(report.local_cached_tokens, prompt)
        pool = min(report.pool_cached_tokens, prompt - local)
        blended = min(report.blended_tokens, prompt - local - pool)
        report = replace(
            report,
            prompt_tokens=prompt,
            local_cached_tokens=local,
            pool_cached_tokens=pool,
            blended_tokens=blended,
        )
        self.summary, self.has_report = replace(self.summary, report=report), not is_early
        return report

    def missing_finish_reason(self, eos_ids: Iterable[int]) -> FinishReason | None:
        """The finish reason of its single answer if that is complete, and the failed attempt lost only the reason."""
        sampling, emitted = self.request.sampling, self.emitted[0]
        stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        if emitted and len(emitted) > sampling.min_tokens and emitted[-1] in stop_ids:
            return FinishReason.STOP
        looping = sampling.repetition_detection
        if (
            looping is not None
            and len(emitted) >= sampling.min_tokens
            and Repetitions(looping, np.array(emitted, np.uint32)).are_enough
        ):
            return FinishReason.REPETITION
        return FinishReason.LENGTH if len(emitted) >= sampling.max_tokens else None
