"""gpt-oss's answer format, harmony: a sequence of messages, each in a channel, with a header before its text.

Text in the channel ``analysis`` is a thought, a message with a function as its recipient is a call of it, and
everything else is for the user. An answer begins in the header of its first message. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from conductor.ingress.reading.json_calls import CallReader, JsonValue
from conductor.ingress.reading.parts import (
    CallPart,
    OnceReader,
    PlainReader,
    Reader,
    Said,
    SayableJson,
    Thought,
    new_call_id,
    overlap,
)
from conductor.ingress.reading.thought import Start, spelled
from conductor.ingress.tools import Tools
from mooncake.types import Guide

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)  # the last one if an end is missing
_MARKERS = frozenset((CHANNEL, MESSAGE, "<|constrain|>", *_ENDS))
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(?P<name>[\w-]{1,128})(?![\w.-])")
_THOUGHT = re.compile(rf"{re.escape(CHANNEL)}\s*analysis\b")
_FIRST_HEADER = re.compile(rf"\s*(?:to=\S*\s*)?(?:{re.escape(CHANNEL)}.*)?", re.DOTALL)  # as far as it has arrived
_MAX_HEADER_CHARS = 512
_BREAK = "\n\n"  # between two messages reported as one text


class _Place(Enum):
    """The reader's state."""

    HEADER = auto()
    TEXT = auto()
    THOUGHT = auto()
    CALL = auto()
    BETWEEN = auto()  # between two messages


@dataclass(slots=True)
class HarmonyReader:
    """Reads one answer. ``answer`` reads the text for the user. With ``calls``, functions may be called. With
    ``is_open`` the answer begins inside a message's text."""

    answer: Reader
    calls: bool
    is_open: bool = False
    _place: _Place = field(init=False)
    _held: str = ""
    _is_first: bool = True  # the first header, which the prompt begins
    _is_begun: bool = False  # this message has text
    _has_text: bool = False  # some text for the user has been reported
    _has_thought: bool = False
    _value: JsonValue | None = None
    _sayable: SayableJson = field(default_factory=SayableJson)
    _said: list[Said] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._place = _Place.TEXT if self.is_open else _Place.HEADER

    @property
    def is_thinking(self) -> bool:
        return self._place is _Place.THOUGHT

    def push(self, text: str, is_last: bool) -> list[Said]:
        self._held += text
        while self._step(is_last):
            pass
        if is_last:
            self._said += self.answer.push("", is_last=True)
        said, self._said = self._said, []
        return said

    def _step(self, is_last: bool) -> bool:
        """Consume as much as can be decided. Returns whether another step may get further."""
        match self._place:
            case _Place.HEADER:
                return self._header(is_last)
            case _Place.BETWEEN:
                return self._between(is_last)
        return self._body(is_last)

    def _header(self, is_last: bool) -> bool:
        header, tag, behind = self._held.partition(MESSAGE)
        known = header if tag or is_last else header[: len(header) - overlap(header, CHANNEL, MESSAGE)]
        is_header = len(known) <= _MAX_HEADER_CHARS and (not self._is_first or _may_be_header(known))
        if not is_header or (is_last and self._is_first and not tag and CHANNEL not in header):
            self._begin(_Place.TEXT, self._held)
            return True
        if not tag:
            return False  # and a header without a message is dropped
        called = _RECIPIENT.search(header) if self.calls else None
        self._begin(_Place.CALL if called else _Place.THOUGHT if _THOUGHT.search(header) else _Place.TEXT, behind)
        if called:
            self._value, self._sayable = JsonValue(), SayableJson()
            self._said.append(CallPart(new_call_id(), called["name"], "", is_end=False))
        return True

    def _begin(self, place: _Place, held: str) -> None:
        self._place, self._held, self._is_first, self._is_begun = place, held, False, False

    def _body(self, is_last: bool) -> bool:
        at, tag = min(((at, tag) for tag in _ENDS if (at := self._held.find(tag)) >= 0), default=(len(self._held), ""))
        if not tag and not is_last:
            at -= overlap(self._held, *_ENDS)
        self._tell(self._held[:at])
        self._held = self._held[at + len(tag) :]
        if tag:
            self._end_call()
            self._place = _Place.HEADER if tag == START else _Place.BETWEEN
        return bool(tag)

    def _tell(self, text: str) -> None:
        if self._place is _Place.CALL:
            self._tell_arguments(text)
        elif text and self._place is _Place.THOUGHT:
            self._said.append(Thought(text if self._is_begun or not self._has_thought else _BREAK + text))
            self._has_thought = self._is_begun = True
        elif text:
            text = text if self._is_begun or not self._has_text else _BREAK + text
            self._said += self.answer.push(text, is_last=False)
            self._has_text = self._is_begun = True

    def _tell_arguments(self, text: str) -> None:
        """Report arguments up to the end of the JSON value; text around it is dropped."""
        assert self._value is not None
        if self._value.is_whole:
            return
        text = text if self._is_begun else text.lstrip()
        own = text[: self._value.take(text)]
        self._is_begun |= bool(own)
        part = self._sayable.take(own)
        if part or self._value.is_whole:
            self._said.append(CallPart("", "", part, self._value.is_whole))

    def _end_call(self) -> None:
        """Also ends a call whose arguments were cut short: what follows is not part of it."""
        if self._place is _Place.CALL and self._value is not None and not self._value.is_whole:
            self._said.append(CallPart("", "", "", is_end=True))

    def _between(self, is_last: bool) -> bool:
        """Text that is not the start of a message is a message of its own."""
        self._held = self._held.lstrip()
        if self._held.startswith(START):
            self._place, self._held = _Place.HEADER, self._held[len(START) :]
            return True
        if not self._held or (not is_last and START.startswith(self._held)):
            return False
        self._begin(_Place.TEXT, self._held)
        return True


def _may_be_header(text: str) -> bool:
    """Whether an answer that begins with ``text`` may begin with a header."""
    return "to=".startswith(text.lstrip()) or _FIRST_HEADER.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class HarmonyForm:
    """The form of gpt-oss, whose chat template describes tools, calls and results."""

    takes_tools: bool
    takes_calls: bool
    thinks: bool = True

    def start(self, prompt: str, opening: str) -> Start:
        return Start.BEHIND if opening or prompt.endswith(MESSAGE) else Start.BEFORE

    def reader(self, tools: Tools | None, start: Start) -> Reader:
        must_call = tools is not None and tools.must_call
        answer: Reader = CallReader(is_call=True) if must_call else PlainReader()
        reader = HarmonyReader(answer, tools is not None and not must_call, start is Start.BEHIND)
        return OnceReader(reader) if tools is not None and tools.once else reader

    def markers(self, tools: Tools | None) -> frozenset[str]:
        return _MARKERS

    def guide(self, guide: Guide, start: Start, token_of: Callable[[str], int | None]) -> Guide:
        """The guide applied to the channel ``final``, after any number of thoughts."""
        if start is Start.BEHIND:
            return guide
        channel, message, begin, end = (spelled(tag, token_of(tag)) for tag in (CHANNEL, MESSAGE, START, _ENDS[0]))
        is_text = token_of(_ENDS[0]) is None
        rules = (
            "%llguidance {}",
            f'start: thought* {channel} "final" {message} @answer',
            f'thought: {channel} "analysis" {message} inside {begin} "assistant"',
            f"inside: text {'' if is_text else end}",
            f"text[suffix={end}]: /(?s:.*)/" if is_text else "text: /(?s:.*)/",
        )
        return replace(guide, lead="\n".join(rules))
