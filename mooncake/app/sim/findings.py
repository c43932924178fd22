"""What an experiment gives: a table of figures beside those published or asked, and what to make of it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One figure. ``measured`` is compared as the finding's rule says; ``published`` None: there is none."""

    what: str
    published: float | None  # or asked of us, where the finding is our own
    measured: float
    note: str = ""

    @property
    def error(self) -> float:
        """By which share it is off what was published; 0 where nothing was."""
        return abs(self.measured / self.published - 1) if self.published else 0.0

    @property
    def points(self) -> float:
        """By how much it is off what was published; 0 where nothing was."""
        return abs(self.measured - self.published) if self.published is not None else 0.0

    @property
    def is_reached(self) -> bool:
        """Whether it is at least what is asked."""
        return self.published is not None and self.measured >= self.published

    @property
    def is_kept(self) -> bool:
        """Whether it is at most what is asked."""
        return self.published is not None and self.measured <= self.published


class Verdict(NamedTuple):
    verdict: str  # "reproduced", "partly" or "not reproduced"; "met", "partly met" or "missed" what is asked of us
    why: str


class Finding(msgspec.Struct, frozen=True):
    name: str
    title: str
    setup: str
    rows: list[Row]
    verdict: str
    why: str
    traces: tuple[str, ...] = ()  # that it was made of: name and SHA-256, or how it was generated
