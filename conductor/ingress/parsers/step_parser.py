"""The loop of a parser that is a state machine: it holds text back until it can decide, and moves from state to state.

Each parser supplies the states and one step; what all of them do with held text is here. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from conductor.ingress.parsers.parts import Part


@dataclass(slots=True)
class StepParser(ABC):
    """An ``OutputParser`` of answers without reasoning. Text is held until a step can tell what it is."""

    _held: str = field(init=False, default="")
    _num_searched: int = field(init=False, default=0)  # characters of it in which no tag begins
    _parts: list[Part] = field(init=False, default_factory=list)
    _is_after_call: bool = field(init=False, default=False)  # white space there is not part of the answer

    @property
    def is_reasoning(self) -> bool:
        return False

    def push(self, text: str, is_last: bool) -> list[Part]:
        self._held += text
        while self._step(is_last):
            pass
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _step(self, is_last: bool) -> bool:
        """Consume as much of the held text as can be decided. Returns whether another step may get further."""

    def _hold(self, text: str) -> None:
        """Replace the held text; a search for tags starts at its beginning."""
        self._held, self._num_searched = text, 0

    def _skip_space_after_call(self) -> None:
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held

    def _find(self, tags: Sequence[str]) -> tuple[int, str]:
        """Position and text of the first tag in the held text; its length and "" if there is none yet. Text that an
        earlier call has searched is not searched again."""
        start = max(0, self._num_searched - len(max(tags, key=len, default="")))
        found = [(at, tag) for tag in tags if (at := self._held.find(tag, start)) >= 0]
        self._num_searched = len(self._held)
        return min(found, default=(len(self._held), ""))

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(text)
