"""No figure in a table of results is stale: each is taken from the file that the row names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import result_tables
from result_tables import PAGES, RESULTS, Result, rows, said, typed_figures, whole

ROWS = [pytest.param(row, id=row["what"][:60]) for page in PAGES for row in rows(page)]
ROOT = Path(__file__).parents[2]
SWITCH = RESULTS / "role-switch-live-2core-amx.json"


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_those_of_the_saved_results(page: str) -> None:
    again = "it is made by: python tests/support/result_tables.py"
    assert PAGES[page].read_text() == whole(page), again


@pytest.mark.parametrize("row", ROWS)
def test_no_figure_is_typed_that_is_not_said_to_be(row: dict[str, Any]) -> None:
    assert typed_figures(row) == []


def test_every_saved_result_has_a_row() -> None:
    told = {row["file"] for row in rows("bench")} | {SWITCH.name}  # which stands in the table before
    assert {file.name for file in RESULTS.iterdir()} == told


def test_a_figure_that_was_measured_anew_is_another_one_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = [row for row in rows("bench") if row["file"].startswith("speculation")]
    before = said(row)
    file = Path(shutil.copy(RESULTS / row["file"], tmp_path))
    saved = json.loads(file.read_text())
    measured, saved["ratios"]["free_b4"] = saved["ratios"]["free_b4"], 0.5
    file.write_text(json.dumps(saved) + "\n")
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    assert said(row) == before.replace(f" and {measured:.2f} (asked", " and 0.50 (asked") != before
    del saved["ratios"]["free_b4"]
    file.write_text(json.dumps(saved) + "\n")
    with pytest.raises(KeyError, match="free_b4"):
        said(row)


def test_a_typed_figure_is_found() -> None:
    row = {"says": "{free_b1:.2f} times (asked 0.95), 1.1 on another day (1.2 before)", "typed": ["(1.2 before)"]}
    assert typed_figures(row) == ["1.1"]


def first_tokens_under_load() -> list[str]:
    """What is said of them, of the Zen 4."""
    zen4 = Result(RESULTS / "serve-2core-zen4-fp32.json")

    def of(subject: str, figure: str, clients: int) -> float:
        return float(zen4["best"][f"{subject} | {figure} | clients={clients}"])

    rates = [of(subject, "requests", 16) for subject in ("cluster, shm", "one engine")]
    first_s = [of("one engine", "TTFT p50", 8) / 1e3, *(of("cluster, shm", "TTFT p50", n) / 1e3 for n in (8, 16))]
    gaps_s = [of("one engine", "TBT p99", 16) / 1e3, of("cluster, shm", "TBT p50", 16) / 1e3]
    return [
        f"({rates[0]:.1f} prompts of 256 tokens a second where one engine does {rates[1]:.1f}, on the Zen 4)",
        f"first tokens in {first_s[0]:.1f} s and gaps of {gaps_s[0]:.1f} s, where the cluster has {first_s[1]:.0f} to "
        f"{first_s[2]:.0f} s and gaps of {gaps_s[1]:.2f} s.",
    ]


def test_what_is_held_elsewhere_is_told_as_it_was_saved() -> None:
    text = " ".join(PAGES["bench"].read_text().split())
    compared = json.loads((ROOT / "deploy/reproduction/validation.json").read_text())["results"]
    limited = [row for row in compared if row["limit"]]
    within = sum(abs(row["error"]) <= row["limit"] for row in limited)
    assert f"**{within} of {len(limited)}** figures within their limits" in text
    assert all(said in text for said in first_tokens_under_load())
    [switch] = json.loads(SWITCH.read_text())["results"]
    assert f"**{switch['best']} ms** of control work" in text
