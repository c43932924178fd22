"""Reasoning between tags: how it is separated from the answer after it, and how a guide applies to the answer only.

Reasoning is between two tags at the beginning of an answer, and nowhere else: later the same tags are text. Many chat
templates write the opening tag themselves, at the end of the prompt; some write both, to turn reasoning off. White
space around it belongs to neither side. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from conductor.ingress.parsers.parts import OutputParser, Part, PlainParser, ReasoningPart, overlap
from mooncake.sampling import Guide

_MAX_SPACE_CHARS = 64  # before the reasoning, and the most removed at its end


class Start(Enum):
    """Where an answer begins, relative to its reasoning."""

    BEFORE = auto()  # before it, if there is one
    WITHIN = auto()  # inside it
    AFTER = auto()  # after it, or in the middle of an answer


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around reasoning. With ``is_first_left_out`` an answer begins inside it, without the opening tag."""

    begin: str
    end: str
    is_first_left_out: bool = False

    def start(self, prompt: str, opening: str) -> Start:
        """Where an answer starts that follows a prompt ending in ``prompt``, or that continues from ``opening``."""
        if opening:
            is_within = opening.lstrip().startswith(self.begin) and self.end not in opening
            return Start.WITHIN if is_within else Start.AFTER
        if prompt.rstrip().endswith(self.end):
            return Start.AFTER
        is_within = self.is_first_left_out or prompt.rstrip().endswith(self.begin)
        return Start.WITHIN if is_within else Start.BEFORE


class _State(Enum):
    """The parser's state."""

    BEFORE = auto()
    REASONING = auto()
    AFTER = auto()  # before the answer's first character
    ANSWER = auto()


@dataclass(slots=True)
class ReasoningParser:
    """Returns the reasoning of one answer, then what ``answer`` parses from the rest. With ``is_open`` the prompt has
    begun the reasoning; if the model still writes the opening tag, it is not part of it."""

    tags: Tags
    is_open: bool
    answer: OutputParser = field(default_factory=PlainParser)
    _state: _State = _State.BEFORE
    _held: str = ""
    _is_begun: bool = False  # a part of the reasoning has been returned

    @property
    def is_reasoning(self) -> bool:
        if self._state is _State.BEFORE:
            return self.is_open
        return self._state is _State.REASONING or (self._state is _State.ANSWER and self.answer.is_reasoning)

    def push(self, text: str, is_last: bool) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if self._state is _State.BEFORE:
            self._begin(is_last)
        if self._state is _State.REASONING:
            parts += self._reasoning_parts(is_last)
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held or is_last:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            held, self._held = self._held, ""
            parts += self.answer.push(held, is_last)
        return parts

    def _begin(self, is_last: bool) -> None:
        begin = self.tags.begin
        text = self._held.lstrip()
        num_spaces = len(self._held) - len(text)
        may_begin = num_spaces <= _MAX_SPACE_CHARS
        if may_begin and text.startswith(begin):
            self._state, self._held = _State.REASONING, text[len(begin) :]
        elif is_last or not may_begin or not begin.startswith(text):
            self._state = _State.REASONING if self.is_open else _State.ANSWER

    def _reasoning_parts(self, is_last: bool) -> list[Part]:
        if not self._is_begun:
            self._held = self._held.lstrip()
        text, tag, rest = self._held.partition(self.tags.end)
        if not tag and not is_last:
            text = text[: len(text) - overlap(text, self.tags.end)]
        decided = text[: max(len(text.rstrip()), len(text) - _MAX_SPACE_CHARS)]
        if tag:
            self._state, self._held = _State.AFTER, rest
        else:
            self._held = "" if is_last else self._held[len(decided) :]
        self._is_begun |= bool(decided)
        return [ReasoningPart(decided)] if decided else []


def after_reasoning(tags: Tags, is_open: bool, token_of: Callable[[str], int | None], answer: str) -> tuple[str, ...]:
    """Rules of a grammar for an answer that may reason first, or must, if its reasoning ``is_open``, and for what
    follows: ``answer``, in such a rule.

    ``token_of`` returns the control token that a tag is; None for one that is plain text.
    """
    begin, end = (spelled(tag, token_of(tag)) for tag in (tags.begin, tags.end))
    if token_of(tags.end) is None:
        thought = f"thought[suffix={end}]: /(?s:.*)/"
    else:
        thought = f"thought: inside {end}\ninside: /(?s:.*)/"
    lead = "thought gap" if is_open else "(lead thought gap)?"
    return f"start: {lead} ({answer})", thought, f"lead: gap {begin}", "gap: /\\n{0,2}/"


def led(guide: Guide, rules: Iterable[str]) -> Guide:
    """``guide`` at the place that ``rules`` of a grammar, the first for the whole answer, call ``@answer``."""
    return replace(guide, lead="\n".join(("%llguidance {}", *rules)))


def spelled(tag: str, token_id: int | None) -> str:
    """A tag in a grammar."""
    return json.dumps(tag) if token_id is None else f"<[{token_id}]>"
