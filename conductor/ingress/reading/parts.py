"""What an answer's text turns out to be while it is made: text for the user, thoughts, and calls of tools.

A reader takes the text in pieces, however it is cut, and tells what has become clear. Pure; it knows no wire form.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

NOT_JSON = (ValueError, RecursionError)  # the second: nested beyond any sense


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model says to itself before it answers, or more of that."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call as far as it is known, or more of the arguments of the last one: that has no name."""

    call_id: str
    name: str
    arguments: str  # the text of a JSON object; together with what follows
    is_end: bool = True  # nothing of it follows


Said = str | Thought | CallPart
"""Text for the user, a thought, or a part of a call."""


class Reader(Protocol):
    """Of one answer. Where its text is cut into pieces changes nothing of what comes out."""

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is, as far as is known, of a thought."""
        ...

    def push(self, text: str, is_last: bool) -> list[Said]:
        """What has become clear, in its order. ``is_last``: nothing follows."""
        ...


class PlainReader:
    """Everything is text for the user."""

    is_thinking = False

    def push(self, text: str, is_last: bool) -> list[Said]:
        return [text] if text else []


@dataclass(slots=True)
class OnceReader:
    """Of another reader's answer nothing behind the first call is told."""

    reader: Reader
    _is_over: bool = False

    @property
    def is_thinking(self) -> bool:
        return not self._is_over and self.reader.is_thinking

    def push(self, text: str, is_last: bool) -> list[Said]:
        told: list[Said] = []
        if self._is_over:
            return told
        for part in self.reader.push(text, is_last):
            told.append(part)
            if isinstance(part, CallPart) and part.is_end:
                self._is_over = True
                break
        return told


def read_json(text: str) -> Any:
    """What ``text`` says. Escapes can spell halves of surrogate pairs, which UTF-8 has no way to say: they become
    question marks. Raises NOT_JSON."""
    return json.loads(json_of(json.loads(text)))


def json_of(value: object) -> str:
    """What says ``value``, with question marks for such halves. Raises NOT_JSON, also for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()


_HEX = "[0-9a-fA-F]"
_PAIR = rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(rf"{_PAIR}|(?P<half>\\u[dD][89a-fA-F]{_HEX}{{2}})|\\.?", re.DOTALL)
_LOW_BEGINS = rf"\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?"
# Of an escape that may be a half, or the first one of a pair.
_BEGINS = re.compile(rf"\\(?:u(?:[dD](?:[89abAB](?:{_HEX}(?:{_HEX}(?:{_LOW_BEGINS})?)?)?|[c-fC-F]{_HEX}?)?)?)?")


@dataclass(slots=True)
class SayableJson:
    """A JSON text that is told as it is written, with question marks for such halves: who is told of one can neither
    write it down nor send it back. What may be the beginning of one waits."""

    _held: str = ""

    def take(self, text: str) -> str:
        text = self._held + text
        escapes = _ESCAPE.finditer(text)
        cut = next((found.start() for found in escapes if _BEGINS.fullmatch(text, found.start())), len(text))
        self._held = text[cut:]
        return _ESCAPE.sub(lambda found: "?" if found["half"] else found[0], text[:cut])


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


def merged(parts: Iterable[Said]) -> list[Said]:
    """Parts of one kind that follow each other as one; calls stay as they are."""
    found: list[Said] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = replace(last, text=last.text + part.text)
        else:
            found.append(part)
    return found


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def overlap(text: str, *tags: str) -> int:
    """Length of the longest end of ``text`` that one of ``tags`` begins with, and that is not all of it."""
    longest = max(map(len, tags)) - 1
    sizes = range(min(len(text), longest), 0, -1)
    return next((size for size in sizes if any(tag.startswith(text[-size:]) for tag in tags if len(tag) > size)), 0)
