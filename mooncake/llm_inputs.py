"""The inputs of ``mooncake.LLM``, converted to lists with one item per prompt.

It knows neither a model's vocabulary nor how answers are made.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mooncake.errors import InvalidRequest, shown
from mooncake.text.tokenizer import ROLES, ChatCall, ChatMessage
from mooncake.types import SamplingParams, TokenIds

Prompt = str | Sequence[int] | TokenIds | Mapping[str, object]
"""Text (in which special tokens are plain text), or token ids; or one of them by its name in vLLM, ``{"prompt": …}`` or
``{"prompt_token_ids": …}``."""

Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[TokenIds] | Sequence[Mapping[str, object]]

Adapters = str | Sequence[str | None] | None
"""The name of an adapter for all prompts, or one each; None: the model itself."""

Message = ChatMessage | Mapping[str, object]
"""E.g. ``{"role": "user", "content": "Hello"}``; the content may be a list of ``{"type": "text", "text": …}``. A turn
of the assistant may have ``tool_calls`` and ``reasoning``, one of a tool has a ``tool_call_id``, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class TextForm:
    """What the text of answers contains."""

    stop: tuple[str, ...] = ()  # it ends before the first of these
    includes_stop: bool = False  # or behind it
    skips_special: bool = True  # control tokens


def prompt_list(prompts: Prompts) -> list[object]:
    """A single prompt as a list, without names. Validated when it is encoded."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return [_unnamed(prompts)]
    items: list[object] = list(prompts)
    return [items] if items and isinstance(items[0], (int, np.integer)) else list(map(_unnamed, items))


def _unnamed(prompt: object) -> object:
    """Raises InvalidRequest for anything that is not known by its name."""
    if not isinstance(prompt, Mapping):
        return prompt
    named = {name: value for name, value in prompt.items() if value is not None}
    if "prompt_token_ids" in named:
        named.pop("prompt", None)  # vLLM's own results have both
    if len(named) != 1 or not named.keys() <= {"prompt", "prompt_token_ids"}:
        raise InvalidRequest('a prompt with names is {"prompt": text} or {"prompt_token_ids": ids}', "prompts")
    return next(iter(named.values()))


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
        message = _from_mapping(message)
    if message.role not in (*ROLES, "tool"):
        known = ", ".join((*ROLES, "tool"))
        raise InvalidRequest(f"the role {shown(message.role)} is not supported; known: {known}", "messages")
    return message


def _from_mapping(message: Mapping[str, object]) -> ChatMessage:
    role, calls = message.get("role"), message.get("tool_calls") or ()
    if not isinstance(role, str):
        raise InvalidRequest("a message needs its role, as text", "messages")
    if not isinstance(calls, Iterable):
        raise InvalidRequest("tool_calls are a list", "messages")
    content = message.get("content")
    thought = message.get("reasoning") or message.get("reasoning_content") or ""
    return ChatMessage(
        role,
        "" if content is None and calls else _content(content),
        str(thought),
        tuple(map(_call, calls)),
        str(message.get("tool_call_id") or ""),
    )


def _call(call: object) -> ChatCall:
    """Its arguments are an object, or the JSON text of one, as OpenAI's clients have it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name, arguments = map(function.get, ("name", "arguments")) if isinstance(function, Mapping) else (None, None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise InvalidRequest('a call is {"function": {"name": …, "arguments": …}}', "messages")
    assert isinstance(call, Mapping)
    return ChatCall(str(call.get("id") or ""), name, dict(arguments))


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
        raise InvalidRequest("sampling_params are one SamplingParams, or one for each prompt", "sampling_params")
    if len(samplings) != count:
        raise InvalidRequest(f"{len(samplings)} sampling parameters were given for {count} prompts", "sampling_params")
    return [
        params if params.is_greedy or params.seed else replace(params, seed=secrets.randbits(63))
        for params in samplings
    ]


def priority_list(priority: Sequence[int] | None, count: int) -> list[int]:
    """For each prompt. Raises InvalidRequest for another number of them, or no whole numbers."""
    priorities = [0] * count if priority is None else list(priority)
    if len(priorities) != count:
        raise InvalidRequest(f"{len(priorities)} priorities were given for {count} prompts", "priority")
    if not all(isinstance(each, int) for each in priorities):
        raise InvalidRequest("a priority is a whole number", "priority")
    return priorities


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)
