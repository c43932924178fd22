"""The inputs of ``mooncake.LLM``, converted to lists with one item per prompt.

It knows neither a model's vocabulary nor how answers are made.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from mooncake.adapters import Adapter
from mooncake.errors import ConfigError, InvalidRequest, ModelError, shown
from mooncake.hashing import check_salt
from mooncake.llm_absent import OF_LORA, OF_PROMPTS, form_says_counterparts
from mooncake.sampling_params import SamplingParams
from mooncake.text.chat_template import ROLES, ChatCall, ChatMessage
from mooncake.text.template_source import template_source
from mooncake.text.tokenizer import Tokenizer
from mooncake.types import TokenIds

Prompt = str | Sequence[int] | TokenIds | Mapping[str, object]
"""Text (in which special tokens are plain text), or token ids; or one of them by its name in vLLM, ``{"prompt": …}`` or
``{"prompt_token_ids": …}``, which may have a ``cache_salt`` beside it."""

Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[TokenIds] | Sequence[Mapping[str, object]]


class TextPrompt(TypedDict):
    """A prompt with its name, in vLLM's form. Only prompts with the same ``cache_salt`` reuse each other's KV."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Likewise; ``prompt``, its text, has no effect."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One without its name: text, token ids, or anything else, which is refused when it is encoded."""

    content: object
    cache_salt: str = ""  # "": none


Adapters = str | Sequence[str | None] | None
"""The name of an adapter for all prompts, or one each; None: the model itself."""

Message = ChatMessage | Mapping[str, object]
"""E.g. ``{"role": "user", "content": "Hello"}``; the content may be a list of ``{"type": "text", "text": …}``. A turn
of the assistant may have ``tool_calls`` and ``reasoning``, one of a tool has a ``tool_call_id``, as in OpenAI's API."""


Priorities = int | Sequence[int] | None
"""For all prompts, or one each."""


@form_says_counterparts(OF_LORA)
@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in vLLM's form: by its name, with its folder. The ``LLM`` may have been opened with it."""

    lora_name: str
    lora_int_id: int = 0  # no effect: its weights tell an adapter from others
    lora_path: str = ""


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


def prompt_list(prompts: Prompts) -> list[GivenPrompt]:
    """A single prompt as a list. Raises InvalidRequest for what is not known by its name."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [_unnamed(prompts)]
    items: list[object] = list(prompts)
    return [GivenPrompt(items)] if items and isinstance(items[0], (int, np.integer)) else list(map(_unnamed, items))


def warn_of_spelled_control(prompts: Sequence[object], tokenizer: Tokenizer, stacklevel: int) -> None:
    """The prompts of one call are made alike, so the first one tells whether a chat template has rendered them."""
    if prompts and isinstance(prompts[0], str) and (name := tokenizer.spelled_control(prompts[0])):
        what = f"a prompt spells {name}, which is plain text in it: LLM.chat renders conversations"
        warnings.warn(f"{what}, and a prompt of token ids may have control tokens", stacklevel=stacklevel)


def _unnamed(prompt: object) -> GivenPrompt:
    """Raises InvalidRequest for anything that is not known by its name."""
    if not isinstance(prompt, Mapping):
        return GivenPrompt(prompt)
    named = {name: value for name, value in prompt.items() if value is not None}
    salt = _salt(named.pop("cache_salt", None))
    if "prompt_token_ids" in named:
        named.pop("prompt", None)  # vLLM's own results have both
    if len(named) != 1 or not named.keys() <= {"prompt", "prompt_token_ids"}:
        others = sorted(map(str, named.keys() - {"prompt", "prompt_token_ids"}))
        what = 'a prompt with names is {"prompt": text} or {"prompt_token_ids": ids}'
        why = "".join(sorted({f"; {OF_PROMPTS[name]}" for name in others if name in OF_PROMPTS}))
        raise InvalidRequest(what + (f", without {', '.join(others)}" if others else "") + why, "prompts")
    return GivenPrompt(next(iter(named.values())), salt)


def _salt(given: object) -> str:
    if given is None:
        return ""
    if not isinstance(given, str) or not given:
        raise InvalidRequest("a cache_salt is a text that is not empty", "cache_salt")
    check_salt(given)
    return given


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
    if message.role == "developer":  # OpenAI's newer name
        return replace(message, role="system")
    if message.role not in (*ROLES, "tool"):
        known = ", ".join((*ROLES, "developer", "tool"))
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
    for part in parts:
        if isinstance(part, Mapping) and part.get("type") != "text":
            what = f"only text parts are supported, this one is {shown(part.get('type'))}"
            raise InvalidRequest(what, "messages")
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("a message needs its content, as text or parts of text", "messages")
    return "\n".join(map(str, texts))


def with_template(tokenizer: Tokenizer, template: str | Path | None) -> Tokenizer:
    """The same tokenizer, with a call's own chat template if there is one. Raises InvalidRequest."""
    try:
        source = template_source(template, "chat_template")
        return tokenizer.with_template(source) if source else tokenizer
    except (ConfigError, ModelError) as error:
        raise InvalidRequest(error.message, "chat_template") from None


def template_variables(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, object]] | None,
    others: Mapping[str, object] | None,
    add_generation_prompt: bool,
) -> dict[str, object]:
    """What a chat template reads beside the messages. Raises InvalidRequest for tools that it does not take."""
    if tools and not tokenizer.takes_tools:
        raise InvalidRequest("the chat template has no place for tools", "tools")
    if isinstance(tools, Mapping) or not all(isinstance(tool, Mapping) for tool in tools or ()):
        raise InvalidRequest('tools are a list of {"type": "function", "function": {"name": …}}', "tools")
    variables = dict(others or {}) | ({"tools": list(tools)} if tools else {})
    return variables if add_generation_prompt else variables | {"add_generation_prompt": False}


def one_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Sampling for each prompt. Raises InvalidRequest for another number of them, or for something else."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    samplings = list(sampling) if isinstance(sampling, Iterable) else [sampling]
    if not all(isinstance(each, SamplingParams) for each in samplings):
        raise InvalidRequest(
            "sampling_params are one mooncake.SamplingParams, or one for each prompt", "sampling_params"
        )
    if len(samplings) != count:
        raise InvalidRequest(f"{len(samplings)} sampling parameters were given for {count} prompts", "sampling_params")
    return samplings


def priority_list(priority: Priorities, count: int) -> list[int]:
    """For each prompt. Raises InvalidRequest for another number of them, or no whole numbers."""
    priorities = list(priority) if isinstance(priority, Sequence) else [0 if priority is None else priority] * count
    if not all(isinstance(each, int) for each in priorities):
        raise InvalidRequest("a priority is a whole number", "priority")
    if len(priorities) != count:
        raise InvalidRequest(f"{len(priorities)} priorities were given for {count} prompts", "priority")
    return priorities


def adapter_places(adapter: Adapters, lora: LoRARequests, count: int, known: Sequence[Adapter]) -> list[int]:
    """Which of the ``known`` adapters acts on each prompt, -1 for none. Raises InvalidRequest."""
    if adapter is not None and lora is not None:
        raise InvalidRequest("adapter and lora_request say the same: give one of them", "lora_request")
    given = adapter if lora is None else lora
    each = [given] * count if given is None or isinstance(given, (str, LoRARequest)) else list(given)
    if len(each) != count:
        raise InvalidRequest(f"{len(each)} adapters were given for {count} prompts", "adapter")
    return [_adapter_place(wanted, known) for wanted in each]


def _adapter_place(wanted: str | LoRARequest | None, known: Sequence[Adapter]) -> int:
    if not wanted:
        return -1
    name, path = (wanted.lora_name, wanted.lora_path) if isinstance(wanted, LoRARequest) else (wanted, "")
    place = next((place for place, adapter in enumerate(known) if adapter.name == name), None)
    if place is None:
        opened = f"open it with the model, LLM(…, adapters={{{name!r}: 'FOLDER'}}), or name its lora_path"
        raise InvalidRequest(f"there is no adapter {name!r}; {opened}", "adapter")
    if path and Path(path).resolve() != known[place].path.resolve():
        raise InvalidRequest(f"the adapter {name!r} was opened from {known[place].path}, not {path}", "lora_request")
    return place


def new_adapters(lora: LoRARequests, known: Sequence[Adapter]) -> dict[str, str]:
    """The folders of those that are not ``known``, by name, where requests say them."""
    requests = [lora] if isinstance(lora, LoRARequest) else lora or ()
    names = {"", *(adapter.name for adapter in known)}
    return {
        request.lora_name: request.lora_path
        for request in requests
        if isinstance(request, LoRARequest) and request.lora_path and request.lora_name not in names
    }


def check_counts(counts: Mapping[str, int], device: str, has_adapters: bool) -> None:
    """Numbers of processes, by parameter: one at most is not 1. Raises InvalidRequest."""
    several = [name for name, count in counts.items() if count > 1]
    if len(several) > 1:
        raise InvalidRequest(f"{' and '.join(several)} do not go together", several[0])
    if several and has_adapters:
        raise InvalidRequest(f"{several[0]} does not go with adapters", several[0])
    if several and several[0] != "tensor_parallel_size" and device != "cpu":
        raise InvalidRequest(f"{several[0]} is for CPUs, without a device", several[0])
