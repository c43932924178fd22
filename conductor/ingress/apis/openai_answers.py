"""OpenAI's wire types: what an answer contains. Requests: ``openai_types``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    audio_tokens: int = 0
    blended_tokens: int | UnsetType = (
        UNSET  # tokens blended from chunks of earlier prompts: our extension, present if there are any
    )


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class UsageBody(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def usage_body(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, blended_tokens: int, reasoning_tokens: int
) -> UsageBody:
    details = PromptTokensDetails(cached_tokens, blended_tokens=blended_tokens or UNSET)
    written = CompletionTokensDetails(reasoning_tokens)
    return UsageBody(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details, written)


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    decoded_token: str
    rank: int  # among all tokens, from 1


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None
"""vLLM's form, by token id."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CalledFunction(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallBody(msgspec.Struct, frozen=True):
    """In chunks it has an index; only a call's first chunk has more than that and part of the arguments."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET  # null if a thinking model did not think; the older name is sent too
    reasoning_content: str | UnsetType | None = UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None


StopReason = str | int | UnsetType | None
"""vLLM's, with the end: which of the request's stop strings or tokens it was."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Of whole answers and of chunks alike."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None
    stop_reason: StopReason
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Around the choices of a whole answer (with usage) or of one chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | CompletionChoice]
    system_fingerprint: str
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelPermission(msgspec.Struct, frozen=True):
    """What vLLM's model cards contain for old clients."""

    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    root: str  # the model's folder or file, or the adapter's
    permission: list[ModelPermission]
    object: str = "model"
    owned_by: str = "mooncake"
    parent: str | None = None  # the base model of an adapter


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET  # as in the vocabulary


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """The part of a tokenizer_config.json that clients need to write prompts themselves."""

    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    tokenizer_class: str = "PreTrainedTokenizerFast"
