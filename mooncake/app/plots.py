"""Plots of a load test: latencies, arrivals, and cache hits.

Needs matplotlib (the extra ``plots``), which is imported only when a plot is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake.app.extras import require
from mooncake.app.latency import SLO, Outcome, RequestResult
from mooncake.app.outputs import writing
from mooncake.app.sim.output.charts import short

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes

WINDOWS = 60  # time windows in plots over time
LINE, SECOND, LIMIT = "#1f6feb", "#d29922", "#cf222e"
SHARES = (-0.02, 1.02)  # the limits of an axis from 0 to 1
YARDSTICK: dict[str, Any] = {"color": "black", "linestyle": ":"}
OURS: dict[str, Any] = {"color": LINE, "linewidth": 2.4}


def write_plots(results: Sequence[RequestResult], slo: SLO, folder: Path, endless: float | None = None) -> list[Path]:
    """Write four PNG files. ``endless`` is the hit rate of an endless cache, if it is known. Raises MissingDependency
    without matplotlib."""
    require("matplotlib", "plots", "drawing plots")
    folder.mkdir(parents=True, exist_ok=True)
    ok = [result for result in results if result.outcome is Outcome.OK]
    end_s = max((result.sent_s for result in results), default=0.0) or 1.0
    return [
        _figure(folder / "ttft.png", lambda axes: _ttft(axes, ok, slo.ttft_ms)),
        _figure(folder / "tbt.png", lambda axes: _tbt(axes, ok, slo.tbt_ms)),
        _figure(folder / "arrivals.png", lambda axes: _arrivals(axes, results, end_s)),
        _figure(folder / "hit_rate.png", lambda axes: _hit_rate(axes, ok, end_s, endless)),
    ]


def write_hit_rates(path: Path, title: str, curves: Mapping[str, Sequence[tuple[int, float]]], endless: float) -> None:
    """Plot hit rate by block over capacity, one line per policy. Raises MissingDependency without matplotlib."""
    require("matplotlib", "plots", "drawing plots")
    path.parent.mkdir(parents=True, exist_ok=True)

    def draw(axes: Axes) -> None:
        for name, points in curves.items():
            style = YARDSTICK if name == "belady" else OURS if name == "workload-aware" else {"linewidth": 1.2}
            axes.plot(*zip(*points, strict=True), label=name, marker="o", markersize=3, **style)
        axes.axhline(endless, color=SECOND, linestyle="--", label="endless cache")
        axes.set(title=title, xlabel="capacity, blocks", ylabel="share of prompt blocks found in cache", xscale="log")
        capacities = sorted({capacity for points in curves.values() for capacity, _ in points})
        axes.set_xticks(capacities, list(map(short, capacities)))
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)

    _figure(path, draw, is_crowded=True)


def write_comparison(path: Path, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Plot the distribution over requests of one figure (ms), one curve per run. Raises MissingDependency without
    matplotlib."""
    require("matplotlib", "plots", "drawing plots")

    def draw(axes: Axes) -> None:
        for (name, values), colour in zip(curves.items(), (LINE, SECOND, LIMIT), strict=False):
            _cdf(axes, values, name, colour)
        axes.set(title=title, xlabel="ms", ylabel="share of requests", xlim=(0, None), ylim=SHARES)

    _figure(path, draw)


def write_timeline(path: Path, title: str, pieces_ms: npt.NDArray[np.float64]) -> None:
    """Plot when each stage of a pipeline computed each piece. ``pieces_ms`` is ``[stages, pieces, 2 or more]``, with
    starts and ends first. Raises MissingDependency without matplotlib."""
    require("matplotlib", "plots", "drawing plots")

    def draw(axes: Axes) -> None:
        for stage, row in enumerate(pieces_ms):
            for piece, (begin, end) in enumerate(row[:, :2]):
                axes.barh(stage, end - begin, left=begin, height=0.8, color=(LINE, SECOND)[piece % 2])
        stages = range(len(pieces_ms))
        axes.set(title=title, xlabel="ms", ylabel="stage", yticks=stages, ylim=(len(pieces_ms) - 0.5, -0.5))

    _figure(path, draw)


def _figure(path: Path, draw: Callable[[Axes], None], is_crowded: bool = False) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if is_crowded:
        figure.legend(frameon=False, fontsize="small", loc="outside right center")
    elif axes.get_legend_handles_labels()[0]:  # outside, since lines may be anywhere
        figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=3)
    with writing(path):
        figure.savefig(path)
    return path


def _ttft(axes: Axes, results: Sequence[RequestResult], limit_ms: float) -> None:
    _cdf(axes, [result.ttft_ms / 1e3 for result in results], "TTFT", LINE)
    _limit(axes, limit_ms / 1e3, "s")
    axes.set(title="Time to first token", xlabel="s", ylabel="share of requests", xlim=(0, None), ylim=SHARES)


def _tbt(axes: Axes, results: Sequence[RequestResult], limit_ms: float) -> None:
    with_gaps = [result for result in results if result.gaps_ms]
    _cdf(axes, [result.tail_tbt_ms for result in with_gaps], "mean of the longest tenth of gaps", LINE)
    _cdf(axes, [result.mean_tbt_ms for result in with_gaps], "mean of all gaps", SECOND)
    _limit(axes, limit_ms, "ms")
    title = "Time between tokens, by request"
    axes.set(title=title, xlabel="ms", ylabel="share of requests", xlim=(0, None), ylim=SHARES)


def _arrivals(axes: Axes, results: Sequence[RequestResult], end_s: float) -> None:
    from matplotlib.ticker import MaxNLocator

    sent = [result.sent_s for result in results]
    rejected = [result.sent_s for result in results if result.outcome is Outcome.REJECTED]
    for times, label, colour in ((sent, "sent", LINE), (rejected, "of these, rejected", LIMIT)):
        if times:
            axes.hist(times, bins=WINDOWS, range=(0.0, end_s), color=colour, label=label)
    axes.set(title="Requests sent", xlabel="s since the start", ylabel=f"requests each {end_s / WINDOWS:.2g} s")
    axes.set(xlim=(0, end_s))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _hit_rate(axes: Axes, results: Sequence[RequestResult], end_s: float, endless: float | None) -> None:
    ordered = sorted(results, key=lambda result: result.sent_s)
    hit = accumulate(result.cached_tokens for result in ordered)
    total_tokens = accumulate(result.prompt_tokens for result in ordered)
    rates = [found / max(1, total) for found, total in zip(hit, total_tokens, strict=True)]
    times = [result.sent_s for result in ordered]
    if rates:  # up to the end: a rate holds until the next request, and one alone is a line, too
        axes.step([*times, end_s], [*rates, rates[-1]], where="post", color=LINE, label="so far")
    if endless is not None:
        axes.axhline(endless, color=SECOND, linestyle="--", label="endless cache, whole run")
    title, share = "Prompt tokens served from cache", "share of prompt tokens"
    axes.set(title=title, xlabel="s since the start", ylabel=share, xlim=(0, end_s), ylim=SHARES)


def _cdf(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    ordered = sorted(values)
    shares = [index / len(ordered) for index in range(len(ordered) + 1)] if ordered else []
    axes.step([*ordered[:1], *ordered], shares, where="post", label=label, color=colour)


def _limit(axes: Axes, limit: float, unit: str) -> None:
    if math.isfinite(limit):
        axes.axvline(limit, color=LIMIT, linestyle="--", label=f"SLO {limit:g} {unit}")
