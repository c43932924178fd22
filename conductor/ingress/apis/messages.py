"""A conversation, from the request's form to the tokenizer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conductor.ingress.apis.openai_types import ContentPart, Message
from conductor.ingress.parsers.hermes import in_words, with_tools
from conductor.ingress.parsers.output_format import OutputFormat
from conductor.ingress.prompts import check_count
from conductor.ingress.tools import Tools, chat_calls
from mooncake.errors import InvalidRequest, shown
from mooncake.text.chat_template import ROLES, ChatMessage

TEMPLATE_ROLES = (*ROLES, "tool")  # the last only where the template supports calls
_ROLES = ("assistant", "developer", "system", "tool", "user")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation so far; ``variables`` are passed to the chat template."""

    messages: list[ChatMessage]
    tools: Tools | None = None
    variables: dict[str, object] | None = None
    continue_final: bool = False  # the last message is continued instead of a new one started
    param: str = "messages"  # its field in the request

    def for_template(self, output_format: OutputFormat) -> tuple[list[ChatMessage], dict[str, object]]:
        """Messages and variables. Tools, calls and results use the model's own form where its template has one, else
        ours."""
        messages = self.messages if output_format.takes_calls else [in_words(message) for message in self.messages]
        variables = dict(self.variables or {})
        if self.tools is None:
            return messages, variables
        if output_format.takes_tools:
            return messages, variables | {"tools": self.tools.listed()}
        return with_tools(messages, self.tools), variables

    @property
    def opening(self) -> str:
        """The start of the answer that the model does not write: a last message to be continued."""
        return self.messages[-1].content if self.continue_final and self.messages else ""


def chat_messages(messages: Sequence[Message], param: str = "messages") -> list[ChatMessage]:
    """Raises InvalidRequest for too many, and, naming the message, for an unknown role or content that is not text."""
    check_count(messages, param)
    return [_chat_message(message, f"{param}[{number}]") for number, message in enumerate(messages)]


def _chat_message(message: Message, where: str) -> ChatMessage:
    if message.role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"the role {shown(message.role)} is not supported; known: {known}", f"{where}.role")
    content = message.content
    if content is None and (message.role == "assistant" or message.tool_calls):  # a refusal or a call has no text
        content = ""
    text = content_text(content, f"{where}.content")
    if message.role == "tool":
        return ChatMessage("tool", text, call_id=message.tool_call_id or "")
    role = "system" if message.role == "developer" else message.role
    calls = chat_calls(message.tool_calls or (), f"{where}.tool_calls")
    return ChatMessage(role, text, message.reasoning or message.reasoning_content or "", calls)


def content_text(content: str | list[ContentPart] | None, where: str) -> str:
    """One line per part, as in vLLM. Raises InvalidRequest, naming the place, for anything but text."""
    if content is None:
        raise InvalidRequest("a message needs content", where)
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise InvalidRequest(f"only text parts are supported, this one is {shown(part.type)}", where)
        if part.text is None:
            raise InvalidRequest("a part of the type text needs text", where)
    return "\n".join(part.text or "" for part in content)
