"""Parses tool calls in Qwen3-Coder's format out of an answer while it is generated: a function and its parameters as
tags.

Parameters arrive as text. Strings are reported as they are written; a value of any other type, by the function's
schema, is reported once it is complete, as JSON. ``<tool_call>`` around a function is often missing, and so are closing
tags. The result does not depend on how the text is cut into pieces. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from conductor.ingress.parsers.parts import NOT_JSON, CallPart, new_call_id, overlap, read_json
from conductor.ingress.parsers.step_parser import StepParser

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, _FUNCTION_END, _PARAMETER)  # the last two if the first is missing
_HEAD = re.compile(rf"(?:{_CALL}\s{{0,64}}+)?{_FUNCTION}(?P<name>[\w.-]{{1,128}})>")
_HEAD_BEGINS = re.compile(rf"(?:{_CALL}\s{{0,64}}+)?{_FUNCTION}[\w.-]{{0,128}}")
_KEY = re.compile(rf"{_PARAMETER}(?P<key>[^>\n]{{1,256}})>")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class _State(Enum):
    """The parser's state."""

    TEXT = auto()
    FUNCTION = auto()  # between parameters
    VALUE = auto()  # inside a parameter
    AFTER = auto()  # after a function, perhaps before the closing tag around it


@dataclass(slots=True)
class XmlCallParser(StepParser):
    """Parses one answer. ``schemas``: parameter schemas by function name."""

    schemas: Mapping[str, Mapping[str, object]]
    _state: _State = _State.TEXT
    _function: str = ""
    _is_first: bool = True  # no parameter has been read yet
    _types: tuple[str, ...] = ()  # allowed for the open parameter; a string alone is reported as it arrives
    _is_begun: bool = False  # the open string's quote has been reported

    def _step(self, is_last: bool) -> bool:
        match self._state:
            case _State.TEXT:
                return self._text(is_last)
            case _State.FUNCTION:
                return self._between(is_last)
            case _State.VALUE:
                return self._value(is_last)
        return self._after(is_last)

    def _text(self, is_last: bool) -> bool:
        self._skip_space_after_call()
        before, sign, after = self._held.partition("<")
        self._emit(before)
        self._held = sign + after
        if head := _HEAD.match(self._held):
            self._function, self._is_first = head["name"], True
            self._parts.append(CallPart(new_call_id(), self._function, "{", is_end=False))
            self._go(_State.FUNCTION, self._held[head.end() :])
            return True
        if not sign or (not is_last and _may_begin(self._held)):
            return False
        self._emit(sign)
        self._held = after
        return True

    def _between(self, is_last: bool) -> bool:
        """Text that is neither a parameter nor a closing tag is dropped."""
        _, sign, after = self._held.partition("<")
        self._held = sign + after
        if key := _KEY.match(self._held):
            self._open(key["key"].strip())
            self._go(_State.VALUE, self._held[key.end() :])
            return True
        if self._held.startswith((_FUNCTION_END, _CALL_END)) or (is_last and not self._held):
            self._emit_arguments("}", is_end=True)
            self._go(_State.AFTER, self._held.removeprefix(_FUNCTION_END))
            return True
        tags = (_PARAMETER, _FUNCTION_END, _CALL_END)
        may_be_tag = any(tag.startswith(self._held) for tag in tags) or self._held.startswith(_PARAMETER)
        if not is_last and (not sign or (may_be_tag and ">" not in self._held and len(self._held) < 512)):
            return False
        self._held = after
        return True

    def _open(self, key: str) -> None:
        properties = self.schemas.get(self._function, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        self._types, self._is_begun = _types_of(schema), False
        self._emit_arguments(f"{'' if self._is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        self._is_first = False

    def _value(self, is_last: bool) -> bool:
        at, tag = self._find(_VALUE_ENDS)
        if self._types == ("string",):
            self._emit_string(at, tag, is_last)
        elif tag:
            self._emit_arguments(_json_of(self._held[:at], self._types))
            self._held = self._held[at:]
        if tag:
            self._go(_State.FUNCTION, self._held.removeprefix(_PARAMETER_END))
        return bool(tag)

    def _emit_string(self, end: int, tag: str, is_last: bool) -> None:
        """Report the string as far as it is known; line breaks next to the tags are not part of it."""
        text = self._held[:end]
        if not self._is_begun:
            if text == "" and not tag and not is_last:
                return
            text, self._is_begun = text.removeprefix("\n"), True
            self._emit_arguments('"')
        if tag:
            told = text.removesuffix("\n")
        else:
            told = text[: len(text) - overlap(text, *(f"\n{tag}" for tag in _VALUE_ENDS))]
            told = told[: len(told) - overlap(told, *_VALUE_ENDS)]
        self._emit_arguments(json.dumps(told, ensure_ascii=False)[1:-1] + ('"' if tag else ""))
        self._hold(self._held[end:] if tag else text[len(told) :])

    def _after(self, is_last: bool) -> bool:
        text = self._held.lstrip()
        if not is_last and _CALL_END.startswith(text):
            return False
        self._go(_State.TEXT, text.removeprefix(_CALL_END))
        self._is_after_call = True
        return True

    def _go(self, state: _State, held: str) -> None:
        self._state = state
        self._hold(held)

    def _emit_arguments(self, arguments: str, is_end: bool = False) -> None:
        if arguments:
            self._parts.append(CallPart("", "", arguments, is_end))


def _may_begin(text: str) -> bool:
    """Whether ``text``, too short to be sure, may begin a call."""
    if _HEAD_BEGINS.fullmatch(text):
        return True
    after = text.removeprefix(_CALL).lstrip() if text.startswith(_CALL) else text
    return len(text) < 128 and (_FUNCTION.startswith(after) or _CALL.startswith(text))


def _types_of(schema: object) -> tuple[str, ...]:
    """Allowed JSON types: without a schema a string; () means any."""
    if not isinstance(schema, dict) or not schema:
        return ("string",)
    types = schema.get("type", [])
    found = tuple(str(each) for each in types) if isinstance(types, list) else (str(types),)
    return ("string",) if not found and set(schema) <= {"description", "title", "default"} else found


def _json_of(text: str, types: tuple[str, ...]) -> str:
    """``text`` as a JSON value of one of ``types``; as a string if it is none."""
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        value = read_json(_PYTHON_WORDS.get(text.strip(), text))
        is_one = "string" not in types or not set(_TYPES[type(value)]).isdisjoint(types)
        return json.dumps(value if is_one else text, ensure_ascii=False, allow_nan=False)
    except NOT_JSON:
        return json.dumps(text, ensure_ascii=False)
