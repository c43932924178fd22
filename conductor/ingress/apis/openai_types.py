"""OpenAI's wire types: what a request may contain beside ``generation_fields``. Answers: ``openai_answers``.

Only data. What a field *does* is in ``openai``.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from conductor.ingress.fields.generation_fields import GenerationFields, chosen_variables
from conductor.ingress.tools import NamedTool, SaidCall, Tool
from mooncake.errors import InvalidRequest


class AnswerFields(GenerationFields, frozen=True, kw_only=True):
    """Fields of vLLM's that completions and chats share, but not the other APIs."""

    stream_interval: int | None = None  # tokens of a chunk, but for the first one and the last
    spaces_between_special_tokens: bool | None = None  # no effect: there are none, as with vLLM's fast tokenizers
    watermarking: bool | None = None  # true is refused


class CompletionRequest(AnswerFields, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None  # None is refused
    prompt_embeds: object = None  # all else is refused
    add_special_tokens: bool | None = None  # whether to add a begin-of-sequence token, if the model has one; None: true
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset({"annotations", "cache_control"})
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset(
        {"annotations", "audio", "function_call", "name", "reasoning_details", "refusal"}
    )
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[SaidCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None  # the reasoning before this message; the older name is accepted too
    reasoning_content: str | None = None


class ChatFields(AnswerFields, frozen=True, kw_only=True):
    """All but the messages."""

    add_special_tokens: bool | None = None  # true is refused: the chat template decides
    echo: bool | None = None  # likewise: of completions
    return_prompt_text: bool | None = None
    chat_template: str | None = None  # refused; this and the next two are vLLM's
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None  # None: true, unless the last message is to be continued; vLLM's again
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # None: true, though a named tool is called once
    functions: list[msgspec.Raw] | None = None
    modalities: list[str] | None = None
    include_reasoning: bool | None = None  # None: true; vLLM's

    @property
    def most_tokens(self) -> int | None:
        """Of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class ChatRequest(ChatFields, frozen=True, kw_only=True):
    messages: list[Message]


class BatchChatRequest(ChatFields, frozen=True, kw_only=True):
    """vLLM's: conversations that are answered by one choice each."""

    messages: list[list[Message]]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[Message] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


def template_variables(body: ChatFields | TokenizeRequest) -> dict[str, object]:
    """Variables for the chat template. Raises InvalidRequest for contradictory ones, and for another template."""
    if body.add_generation_prompt and body.continue_final_message:
        what = "add_generation_prompt begins a new message: no continue_final_message with it"
        raise InvalidRequest(what, "continue_final_message")
    variables = chosen_variables(body.chat_template_kwargs, body.reasoning_effort, body.chat_template)
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return variables
