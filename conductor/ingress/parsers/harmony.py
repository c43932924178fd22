"""gpt-oss's answer format, harmony: a sequence of messages, each in a channel, with a header before its text.

Text in the channel ``analysis`` is reasoning, a message with a function as its recipient is a call of it, and
everything else is for the user. An answer begins in the header of its first message. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from conductor.ingress.parsers.calls_instead import RULE, free_calls
from conductor.ingress.parsers.json_calls import JsonCallParser, JsonValue
from conductor.ingress.parsers.parts import (
    CallPart,
    FirstCallParser,
    OutputParser,
    Part,
    PlainParser,
    ReasoningPart,
    SurrogateFilter,
    new_call_id,
    overlap,
)
from conductor.ingress.parsers.reasoning import Start, led, spelled
from conductor.ingress.tools import Tools
from mooncake.sampling import Guide

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)  # the last one if an end is missing
_OF_CALLS = (CHANNEL, "<|constrain|>", MESSAGE)  # in a call
_MARKERS = frozenset((CHANNEL, MESSAGE, "<|constrain|>", *_ENDS))
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(?P<name>[\w-]{1,128})(?![\w.-])")
_REASONING = re.compile(rf"{re.escape(CHANNEL)}\s*analysis\b")
_FIRST_HEADER = re.compile(rf"\s*(?:to=\S*\s*)?(?:{re.escape(CHANNEL)}.*)?", re.DOTALL)  # as far as it has arrived
_MAX_HEADER_CHARS = 512
_BREAK = "\n\n"  # between two messages reported as one text


class _State(Enum):
    """The parser's state."""

    HEADER = auto()
    TEXT = auto()
    REASONING = auto()
    CALL = auto()
    BETWEEN = auto()  # between two messages


@dataclass(slots=True)
class HarmonyParser:
    """Parses one answer. ``answer`` parses the text for the user. With ``calls``, functions may be called. With
    ``is_open`` the answer begins inside a message's text."""

    answer: OutputParser
    calls: bool
    is_open: bool = False
    _state: _State = field(init=False)
    _held: str = ""
    _is_first: bool = True  # the first header, which the prompt begins
    _is_begun: bool = False  # this message has text
    _has_text: bool = False  # some text for the user has been reported
    _has_reasoning: bool = False
    _value: JsonValue | None = None
    _surrogates: SurrogateFilter = field(default_factory=SurrogateFilter)
    _parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._state = _State.TEXT if self.is_open else _State.HEADER

    @property
    def is_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def push(self, text: str, is_last: bool) -> list[Part]:
        self._held += text
        while self._step(is_last):
            pass
        if is_last:
            self._parts += self.answer.push("", is_last=True)
        parts, self._parts = self._parts, []
        return parts

    def _step(self, is_last: bool) -> bool:
        """Consume as much as can be decided. Returns whether another step may get further."""
        match self._state:
            case _State.HEADER:
                return self._header(is_last)
            case _State.BETWEEN:
                return self._between(is_last)
        return self._body(is_last)

    def _header(self, is_last: bool) -> bool:
        header, tag, after = self._held.partition(MESSAGE)
        known = header if tag or is_last else header[: len(header) - overlap(header, CHANNEL, MESSAGE)]
        is_header = len(known) <= _MAX_HEADER_CHARS and (not self._is_first or _may_be_header(known))
        if not is_header or (is_last and self._is_first and not tag and CHANNEL not in header):
            self._begin(_State.TEXT, self._held)
            return True
        if not tag:
            return False  # and a header without a message is dropped
        called = _RECIPIENT.search(header) if self.calls else None
        self._begin(_State.CALL if called else _State.REASONING if _REASONING.search(header) else _State.TEXT, after)
        if called:
            self._value, self._surrogates = JsonValue(), SurrogateFilter()
            self._parts.append(CallPart(new_call_id(), called["name"], "", is_end=False))
        return True

    def _begin(self, state: _State, held: str) -> None:
        self._state, self._held, self._is_first, self._is_begun = state, held, False, False

    def _body(self, is_last: bool) -> bool:
        at, tag = min(((at, tag) for tag in _ENDS if (at := self._held.find(tag)) >= 0), default=(len(self._held), ""))
        if not tag and not is_last:
            at -= overlap(self._held, *_ENDS)
        self._emit_text(self._held[:at])
        self._held = self._held[at + len(tag) :]
        if tag:
            self._end_call()
            self._state = _State.HEADER if tag == START else _State.BETWEEN
        return bool(tag)

    def _emit_text(self, text: str) -> None:
        if self._state is _State.CALL:
            self._emit_arguments(text)
        elif text and self._state is _State.REASONING:
            self._parts.append(ReasoningPart(text if self._is_begun or not self._has_reasoning else _BREAK + text))
            self._has_reasoning = self._is_begun = True
        elif text:
            text = text if self._is_begun or not self._has_text else _BREAK + text
            self._parts += self.answer.push(text, is_last=False)
            self._has_text = self._is_begun = True

    def _emit_arguments(self, text: str) -> None:
        """Report arguments up to the end of the JSON value; text around it is dropped."""
        assert self._value is not None
        if self._value.is_whole:
            return
        text = text if self._is_begun else text.lstrip()
        own = text[: self._value.take(text)]
        self._is_begun |= bool(own)
        part = self._surrogates.take(own)
        if part or self._value.is_whole:
            self._parts.append(CallPart("", "", part, self._value.is_whole))

    def _end_call(self) -> None:
        """Also ends a call whose arguments were cut short: what follows is not part of it."""
        if self._state is _State.CALL and self._value is not None and not self._value.is_whole:
            self._parts.append(CallPart("", "", "", is_end=True))

    def _between(self, is_last: bool) -> bool:
        """Text that is not the start of a message is a message of its own."""
        self._held = self._held.lstrip()
        if self._held.startswith(START):
            self._state, self._held = _State.HEADER, self._held[len(START) :]
            return True
        if not self._held or (not is_last and START.startswith(self._held)):
            return False
        self._begin(_State.TEXT, self._held)
        return True


def _may_be_header(text: str) -> bool:
    """Whether an answer that begins with ``text`` may begin with a header."""
    return "to=".startswith(text.lstrip()) or _FIRST_HEADER.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """The form of gpt-oss, whose chat template describes tools, calls and results."""

    takes_tools: bool
    takes_calls: bool
    has_reasoning: bool = True
    reasoning_tags: None = None  # it is in a channel of its own

    def start(self, prompt: str, opening: str) -> Start:
        return Start.AFTER if opening or prompt.endswith(MESSAGE) else Start.BEFORE

    def parser(self, tools: Tools | None, start: Start) -> OutputParser:
        must_call = tools is not None and tools.must_call
        answer: OutputParser = JsonCallParser(is_call=True) if must_call else PlainParser()
        parser = HarmonyParser(answer, tools is not None and not must_call, start is Start.AFTER)
        return FirstCallParser(parser) if tools is not None and tools.once else parser

    def markers(self, tools: Tools | None) -> frozenset[str]:
        return _MARKERS

    def guide(self, guide: Guide, start: Start, token_of: Callable[[str], int | None], tools: Tools | None) -> Guide:
        """The guide applied to the channel ``final``, after any number of reasoning messages. A call is one message."""
        if start is Start.AFTER:
            return guide
        channel, message, begin, end = (spelled(tag, token_of(tag)) for tag in (CHANNEL, MESSAGE, START, _ENDS[0]))
        is_text = token_of(_ENDS[0]) is None
        calls = () if tools is None else free_calls(("to=", " to="), _OF_CALLS, token_of)
        called = f' | {channel} "commentary"? {RULE} | {RULE}' if calls else ""
        rules = (
            f'start: thought* ({channel} "final" {message} @answer{called})',
            f'thought: {channel} "analysis" {message} inside {begin} "assistant"',
            f"inside: text {'' if is_text else end}",
            f"text[suffix={end}]: /(?s:.*)/" if is_text else "text: /(?s:.*)/",
            *calls,
        )
        return led(guide, rules)
