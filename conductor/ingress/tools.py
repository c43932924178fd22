"""Tools of a chat: what a client may ask for, and how an answer is constrained to call them; ``parsers`` parses the
calls.

Pure; it knows no wire form of answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from mooncake.errors import InvalidRequest, shown
from mooncake.sampling import Guide, GuideKind
from mooncake.text.chat_template import ChatCall

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # as Anthropic allows; OpenAI allows 64


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    without_effect: ClassVar = frozenset({"strict"})
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None  # None: it takes none, as with OpenAI

    @property
    def form_of_arguments(self) -> dict[str, object]:
        """Their schema."""
        if self.parameters is None:
            return {"type": "object", "additionalProperties": False}
        return self.parameters or {"type": "object"}


class Tool(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset({"cache_control"})
    function: Function = Function("")  # what has none is refused in words of its own
    type: str = "function"


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class AllowedTool(msgspec.Struct, frozen=True):
    """Its name is in ``function`` in chats, beside the type in responses."""

    function: FunctionName | None = None
    name: str = ""
    type: str = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    """Some of the request's tools; ``mode`` is auto or required."""

    tools: list[AllowedTool]
    mode: str = "auto"


class NamedTool(msgspec.Struct, frozen=True):
    function: FunctionName | None = None
    type: str = "function"
    allowed_tools: AllowedTools | None = None


class SaidFunction(msgspec.Struct, frozen=True):
    """A call as a client returns it in a later turn: ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str = "{}"


class SaidCall(msgspec.Struct, frozen=True):
    without_effect: ClassVar = frozenset({"index"})
    function: SaidFunction
    id: str = ""
    type: str = "function"


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat may call. ``must_call`` constrains the whole answer to one call of one of them, or with ``several``
    to a list of calls; with ``once`` nothing after the first call is reported."""

    functions: tuple[Function, ...]
    must_call: bool = False
    once: bool = False
    several: bool = False

    @property
    def schemas(self) -> dict[str, dict[str, object]]:
        """Parameter schemas by function name."""
        return {function.name: function.parameters or {} for function in self.functions}

    def guide(self) -> Guide | None:
        """The guide for an answer that must be a call, or several."""
        if not self.must_call:
            return None
        place = "/items" if self.several else ""
        if len(self.functions) == 1:
            schema = _form_of_call(self.functions[0], place)
        else:
            forms = enumerate(self.functions)
            schema = {"anyOf": [_form_of_call(function, f"{place}/anyOf/{number}") for number, function in forms]}
        if self.several:
            schema = {"type": "array", "minItems": 1, "items": schema}
        return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))

    def listed(self) -> list[dict[str, object]]:
        """As chat templates expect them."""
        return [{"type": "function", "function": msgspec.to_builtins(function)} for function in self.functions]


def tools_of(
    tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool | None = None
) -> Tools | None:
    """None when nothing may be called; not ``parallel`` means at most one call. Raises InvalidRequest, naming the
    field."""
    if isinstance(choice, NamedTool) and choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        return tools_of(_allowed(tools or (), allowed.tools), allowed.mode, parallel)
    if isinstance(choice, NamedTool) and (choice.type != "function" or choice.function is None):
        known = "none, auto, required, a function, allowed_tools"
        what = f"a tool_choice of the type {shown(choice.type)} is not supported; known: {known}"
        raise InvalidRequest(what, "tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        return None
    _check(tools)
    functions = tuple(tool.function for tool in tools)
    match choice:
        case None | "auto":
            return Tools(functions, once=parallel is False)
        case "required":
            return Tools(functions, must_call=True, several=parallel is not False)
        case "none":
            return None
        case NamedTool(FunctionName(name)):
            named = tuple(function for function in functions if function.name == name)
            if not named:
                raise InvalidRequest(f"there is no tool {shown(name)} to choose", "tool_choice")
            return Tools(named, must_call=True)
    raise InvalidRequest("tool_choice is none, auto, required or a function", "tool_choice")


def _check(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are allowed", "tools")
    for number, tool in enumerate(tools):
        if tool.type != "function":
            what = f"a tool of the type {shown(tool.type)} is not called here, only functions are"
            raise InvalidRequest(what, f"tools[{number}]")
        if not _NAME.fullmatch(tool.function.name):
            what = "a tool is a function with a name of up to 128 letters, digits, _ and -"
            raise InvalidRequest(what, f"tools[{number}]")


def _allowed(tools: Sequence[Tool], allowed: Sequence[AllowedTool]) -> list[Tool]:
    """Those of ``tools`` that are allowed. Raises InvalidRequest for one that is not among them, or none at all."""
    names = {tool.function.name if tool.function is not None else tool.name for tool in allowed}
    if unknown := names - {tool.function.name for tool in tools}:
        raise InvalidRequest(f"there is no tool {shown(min(unknown))} to allow", "tool_choice")
    if not names:
        raise InvalidRequest("allowed_tools names no tool", "tool_choice")
    return [tool for tool in tools if tool.function.name in names]


def _form_of_call(function: Function, place: str) -> dict[str, object]:
    """The schema of a call, for use at ``place`` within a schema."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": _at(f"{place}/properties/arguments", function.form_of_arguments),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _at(place: str, schema: dict[str, object]) -> dict[str, object]:
    """``schema`` for use at ``place`` within another one: there "#" would be that one's root, unless ``schema`` has
    an id."""
    if "$id" in schema:
        return schema

    def moved(part: dict[str, object]) -> dict[str, object]:
        ref = part.get("$ref")
        is_own = isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))
        return part | {"$ref": f"#{place}{str(ref)[1:]}"} if is_own else part

    found: dict[str, object] = json.loads(json.dumps(schema), object_hook=moved)
    return found


def chat_calls(calls: Sequence[SaidCall], where: str) -> tuple[ChatCall, ...]:
    """Raises InvalidRequest, naming the place, for arguments that are not a JSON object."""
    return tuple(ChatCall(call.id, call.function.name, _arguments(call, where)) for call in calls)


def _arguments(call: SaidCall, where: str) -> dict[str, object]:
    text = call.function.arguments or "{}"
    try:
        arguments = json.loads(text)
        if "\\ud" in text.lower():  # perhaps half of a surrogate pair, which is no text: a question mark instead
            arguments = json.loads(json.dumps(arguments, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):  # the second: nested too deeply
        raise InvalidRequest("arguments are not JSON", where) from None
    if not isinstance(arguments, dict):
        raise InvalidRequest("arguments are a JSON object", where)
    return arguments
