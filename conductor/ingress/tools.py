"""Tools of a chat: how they are told to a model, how an answer is held to them, and how its calls are read.

The form is Hermes', which SmolLM2, Qwen and others were trained on: tools as JSON lines in the system message (in the
words of the model's chat template, where it has that form, else in ours), a call as JSON between ``<tool_call>`` tags,
a result between ``<tool_response>`` tags. Pure; it knows no wire form of answers.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake.errors import InvalidRequest
from mooncake.tokenizer import ChatMessage
from mooncake.types import Guide, GuideKind

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
_NOT_JSON = (ValueError, RecursionError)  # the second: nested beyond any sense
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_CALL_START = '{"name": "'  # of a call as its guide writes it
_CALL_HEAD = re.compile(r'{"name": "([^"]*)", "arguments": ')

_PROMPT = """You may call one or more functions to help with the user's request. These are the functions:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object that has its name and its arguments, between {open} tags:
{open}
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
{close}"""


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class Tool(msgspec.Struct, frozen=True):
    function: Function
    type: str = "function"


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    function: FunctionName | None = None
    type: str = "function"


class SaidFunction(msgspec.Struct, frozen=True):
    """A call as a client gives it back in a later turn: ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str = "{}"


class SaidCall(msgspec.Struct, frozen=True):
    function: SaidFunction
    id: str = ""
    type: str = "function"


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call as far as it is known, or more of the arguments of the last one: that has no name."""

    call_id: str
    name: str
    arguments: str  # the text of a JSON object; together with what follows
    is_end: bool = True  # nothing of it follows


def joined_calls(parts: Sequence[CallPart]) -> list[CallPart]:
    """Whole calls; the last one may have been cut short."""
    calls: list[list[CallPart]] = []
    for part in parts:
        if part.name:
            calls.append([])
        calls[-1].append(part)
    return [
        CallPart(call[0].call_id, call[0].name, "".join(part.arguments for part in call), call[-1].is_end)
        for call in calls
    ]


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat may call. ``must_call`` holds the whole answer to one call of one of them; with ``once`` nothing
    behind the first call is told."""

    functions: tuple[Function, ...]
    must_call: bool = False
    once: bool = False

    def reader(self) -> CallReader:
        """Of one answer."""
        return CallReader(self.must_call, self.once)

    def guide(self) -> Guide | None:
        """What such an answer has to look like."""
        if not self.must_call:
            return None
        if len(self.functions) == 1:
            schema = _form_of_call(self.functions[0])
        else:
            forms = enumerate(self.functions)
            schema = {"anyOf": [_form_of_call(function, f"/anyOf/{number}") for number, function in forms]}
        return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))

    def listed(self) -> list[dict[str, object]]:
        """As chat templates take them."""
        return [{"type": "function", "function": msgspec.to_builtins(function)} for function in self.functions]

    def told(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The conversation with the functions in its system message."""
        lines = "\n".join(msgspec.json.encode(Tool(function)).decode() for function in self.functions)
        prompt = _PROMPT.format(tools=lines, open=OPEN, close=CLOSE)
        if messages and messages[0].role == "system":
            return [ChatMessage("system", f"{messages[0].content}\n\n{prompt}"), *messages[1:]]
        return [ChatMessage("system", prompt), *messages]


def tools_of(
    tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool | None = None
) -> Tools | None:
    """None when nothing may be called; not ``parallel`` is once at most. Raises InvalidRequest, naming the field."""
    if isinstance(choice, NamedTool) and (choice.type != "function" or choice.function is None):
        what = (
            f"a tool_choice of the type {choice.type[:32]!r} is not supported; known: none, auto, required, a function"
        )
        raise InvalidRequest(what, "tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are allowed", "tools")
    for number, tool in enumerate(tools):
        if tool.type != "function" or not _NAME.fullmatch(tool.function.name):
            what = "a tool is a function with a name of up to 64 letters, digits, _ and -"
            raise InvalidRequest(what, f"tools[{number}]")
    functions = tuple(tool.function for tool in tools)
    match choice:
        case None | "auto":
            return Tools(functions, once=parallel is False)
        case "required":
            return Tools(functions, must_call=True)
        case "none":
            return None
        case NamedTool(FunctionName(name)):
            named = tuple(function for function in functions if function.name == name)
            if not named:
                raise InvalidRequest(f"there is no tool {name[:64]!r} to choose", "tool_choice")
            return Tools(named, must_call=True)
    raise InvalidRequest("tool_choice is none, auto, required or a function", "tool_choice")


def _form_of_call(function: Function, place: str = "") -> dict[str, object]:
    """The schema of a call, for use at ``place`` of a schema."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": _at(f"{place}/properties/arguments", function.parameters or {"type": "object"}),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _at(place: str, schema: dict[str, object]) -> dict[str, object]:
    """``schema`` for use at ``place`` of another one: "#" is that one's root there, unless ``schema`` has a name."""
    if "$id" in schema:
        return schema

    def moved(part: dict[str, object]) -> dict[str, object]:
        ref = part.get("$ref")
        is_own = isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))
        return part | {"$ref": f"#{place}{str(ref)[1:]}"} if is_own else part

    found: dict[str, object] = json.loads(json.dumps(schema), object_hook=moved)
    return found


def said_calls(content: str, calls: Sequence[SaidCall], where: str) -> str:
    """An assistant's turn with the calls that it made, as the model wrote it. Raises InvalidRequest."""
    parts = [content] if content else []
    for call in calls:
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except _NOT_JSON:
            raise InvalidRequest("arguments are not JSON", f"{where}.tool_calls") from None
        parts.append(f"{OPEN}\n{json.dumps({'name': call.function.name, 'arguments': arguments})}\n{CLOSE}")
    return "\n".join(parts)


def tool_response(content: str) -> ChatMessage:
    """A result as the turn that the model was trained to read."""
    return ChatMessage("user", f"<tool_response>\n{content}\n</tool_response>")


@dataclass(slots=True)
class CallReader:
    """Text of one answer in; text that is for the user, and calls, out. What may be the start of a call waits.

    With ``is_call`` the whole answer is one call, without tags, as its guide writes it: that is told as it comes. What
    looks like a call and is none stays text; a call at the end may lack its tag. With ``once`` nothing comes out behind
    the first call.
    """

    is_call: bool = False
    once: bool = False
    _held: str = ""
    _is_behind_call: bool = False  # and white space there is no text
    _is_over: bool = False
    _calls: list[CallPart] = field(default_factory=list)
    _arguments: _Value | None = None  # of the call that the whole answer is

    def push(self, text: str, is_last: bool) -> tuple[str, list[CallPart]]:
        """``is_last``: nothing follows."""
        if self._is_over:
            return "", []
        self._held += text
        said = self._whole(is_last) if self.is_call else self._parts(is_last)
        calls, self._calls = self._calls, []
        return said, calls

    def _whole(self, is_last: bool) -> str:
        call_id = name = ""
        if self._arguments is None:
            head = _CALL_HEAD.match(self._held)
            if head is None:
                return self._without_name() if is_last else ""
            call_id, name = _call_id(), head[1]
            self._held, self._arguments = self._held[head.end() :], _Value()
        if not self._arguments.is_whole:
            arguments = self._arguments.take(self._held)
            if name or arguments or self._arguments.is_whole:
                self._calls.append(CallPart(call_id, name, arguments, self._arguments.is_whole))
        self._held = ""
        return ""

    def _without_name(self) -> str:
        """Of what was cut short before the name was there, nothing is text; all of what was to be no call."""
        text, self._held = self._held, ""
        return "" if _CALL_START.startswith(text[: len(_CALL_START)]) else text

    def _parts(self, is_last: bool) -> str:
        said = ""
        while True:
            if self._is_behind_call:
                self._held = self._held.lstrip()
                self._is_behind_call = not self._held
            before, tag, rest = self._held.partition(OPEN)
            if not tag:
                keep = 0 if is_last else _overlap(self._held, OPEN)
                cut = len(self._held) - keep
                said, self._held = said + self._held[:cut], self._held[cut:]
                return said
            inside, end, behind = rest.partition(CLOSE)
            if not end and not is_last:
                self._held = tag + rest
                return said + before
            self._is_behind_call = self._read(inside)
            if not self._is_behind_call:
                before += tag + inside + end
            said, self._held = said + before, behind
            if self._is_behind_call and self.once:
                self._is_over = True
                return said

    def _read(self, text: str) -> bool:
        """Whether ``text`` is a call, or a list of them."""
        try:
            found = json.loads(text)
        except _NOT_JSON:
            return False
        forms = found if isinstance(found, list) else [found]
        if not forms or not all(map(_is_call, forms)):
            return False
        for form in forms[:1] if self.once else forms:
            arguments = form.get("arguments", form.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            self._calls.append(CallPart(_call_id(), form["name"], text))
        return True


@dataclass(slots=True)
class _Value:
    """Reads a JSON value that is a member of an object, to its end."""

    is_whole: bool = False
    _depth: int = 0
    _is_text: bool = False
    _is_escaped: bool = False

    def take(self, text: str) -> str:
        """The part of ``text`` that belongs to it."""
        for at, char in enumerate(text):
            if self._is_text:
                self._is_text = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth < 1:
                    self.is_whole = True
                    return text[: at + 1 + self._depth]
        return text


def _is_call(form: object) -> bool:
    return isinstance(form, dict) and isinstance(name := form.get("name"), str) and bool(name)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)
