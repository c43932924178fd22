"""What a response is made of: the items of its input, and those of an earlier response, as the messages of a chat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from conductor.ingress.apis.messages import content_text
from conductor.ingress.apis.openai_types import ContentPart
from conductor.ingress.apis.responses_types import InputItem, InputPart, ResponsesRequest
from conductor.ingress.apis.stored_responses import StoredResponse
from conductor.ingress.prompts import MAX_MESSAGES
from conductor.ingress.tools import SaidCall, SaidFunction, chat_calls
from mooncake.errors import InvalidRequest, shown
from mooncake.text.chat_template import ChatMessage

MAX_ITEMS = 4 * MAX_MESSAGES  # of an input: one turn is reasoning, text and several calls
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class _Said(msgspec.Struct):
    """What counts of a response that is continued: its items, which may be those of an input."""

    output: list[InputItem]


def input_items(body: ResponsesRequest) -> list[InputItem]:
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def conversation_of(stored: StoredResponse) -> list[InputItem]:
    """Its input and what was said then."""
    before = msgspec.msgpack.decode(stored.input, type=list[InputItem])
    return before + msgspec.json.decode(stored.body, type=_Said).output


def input_messages(body: ResponsesRequest) -> list[ChatMessage]:
    """Raises InvalidRequest, naming the item, for anything but text, calls and their results."""
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, ChatMessage("user", body.input)]
    if len(body.input) > MAX_ITEMS:
        raise InvalidRequest(f"at most {MAX_ITEMS} items are allowed", "input")
    said = [_message(item, f"input[{number}]") for number, item in enumerate(body.input)]
    for role, items in itertools.groupby(said, attrgetter("role")):
        turn = list(items)
        messages += [_as_one(turn)] if role == "assistant" else turn
    return messages


def _as_one(items: Sequence[ChatMessage]) -> ChatMessage:
    """A turn of the assistant, which comes in several items."""
    content = "\n".join(item.content for item in items if item.content)
    thought = "\n".join(item.thought for item in items if item.thought)
    return ChatMessage("assistant", content, thought, tuple(call for item in items for call in item.calls))


def _message(item: InputItem, where: str) -> ChatMessage:
    match item.type:
        case "message" if item.role in _ROLES:
            content = content_text(_parts(item.content), f"{where}.content")
            return ChatMessage("system" if item.role == "developer" else item.role, content)
        case "message":
            raise InvalidRequest(f"a message needs a role: {', '.join(_ROLES)}", f"{where}.role")
        case "function_call":
            if item.name is None:
                raise InvalidRequest("a function_call needs the function's name", f"{where}.name")
            said = SaidCall(SaidFunction(item.name, item.arguments or "{}"), item.call_id or "")
            return ChatMessage("assistant", "", calls=chat_calls([said], f"{where}.arguments"))
        case "function_call_output":
            content = content_text(_parts(item.output), f"{where}.output")
            return ChatMessage("tool", content, call_id=item.call_id or "")
        case "reasoning":
            content = content_text(_parts(item.content or item.summary or ""), f"{where}.content")
            return ChatMessage("assistant", "", content)
    known = "message, function_call, function_call_output, reasoning"
    raise InvalidRequest(f"an item of the type {shown(item.type)} is not supported; known: {known}", f"{where}.type")


def _parts(content: str | Sequence[InputPart] | None) -> str | list[ContentPart] | None:
    """Convert to the content parts of a chat message."""
    if content is None or isinstance(content, str):
        return content
    return [ContentPart("text" if part.type in _TEXT_PARTS else part.type, part.text) for part in content]
