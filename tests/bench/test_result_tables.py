"""No figure in a table of results or in a plot is stale: each is taken from the file that the table names."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import result_tables
from result_plots import PLOTS, shown
from result_tables import (
    FOLDER,
    PAGES,
    RESULTS,
    Row,
    farthest,
    table_of,
    table_text,
    tables,
    told,
    typed_figures,
    whole,
)
from saved_results import Result

TOLD = told()
ROOT = Path(__file__).parents[2]
AGAIN = "it is made by: python tests/support/result_tables.py"


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_those_of_the_saved_results(page: str) -> None:
    assert PAGES[page].read_text() == whole(page), AGAIN


@pytest.mark.parametrize("plot", TOLD["plot"], ids=lambda plot: plot["file"])
def test_a_plot_shows_what_was_saved(plot: dict[str, Any]) -> None:
    [said] = re.findall("<dc:description>(.*)</dc:description>", (PLOTS / plot["file"]).read_text())
    assert html.unescape(said) == shown(plot, tables()), AGAIN


@pytest.mark.parametrize("table", TOLD["table"], ids=lambda table: table["title"])
def test_no_figure_is_typed_that_is_not_said_to_be(table: dict[str, Any]) -> None:
    assert typed_figures(table) == []


def test_every_saved_result_has_a_table() -> None:
    assert {file.name for file in RESULTS.iterdir()} == set().union(*(table.all_files() for table in tables()))


def test_whatever_misses_its_target_says_why() -> None:
    assert [table.title for table in tables() if table.misses() and not table.missed] == []
    assert [table.title for table in tables() if table.missed and not table.misses()] == []


def test_a_figure_that_was_measured_anew_is_another_one_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [told] = [table for table in TOLD["table"] if table["title"] == "Prompt lookup"]
    rows = [row for row in told["rows"] if "files" not in row]
    words = told | {"files": {"amx": told["files"]["amx"]}, "also": {}, "rows": rows, "missed": "", "notes": []}
    names = TOLD["machines"]
    before = table_of(words)
    assert not before.misses()
    file = Path(shutil.copy(RESULTS / words["files"]["amx"], tmp_path))
    saved = json.loads(file.read_text())
    measured, saved["ratios"]["free_b4"] = saved["ratios"]["free_b4"], 0.5
    file.write_text(json.dumps(saved) + "\n")
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    after = table_of(words)
    assert table_text(after, names) == table_text(before, names).replace(f"**{measured:.2f}**", "✗ 0.50")
    assert farthest(after, names) == "free text, batch 4: 0.50, AMX (target ≥ 0.95)"
    del saved["ratios"]["free_b4"]
    file.write_text(json.dumps(saved) + "\n")
    with pytest.raises(KeyError, match="free_b4"):
        table_of(words)


def test_a_target_is_held_against_the_figure_itself_not_against_its_rounding() -> None:
    row = Row("million", {"amx": 204.0, "cascadelake": 300.02, "zen5": 300.0}, None, 300.0, "", ".1f", " s")
    assert row.missed() == ["cascadelake"]
    assert [row.target, *map(row.cell, [*row.values, "zen4"])] == [
        "≤ 300 s",
        "**204.0 s**",
        "✗ 300.0 s",
        "**300.0 s**",
        "–",
    ]


def test_a_typed_figure_is_found() -> None:
    table = {"missed": "{zen5[free_b1]:.2f}, 1.1 on another day", "notes": ["1.2 before"], "typed": ["1.2 before"]}
    assert typed_figures(table) == ["1.1"]


def first_tokens_under_load() -> list[str]:
    """The rows about them on the Zen 4."""
    serve, http, nice = (
        Result(RESULTS / name)
        for name in ("serve-2core-zen4-fp32.json", "http-2core-zen4-bf16.json", "http-2core-zen4-nice-bf16.json")
    )

    def over(peer: str, result: Result, figure: str, clients: tuple[int, ...]) -> list[str]:
        return [f"{result.figure(f'{figure}_{number}_cluster_vs_{peer}'):.2f}" for number in clients]

    told = {"median first token": "ttft_p50", "output": "output", "p99 gap": "tbt_p99"}
    disturbed = serve.figure("tbt_p99_disturbed_cluster_vs_engine")

    def row(words: str, figure: str) -> str:
        before, after = (", ".join(over("vllm", result, figure, (1, 8, 16))) for result in (nice, http))
        return f"| {words} | {before} | {after} |"

    return [
        *(f"{' and '.join(over('engine', serve, figure, (8, 16)))} |" for figure in told.values()),
        f"| p99 gap while a long prompt arrives | 0.38 | {disturbed:.2f} |",
        *(row(words, figure) for words, figure in told.items()),
    ]


def test_what_is_held_elsewhere_is_told_as_it_was_saved() -> None:
    text = " ".join((FOLDER / "README.md").read_text().split())
    compared = json.loads((ROOT / "deploy/reproduction/validation.json").read_text())["results"]
    limited = [row for row in compared if row["limit"]]
    within = sum(abs(row["error"]) <= row["limit"] for row in limited)
    assert f"**{within} of {len(limited)}** figures within their limits" in text
    assert all(said in text for said in first_tokens_under_load())
