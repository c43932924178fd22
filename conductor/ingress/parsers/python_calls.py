"""Parses tool calls written as a list of Python calls out of an answer: ``[f(x=1), g()]``.

Llama 4 and small Llama 3.2 models write them like this, only at the beginning of an answer. A call is reported when it
is complete. The result does not depend on how the text is cut into pieces. Pure.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field
from enum import Enum, auto

from conductor.ingress.parsers.parts import CallPart, json_of, new_call_id
from conductor.ingress.parsers.step_parser import StepParser

BEGIN, END = "<|python_start|>", "<|python_end|>"

_NAME = r"[A-Za-z_][\w.]{0,127}+"
_LIST = re.compile(rf"(?P<space>\s{{0,64}}+)(?:{re.escape(BEGIN)}\s{{0,64}}+)?\[\s{{0,64}}+(?={_NAME}\s*\()")
_LIST_BEGINS = re.compile(rf"\s{{0,64}}+(?:\[\s{{0,64}}+(?:{_NAME})?)?")
_NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
_JSON_WORDS = {"true": True, "false": False, "null": None}


class _State(Enum):
    """The parser's state."""

    BEFORE = auto()
    CALL = auto()
    BETWEEN = auto()  # after a call of the list
    AFTER = auto()  # after the list
    TEXT = auto()


@dataclass(slots=True)
class PythonicCallParser(StepParser):
    """Parses one answer. From the first thing that is not a list of calls on, it is text."""

    _state: _State = _State.BEFORE
    _lead: str = ""  # text before the first call, until that is reported
    _call: _Brackets = field(default_factory=lambda: _Brackets())

    def _step(self, is_last: bool) -> bool:
        match self._state:
            case _State.BEFORE:
                return self._begin(is_last)
            case _State.CALL:
                return self._take_call(is_last)
            case _State.BETWEEN:
                return self._between(is_last)
            case _State.AFTER:
                return self._after(is_last)
        return self._text()

    def _begin(self, is_last: bool) -> bool:
        if found := _LIST.match(self._held):
            self._lead, self._held, self._state = found[0], self._held[found.end() :], _State.CALL
            return True
        if not is_last and _may_begin(self._held):
            return False
        self._state = _State.TEXT
        return True

    def _take_call(self, is_last: bool) -> bool:
        end = self._call.end_in(self._held)
        if not self._lead and self._held.lstrip().startswith("]"):  # after a trailing comma
            self._state = _State.BETWEEN
            return True
        if end is None and not is_last:
            return False
        call = _call_of(self._held[:end]) if end is not None else None
        if call is None:
            self._held, self._lead, self._state = self._lead + self._held, "", _State.TEXT
            return True
        self._parts.append(call)
        self._held, self._lead, self._state = self._held[end:], "", _State.BETWEEN
        self._call, self._is_after_call = _Brackets(), True
        return True

    def _between(self, is_last: bool) -> bool:
        self._held = self._held.lstrip()
        if not self._held and not is_last:
            return False
        if self._held.startswith(","):
            self._held, self._state = self._held[1:], _State.CALL
        else:
            self._state = _State.AFTER
            self._held = self._held.removeprefix("]")
        return True

    def _after(self, is_last: bool) -> bool:
        self._held = self._held.lstrip()
        if not is_last and END.startswith(self._held):
            return False
        self._held, self._state = self._held.removeprefix(END), _State.TEXT
        return True

    def _text(self) -> bool:
        self._skip_space_after_call()
        self._emit(self._held)
        self._held = ""
        return False


@dataclass(slots=True)
class _Brackets:
    """Finds the end of a call, looking at each character once."""

    _depth: int = 0
    _num_seen: int = 0
    _quote: str = ""
    _is_escaped: bool = False

    def end_in(self, text: str) -> int | None:
        """Position after the bracket that closes the first one; None if there is none yet. ``text`` grows between
        calls."""
        for at in range(self._num_seen, len(text)):
            char = text[at]
            self._num_seen = at + 1
            if self._quote:
                if not self._is_escaped and char == self._quote:
                    self._quote = ""
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


def _may_begin(text: str) -> bool:
    """Whether ``text``, too short to be sure, may begin a list of calls."""
    begins = text.lstrip()
    if begins.startswith(BEGIN):
        begins = begins[len(BEGIN) :]
    elif begins and BEGIN.startswith(begins):
        return len(text) < 128
    return _LIST_BEGINS.fullmatch(begins) is not None and len(text) < 256


def _call_of(text: str) -> CallPart | None:
    """None for anything but a call with keyword arguments and literal values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes
            call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        if not re.fullmatch(_NAME, name := ast.unparse(call.func)):
            return None
        arguments = {str(each.arg): ast.literal_eval(_Words().visit(each.value)) for each in call.keywords}
        return CallPart(new_call_id(), name, json_of(arguments))
    except _NOT_PYTHON:
        return None


class _Words(ast.NodeTransformer):
    """Accepts JSON's literals as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node
