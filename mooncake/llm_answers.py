"""What ``mooncake.LLM`` returns, and how it comes together from an engine's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake.text.detokenizer import TextAssembler, TextPiece
from mooncake.types import FinishReason, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from mooncake.engine.engine import StepOutput
    from mooncake.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Answer:
    """``logprobs`` is parallel to ``token_ids``, and empty unless requested. ``stop_reason`` is the stop string, or
    the one of ``stop_token_ids``, that ended the answer."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float:
        return sum(token.logprob for token in self.logprobs)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result for one prompt: ``outputs`` has as many answers as requested, usually one."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV was cached
    outputs: list[Answer]
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob] | None = None  # if requested: of all prompt tokens but the first
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
    def logprobs(self) -> list[TokenLogprob]:
        return self.outputs[0].logprobs


class Draft:
    """The answers to one prompt while they are generated."""

    def __init__(
        self,
        sequence: Sequence,
        sampling: SamplingParams,
        assemblers: list[TextAssembler],
        stop_ids: frozenset[int],
        includes_stop: bool,
    ) -> None:
        """``stop_ids`` are the request's own."""
        self.sequence = sequence
        self._sampling = sampling
        self._answers = [DraftAnswer(assembler, stop_ids, includes_stop) for assembler in assemblers]
        self._prompt_logprobs: list[TokenLogprob] | None = None

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
        wants_logprobs = self._sampling.logprobs is not None
        outputs = [answer.answer(index, wants_logprobs) for index, answer in enumerate(answers)]
        prompt = self.sequence.tokens[: self.sequence.num_prompt].tolist()
        return Completion(len(prompt), self.sequence.num_cached_tokens, outputs, prompt, self._prompt_logprobs)


class DraftAnswer:
    def __init__(self, assembler: TextAssembler, stop_ids: frozenset[int], includes_stop: bool) -> None:
        self.finish_reason: FinishReason | None = None
        self._assembler = assembler
        self._stop_ids = stop_ids
        self._includes_stop = includes_stop
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def take(self, output: StepOutput) -> None:
        self._token_ids.append(output.token.token_id)
        if output.token.logprob is not None:
            self._logprobs.append(output.token.logprob)
        self.finish_reason = output.finish_reason
        if self._includes_stop or output.finish_reason is not FinishReason.STOP:  # else it is not part of the text
            self._add(self._assembler.push(output.token.token_id))
        if output.finish_reason is not None:
            self._add(self._assembler.flush())

    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self._logprobs) / max(len(self._logprobs), 1)

    def answer(self, index: int, wants_logprobs: bool) -> Answer:
        assert self.finish_reason is not None
        logprobs = self._logprobs if wants_logprobs else []
        return Answer(
            index,
            self._token_ids,
            "".join(self._text),
            self.finish_reason,
            logprobs,
            self._stop_reason(self.finish_reason),
        )

    def _stop_reason(self, reason: FinishReason) -> str | int | None:
        if self._assembler.stopped_by:
            return self._assembler.stopped_by
        last_id = self._token_ids[-1]
        return last_id if reason is FinishReason.STOP and last_id in self._stop_ids else None

    def _add(self, piece: TextPiece) -> None:
        self._text.append(piece.text)
        if piece.stopped:
            self.finish_reason = FinishReason.STOP
