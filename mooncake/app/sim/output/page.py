"""The report of one run as one self-contained HTML file: figures, charts, and published values."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.app.latency import Spread
from mooncake.app.sim.output import published
from mooncake.app.sim.output.charts import Series, cdf, lines
from mooncake.app.sim.output.summary import Summary
from mooncake.app.sim.requests import Fate, Floats
from mooncake.app.sim.simulation import Simulation
from mooncake.errors import ConfigError

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#1f2328;max-width:980px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:.6em 0}
td,th{padding:.2em .8em .2em 0;text-align:right;border-bottom:1px solid #d0d7de}
td:first-child,th:first-child{text-align:left}.charts{display:grid;grid-template-columns:1fr 1fr;gap:12px}
svg{width:100%;font:10px system-ui,sans-serif;fill:#57606a}svg .grid{stroke:#d0d7de;stroke-width:.5}
svg .title{font-size:12px;fill:#1f2328;font-weight:600}
.note{color:#57606a}
"""
WINDOWS = 60
_SHARES = " / ".join(f"{share:g}" for share in published.FIG6_SHARES["conversation"]["paper-16"])
_EFFECTIVE, _TTFT_S, _TBT_MS = published.FIG15[8]
_ENDLESS = ", ".join(f"{name} {rates[-1]:.3f}" for name, rates in published.FIG9_RATES.items())
PUBLISHED = (
    (
        "conversation, 16 machines, all policies' best",
        f"mean TTFT {published.FIG5_GLOBAL_TTFT_S:g} s (FAST'25 Fig. 5; split not said)",
    ),
    (
        f"conversation, share inside TBT {' / '.join(map(str, published.FIG6_TBT_MS))} ms",
        f"{_SHARES} % (FAST'25 Fig. 6)",
    ),
    (
        "synthetic, 8 prefill and 8 decode",
        f"TTFT {_TTFT_S:.2f} s, TBT {_TBT_MS:.1f} ms, {_EFFECTIVE:.1f} % effective (FAST'25 Fig. 15)",
    ),
    ("hit rate of tokens, endless cache", f"{_ENDLESS} (FAST'25 Fig. 9)"),
)


def write_page(simulation: Simulation, summary: Summary, path: Path) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(page(simulation, summary))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def page(simulation: Simulation, summary: Summary) -> str:
    slo = simulation.cluster.slo
    refused = summary.rejected + summary.rejected_late
    title = f"{summary.trace} on {summary.cluster}"
    facts = [
        ("policy", summary.policy),
        ("requests answered / rejected / failed", f"{summary.done:,} / {refused:,} / {summary.failed:,}"),
        (f"inside TTFT {slo.ttft_s:g} s and TBT {slo.tbt_ms:g} ms", f"{summary.goodput:.2%}"),
        ("prompt tokens reused, of all", f"{summary.hit_tokens:.2%}"),
        ("from memory / from an SSD, of all", f"{summary.hit_dram:.2%} / {summary.hit_ssd:.2%}"),
        ("from another host, of all", f"{summary.fetched_tokens:.2%}"),
        ("reused, mean of requests' own shares", f"{summary.hit_requests:.2%}"),
        ("prefill machines at work, mean / busiest", f"{summary.prefill_use:.0%} / {summary.prefill_use_max:.0%}"),
        ("decode machines at work", f"{summary.decode_use:.0%}"),
        ("moved between hosts", f"{summary.bytes_moved_gb:,.0f} GB"),
        ("read from / written to SSDs", f"{summary.ssd_read_gb:,.0f} / {summary.ssd_written_gb:,.0f} GB"),
        ("error of the conductor's TTFT predictions, median", f"{summary.ttft_error:.1%}"),
        ("seed, speed", f"{summary.seed}, {summary.speed:g}"),
    ]
    latency = [
        ("TTFT, s", summary.ttft_s),
        ("of that, before its prefill starts, s", summary.queue_s),
        ("TBT, mean of gaps, ms", summary.mean_tbt_ms),
        ("TBT, longest tenth, ms", summary.tail_tbt_ms),
    ]
    return document(
        title,
        f'<p class="note">{escape(simulation.cluster.note)}</p>'
        + _table(("", ""), facts)
        + _table(("", "mean", "p50", "p90", "p99", "max"), [(name, *_cells(spread)) for name, spread in latency])
        + f'<div class="charts">{"".join(_charts(simulation))}</div>'
        + "<h2>Published values</h2>"
        + _table(("what", "value"), PUBLISHED)
        + '<p class="note">'
        "Published set-ups are only partly described: <code>mooncake reproduce</code> says what compares.</p>",
    )


def document(title: str, body: str) -> str:
    """``title`` is text, ``body`` HTML."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{body}</html>"
    )


def _charts(simulation: Simulation) -> list[str]:
    results, timeline = simulation.results, simulation.timeline
    done = results.fate == Fate.DONE
    minutes = [at_s / 60 for at_s in timeline.at_s]
    windows = over_time(simulation)
    steps = [(at, step) for at, step in zip(minutes, timeline.step_ms, strict=True) if step]  # while there were any
    end = max(
        minutes[-1] if minutes else 0.0, float(results.arrival_s.max()) / 60
    )  # all charts over time have one axis
    return [
        lines("Time to first token", "s", "share of requests", [cdf("", results.ttft_s[done].tolist())], log_x=True),
        lines(
            "Time between tokens",
            "ms",
            "share of requests",
            [
                cdf("longest tenth", _without_nan(results.tail_tbt_ms[done])),
                cdf("mean", _without_nan(results.mean_tbt_ms[done])),
            ],
        ),
        lines("Requests a minute", "minutes", "requests", [windows["sent"], windows["refused"]], end=end),
        lines(
            "Prompt tokens reused, by tier",
            "minutes",
            "share",
            [windows[name] for name in ("all tiers", "memory", "SSD", "another host")],
            end=end,
        ),
        lines(
            "Machines at work",
            "minutes",
            "share",
            [Series("prefill", minutes, timeline.prefill_load), Series("decode batch / 64", minutes, timeline.batch)],
            end=end,
        ),
        lines("Prompts that wait, a machine", "minutes", "prompts", [Series("", minutes, timeline.queued)], end=end),
        lines("One decode step", "minutes", "ms", [Series("mean of machines", *_columns(steps))], end=end),
        lines("Mean TTFT", "minutes", "s", [Series("", windows["ttft"].x, windows["ttft"].y)], end=end),
    ]


def over_time(simulation: Simulation) -> dict[str, Series]:
    results = simulation.results
    edges = np.linspace(0.0, max(float(results.arrival_s.max()), 1e-9), WINDOWS + 1)
    middle = (edges[1:] + edges[:-1]) / 120
    per_minute = 60 / (edges[1] - edges[0])
    done = results.fate == Fate.DONE
    refused = (results.fate == Fate.REJECTED) | (results.fate == Fate.REJECTED_LATE)

    def total(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> Floats:
        arrivals, weights = results.arrival_s[mask], values[mask]
        return np.histogram(arrivals, edges, weights=weights)[0].astype(np.float64)

    ones = np.ones(results.size)
    everybody = np.ones(results.size, dtype=bool)
    tokens = np.maximum(total(results.input_tokens, done), 1.0)
    count = np.maximum(total(ones, done), 1.0)
    rates = {"sent": total(ones, everybody) * per_minute, "refused": total(ones, refused) * per_minute}
    means = {
        "all tiers": total(results.cached_tokens, done) / tokens,
        "memory": total(results.cached_tokens - results.ssd_tokens, done) / tokens,
        "SSD": total(results.ssd_tokens, done) / tokens,
        "another host": total(results.fetched_tokens, done) / tokens,
        "ttft": total(results.ttft_s, done) / count,
    }
    answered = total(ones, done) > 0  # elsewhere there is nothing to take a mean of
    found = {name: Series(name, middle.tolist(), values.tolist()) for name, values in rates.items()}
    return found | {n: Series(n, middle[answered].tolist(), v[answered].tolist()) for n, v in means.items()}


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _without_nan(values: Floats) -> list[float]:
    return [float(value) for value in values[~np.isnan(values)]]


def _cells(spread: Spread) -> tuple[str, ...]:
    return tuple(f"{value:,.3g}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
