"""The inputs of ``mooncake.LLM``, converted to lists with one item per prompt.

It knows neither a model's vocabulary nor how answers are made.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mooncake.errors import InvalidRequest, shown
from mooncake.text.tokenizer import ROLES, ChatMessage
from mooncake.types import SamplingParams, TokenIds

Prompt = str | Sequence[int] | TokenIds
"""Text (in which special tokens are plain text), or token ids."""

Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[TokenIds]

Adapters = str | Sequence[str | None] | None
"""The name of an adapter for all prompts, or one each; None: the model itself."""

Message = ChatMessage | Mapping[str, object]
"""E.g. ``{"role": "user", "content": "Hello"}``; the content may be a list of ``{"type": "text", "text": …}``."""


def prompt_list(prompts: Prompts) -> list[object]:
    """A single prompt as a list. Validated when it is encoded."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items: list[object] = list(prompts)
    return [items] if items and isinstance(items[0], (int, np.integer)) else items


def conversation_list(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[ChatMessage]]:
    conversations: list[list[ChatMessage]] = []
    single: list[ChatMessage] = []
    for item in messages:
        if isinstance(item, (ChatMessage, Mapping)):
            single.append(_message(item))
        else:
            conversations.append([_message(message) for message in item])
    if single and conversations:
        raise InvalidRequest("messages are one conversation or a list of conversations, not both", "messages")
    if not single and not (conversations and all(conversations)):
        raise InvalidRequest("at least one message is needed", "messages")
    return conversations or [single]


def _message(message: Message) -> ChatMessage:
    if not isinstance(message, (ChatMessage, Mapping)):
        raise InvalidRequest('a message is {"role": …, "content": …}', "messages")
    if isinstance(message, Mapping):
        role, content = message.get("role"), _content(message.get("content"))
        if not isinstance(role, str):
            raise InvalidRequest("a message needs its role, as text", "messages")
        message = ChatMessage(role, content)
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequest(f"the role {shown(message.role)} is not supported; known: {known}", "messages")
    return message


def _content(content: object) -> str:
    """One line per part, as in vLLM."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("a message needs its content, as text or parts of text", "messages")
    return "\n".join(map(str, texts))


def one_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Sampling for each prompt. A random answer without a seed gets one of its own."""
    samplings = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
    if not all(isinstance(each, SamplingParams) for each in samplings):
        raise InvalidRequest("sampling is one SamplingParams, or one for each prompt", "sampling")
    if len(samplings) != count:
        raise InvalidRequest(f"{len(samplings)} sampling parameters were given for {count} prompts", "sampling")
    return [
        params if params.is_greedy or params.seed else replace(params, seed=secrets.randbits(63))
        for params in samplings
    ]


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)
