"""Wire types of OpenAI's Responses API. Only data."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from conductor.ingress.apis.openai_answers import ContentLogprob
from conductor.ingress.fields.generation_fields import GenerationFields
from conductor.ingress.tools import AllowedTool

# ---------------------------------------------------------------- requests


class InputPart(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset({"annotations", "detail", "logprobs", "refusal"})
    type: str
    text: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """A message, reasoning, a call that the model made, or that call's result, depending on ``type``."""

    without_effect: ClassVar = frozenset(
        {"caller", "created_by", "encrypted_content", "id", "namespace", "phase", "status"}
    )
    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    without_effect: ClassVar = frozenset({"description"})
    type: str
    name: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    format: TextFormat | None = None


class Reasoning(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset({"context", "generate_summary"})
    effort: str | None = None  # read by the chat template
    summary: str | None = None  # accepted, but none is made


class FunctionTool(msgspec.Struct, frozen=True, omit_defaults=True):
    without_effect: ClassVar = frozenset({"allowed_callers", "defer_loading", "output_schema"})
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    function: dict[str, object] | None = None  # where chats have the fields above; refused


class ChosenTool(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    name: str = ""
    mode: str = ""  # this and the next are of allowed_tools
    tools: list[AllowedTool] = []


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True):
    """OpenAI's fields, plus the vLLM fields that completions and chats share."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, object] | None = None
    prompt: dict[str, object] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None  # None: true; vLLM's, of chats

    @property
    def guide_field(self) -> str:
        name = super().guide_field
        return "text.format" if name == "response_format" else name


# ---------------------------------------------------------------- responses


class OutputText(msgspec.Struct, frozen=True):
    text: str
    type: str = "output_text"
    annotations: tuple[str, ...] = ()
    logprobs: list[ContentLogprob] | None = None


class MessageItem(msgspec.Struct, frozen=True):
    id: str
    status: str
    content: list[OutputText]
    type: str = "message"
    role: str = "assistant"


class CallItem(msgspec.Struct, frozen=True):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    type: str = "function_call"


class ReasoningText(msgspec.Struct, frozen=True):
    text: str
    type: str = "reasoning_text"


class ReasoningItem(msgspec.Struct, frozen=True):
    """It has a ``summary`` field, but none is made."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: tuple[str, ...] = ()
    type: str = "reasoning"


OutputItem = MessageItem | CallItem | ReasoningItem


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    blended_tokens: int | UnsetType = UNSET  # as in chats


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()


class ResponseFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str = "max_output_tokens"


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str  # "in_progress", "completed", "incomplete", "failed"
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: TextConfig
    tools: list[FunctionTool]
    tool_choice: str | ChosenTool
    parallel_tool_calls: bool
    truncation: str
    metadata: dict[str, str]
    user: str | None
    reasoning: Reasoning = Reasoning()
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None


class InputTokens(msgspec.Struct, frozen=True):
    """The answer to who asks how long a prompt would be."""

    input_tokens: int
    object: str = "response.input_tokens"


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream; which fields are set depends on ``type``."""

    type: str
    sequence_number: int
    response: ResponseBody | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
