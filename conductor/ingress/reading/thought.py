"""Thoughts: how they are separated from the answer after them, and how a guide is applied only to the answer.

A thought is between two tags at the beginning of an answer, and nowhere else: later the same tags are text. Many chat
templates write the opening tag themselves, at the end of the prompt; some write both, to turn thinking off. White space
around a thought belongs to neither side. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from conductor.ingress.reading.parts import PlainReader, Reader, Said, Thought, overlap
from mooncake.types import Guide

_MAX_SPACE_CHARS = 64  # before a thought, and the most removed at its end


class Start(Enum):
    """Where an answer begins, relative to its thought."""

    BEFORE = auto()  # before it, if there is one
    WITHIN = auto()  # inside it
    BEHIND = auto()  # after it, or in the middle of an answer


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around a thought. With ``is_first_left_out`` an answer begins inside a thought, without the opening
    tag."""

    begin: str
    end: str
    is_first_left_out: bool = False

    def start(self, prompt: str, opening: str) -> Start:
        """Where an answer starts that follows a prompt ending in ``prompt``, or that continues from ``opening``."""
        if opening:
            is_within = opening.lstrip().startswith(self.begin) and self.end not in opening
            return Start.WITHIN if is_within else Start.BEHIND
        if prompt.rstrip().endswith(self.end):
            return Start.BEHIND
        is_within = self.is_first_left_out or prompt.rstrip().endswith(self.begin)
        return Start.WITHIN if is_within else Start.BEFORE


class _Place(Enum):
    """The reader's state."""

    BEFORE = auto()
    THOUGHT = auto()
    BEHIND = auto()  # after the thought, before the answer's first character
    ANSWER = auto()


@dataclass(slots=True)
class ThoughtReader:
    """Reports the thought of one answer, then what ``answer`` reads from the rest. With ``is_open`` the prompt has
    begun the thought; if the model still writes the opening tag, it is not part of it."""

    tags: Tags
    is_open: bool
    answer: Reader = field(default_factory=PlainReader)
    _place: _Place = _Place.BEFORE
    _held: str = ""
    _has_told: bool = False  # a part of the thought has been reported

    @property
    def is_thinking(self) -> bool:
        if self._place is _Place.BEFORE:
            return self.is_open
        return self._place is _Place.THOUGHT or (self._place is _Place.ANSWER and self.answer.is_thinking)

    def push(self, text: str, is_last: bool) -> list[Said]:
        self._held += text
        parts: list[Said] = []
        if self._place is _Place.BEFORE:
            self._begin(is_last)
        if self._place is _Place.THOUGHT:
            parts += self._think(is_last)
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            if self._held or is_last:
                self._place = _Place.ANSWER
        if self._place is _Place.ANSWER:
            held, self._held = self._held, ""
            parts += self.answer.push(held, is_last)
        return parts

    def _begin(self, is_last: bool) -> None:
        begin = self.tags.begin
        text = self._held.lstrip()
        num_spaces = len(self._held) - len(text)
        may_begin = num_spaces <= _MAX_SPACE_CHARS
        if may_begin and text.startswith(begin):
            self._place, self._held = _Place.THOUGHT, text[len(begin) :]
        elif is_last or not may_begin or not begin.startswith(text):
            self._place = _Place.THOUGHT if self.is_open else _Place.ANSWER

    def _think(self, is_last: bool) -> list[Said]:
        if not self._has_told:
            self._held = self._held.lstrip()
        thought, tag, behind = self._held.partition(self.tags.end)
        if not tag and not is_last:
            thought = thought[: len(thought) - overlap(thought, self.tags.end)]
        decided = thought[: max(len(thought.rstrip()), len(thought) - _MAX_SPACE_CHARS)]
        if tag:
            self._place, self._held = _Place.BEHIND, behind
        else:
            self._held = "" if is_last else self._held[len(decided) :]
        self._has_told |= bool(decided)
        return [Thought(decided)] if decided else []


def behind_thought(guide: Guide, tags: Tags, is_open: bool, token_of: Callable[[str], int | None]) -> Guide:
    """The guide of an answer that may think first, or must, if its thought ``is_open``.

    ``token_of`` returns the control token that a tag is; None for one that is plain text.
    """
    begin, end = (spelled(tag, token_of(tag)) for tag in (tags.begin, tags.end))
    if token_of(tags.end) is None:
        thought = f"thought[suffix={end}]: /(?s:.*)/"
    else:
        thought = f"thought: inside {end}\ninside: /(?s:.*)/"
    lead = "thought gap" if is_open else "(lead thought gap)?"
    rules = ("%llguidance {}", f"start: {lead} @answer", thought, f"lead: gap {begin}", "gap: /\\n{0,2}/")
    return replace(guide, lead="\n".join(rules))


def spelled(tag: str, token_id: int | None) -> str:
    """A tag in a grammar."""
    return json.dumps(tag) if token_id is None else f"<[{token_id}]>"
