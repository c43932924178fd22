"""How calls of tools are read out of an answer while it is made: its text in; text for the user, and calls, out.

The form is Hermes' (``tools.py``). A call is told as it is written: its name once its arguments begin, then those as
they come. Where the text is cut into pieces changes nothing of what comes out. Pure; it knows no wire form of answers.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NOT_JSON = (ValueError, RecursionError)  # the second: nested beyond any sense

_START = '{"name": "'  # of a call as its guide writes it
# A call up to its arguments, alone or in a list. Other orders of its members are read when it is whole.
_NAME = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_HEAD = re.compile(rf'\s*+(\[?)\s*+\{{\s*"name"\s*:\s*({_NAME})\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_NEXT = re.compile(r"\s*+\}\s*+,?\s*+(?=\{)")  # from the arguments of a call to another one between the same tags
_MAX_HEAD_CHARS = 1024  # of either: they are tried anew with each piece of text


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call as far as it is known, or more of the arguments of the last one: that has no name."""

    call_id: str
    name: str
    arguments: str  # the text of a JSON object; together with what follows
    is_end: bool = True  # nothing of it follows


Said = str | CallPart
"""Text for the user, or a part of a call."""


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


class _Place(Enum):
    """Where the reader is."""

    TEXT = auto()
    HEAD = auto()  # of a call, behind its tag
    ARGUMENTS = auto()
    REST = auto()  # of what stands between the tags, behind a call's arguments
    OVER = auto()  # nothing comes out any more


@dataclass(slots=True)
class CallReader:
    """Reads one answer. What may be the start of a tag or of a call waits, and what turns out to be none stays text.

    With ``is_call`` the whole answer is one call without tags, as its guide writes it. With ``once`` nothing comes out
    behind the first call. Tags may be missing behind a call, and calls may follow each other between the same tags.
    """

    is_call: bool = False
    once: bool = False
    _place: _Place = field(init=False)
    _held: str = ""
    _num_sought: int = 0  # characters of it in which no tag begins
    _said: list[Said] = field(default_factory=list)
    _is_behind_call: bool = False  # and white space there is no text
    _is_list: bool = False  # what stands between these tags
    _is_further: bool = False  # a call between these tags has been told
    _name: str = ""  # not yet told
    _arguments: _Value | None = None

    def __post_init__(self) -> None:
        self._place = _Place.HEAD if self.is_call else _Place.TEXT

    def push(self, text: str, is_last: bool) -> list[Said]:
        """What has become clear, in its order. ``is_last``: nothing follows."""
        if self._place is _Place.OVER:
            return []
        self._held += text
        steps = {
            _Place.TEXT: self._text,
            _Place.HEAD: self._head,
            _Place.ARGUMENTS: self._value,
            _Place.REST: self._call if self.is_call else self._rest,
        }
        while (step := steps.get(self._place)) is not None and step(is_last):
            pass
        said, self._said = self._said, []
        return said

    # Each of these moves on as far as it can tell, and says whether the next one may go on.

    def _text(self, is_last: bool) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip()
            self._is_behind_call = not self._held
        before, tag, behind = self._held.partition(OPEN)
        if tag:
            self._say(before)
            self._go(_Place.HEAD, behind)
            self._is_list = self._is_further = False
            return True
        cut = len(self._held) - (0 if is_last else _overlap(self._held, OPEN))
        self._say(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _head(self, is_last: bool) -> bool:
        is_open = self._num_sought < _MAX_HEAD_CHARS  # else it has been tried on as much as it may have
        head = _HEAD.match(self._held, 0, _MAX_HEAD_CHARS) if is_open else None
        begins = self._held[head.end() :][:1] if head else ""
        if head and (begins == "{" or (self.is_call and (begins or is_last))) and (name := _text_of(head[2])):
            self._is_list, self._name, self._arguments = bool(head[1]), name, _Value()
            self._go(_Place.ARGUMENTS, self._held[head.end() :])
            return True
        return self._without_name(is_last) if self.is_call else self._whole(is_last)

    def _without_name(self, is_last: bool) -> bool:
        """Of what was cut short before the name was there, nothing is text; all of what was to be no call."""
        if is_last:
            self._say("" if _START.startswith(self._held[: len(_START)]) else self._held)
            self._held = ""
        return False

    def _whole(self, is_last: bool) -> bool:
        """What stands between tags and does not begin as most calls do."""
        at, tag = self._find(CLOSE)
        if not tag and not is_last:
            return False
        inside = self._held[:at]
        self._go(_Place.TEXT, self._held[at + len(tag) :])
        if self._take_forms(inside) or self._is_further:
            self._end_call()
        else:
            self._say(OPEN + inside + tag)
        return True

    def _take_forms(self, text: str) -> bool:
        """Whether ``text`` is a call, or a list of them."""
        try:
            found = json.loads(text)
        except NOT_JSON:
            return False
        forms = found if isinstance(found, list) else [found]
        if not forms or not all(map(_is_call, forms)):
            return False
        for form in forms[:1] if self.once else forms:
            arguments = form.get("arguments", form.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            self._said.append(CallPart(_call_id(), form["name"], text))
        return True

    def _value(self, is_last: bool) -> bool:
        assert self._arguments is not None
        num_chars = self._arguments.take(self._held)
        part, self._held = self._held[:num_chars], self._held[num_chars:]
        is_end = self._arguments.is_whole
        if self._name or part or is_end:
            self._said.append(CallPart(_call_id() if self._name else "", self._name, part, is_end))
            self._name = ""
        if is_end:
            self._go(_Place.REST, self._held)
            if self.once:
                self._end_call()
        return is_end

    def _call(self, is_last: bool) -> bool:
        """Behind the call that the whole answer is."""
        self._held = ""
        return False

    def _rest(self, is_last: bool) -> bool:
        if following := _NEXT.match(self._held, 0, _MAX_HEAD_CHARS):
            self._go(_Place.HEAD, ("[" if self._is_list else "") + self._held[following.end() :])
            self._is_further = True
            return True
        at, tag = self._find(OPEN, CLOSE)
        if not tag and not is_last:
            return False
        if tag != CLOSE:  # it is missing, or cut short
            self._say(self._behind_call(self._held[:at]))
        self._go(_Place.TEXT, self._held[at + len(CLOSE) :] if tag == CLOSE else self._held[at:])
        self._end_call()
        return True

    def _behind_call(self, text: str) -> str:
        """What is left behind the end of a call, or of a list of them, whose arguments were before ``text``."""
        end = _Value(depth=2 if self._is_list else 1)
        num_chars = end.take(text)
        behind = text[num_chars:] if end.is_whole else ""
        return behind[: len(behind) - _overlap(behind, CLOSE)].lstrip()

    def _find(self, *tags: str) -> tuple[int, str]:
        """The first of the tags in what is held, and where it is; its end and "" when there is none yet."""
        start = max(0, self._num_sought - len(CLOSE))
        found = [(at, tag) for tag in tags if (at := self._held.find(tag, start)) >= 0]
        self._num_sought = len(self._held)
        return min(found, default=(len(self._held), ""))

    def _go(self, place: _Place, held: str) -> None:
        self._place, self._held, self._num_sought = place, held, 0

    def _end_call(self) -> None:
        self._is_behind_call = True
        if self.once:
            self._place = _Place.OVER

    def _say(self, text: str) -> None:
        if text:
            self._said.append(text)


@dataclass(slots=True)
class _Value:
    """Reads a JSON value that is a member of an object, to its end: ``depth`` brackets are open before it begins.

    The closing tag ends it too, where no JSON can hold one: a string has no line breaks, so behind one it is no string.
    """

    depth: int = 0
    is_whole: bool = False
    _is_text: bool = False
    _is_escaped: bool = False
    _is_torn: bool = False  # the string

    def take(self, text: str) -> int:
        """How many characters of ``text`` belong to it. The others are to come again unless it is whole."""
        for at, char in enumerate(text):
            if char == "<" and (self._is_torn or not self._is_text) and CLOSE.startswith(text[at : at + len(CLOSE)]):
                self.is_whole = text.startswith(CLOSE, at)
                return at
            if self._is_text:
                self._is_text = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
                self._is_torn = self._is_text and (self._is_torn or char == "\n")
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth < 1:
                    self.is_whole = True
                    return at + 1 + self.depth
        return len(text)


def _is_call(form: object) -> bool:
    return isinstance(form, dict) and isinstance(name := form.get("name"), str) and bool(name)


def _text_of(literal: str) -> str:
    """What a JSON string says; "" for one that is none."""
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)
