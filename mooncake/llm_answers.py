"""What ``mooncake.LLM`` returns, and how it comes together from an engine's outputs."""

from __future__ import annotations

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
    of ``stop_token_ids``, that ended the answer."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None


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

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
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
        """Always: only whole answers are returned."""
        return True


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
    finish_reason: FinishReason
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
        self._answers = [DraftAnswer(assembler, stop_ids, includes_stop) for assembler in assemblers]
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._text_of = text_of

    @property
    def is_complete(self) -> bool:
        return all(answer.finish_reason is not None for answer in self._answers)

    def take(self, output: StepOutput) -> bool:
        """Returns whether it completes an answer."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = list(output.prompt_logprobs)
        answer = self._answers[output.choice]
        if answer.finish_reason is not None:
            return False
        answer.take(output)
        return answer.finish_reason is not None

    def completion(self) -> Completion:
        answers = self._answers
        if len(answers) > self._sampling.n:
            answers = sorted(answers, key=DraftAnswer.mean_logprob, reverse=True)[: self._sampling.n]
        prompt = self.sequence.tokens[: self.sequence.num_prompt].tolist()
        scored = None if self._prompt_logprobs is None else self._named(prompt[1:], self._prompt_logprobs)
        return Completion(
            self.sequence.request_id,
            len(prompt),
            self.sequence.num_cached_tokens,
            [self._answer(index, answer) for index, answer in enumerate(answers)],
            prompt,
            None if scored is None else [None, *scored],
        )

    def _answer(self, index: int, answer: DraftAnswer) -> Answer:
        assert answer.finish_reason is not None
        told = self._sampling.logprobs is not None
        return Answer(
            index,
            answer.token_ids,
            answer.text,
            answer.finish_reason,
            self._named(answer.token_ids, answer.logprobs) if told else None,
            sum(token.logprob for token in answer.logprobs) if told else None,
            answer.stop_reason,
        )

    def _named(self, token_ids: list[int], scores: list[TokenLogprob]) -> list[Logprobs]:
        return [self._at_one_place(*each) for each in zip(token_ids, scores, strict=True)]

    def _at_one_place(self, token_id: int, score: TokenLogprob) -> Logprobs:
        ranks = {token_id: score.rank} | {other: rank for rank, (other, _) in enumerate(score.top, 1)}
        values = {token_id: score.logprob} | dict(score.top)
        return {each: Logprob(value, ranks[each], self._text_of(each)) for each, value in values.items()}


class DraftAnswer:
    def __init__(self, assembler: TextAssembler | None, stop_ids: frozenset[int], includes_stop: bool) -> None:
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._assembler = assembler
        self._stop_ids = stop_ids
        self._includes_stop = includes_stop
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def stop_reason(self) -> str | int | None:
        """Once it is complete."""
        if self._assembler is not None and self._assembler.stopped_by:
            return self._assembler.stopped_by
        last_id = self.token_ids[-1]
        return last_id if self.finish_reason is FinishReason.STOP and last_id in self._stop_ids else None

    def take(self, output: StepOutput) -> None:
        self.token_ids.append(output.token.token_id)
        if output.token.logprob is not None:
            self.logprobs.append(output.token.logprob)
        self.finish_reason = output.finish_reason
        if self._assembler is None:
            return
        if self._includes_stop or output.finish_reason is not FinishReason.STOP:  # else it is not part of the text
            self._add(self._assembler.push(output.token.token_id))
        if output.finish_reason is not None:
            self._add(self._assembler.flush())

    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.logprobs) / max(len(self.logprobs), 1)

    def _add(self, piece: TextPiece) -> None:
        self._text.append(piece.text)
        if piece.stopped:
            self.finish_reason = FinishReason.STOP
