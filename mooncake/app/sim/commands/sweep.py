"""``mooncake sweep``: the same trace once per value of one parameter; a table, lines of JSON, and a plot."""

from __future__ import annotations

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
from mooncake.app.sim.output.page import document
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

    def chart(title: str, unit: str, values: dict[str, Callable[[Summary], float]]) -> str:
        series = [Series(label, xs, [value(point.summary) for point in points]) for label, value in values.items()]
        return lines(title, vary, unit, series, names=names)

    ttft = {"mean": lambda one: one.ttft_s.mean, "p99": lambda one: one.ttft_s.p99}
    tbt = {"mean": lambda one: one.tail_tbt_ms.mean, "p99": lambda one: one.tail_tbt_ms.p99}
    reused = {
        "all": lambda one: one.hit_tokens,
        "from memory": lambda one: one.hit_dram,
        "from an SSD": lambda one: one.hit_ssd,
        "from another host": lambda one: one.fetched_tokens,
    }
    charts = [
        chart("Time to first token", "s", ttft),
        chart("Time between tokens, longest tenth", "ms", tbt),
        chart("Requests inside the limits", "share", {"": lambda one: one.goodput}),
        chart("Prompt tokens reused", "share", reused),
    ]
    data = msgspec.json.encode([point.line for point in points]).decode().replace("<", "\\u003c")
    script = f'<script type="application/json" id="data">{data}</script>'
    with writing(path):
        path.write_text(document(f"{vary} on {name}", f'<div class="charts">{"".join(charts)}</div>{script}'))


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
