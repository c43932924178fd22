"""Answers while they are generated: deltas of tokens become text, counts and times, the same for every API.

Pure: no I/O and no clock of its own. It knows neither wire formats nor where a request runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from conductor.api import Delta, InferenceRequest, RequestSummary
from conductor.ingress.parsers.parts import OutputParser, Part, PlainParser, merged
from conductor.ingress.trace import CallTrace
from mooncake.errors import Cancelled, InternalError
from mooncake.pooling import Vector
from mooncake.sampling import SamplingParams
from mooncake.text.detokenizer import TextAssembler, TextPiece
from mooncake.text.tokenizer import Tokenizer
from mooncake.types import FinishReason, SampledToken, Usage


@dataclass(frozen=True, slots=True)
class Job:
    """One checked request. ``arrived_at`` is on the monotonic clock; times count from there, tokenizing included."""

    request: InferenceRequest
    stop: tuple[str, ...]
    arrived_at: float
    include_stop: bool = False  # whether the stop string or token is part of the text
    skip_special: bool = True  # whether control tokens are left out of the text
    model: str = ""  # the client's name for the model or an adapter; "": the model
    kept: frozenset[str] = frozenset()  # control tokens that stay, because ``parser`` needs to see them
    parser: Callable[[], OutputParser] = PlainParser  # makes one per answer
    trace: CallTrace | None = None  # of the call that it belongs to, if that is traced


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds on one monotonic clock, as ingress measured them."""

    ttft_ms: float
    mean_tbt_ms: float  # plain mean of the token gaps
    tail_tbt_ms: float  # mean of the longest tenth of the gaps (FAST'25)
    total_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    finish_reason: FinishReason
    usage: Usage
    latency: Latency
    summary: RequestSummary
    stop_reason: str | int | None = None  # the stop string or token id that ended it, if one of the request's did


class Piece(msgspec.Struct, frozen=True):
    """What is new in answer number ``choice``. Text may lag behind the tokens; only an answer's last piece has an
    outcome. ``parts`` are the parsed text, and may lag behind too."""

    tokens: tuple[SampledToken, ...]
    text: str
    outcome: Outcome | None = None
    choice: int = 0
    prompt_logprobs: Collection[SampledToken] | None = None  # before any token: all prompt tokens but the first
    parts: tuple[Part, ...] = ()
    is_reasoning: tuple[bool, ...] = ()  # for each token, its tags included
    pooled: Vector | None = None  # in place of an answer, with the outcome

    @property
    def num_reasoning(self) -> int:
        return sum(self.is_reasoning)


class Observer(Protocol):
    """Counts what passes. Called on the event loop; must not block or raise."""

    def first_token(self, ttft_s: float) -> None: ...

    def token_gap(self, gap_s: float) -> None: ...

    def finished(self, outcome: Outcome, prompt_counts: bool) -> None:
        """An answer is complete. The prompt and its statistics count only with the first of its answers."""

    def answered(self, sampling: SamplingParams, longest: int) -> None:
        """All answers of a request are complete; the longest has so many tokens."""

    def failed(self, code: str) -> None: ...


class Stopwatch:
    """Times of one answer's tokens, all on one clock (seconds)."""

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._last_at = arrived_at
        self.ttft_s: float | None = None
        self.gaps_s: list[float] = []

    def token(self, now: float) -> None:
        if self.ttft_s is None:
            self.ttft_s = now - self._arrived_at
        else:
            self.gaps_s.append(now - self._last_at)
        self._last_at = now

    def read(self, now: float) -> Latency:
        gaps = self.gaps_s
        slowest = sorted(gaps, reverse=True)[: math.ceil(len(gaps) / 10)]
        return Latency(
            ttft_ms=1e3 * (self.ttft_s or 0.0),
            mean_tbt_ms=1e3 * sum(gaps) / len(gaps) if gaps else 0.0,
            tail_tbt_ms=1e3 * sum(slowest) / len(slowest) if slowest else 0.0,
            total_ms=1e3 * (now - self._arrived_at),
        )


@dataclass(slots=True)
class _Increment:
    """What one delta adds. The parser gets the text token by token, so the result does not depend on how tokens are
    batched."""

    parser: OutputParser
    text: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    is_reasoning: list[bool] = field(default_factory=list)

    def take_token(self, text: str) -> None:
        was_reasoning = self.parser.is_reasoning
        self._push(text, is_last=False)
        self.is_reasoning.append(was_reasoning or self.parser.is_reasoning)

    def take_end(self, text: str) -> None:
        self._push(text, is_last=True)

    def _push(self, text: str, is_last: bool) -> None:
        self.text.append(text)
        self.parts += self.parser.push(text, is_last)


class Answer:
    """Deltas of one answer in, pieces out. No I/O, no clock of its own."""

    def __init__(self, job: Job, choice: int, tokenizer: Tokenizer, observer: Observer) -> None:
        sampling = job.request.sampling
        self._job = job
        self._choice = choice
        self._observer = observer
        self._assembler = TextAssembler(
            tokenizer, job.stop, job.include_stop, job.skip_special, sampling.min_tokens, job.kept
        )
        self._parser = job.parser()
        self._end_ids = frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else tokenizer.eos_ids)))
        self._stop_ids = frozenset(sampling.stop_token_ids) - (
            frozenset() if sampling.ignore_eos else {*tokenizer.eos_ids}
        )
        self._last_id = -1
        self._watch = Stopwatch(job.arrived_at)
        self.summary = RequestSummary()  # the latest of the request's
        self.num_tokens = 0
        self.is_complete = False

    def take(self, delta: Delta, now: float) -> Piece:
        """Raises InternalError when the core lost a token, Cancelled when it gave the answer up."""
        if delta.finish_reason is FinishReason.ABORT:
            raise Cancelled("the request was cancelled")
        tokens: list[SampledToken] = []
        increment = _Increment(self._parser)
        stopped = False
        for token in delta.tokens:
            self._count(token, now)
            tokens.append(token)
            is_text = self._job.include_stop or token.token_id not in self._end_ids
            piece = self._assembler.push(token.token_id) if is_text else TextPiece("")
            increment.take_token(piece.text)
            if stopped := piece.stopped:
                break
        reason = FinishReason.STOP if stopped else delta.finish_reason
        outcome = None
        if reason is not None:
            last = TextPiece("") if stopped else self._assembler.flush()
            increment.take_end(last.text)
            outcome = self._complete(FinishReason.STOP if last.stopped else reason, now)
        scores = None if outcome else delta.prompt_logprobs
        text, parts = "".join(increment.text), tuple(merged(increment.parts))
        return Piece(
            tuple(tokens), text, outcome, self._choice, scores, parts, tuple(increment.is_reasoning), delta.pooled
        )

    def _count(self, token: SampledToken, now: float) -> None:
        if token.index != self.num_tokens:
            raise InternalError(f"token {token.index} came where token {self.num_tokens} was due")
        self.num_tokens += 1
        self._last_id = token.token_id
        self._watch.token(now)
        if self.num_tokens == 1:
            self._observer.first_token(self._watch.ttft_s or 0.0)
        else:
            self._observer.token_gap(self._watch.gaps_s[-1])

    def _complete(self, reason: FinishReason, now: float) -> Outcome:
        self.is_complete = True
        usage = Usage(len(self._job.request.tokens), self.num_tokens, self.summary.report.cached_tokens)
        outcome = Outcome(reason, usage, self._watch.read(now), self.summary, self._stop_reason(reason))
        self._observer.finished(outcome, prompt_counts=self._choice == 0)
        return outcome

    def _stop_reason(self, reason: FinishReason) -> str | int | None:
        if self._assembler.stopped_by:
            return self._assembler.stopped_by
        if reason is FinishReason.REPETITION:
            return "repetition_detected"  # vLLM's word
        return self._last_id if reason is FinishReason.STOP and self._last_id in self._stop_ids else None


def joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        tuple(token for piece in pieces for token in piece.tokens),
        "".join(piece.text for piece in pieces),
        pieces[-1].outcome,
        prompt_logprobs=pieces[0].prompt_logprobs,
        parts=tuple(merged(part for piece in pieces for part in piece.parts)),
        is_reasoning=tuple(itertools.chain.from_iterable(piece.is_reasoning for piece in pieces)),
    )


def mean_logprob(answer: Piece) -> float:
    """OpenAI's ranking of answers: mean log-probability per token."""
    return sum(token.logprob.logprob for token in answer.tokens if token.logprob) / max(len(answer.tokens), 1)
