"""Writes one choice of an OpenAI answer: pieces in; chunks of a stream, or a whole choice, out.

Tokens wait until their text is complete, so that a chunk's log-probabilities and ids match its text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType, structs

from conductor.ingress.answers import Outcome, Piece
from conductor.ingress.apis.openai_answers import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    StopReason,
    ToolCallBody,
    TopLogprob,
)
from conductor.ingress.parsers.parts import CallPart, ReasoningPart, joined_calls
from mooncake.text.tokenizer import DetokenizeStream
from mooncake.types import FinishReason, SampledToken

AnyChoice = ChatChoice | ChatChunkChoice | CompletionChoice
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """What a client wants to know about tokens beside the text. ``bytes_of`` gives a token's bytes; ``stream``
    starts a detokenizer like the answer's."""

    bytes_of: Callable[[int], bytes]
    stream: Callable[[], DetokenizeStream]
    logprobs: bool = False
    token_ids: bool = False
    prompt_logprobs: int | None = None
    names_ids: bool = False
    interval: int = 1  # tokens of a chunk, but for the first one and the last

    def text_of(self, token_id: int) -> str:
        """Incomplete UTF-8 becomes U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")

    def name_of(self, token_id: int) -> str:
        """A token's name in log-probabilities."""
        return f"token_id:{token_id}" if self.names_ids else self.text_of(token_id)


class ChoiceWriter(ABC):
    """One choice while it is generated."""

    def __init__(self, index: int, details: TokenDetails) -> None:
        self._index = index
        self._details = details
        self._text = ""  # not yet in a chunk
        self._tokens: list[SampledToken] = []  # likewise
        self._prompt_scores: Collection[SampledToken] | None = None  # of all prompt tokens but the first
        self._has_begun = False
        self._told_scores = False
        self._has_told = False  # a chunk with news
        self.num_tokens = 0
        self.num_reasoning = 0  # how many of them are reasoning
        self.outcome: Outcome | None = None

    def take(self, piece: Piece) -> None:
        self._text += self._text_of(piece)
        self._tokens.extend(piece.tokens)
        if piece.prompt_logprobs is not None:  # empty for a prompt of one token
            self._prompt_scores = piece.prompt_logprobs
        self.num_tokens += len(piece.tokens)
        self.num_reasoning += piece.num_reasoning
        self.outcome = piece.outcome or self.outcome

    def _text_of(self, piece: Piece) -> str:
        return piece.text

    def chunks(self, piece: Piece) -> list[AnyChoice]:
        """The chunks a stream sends for this piece: none while its text is incomplete."""
        self.take(piece)
        chunks: list[AnyChoice] = []
        if not self._has_begun:
            self._has_begun = True
            chunks.extend(self._opening())
        if self._has_news and self._is_due:
            self._has_told = True
            chunks.append(self._chunk())
            self._text = ""
            self._tokens = []
        return chunks

    def tells_prompt(self, piece: Piece) -> bool:
        """Whether the prompt's log-probabilities, which may be many, are told with this piece or one soon after it."""
        return piece.prompt_logprobs is not None or (self._prompt_scores is not None and not self._told_scores)

    def prompt_scores(self) -> PromptLogprobs | UnsetType:
        """The prompt's scores in vLLM's form, once, if the client wants them."""
        scores, self._told_scores = (None if self._told_scores else self._prompt_scores), True
        if self._details.prompt_logprobs is None or scores is None:
            return UNSET
        return _prompt_scores(scores, self._details)

    @property
    def _is_due(self) -> bool:
        is_long = len(self._tokens) >= self._details.interval
        return is_long or not self._has_told or self.outcome is not None

    @property
    def _has_news(self) -> bool:
        return bool(self._text) or self.outcome is not None

    @property
    def _finish_reason(self) -> str | None:
        return None if self.outcome is None else str(self.outcome.finish_reason)

    @property
    def _stop_reason(self) -> StopReason:
        return UNSET if self.outcome is None else self.outcome.stop_reason

    @property
    def _token_ids(self) -> list[int] | UnsetType:
        return [token.token_id for token in self._tokens] if self._details.token_ids else UNSET

    @abstractmethod
    def _opening(self) -> list[AnyChoice]: ...

    @abstractmethod
    def _chunk(self) -> AnyChoice: ...

    @abstractmethod
    def whole(self) -> AnyChoice:
        """The whole choice, once ``take`` has had all its pieces."""


class ChatWriter(ChoiceWriter):
    """``has_reasoning``: whether the model does; ``sends_reasoning``: whether the client wants to read it."""

    def __init__(self, index: int, details: TokenDetails, has_reasoning: bool, sends_reasoning: bool) -> None:
        super().__init__(index, details)
        self._has_reasoning = has_reasoning
        self._sends_reasoning = sends_reasoning
        self._reasoning = ""  # not yet sent
        self._calls: list[CallPart] = []  # likewise
        self._num_calls = 0  # sent
        self._ends_with_call = False  # a whole one, as far as calls are known

    def take(self, piece: Piece) -> None:
        super().take(piece)
        for part in piece.parts:
            if isinstance(part, ReasoningPart) and self._sends_reasoning:
                self._reasoning += part.text
            elif isinstance(part, CallPart):
                self._calls.append(part)
                self._ends_with_call = part.is_end

    def _text_of(self, piece: Piece) -> str:
        return "".join(part for part in piece.parts if isinstance(part, str))

    @property
    def _has_news(self) -> bool:
        return super()._has_news or bool(self._calls or self._reasoning)

    @property
    def _finish_reason(self) -> str | None:
        """A last call that a stop string cut short asks for nothing: its arguments are no JSON."""
        reason = super()._finish_reason
        return "tool_calls" if reason == FinishReason.STOP and self._ends_with_call else reason

    def _opening(self) -> list[AnyChoice]:
        return [ChatChunkChoice(index=self._index, delta=ChatDelta(role="assistant", content=""))]

    def _chunk(self) -> AnyChoice:
        calls: list[ToolCallBody] = []
        for part in self._calls:
            self._num_calls += bool(part.name)
            calls.append(structs.replace(_call_body(part), index=self._num_calls - 1))
        reasoning = self._reasoning or None
        delta = ChatDelta(
            content=self._text or None, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or None
        )
        self._calls, self._reasoning = [], ""
        return ChatChunkChoice(
            index=self._index,
            delta=delta,
            finish_reason=self._finish_reason,
            logprobs=self._logprobs(),
            stop_reason=self._stop_reason,
            token_ids=self._token_ids,
        )

    def whole(self) -> AnyChoice:
        calls = [_call_body(call) for call in joined_calls(self._calls)]
        reasoning = (self._reasoning or None) if self._has_reasoning and self._sends_reasoning else UNSET
        message = AssistantMessage(
            self._text or (None if calls else ""),
            tool_calls=calls or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning,
        )
        return ChatChoice(
            index=self._index,
            message=message,
            finish_reason=self._finish_reason or "stop",
            logprobs=self._logprobs(),
            stop_reason=self._stop_reason,
            token_ids=self._token_ids,
        )

    def _logprobs(self) -> ChatLogprobs | None:
        if not self._details.logprobs:
            return None
        return ChatLogprobs([content_logprob(token, self._details) for token in self._tokens])


class CompletionWriter(ChoiceWriter):
    """``echo``, the prompt's text, is prepended to the answer's, and its tokens to the log-probabilities."""

    def __init__(self, index: int, details: TokenDetails, prompt_ids: list[int], echo: str | None = None) -> None:
        super().__init__(index, details)
        self._text = self._echo = echo or ""
        self._offset = 0  # of the next token in the text
        self._stream = details.stream()
        self._echoed = [] if echo is None else prompt_ids  # control tokens alone have no text
        self._prompt_ids: list[int] | UnsetType = prompt_ids if details.token_ids else UNSET

    def _opening(self) -> list[AnyChoice]:
        return []

    def _chunk(self) -> AnyChoice:
        choice = self._choice(self._finish_reason)
        self._prompt_ids = UNSET  # sent once
        return choice

    def whole(self) -> AnyChoice:
        return self._choice(self._finish_reason or "stop")

    def _choice(self, finish_reason: str | None) -> AnyChoice:
        return CompletionChoice(
            index=self._index,
            text=self._text,
            finish_reason=finish_reason,
            logprobs=self._logprobs(),
            stop_reason=self._stop_reason,
            prompt_token_ids=self._prompt_ids,
            token_ids=self._token_ids,
            prompt_logprobs=self.prompt_scores(),
        )

    def _logprobs(self) -> CompletionLogprobs | None:
        if not self._details.logprobs:
            return None
        echoed = self._echoed_tokens()
        offsets = [*self._offsets_in_echo(echoed), *self._offsets(self._tokens)]
        tokens = [*echoed, *self._tokens]
        names = [self._details.name_of(token.token_id) for token in tokens]
        top = [
            {name: _logprob(token)} | {self._details.name_of(other): value for other, value in _top(token)}
            if token.logprob is not None
            else None
            for name, token in zip(names, tokens, strict=True)
        ]
        values = [None if token.logprob is None else _logprob(token) for token in tokens]
        return CompletionLogprobs(names, values, top, offsets)

    def _offsets_in_echo(self, tokens: Sequence[SampledToken]) -> list[int]:
        if not tokens:
            return []
        stream = self._details.stream()
        if not self._echo.startswith("".join(stream.push(token.token_id) for token in tokens)):
            self._offset = -1  # SentencePiece's leading space, which the text itself does not have
        offsets = self._offsets(tokens)
        self._offset, self._stream = len(self._echo), self._details.stream()
        return offsets

    def _offsets(self, tokens: Sequence[SampledToken]) -> list[int]:
        """Where each token begins in the text: part of a character where the character does, a token without text
        where the next one does."""
        offsets = []
        for token in tokens:
            offsets.append(max(self._offset, 0))
            self._offset += len(self._stream.push(token.token_id))
        return offsets

    def _echoed_tokens(self) -> list[SampledToken]:
        """The prompt's tokens, once. Nothing precedes the first, so it has no probability."""
        echoed, self._echoed = self._echoed, []
        if not echoed:
            return []
        return [SampledToken(0, echoed[0]), *(self._prompt_scores or ())]


class EchoWriter(CompletionWriter):
    """The prompt alone, for ``max_tokens`` 0: the one token that a node must generate is not shown."""

    def take(self, piece: Piece) -> None:
        outcome = piece.outcome and replace(piece.outcome, finish_reason=FinishReason.LENGTH)
        super().take(structs.replace(piece, tokens=(), text="", outcome=outcome))


def _call_body(part: CallPart) -> ToolCallBody:
    if not part.name:
        return ToolCallBody(CalledFunction(part.arguments))
    return ToolCallBody(CalledFunction(part.arguments, part.name), part.call_id, "function")


def content_logprob(token: SampledToken, details: TokenDetails) -> ContentLogprob:
    top = [TopLogprob(details.name_of(other), value, list(details.bytes_of(other))) for other, value in _top(token)]
    token_id = token.token_id
    return ContentLogprob(details.name_of(token_id), _logprob(token), list(details.bytes_of(token_id)), top)


def _prompt_scores(scores: Collection[SampledToken], details: TokenDetails) -> PromptLogprobs:
    """One entry per prompt token: None for the first, then the token and the most likely others by id."""
    entries: list[dict[str, PromptLogprob] | None] = [None]
    for token in scores:
        own = {token.token_id: 0 if token.logprob is None else token.logprob.rank}
        ranks = own | {other: rank for rank, (other, _) in enumerate(_top(token), 1)}
        values = {token.token_id: _logprob(token)} | dict(_top(token))
        entries.append(
            {
                str(token_id): PromptLogprob(value, details.text_of(token_id), ranks[token_id])
                for token_id, value in values.items()
            }
        )
    return entries


def _logprob(token: SampledToken) -> float:
    return LOWEST_LOGPROB if token.logprob is None else max(token.logprob.logprob, LOWEST_LOGPROB)


def _top(token: SampledToken) -> list[tuple[int, float]]:
    if token.logprob is None:
        return []
    return [(token_id, max(value, LOWEST_LOGPROB)) for token_id, value in token.logprob.top]
