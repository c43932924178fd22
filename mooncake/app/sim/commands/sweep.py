"""``mooncake sweep``: the same trace once per value of one parameter; a table, lines of JSON, and a plot."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec.structs import replace as replace_struct
from rich.markup import escape

from mooncake.app.console import err, out, plain_table, print_json
from mooncake.app.outputs import writing
from mooncake.app.sim.cluster import Cluster, Ssd
from mooncake.app.sim.commands.simulate import play
from mooncake.app.sim.output.charts import Series, lines
from mooncake.app.sim.output.summary import Summary, summarize, to_json
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.errors import ConfigError
from mooncake.trace import TraceRequest

Setting = tuple[Cluster, Run]


@dataclass(frozen=True, slots=True)
class Point:
    value: str
    summary: Summary
    line: dict[str, object]


def _policy(setting: Setting, value: str) -> Setting:
    return setting[0].with_conductor(policy=value), setting[1]


def _admission(setting: Setting, value: str) -> Setting:
    return setting[0].with_conductor(admission=value), setting[1]


def _split(setting: Setting, value: str) -> Setting:
    """``5:11``: numbers of prefill and decode machines."""
    prefill, colon, decode = value.partition(":")
    if not colon:
        raise ConfigError(f"a split is two numbers like 5:11, got {value!r}")
    return setting[0].with_counts(prefill=_count(prefill), decode=_count(decode)), setting[1]


def _nodes(setting: Setting, value: str) -> Setting:
    """Total number of machines, in the cluster's proportions."""
    cluster = setting[0]
    total = sum(group.count for group in cluster.machines)
    counts = {
        role: max(1, round(cluster.count(role) * _count(value) / total))
        for role in ("prefill", "decode", "coupled")
        if cluster.count(role)
    }
    return cluster.with_counts(**counts), setting[1]


def _bandwidth(setting: Setting, value: str) -> Setting:
    """Network bandwidth of every machine in Gbit/s."""
    return setting[0].with_machines(nic_gb_per_s=_number(value) / 8), setting[1]


def _capacity(setting: Setting, value: str) -> Setting:
    """Tokens of KV in each prefill machine's memory."""
    return setting[0].with_machines("prefill", store_tokens=int(_number(value))), setting[1]


def _ssd(setting: Setting, value: str) -> Setting:
    """Tokens of KV on each prefill machine's SSD; 0: no SSD."""
    cluster, tokens = setting[0], int(_number(value))
    had = next((group.ssd for group in cluster.machines if group.ssd is not None), Ssd(tokens=1))
    ssd = replace_struct(had, tokens=tokens) if tokens else None
    return cluster.with_machines("prefill", ssd=ssd), setting[1]


def _load(setting: Setting, value: str) -> Setting:
    """Factor on the trace's speed."""
    speed = _number(value)
    if not speed:
        raise ConfigError("a load of 0 never ends")
    return setting[0], replace(setting[1], speed=speed)


VARIED: dict[str, Callable[[Setting, str], Setting]] = {
    "policy": _policy,
    "admission": _admission,
    "split": _split,
    "nodes": _nodes,
    "bandwidth": _bandwidth,
    "capacity": _capacity,
    "ssd": _ssd,
    "load": _load,
}


def sweep(
    trace: list[TraceRequest],
    name: str,
    setting: Setting,
    vary: str,
    values: Sequence[str],
    as_json: bool,
    plot: Path | None,
) -> None:
    """Raises ConfigError for an unknown parameter or an invalid value, before anything is simulated."""
    if vary not in VARIED:
        raise ConfigError(f"{vary!r} cannot be varied; possible: {', '.join(VARIED)}")
    settings = []
    for value in values:
        try:
            cluster, run = VARIED[vary](setting, value.strip())
            cluster.check()
            Simulation(cluster, trace[:1], run)  # checks policies and the sizes of SSDs
        except ConfigError as error:
            raise ConfigError(f"--vary {vary} --values {value}: {error.message}") from None
        settings.append((cluster, run))
    points = []
    for value, (cluster, run) in zip(values, settings, strict=True):
        simulation, wall_s = play(cluster, trace, run, f"{vary} {value}")
        summary = summarize(simulation, name)
        line = {"sweep": vary, "value": value, **to_json(summary, cluster, run), "wall_s": round(wall_s, 3)}
        points.append(Point(value, summary, line))
        if as_json:
            print_json(line)
    if not as_json:
        out.print(_table(vary, points))
    if plot is not None:
        write_plot(vary, name, points, plot)
        err.print(f"[dim]wrote {escape(str(plot))}[/]")


def _table(vary: str, points: Sequence[Point]) -> object:
    table = plain_table(
        vary, "TTFT mean s", "p99 s", "TBT mean ms", "p99 ms", "goodput", "reused", "from SSD", "rejected", "GB moved"
    )
    for point in points:
        one = point.summary
        table.add_row(
            escape(point.value),
            f"{one.ttft_s.mean:.3g}",
            f"{one.ttft_s.p99:.3g}",
            f"{one.tail_tbt_ms.mean:.3g}",
            f"{one.tail_tbt_ms.p99:.3g}",
            f"{one.goodput:.1%}",
            f"{one.hit_tokens:.1%}",
            f"{one.hit_ssd:.1%}",
            f"{one.rejected + one.rejected_late:,}",
            f"{one.bytes_moved_gb:,.0f}",
        )
    return table


def write_plot(vary: str, name: str, points: Sequence[Point], path: Path) -> None:
    """Write one HTML file with the charts. Values that are not numbers are spaced evenly."""
    try:
        xs, names = [float(point.value) for point in points], []
    except ValueError:
        xs, names = [float(at) for at in range(len(points))], [point.value for point in points]
    found = [point.summary for point in points]
    ttft = [
        Series("mean", xs, [one.ttft_s.mean for one in found]),
        Series("p99", xs, [one.ttft_s.p99 for one in found]),
    ]
    tbt = [
        Series("mean", xs, [one.tail_tbt_ms.mean for one in found]),
        Series("p99", xs, [one.tail_tbt_ms.p99 for one in found]),
    ]
    reused = [
        Series("all", xs, [one.hit_tokens for one in found]),
        Series("from memory", xs, [one.hit_dram for one in found]),
        Series("from an SSD", xs, [one.hit_ssd for one in found]),
        Series("from another host", xs, [one.fetched_tokens for one in found]),
    ]
    charts = [
        lines("Time to first token", vary, "s", ttft, names=names),
        lines("Time between tokens, longest tenth", vary, "ms", tbt, names=names),
        lines(
            "Requests inside the limits", vary, "share", [Series("", xs, [one.goodput for one in found])], names=names
        ),
        lines("Prompt tokens reused", vary, "share", reused, names=names),
    ]
    style = "body{font:14px system-ui;max-width:980px;margin:2em auto}"
    style += "svg{width:48%;overflow:visible;font:10px system-ui;fill:#57606a}"
    style += "svg .grid{stroke:#d0d7de;stroke-width:.5}svg .title{font-size:12px;font-weight:600}"
    title = html.escape(f"{vary} on {name}")
    data = msgspec.json.encode([point.line for point in points]).decode().replace("<", "\\u003c")
    with writing(path):
        path.write_text(
            f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
            f"<h1>{title}</h1>{''.join(charts)}"
            f'<script type="application/json" id="data">{data}</script>'
        )


def _count(text: str) -> int:
    value = _number(text)
    if value < 1 or value != int(value):
        raise ConfigError(f"a number of machines must be an integer from 1 on, got {text!r}")
    return int(value)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise ConfigError(f"{text!r} is not a number from 0 on")
    return value
