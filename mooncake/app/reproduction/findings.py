"""The result of an experiment: a table of figures beside the published or required ones, and a verdict."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One figure. ``published`` is None if there is none; the finding's rule compares ``measured`` with it."""

    what: str
    published: float | None  # in our own experiments: the required value
    measured: float
    note: str = ""

    @property
    def error(self) -> float:
        """Relative difference from the published value; 0 if there is none."""
        return abs(self.measured / self.published - 1) if self.published else 0.0

    @property
    def points(self) -> float:
        """Absolute difference from the published value; 0 if there is none."""
        return abs(self.measured - self.published) if self.published is not None else 0.0

    @property
    def is_reached(self) -> bool:
        """Whether it is at least the required value."""
        return self.published is not None and self.measured >= self.published

    @property
    def is_kept(self) -> bool:
        """Whether it is at most the required value."""
        return self.published is not None and self.measured <= self.published


class Verdict(NamedTuple):
    verdict: str  # "reproduced", "partly" or "not reproduced"; for our own, "met", "partly met" or "missed"
    why: str


class Finding(msgspec.Struct, frozen=True):
    name: str
    title: str
    setup: str
    rows: list[Row]
    verdict: str
    why: str
    traces: tuple[str, ...] = ()  # traces used: name and SHA-256, or how they were generated
