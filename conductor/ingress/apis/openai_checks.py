"""What completions and chats cannot ask for although their wire types allow it: each refusal is one sentence."""

from __future__ import annotations

from conductor.ingress.apis.openai_types import AnswerFields, BatchChatRequest, ChatFields, CompletionRequest
from conductor.ingress.fields.generation_fields import GenerationFields
from conductor.ingress.pipeline import MAX_CHOICES
from mooncake.errors import InvalidRequest, shown
from mooncake.sampling import MAX_TOP_LOGPROBS


def check_completion(body: CompletionRequest) -> None:
    """Raises InvalidRequest for valid completion fields that are not supported."""
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest("best_of must not be less than n", "best_of")
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        raise InvalidRequest("best_of cannot be streamed: only the end tells which answers are best", "best_of")
    if body.suffix:
        raise InvalidRequest("suffix is not supported", "suffix")
    if body.prompt_embeds is not None:
        raise InvalidRequest("prompt_embeds are not supported: a prompt is text or token ids", "prompt_embeds")
    if body.prompt is None:
        raise InvalidRequest("a completion needs a prompt", "prompt")
    if body.thinking_token_budget not in (None, -1):
        raise InvalidRequest("reasoning is only recognised in chats, not in completions", "thinking_token_budget")
    check_answer(body)


def check_answer(body: AnswerFields) -> None:
    """Raises InvalidRequest for fields that completions and chats share."""
    if body.watermarking:
        raise InvalidRequest("answers are not watermarked here", "watermarking")
    check_positive("stream_interval", body.stream_interval)


def check_chat(body: ChatFields) -> None:
    """Raises InvalidRequest for valid chat fields that are not supported."""
    check_answer(body)
    if body.add_special_tokens:
        raise InvalidRequest("the chat template alone decides about special tokens", "add_special_tokens")
    if body.echo:
        what = (
            "a chat has no echo; continue_final_message continues its last message, return_prompt_text adds the prompt"
        )
        raise InvalidRequest(what, "echo")
    if body.functions:
        raise InvalidRequest("functions were replaced by tools", "functions")
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest('only the modality "text" is supported', "modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    check_top_logprobs(body.top_logprobs)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("the prompt_logprobs of a chat cannot be streamed", "prompt_logprobs")
    check_positive("max_completion_tokens", body.max_completion_tokens)


def check_chat_batch(body: BatchChatRequest) -> None:
    """Raises InvalidRequest also for what belongs to one conversation alone, as in vLLM."""
    check_chat(body)
    if not 1 <= len(body.messages) <= MAX_CHOICES:
        raise InvalidRequest(f"a batch has 1 to {MAX_CHOICES} conversations, not {len(body.messages)}", "messages")
    refused = {
        "stream": body.stream,
        "n": num_choices(body, 1) > 1,
        "use_beam_search": body.use_beam_search,
        "tools": body.tools,
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "prompt_logprobs": body.prompt_logprobs is not None,
        "return_prompt_text": body.return_prompt_text,
    }
    for name in (name for name, is_asked in refused.items() if is_asked):
        raise InvalidRequest(f"{name} is for one conversation: a batch has one whole choice for each", name)


def check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} must be at least 1, got {shown(value)}", name)


def check_top_logprobs(value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
        what = f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {shown(value)}"
        raise InvalidRequest(what, "top_logprobs")


def num_choices(fields: GenerationFields, num_prompts: int, best_of: int = 0) -> int:
    """Per prompt. Raises InvalidRequest also when ``best_of`` asks for too many answers."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, got {shown(n)}", "n")
    if max(n, best_of) * num_prompts > MAX_CHOICES:
        name = "n" if best_of <= n else "best_of"
        raise InvalidRequest(f"at most {MAX_CHOICES} choices over all prompts are allowed", name)
    return n
