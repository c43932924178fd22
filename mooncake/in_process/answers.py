"""What ``mooncake.LLM`` returns, and how it comes together from an engine's outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake.sampling import SamplingParams
from mooncake.text.detokenizer import TextAssembler, TextPiece
from mooncake.types import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from mooncake.engine.contract import StepOutput
    from mooncake.engine.sequence import Sequence
    from mooncake.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural-log probability at one place. ``rank`` counts all tokens, the most likely first, from 1."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]
"""At one place, by token id: the chosen token, then the most likely ones; vLLM's form."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``logprobs`` is parallel to ``token_ids``; None unless requested. ``stop_reason`` is the stop string, or the one
    of ``stop_token_ids``, that ended the answer. Without a ``finish_reason`` it goes on."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When something of a request happened, in seconds since 1970; its parts and vLLM's names of them. A time is None
    until then."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0  # of all its answers

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class Completion:
    """The result for one prompt: ``outputs`` has as many answers as requested, usually one."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV was cached
    outputs: list[Answer]
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None = None  # if requested: a place per prompt token, the first None
    prompt: str | None = None  # its text, with control tokens for a conversation; None if it was given as token ids
    metrics: RequestMetrics | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.outputs[0].logprobs

    @property
    def num_cached_tokens(self) -> int:
        """``cached_tokens`` by vLLM's name."""
        return self.cached_tokens

    @property
    def finished(self) -> bool:
        """Whether its answers are whole; an ``LLM`` returns no others."""
        return all(answer.finish_reason is not None for answer in self.outputs)


CompletionOutput = Answer  # by their names in vLLM, for annotations
RequestOutput = Completion


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Guessed by speculation so far, in all answers, and those of them that were right."""

    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One answer with the prompt before it, as in vLLM; ``logprobs`` and ``cum_logprob`` are the answer's."""

    tokens: list[int]
    text: str
    logprobs: list[Logprobs]
    cum_logprob: float
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams found for one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beams_of(found: Completion, tokenizer: Tokenizer, skips_special: bool) -> BeamSearchOutput:
    """The result of a search in vLLM's form."""
    sequences = []
    for answer in found.outputs:
        tokens = [*found.prompt_token_ids, *answer.token_ids]
        text = tokenizer.decode(tokens, skips_special)
        scores, total = answer.logprobs or [], answer.cumulative_logprob or 0.0
        sequences.append(BeamSearchSequence(tokens, text, scores, total, answer.finish_reason, answer.stop_reason))
    return BeamSearchOutput(sequences)


class Draft:
    """The answers to one prompt while they are generated."""

    def __init__(
        self,
        sequence: Sequence,
        sampling: SamplingParams,
        assemblers: list[TextAssembler | None],
        stop_ids: frozenset[int],
        includes_stop: bool,
        text_of: Callable[[int], str],
    ) -> None:
        """An answer without an assembler has no text. ``stop_ids`` are the request's own. ``text_of`` gives a token's
        text."""
        self.sequence = sequence
        self._sampling = sampling
        name = _Naming(text_of) if sampling.logprobs is not None else None
        self._answers = [DraftAnswer(assembler, stop_ids, includes_stop, name) for assembler in assemblers]
        self._prompt_logprobs: list[Logprobs | None] | None = None
        self._name = _Naming(text_of)
        self._times = Times()

    @property
    def is_complete(self) -> bool:
        return all(answer.finish_reason is not None for answer in self._answers)

    @property
    def is_ranked(self) -> bool:
        """Whether only complete answers tell which of them are the result."""
        return len(self._answers) > self._sampling.n

    def take(self, output: StepOutput) -> bool:
        """Returns whether it completes an answer."""
        if output.prompt_logprobs is not None:
            prompt = self._prompt()[1:]
            self._prompt_logprobs = [None, *map(self._name, prompt, output.prompt_logprobs)]
        answer = self._answers[output.choice]
        if answer.finish_reason is not None:
            return False
        answer.take(output)
        self._times.note(self.is_complete)
        return answer.finish_reason is not None

    def abort(self) -> None:
        """Its answers end as they are."""
        for answer in self._answers:
            answer.finish_reason = answer.finish_reason or FinishReason.ABORT
        self._times.finish()

    def completion(self) -> Completion:
        """What there is so far, but for what it was told to ``forget``."""
        answers = self._answers
        if self.is_ranked:
            answers = sorted(answers, key=DraftAnswer.mean_logprob, reverse=True)[: self._sampling.n]
        prompt = self._prompt()
        return Completion(
            self.sequence.request_id,
            len(prompt),
            self.sequence.num_cached_tokens,
            [answer.answer(index) for index, answer in enumerate(answers)],
            prompt,
            self._prompt_logprobs,
            metrics=self._times.metrics(sum(answer.num_tokens for answer in self._answers)),
        )

    def forget(self) -> None:
        """What has been told of the answers is no part of later ``completion``s."""
        for answer in self._answers:
            answer.forget()

    def _prompt(self) -> list[int]:
        prompt: list[int] = self.sequence.tokens[: self.sequence.num_prompt].tolist()
        return prompt


class Times:
    """When something of a request happened, by a clock that nobody sets."""

    def __init__(self) -> None:
        self._arrival_time, self._arrival_s = time.time(), time.monotonic()
        self._first: float | None = None
        self._last: float | None = None
        self._finished: float | None = None

    def note(self, ends: bool) -> None:
        """A token came."""
        self._last = self._now()
        self._first = self._first or self._last
        if ends:
            self._finished = self._last

    def finish(self) -> None:
        self._finished = self._finished or self._now()

    def metrics(self, num_tokens: int) -> RequestMetrics:
        return RequestMetrics(self._arrival_time, self._first, self._last, self._finished, num_tokens)

    def _now(self) -> float:
        return self._arrival_time + time.monotonic() - self._arrival_s


class DraftAnswer:
    def __init__(
        self,
        assembler: TextAssembler | None,
        stop_ids: frozenset[int],
        includes_stop: bool,
        name: _Naming | None,
    ) -> None:
        """``name`` makes log-probabilities of it, if they are wanted."""
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._sum_logprobs = 0.0
        self._last_id = -1
        self._assembler = assembler
        self._stop_ids = stop_ids
        self._includes_stop = includes_stop
        self._name = name

    def answer(self, index: int) -> Answer:
        return Answer(
            index,
            self._token_ids.copy(),
            "".join(self._text),
            self.finish_reason,
            None if self._name is None else self._logprobs.copy(),
            None if self._name is None else self._sum_logprobs,
            self._stop_reason,
        )

    @property
    def _stop_reason(self) -> str | int | None:
        if self._assembler is not None and self._assembler.stopped_by:
            return self._assembler.stopped_by
        return self._last_id if self.finish_reason is FinishReason.STOP and self._last_id in self._stop_ids else None

    def take(self, output: StepOutput) -> None:
        self.num_tokens += 1
        self._last_id = output.token.token_id
        self._token_ids.append(self._last_id)
        if output.token.logprob is not None:
            self._sum_logprobs += output.token.logprob.logprob
            if self._name is not None:
                self._logprobs.append(self._name(self._last_id, output.token.logprob))
        self.finish_reason = output.finish_reason
        if self._assembler is None:
            return
        if self._includes_stop or output.finish_reason is not FinishReason.STOP:  # else it is not part of the text
            self._add(self._assembler.push(output.token.token_id))
        if output.finish_reason is not None:
            self._add(self._assembler.flush())

    def forget(self) -> None:
        self._token_ids, self._text, self._logprobs = [], [], []

    def mean_logprob(self) -> float:
        return self._sum_logprobs / max(self.num_tokens, 1)

    def _add(self, piece: TextPiece) -> None:
        self._text.append(piece.text)
        if piece.stopped:
            self.finish_reason = FinishReason.STOP


class _Naming:
    """Log-probabilities of one place, with the texts of tokens."""

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of = text_of

    def __call__(self, token_id: int, score: TokenLogprob) -> Logprobs:
        ranks = {token_id: score.rank} | {other: rank for rank, (other, _) in enumerate(score.top, 1)}
        values = {token_id: score.logprob} | dict(score.top)
        return {each: Logprob(value, ranks[each], self._text_of(each)) for each, value in values.items()}
