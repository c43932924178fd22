"""``mooncake simulate``: one trace on one described cluster in virtual time; prints tables or JSON, writes a page."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.table import Table

from mooncake.app.console import PROSE_WIDTH, counted, duration, out, plain_table, print_json
from mooncake.app.latency import Spread
from mooncake.app.outputs import writing
from mooncake.app.sim.arenas import use_huge_pages
from mooncake.app.sim.cluster import Cluster, load_cluster, load_preset, preset_names
from mooncake.app.sim.output.summary import Summary, summarize, to_json
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.traces.files import load_any
from mooncake.errors import ConfigError
from mooncake.trace import TRACE_BLOCK_TOKENS, ResampledTrace, TraceRequest, scale

PROGRESS_EVERY = 256  # arrivals
GARBAGE_EVERY = 500_000  # new objects between collections: requests leave no cycles, so there is little to find
REQUEST_COLUMNS = (
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "fate",
    "ttft_s",
    "queue_s",
    "predicted_ttft_s",
    "mean_tbt_ms",
    "tail_tbt_ms",
    "end_s",
    "cached_tokens",
    "fetched_tokens",
    "ssd_tokens",
    "prefill_ms",
    "retry_after_s",
)


@dataclass(frozen=True, slots=True)
class Output:
    as_json: bool = False
    report: Path | None = None
    requests: Path | None = None


def choose_cluster(preset: str, file: Path | None) -> Cluster:
    """Raises ConfigError when both are given, or neither."""
    if bool(preset) == (file is not None):
        raise ConfigError("give either --preset NAME (--preset help lists them) or --cluster FILE")
    return load_cluster(file) if file is not None else load_preset(preset)


def list_presets() -> None:
    table = plain_table("preset", "")
    for name in preset_names():
        table.add_row(name, escape(load_preset(name).note))
    table.columns[0].no_wrap = True
    table.columns[1].justify = "left"
    out.print(table, width=min(out.width, PROSE_WIDTH))


def changed(cluster: Cluster, policy: str, admission: str, prefill: int | None, decode: int | None) -> Cluster:
    """The cluster with the overrides of the command line. Raises ConfigError."""
    counts = {role: count for role, count in (("prefill", prefill), ("decode", decode)) if count is not None}
    cluster.check_roles(*counts)
    cluster = cluster.with_counts(**counts)
    if admission:
        cluster = cluster.with_conductor(admission=admission)
    return cluster.with_conductor(policy=policy) if policy else cluster


def play(
    cluster: Cluster, trace: Sequence[TraceRequest], run: Run, title: str = "simulating"
) -> tuple[Simulation, float]:
    """Run to the end with a progress bar on a terminal. Returns the simulation and its wall time (s)."""
    simulation = Simulation(cluster, trace, run)
    gc.collect()
    gc.freeze()  # the trace stays alive: the collector need not visit it
    thresholds = gc.get_threshold()
    gc.set_threshold(GARBAGE_EVERY, *thresholds[1:])
    started_s = time.perf_counter()
    with counted(title, len(trace), TimeRemainingColumn()) as advance:

        def progress(arrived: int) -> None:
            if arrived and arrived % PROGRESS_EVERY == 0:
                advance(PROGRESS_EVERY)

        simulation.run(progress)
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    return simulation, time.perf_counter() - started_s


def simulate(path: Path, limit: int | None, resample: int | None, cluster: Cluster, run: Run, output: Output) -> None:
    use_huge_pages()
    trace: Sequence[TraceRequest] = load_scaled(path, limit, run.tokens_per_block)
    if resample is not None:
        trace = ResampledTrace(trace, resample, run.seed)
    simulation, wall_s = play(cluster, trace, run)
    summary = summarize(simulation, path.name)
    line = to_json(summary, cluster, run)
    line |= {"wall_s": round(wall_s, 3), "peak_memory_gb": round(peak_memory_gb(), 3)}
    if output.report is not None:
        from mooncake.app.sim.output.page import write_page

        write_page(simulation, summary, output.report)
    if output.requests is not None:
        write_requests(simulation, output.requests)
    if output.as_json:
        print_json(line)
        return
    print_summary(summary, cluster)
    out.print(f"\n[dim]{wall_s:.1f} s for {summary.duration_s:,.0f} s of virtual time[/]")
    for file in (output.report, output.requests):
        if file is not None:
            out.print(f"[dim]wrote {escape(str(file))}[/]")


def load_scaled(path: Path, limit: int | None, tokens_per_block: int) -> list[TraceRequest]:
    """The trace with ``tokens_per_block`` tokens per id, as ``mooncake replay`` plays it."""
    trace = load_any(path, limit)
    return trace if tokens_per_block == TRACE_BLOCK_TOKENS else [scale(one, tokens_per_block) for one in trace]


def peak_memory_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def print_summary(summary: Summary, cluster: Cluster) -> None:
    out.print(
        f"[bold]{escape(summary.trace)}[/] on [bold]{escape(summary.cluster)}[/], policy {escape(summary.policy)}",
        soft_wrap=True,
    )
    if cluster.note:
        out.print(f"[dim]{escape(cluster.note)}[/]")
    out.print()
    table = plain_table("", "mean", "p50", "p90", "p99", "max")
    _row(table, "TTFT", summary.ttft_s, 1e3)
    _row(table, "of that, before its prefill starts", summary.queue_s, 1e3)
    _row(table, "TBT, mean of gaps", summary.mean_tbt_ms, 1.0)
    _row(table, "TBT, longest tenth", summary.tail_tbt_ms, 1.0)
    out.print(table)
    refused = summary.rejected + summary.rejected_late
    out.print(
        f"\n{summary.done:,} of {summary.requests:,} answered, {refused:,} rejected, {summary.failed:,} failed\n"
        f"{summary.goodput:.1%} inside TTFT {cluster.slo.ttft_s:g} s and TBT {cluster.slo.tbt_ms:g} ms\n"
        f"{summary.hit_tokens:.1%} of prompt tokens reused ({summary.hit_ssd:.1%} from an SSD, "
        f"{summary.fetched_tokens:.1%} from another host); "
        f"mean of requests {summary.hit_requests:.1%}\n"
        f"machines at work: prefill {summary.prefill_use:.0%} (busiest {summary.prefill_use_max:.0%}), "
        f"decode {summary.decode_use:.0%}; {summary.bytes_moved_gb:,.0f} GB moved\n"
        f"TTFT as the conductor predicted it: {summary.ttft_error:.1%} off (median)"
    )


def _row(table: Table, name: str, spread: Spread, factor: float) -> None:
    table.add_row(
        name, *(duration(value * factor) for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))
    )


def write_requests(simulation: Simulation, path: Path) -> None:
    """Write one JSON object per request, in the order of the trace."""
    results = simulation.results
    columns = [getattr(results, name).tolist() for name in REQUEST_COLUMNS]
    with writing(path), path.open("wb") as file:
        for row in zip(*columns, strict=True):
            record = {name: _none_for_nan(value) for name, value in zip(REQUEST_COLUMNS, row, strict=True)}
            file.write(msgspec.json.encode(record) + b"\n")


def _none_for_nan(value: float) -> float | None:
    return None if value != value else value
