"""Wire types of Anthropic's Messages API: the part for text, reasoning and a client's own tools. Only data."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from conductor.ingress.fields.generation_fields import GenerationFields

# ---------------------------------------------------------------- requests


class Source(msgspec.Struct, frozen=True):
    """Of a document: ``data``, a text, or ``content``."""

    without_effect: ClassVar = frozenset({"file_id", "media_type", "url"})
    type: str
    data: str | None = None
    content: str | list[Block] | None = None


class Block(msgspec.Struct, frozen=True):
    """A text, a document, reasoning, a call that the model made, or that call's result, depending on ``type``."""

    without_effect: ClassVar = frozenset({"cache_control", "caller", "citations", "data", "is_error", "signature"})
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    source: Source | None = None
    title: str | None = None
    context: str | None = None


class Turn(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Block]


class OwnTool(msgspec.Struct, frozen=True):
    """``type`` names the tools that Anthropic runs itself; a client's have none, or "custom"."""

    without_effect: ClassVar = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples", "strict"}
    )
    name: str
    description: str | None = None
    input_schema: dict[str, object] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: dict[str, object] | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None  # read by the chat template
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class CountRequest(GenerationFields, frozen=True, kw_only=True):
    """Anthropic's fields, plus the vLLM fields that all doors share."""

    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[OwnTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, object] | None = None

    @property
    def guide_field(self) -> str:
        name = super().guide_field
        return "output_config.format" if name == "response_format" else name


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    thread: dict[str, object] | None = None  # refused, like the next: the server would have to keep the conversation
    compaction: dict[str, object] | None = None  # or answer with a summary of it
    include_reasoning: bool | None = None  # None: true; vLLM's, of chats

    @property
    def wants_thoughts(self) -> bool:
        is_omitted = self.thinking is not None and self.thinking.display == "omitted"
        return not is_omitted and self.include_reasoning is not False


# ---------------------------------------------------------------- responses


class TextBlock(msgspec.Struct, frozen=True):
    text: str
    type: str = "text"


class ThinkingBlock(msgspec.Struct, frozen=True):
    thinking: str
    signature: str = ""  # reasoning needs no proof here that it is the model's own
    type: str = "thinking"


class ToolUseBlock(msgspec.Struct, frozen=True):
    id: str
    name: str
    input: dict[str, object]
    type: str = "tool_use"


AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(msgspec.Struct, frozen=True):
    text: str
    type: str = "text_delta"


class ThinkingDelta(msgspec.Struct, frozen=True):
    thinking: str
    type: str = "thinking_delta"


class JsonDelta(msgspec.Struct, frozen=True):
    partial_json: str
    type: str = "input_json_delta"


class EndDelta(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageUsage(msgspec.Struct, frozen=True):
    """The prompt's length is the sum of the first two."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnyBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream; which fields are set depends on ``type``."""

    type: str
    message: MessageBody | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnyBlock | UnsetType = UNSET
    delta: TextDelta | ThinkingDelta | JsonDelta | EndDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class ErrorDetails(msgspec.Struct, frozen=True):
    error_code: str
    unsupported: tuple[str, ...]


class MessageError(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class MessageErrorBody(msgspec.Struct, frozen=True):
    error: MessageError
    type: str = "error"


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class ModelInfo(msgspec.Struct, frozen=True):
    id: str
    display_name: str
    created_at: str  # RFC 3339
    max_input_tokens: int
    max_tokens: int
    lifecycle: str = "active"
    type: str = "model"


class ModelPage(msgspec.Struct, frozen=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
