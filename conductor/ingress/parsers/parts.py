"""The parts of an answer's text, recognised while it is generated: text for the user, reasoning, tool calls.

A parser takes the text in pieces, however it is cut, and returns what has been decided. Pure; it knows no wire format.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

NOT_JSON = (ValueError, RecursionError)  # the second: nested too deeply


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """What the model thinks before it answers; a part, or all of it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call as far as it is known, or, without a name, more arguments of the previous one."""

    call_id: str
    name: str
    arguments: str  # JSON text of an object, or the next part of it
    is_end: bool = True  # nothing of it follows


Part = str | ReasoningPart | CallPart
"""Text for the user, reasoning, or a part of a tool call."""


class OutputParser(Protocol):
    """Parses one answer. The result does not depend on how its text is cut into pieces."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        ...

    def push(self, text: str, is_last: bool) -> list[Part]:
        """What has been decided, in order. ``is_last``: nothing follows."""
        ...


class PlainParser:
    """Everything is text for the user."""

    is_reasoning = False

    def push(self, text: str, is_last: bool) -> list[Part]:
        return [text] if text else []


@dataclass(slots=True)
class FirstCallParser:
    """Another parser's parts up to the end of the first call."""

    parser: OutputParser
    _is_over: bool = False

    @property
    def is_reasoning(self) -> bool:
        return not self._is_over and self.parser.is_reasoning

    def push(self, text: str, is_last: bool) -> list[Part]:
        parts: list[Part] = []
        if self._is_over:
            return parts
        for part in self.parser.push(text, is_last):
            parts.append(part)
            if isinstance(part, CallPart) and part.is_end:
                self._is_over = True
                break
        return parts


def read_json(text: str) -> Any:
    """The value of ``text``. JSON escapes can spell lone surrogates, which UTF-8 cannot encode: they become question
    marks. Raises NOT_JSON."""
    return json.loads(json_of(json.loads(text)))


def json_of(value: object) -> str:
    """JSON text of ``value``, with question marks for lone surrogates. Raises NOT_JSON, also for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()


_HEX = "[0-9a-fA-F]"
_PAIR = rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(rf"{_PAIR}|(?P<half>\\u[dD][89a-fA-F]{_HEX}{{2}})|\\.?", re.DOTALL)
_LOW_BEGINS = rf"\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?"
# The beginning of an escape that may be an unpaired surrogate, or the first of a pair.
_BEGINS = re.compile(rf"\\(?:u(?:[dD](?:[89abAB](?:{_HEX}(?:{_HEX}(?:{_LOW_BEGINS})?)?)?|[c-fC-F]{_HEX}?)?)?)?")


@dataclass(slots=True)
class SurrogateFilter:
    """A JSON text passed on as it is generated, with escaped unpaired surrogates replaced by question marks, because
    clients can neither store nor send them. Text that may begin such an escape is held back."""

    _held: str = ""

    def take(self, text: str) -> str:
        text = self._held + text
        escapes = _ESCAPE.finditer(text)
        cut = next((found.start() for found in escapes if _BEGINS.fullmatch(text, found.start())), len(text))
        self._held = text[cut:]
        return _ESCAPE.sub(lambda found: "?" if found["half"] else found[0], text[:cut])


def joined_calls(parts: Sequence[CallPart]) -> list[CallPart]:
    """Join parts into calls; the last one may be incomplete."""
    calls: list[list[CallPart]] = []
    for part in parts:
        if part.name:
            calls.append([])
        calls[-1].append(part)
    return [
        CallPart(call[0].call_id, call[0].name, "".join(part.arguments for part in call), call[-1].is_end)
        for call in calls
    ]


def merged(parts: Iterable[Part]) -> list[Part]:
    """Join consecutive parts of the same kind; calls stay separate."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            found[-1] = replace(last, text=last.text + part.text)
        else:
            found.append(part)
    return found


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def overlap(text: str, *tags: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of one of ``tags``."""
    longest = max(map(len, tags)) - 1
    sizes = range(min(len(text), longest), 0, -1)
    return next((size for size in sizes if any(tag.startswith(text[-size:]) for tag in tags if len(tag) > size)), 0)
