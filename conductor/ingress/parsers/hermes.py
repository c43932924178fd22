"""Tools, calls and results in words, for chat templates that have no form for them whose calls can be parsed.

Hermes' form, which SmolLM2, Qwen and others were trained on: tools as JSON lines in the system message, a call as JSON
between ``<tool_call>`` tags, a result between ``<tool_response>`` tags. ``json_calls`` parses the calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from conductor.ingress.parsers.json_calls import CLOSE, OPEN
from conductor.ingress.tools import Tool, Tools
from mooncake.text.chat_template import ChatMessage

_PROMPT = """You may call one or more functions to help with the user's request. These are the functions:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object that has its name and its arguments, between {open} tags:
{open}
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
{close}"""


def with_tools(messages: Sequence[ChatMessage], tools: Tools) -> list[ChatMessage]:
    """The conversation with the functions described in its system message."""
    lines = "\n".join(msgspec.json.encode(Tool(function)).decode() for function in tools.functions)
    prompt = _PROMPT.format(tools=lines, open=OPEN, close=CLOSE)
    if messages and messages[0].role == "system":
        return [ChatMessage("system", f"{messages[0].content}\n\n{prompt}"), *messages[1:]]
    return [ChatMessage("system", prompt), *messages]


def in_words(message: ChatMessage) -> ChatMessage:
    """A call or a result as text."""
    if message.role == "tool":
        return ChatMessage("user", f"<tool_response>\n{message.content}\n</tool_response>")
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in message.calls]
    parts = [message.content, *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)]
    return ChatMessage(message.role, "\n".join(filter(None, parts)) if calls else message.content, message.thought)
