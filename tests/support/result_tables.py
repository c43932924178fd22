"""The tables of results in README.md and tests/bench/RESULTS.md, and their plots: text from
``tests/bench/result_tables.toml``, figures from saved results.

    python tests/support/result_tables.py    # regenerates all of them; a test fails when they are stale

A row is a figure, a column a machine. Requirements are ``least`` or ``most``, so whether a cell meets them is computed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from saved_results import RESULTS, Result, filled

FOLDER = Path(__file__).parents[1] / "bench"
PAGES = {"results": FOLDER / "RESULTS.md", "readme": FOLDER.parents[1] / "README.md"}
AS_THEY_ARE: Any = {"break_long_words": False, "break_on_hyphens": False}
BEGIN, END = "<!-- made by tests/support/result_tables.py -->\n", "<!-- end -->\n"


def told() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "result_tables.toml").read_text())


@dataclass(frozen=True, slots=True)
class Row:
    """One figure on each machine that has it."""

    figure: str
    values: Mapping[str, float]
    least: float | None
    most: float | None
    words: str  # instead of a limit that can be checked
    form: str
    unit: str

    @property
    def target(self) -> str:
        if self.least is not None and self.least == self.most:
            return self._with_unit(f"{self.least:,g}", "= ")
        if self.least is not None:
            return self._with_unit(f"{self.least:,g}", "≥ ")
        return self._with_unit(f"{self.most:,g}", "≤ ") if self.most is not None else self.words

    @property
    def has_target(self) -> bool:
        return self.least is not None or self.most is not None

    def meets(self, machine: str) -> bool:
        value = self.values[machine]
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def missed(self) -> list[str]:
        return [machine for machine in self.values if not self.meets(machine)]

    def shortfall(self, machine: str) -> float:
        """The share of the required value by which the machine misses it."""
        value = self.values[machine]
        return max((self.least or value) / value, value / (self.most or value))

    def said(self, machine: str) -> str:
        return self._with_unit(format(self.values[machine], self.form))

    def cell(self, machine: str) -> str:
        if machine not in self.values:
            return "–"
        if not self.has_target:
            return self.said(machine)
        return f"**{self.said(machine)}**" if self.meets(machine) else f"✗ {self.said(machine)}"

    def _with_unit(self, number: str, before: str = "") -> str:
        return before + number + self.unit


@dataclass(frozen=True, slots=True)
class Table:
    section: str
    title: str
    about: str
    files: Mapping[str, str]  # by machine
    also: Mapping[str, str]  # other files, used in the text
    rows: tuple[Row, ...]
    missed: str  # why requirements are not met
    weakness: str  # other weaknesses, without a requirement or a file
    notes: tuple[str, ...]

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    def row(self, figure: str) -> Row:
        [found] = [row for row in self.rows if row.figure == figure]
        return found

    def misses(self) -> list[tuple[Row, str]]:
        return [(row, machine) for row in self.rows for machine in row.missed()]

    def all_files(self) -> set[str]:
        return {*self.files.values(), *self.also.values()}


def row_of(words: Mapping[str, Any], files: Mapping[str, str]) -> Row:
    files = words.get("files", files)
    values = {
        machine: Result(RESULTS / file).figure(words["value"])
        for machine, file in files.items()
        if machine in words.get("on", files)
    }
    return Row(
        words["figure"], values, words.get("least"), words.get("most"), words.get("target", ""),
        words.get("form", ".2f"), words.get("unit", ""),
    )  # fmt: skip


def table_of(words: Mapping[str, Any]) -> Table:
    also = words.get("also", {})
    sources: dict[str, Any] = {name: Result(RESULTS / file) for name, file in {**words["files"], **also}.items()}
    sources |= {f"{name}_file": file for name, file in also.items()}
    return Table(
        words["section"], words["title"], words["about"], words["files"], also,
        tuple(row_of(row, words["files"]) for row in words["rows"]),
        filled(words.get("missed", ""), sources),
        filled(words.get("weakness", ""), sources),
        tuple(filled(note, sources) for note in words.get("notes", ())),
    )  # fmt: skip


def tables() -> list[Table]:
    return [table_of(each) for each in told()["table"]]


def lines_of(header: list[str], rows: Iterator[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, ["---"] * len(header), *rows])


def wrapped(text: str, before: str = "") -> str:
    return fill(text, 112, initial_indent=before, subsequent_indent=" " * len(before), **AS_THEY_ARE) + "\n"


def table_text(table: Table, names: Mapping[str, str]) -> str:
    """The table under its heading, with its notes and files."""
    machines = [machine for machine in names if machine in table.files]
    header = ["", "target", *(names[machine] for machine in machines)]
    body = lines_of(header, ([row.figure, row.target, *map(row.cell, machines)] for row in table.rows))
    whys = [f"✗ {why[0].upper()}{why[1:].rstrip('.')}." for why in (table.missed, table.weakness) if why]
    files = "Files: " + ", ".join(f"`{file}`" for file in sorted(table.all_files()))
    notes = "".join(wrapped(note, "- ") for note in [*whys, *table.notes, files])
    return f"### {table.title}\n\n{wrapped(table.about)}\n{body}\n{notes}"


def summary(found: list[Table], names: Mapping[str, str]) -> str:
    """For each table, how many requirements each machine meets, and which figure is farthest from its requirement."""

    def met(table: Table, machine: str) -> str:
        targets = [row for row in table.rows if row.has_target and machine in row.values]
        num_met = sum(row.meets(machine) for row in targets)
        return f"{'' if num_met == len(targets) else '✗ '}{num_met} of {len(targets)}" if targets else ""

    def line(table: Table) -> list[str]:
        targets = dict.fromkeys(row.target for row in table.rows if row.has_target)
        cells = [met(table, machine) for machine in names]
        return [f"[{table.title}](#{table.anchor})", ", ".join(targets), *cells, farthest(table, names)]

    shown = [table for table in found if table.weakness or any(row.has_target for row in table.rows)]
    header = ["targets met", "target", *names.values(), "farthest from its target"]
    return lines_of(header, map(line, shown))


def farthest(table: Table, names: Mapping[str, str]) -> str:
    if not table.misses():
        return f"✗ {table.weakness}" if table.weakness else ""
    row, machine = max(table.misses(), key=lambda miss: miss[0].shortfall(miss[1]))
    return f"{row.figure}: {row.said(machine)}, {names[machine]} (target {row.target})"


def results_page() -> str:
    found, words = tables(), told()
    text = "## Summary\n\n" + summary(found, words["machines"])
    for section in dict.fromkeys(table.section for table in found):
        plots = "".join(
            f"\n![{plot['title']}](plots/{plot['file']})\n" for plot in words["plot"] if plot["section"] == section
        )
        parts = [table_text(table, words["machines"]) for table in found if table.section == section]
        text += f"\n## {section}\n{plots}\n" + "\n".join(parts)
    return text


def readme_table() -> str:
    words = told()
    by_title = {table.title: table for table in tables()}
    chosen = [
        (by_title[each["table"]].row(figure), short)
        for each in words["readme"]
        for figure, short in each["figures"].items()
    ]
    measured = {machine for each in words["readme"] for machine in by_title[each["table"]].files}
    names = {machine: name for machine, name in words["machines"].items() if machine in measured - {"emulated"}}
    return lines_of(
        ["", "target", *names.values()], ([short, row.target, *map(row.cell, names)] for row, short in chosen)
    )


def whole(page: str) -> str:
    """The page with its generated parts regenerated."""
    before, rest = PAGES[page].read_text().split(BEGIN)
    made = readme_table() if page == "readme" else results_page()
    return before + BEGIN + made + END + rest.split(END)[1]


def typed_figures(table: Mapping[str, Any]) -> list[str]:
    """Fractions in a table's text that neither come from a file nor are listed as typed."""
    words = re.sub(
        r"\{[^{}]*\}", "", " ".join([table.get("missed", ""), table.get("weakness", ""), *table.get("notes", ())])
    )
    for phrase in table.get("typed", ()):
        assert phrase in words, f"{phrase!r} is not in the table's words"
        words = words.replace(phrase, "")
    return re.findall(r"\d+\.\d+", words)


if __name__ == "__main__":
    from result_plots import draw_all

    for name, path in PAGES.items():
        path.write_text(whole(name))
    draw_all(told()["plot"], tables(), told()["machines"])
