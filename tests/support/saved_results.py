"""Saved results of benchmarks (``tests/bench/results``), and expressions that name a figure in a table's text.

A figure is one of these; in braces within a sentence, a Python format may follow after a colon:

    RATIO                              one of the file's ratios
    best[SUBJECT | FIGURE | KEY=VALUE] one of its results; or median[…], highest[…]
    over[SUBJECT / OTHER | FIGURE | …] best over best; or medians[…]
    per[RATIO / RATIO]                 one ratio over another
    gain[RATIO]                        percent above 1
    least[PATTERN …], most[PATTERN …]  over all ratios with matching names
    line[0][KEY][…]                    any value of the file's first line
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench/results"


class _Found(dict[str, Any]):
    """Figures looked up on access."""

    def __init__(self, look_up: Callable[[str], Any]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, key: str) -> Any:
        return self._look_up(key)


class Result:
    """One saved file. Raises KeyError for a figure that it does not have."""

    def __init__(self, file: Path) -> None:
        self.name = file.name
        self._lines = [json.loads(line) for line in file.read_text().splitlines()]
        self._ways: dict[str, object] = {
            "best": _Found(lambda key: self._figure(key)["best"]),
            "median": _Found(lambda key: self._figure(key)["median"]),
            "over": _Found(lambda key: self._over(key, "best")),
            "medians": _Found(lambda key: self._over(key, "median")),
            "per": _Found(self._per),
            "gain": _Found(lambda key: 100 * (self._ratio(key) - 1)),
            "highest": _Found(lambda key: max(self._figure(key)["values"])),
            "least": _Found(lambda key: min(self._all(key))),
            "most": _Found(lambda key: max(self._all(key))),
            "line": self._lines,
        }

    def __getitem__(self, key: str) -> Any:
        return self._ways[key] if key in self._ways else self._ratio(key)

    def figure(self, name: str) -> float:
        """The value of the named figure."""
        return float(_Words().get_field(name, (), self)[0])

    def _ratio(self, key: str) -> float:
        ratios: dict[str, float] = self._lines[0]["ratios"]
        if key not in ratios:
            raise KeyError(f"{self.name} has no ratio {key!r}")
        return ratios[key]

    def _figure(self, key: str) -> dict[str, Any]:
        subject, name, *wanted = key.split(" | ")
        params = dict(each.split("=") for each in wanted)
        found = [
            row
            for row in self._lines[0]["results"]
            if (row["subject"], row["name"]) == (subject, name)
            and all(str(row.get(param)) == value for param, value in params.items())
        ]
        if len(found) != 1:
            raise KeyError(f"{self.name} has {len(found)} figures {key!r}")
        return found[0]

    def _over(self, key: str, which: str) -> float:
        both, _, rest = key.partition(" | ")
        ours, theirs = (self._figure(f"{subject} | {rest}")[which] for subject in both.split(" / "))
        return float(ours / theirs)

    def _per(self, key: str) -> float:
        ours, theirs = (self._ratio(name) for name in key.split(" / "))
        return ours / theirs

    def _all(self, patterns: str) -> list[float]:
        ratios: dict[str, float] = self._lines[0]["ratios"]
        return [ratios[name] for pattern in patterns.split() for name in fnmatch.filter(ratios, pattern)]


class _Words(Formatter):
    def get_value(self, key: int | str, args: object, kwargs: Any) -> Any:
        return kwargs[str(key)]


def filled(words: str, results: Mapping[str, Result]) -> str:
    """The text with its figures filled in: ``{zen5[decode_b1_vs_vllm]:.1f}`` is a ratio of the result named zen5."""
    return _Words().vformat(words, (), results)
