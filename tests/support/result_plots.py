"""Plots of tests/bench/RESULTS.md: one panel per figure, one bar per machine, and the required value.

Each file has its data in its description, so a test can recognise a stale plot without drawing it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from result_tables import Row, Table

PLOTS = Path(__file__).parents[1] / "bench/plots"
MET, MISSED, ASKED, INK = "#2a6fb0", "#c8641e", "#444444", "#222222"


def rows_of(plot: Mapping[str, Any], tables: list[Table]) -> list[tuple[str, Row]]:
    """Rows with their captions."""
    by_title = {table.title: table for table in tables}
    return [(each["caption"], by_title[each["table"]].row(each["figure"])) for each in plot["panels"]]


def shown(plot: Mapping[str, Any], tables: list[Table]) -> str:
    """The plot's data, as in the file's description."""
    rows = rows_of(plot, tables)
    return json.dumps(
        [[caption, row.target, {m: row.said(m) for m in row.values}] for caption, row in rows], ensure_ascii=False
    )


def draw_all(plots: list[Mapping[str, Any]], tables: list[Table], names: Mapping[str, str]) -> None:
    PLOTS.mkdir(exist_ok=True)
    for plot in plots:
        draw(plot, tables, names)


def draw(plot: Mapping[str, Any], tables: list[Table], names: Mapping[str, str]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    rows = rows_of(plot, tables)
    style = {"svg.fonttype": "none", "svg.hashsalt": "results", "font.sans-serif": ["DejaVu Sans", "Arial"]}
    with plt.rc_context({**style, "font.size": 9, "text.color": INK}):
        figure, panels = plt.subplots(1, len(rows), figsize=(2.3 * len(rows), 3.1), layout="constrained")
        figure.suptitle(f"{plot['title']} (dashed: target)", fontsize=11)
        for panel, (caption, row) in zip(panels, rows, strict=True):
            _bars(panel, caption, row, names)
        about = {"Date": None, "Creator": None, "Description": shown(plot, tables)}
        figure.savefig(PLOTS / plot["file"], metadata=about, facecolor="white")
        plt.close(figure)


def _bars(panel: Axes, caption: str, row: Row, names: Mapping[str, str]) -> None:
    machines = list(row.values)
    ticks = [names[machine].replace(" L", "\nL") for machine in machines]
    colours = [MET if row.meets(machine) else MISSED for machine in machines]
    bars = panel.bar(ticks, [row.values[machine] for machine in machines], 0.65, color=colours)
    if row.least is not None:
        panel.axhline(row.least, color=ASKED, linestyle="--", linewidth=1)
        panel.annotate(
            row.target, (1, row.least), (2, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=8
        )
    said = [row.said(machine) if row.meets(machine) else f"✗ {row.said(machine)}" for machine in machines]
    for label in panel.bar_label(bars, said, padding=3, fontsize=8):
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    panel.set_title(caption, fontsize=9)
    panel.tick_params(axis="x", labelsize=8, length=0)
    panel.set_yticks([])
    panel.set_ylim(0, 1.15 * max(*row.values.values(), row.least or 0))
    panel.spines[["top", "right", "left"]].set_visible(False)
