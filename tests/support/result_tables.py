"""The tables of results in README.md and tests/bench/README.md: words of ``tests/bench/result_tables.toml``, figures of
what was saved.

    python tests/support/result_tables.py    # writes both anew; a test says when that is to be done

A place for a figure is one of these, and a format of Python's behind a colon (``{decode_b1_vs_vllm:.1f}``):

    RATIO                              of the file's ratios
    best[SUBJECT | FIGURE | KEY=VALUE] of its results; or median[…], highest[…]
    over[SUBJECT / OTHER | FIGURE | …] best over best; or medians[…]
    gain[RATIO]                        in percent more than 1
    least[PATTERN …], most[PATTERN …]  of all ratios of such names
    line[0][KEY][…]                    whatever the file's first line has

A row of several files names each (``{zen4[tcp_read_1MiB_vs_socket]:.2f}``). What no file has saved is typed; a row
lists such words under ``typed``, so that nobody takes them for more. Targets ("asked 2.0") and sizes are words.
"""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

FOLDER = Path(__file__).parents[1] / "bench"
RESULTS = FOLDER / "results"
PAGES = {"bench": FOLDER / "README.md", "readme": FOLDER.parents[1] / "README.md"}
BEGIN, END = "<!-- made by tests/support/result_tables.py -->\n", "<!-- end -->\n"


class _Found(dict[str, Any]):
    """Looked up when asked for."""

    def __init__(self, look_up: Callable[[str], Any]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, key: str) -> Any:
        return self._look_up(key)


class Result:
    """One saved file. Raises KeyError for what it does not have."""

    def __init__(self, file: Path) -> None:
        self.name = file.name
        self._lines = [json.loads(line) for line in file.read_text().splitlines()]
        self._ways: dict[str, object] = {
            "best": _Found(lambda key: self._figure(key)["best"]),
            "median": _Found(lambda key: self._figure(key)["median"]),
            "over": _Found(lambda key: self._over(key, "best")),
            "medians": _Found(lambda key: self._over(key, "median")),
            "gain": _Found(lambda key: 100 * (self._lines[0]["ratios"][key] - 1)),
            "highest": _Found(lambda key: max(self._figure(key)["values"])),
            "least": _Found(lambda key: min(self._all(key))),
            "most": _Found(lambda key: max(self._all(key))),
            "line": self._lines,
        }

    def __getitem__(self, key: str) -> Any:
        return self._ways[key] if key in self._ways else self._lines[0]["ratios"][key]

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

    def _all(self, patterns: str) -> list[float]:
        ratios: dict[str, float] = self._lines[0]["ratios"]
        return [ratios[name] for pattern in patterns.split() for name in fnmatch.filter(ratios, pattern)]


class _Words(Formatter):
    def get_value(self, key: int | str, args: object, kwargs: Mapping[str, Any]) -> Any:
        return kwargs[str(key)]


def rows(page: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((FOLDER / "result_tables.toml").read_text())[page]
    return found


def said(row: Mapping[str, Any]) -> str:
    """The row's words with their figures."""
    source: Any
    if "files" in row:
        source = {name: Result(RESULTS / file) for name, file in row["files"].items()}
    else:
        source = Result(RESULTS / row["file"])
    return _Words().vformat(row["says"], (), source)


def table(page: str) -> str:
    if page == "readme":
        return "| | |\n|---|---|\n" + "".join(f"| {row['what']} | {said(row)} |\n" for row in rows(page))
    lines = [f"| `results/{row['file']}` | {row['what']} | {said(row)} |\n" for row in rows(page)]
    return "| file | what | ratios |\n|---|---|---|\n" + "".join(lines)


def whole(page: str) -> str:
    """The page with its table made anew."""
    before, rest = PAGES[page].read_text().split(BEGIN)
    return before + BEGIN + table(page) + END + rest.split(END)[1]


def typed_figures(row: Mapping[str, Any]) -> list[str]:
    """Fractions in a row's words that are neither a file's, nor a target, nor listed as typed."""
    words = re.sub(r"\{[^{}]*\}", "", row["says"])
    words = re.sub(r"\basked [^:;)]*", "", words)
    for phrase in row.get("typed", ()):
        assert phrase in words, f"{phrase!r} is not in the row"
        words = words.replace(phrase, "")
    return re.findall(r"\d+\.\d+", words)


if __name__ == "__main__":
    for name, path in PAGES.items():
        path.write_text(whole(name))
