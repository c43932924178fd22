"""``mooncake replay``: progress while it runs, a report at the end, and optional output files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from mooncake.app.cluster.role_main import run_async, unless_stopped
from mooncake.app.console import out, plain_table
from mooncake.app.extras import require
from mooncake.app.latency import Outcome
from mooncake.app.load.report import NO_SAMPLE, latency_table, metered, tell_backlog, tell_failures, tell_goodput
from mooncake.app.reach import telling_what_to_do
from mooncake.app.traces.replay import Replay, ReplayOptions, ReplayReport, write_json
from mooncake.errors import Cancelled, NodeUnavailable
from mooncake.trace import load_trace, scale


@dataclass(frozen=True, slots=True)
class ReplayOutput:
    requests: Path | None = None
    plots: Path | None = None


def replay_trace(
    path: Path, address: str, limit: int | None, max_output: int | None, options: ReplayOptions, output: ReplayOutput
) -> None:
    """Raises InvalidRequest for a broken trace; once the results so far are reported, NodeUnavailable when no request
    was answered, and Cancelled after Ctrl-C."""
    if output.plots is not None:
        require("matplotlib", "plots", "--plots")
    trace = [scale(request, options.tokens_per_block, max_output) for request in load_trace(path, limit)]
    complete = True
    with metered("replaying", len(trace)) as add:
        replay = Replay(address, options, add)
        try:
            with telling_what_to_do(address):
                run_async(unless_stopped(replay.run(trace)))
        except Cancelled:
            complete = False
    report = replay.report(trace)
    print_report(report)
    if output.requests is not None:
        write_json(report, output.requests, path.name)
        out.print(f"\nevery request: {escape(str(output.requests))}", soft_wrap=True)
    if output.plots is not None:
        from mooncake.app.plots import write_plots

        files = write_plots(report.results, options.slo, output.plots, report.endless_cache.token)
        out.print(f"plots: {escape(', '.join(str(file) for file in files))}", soft_wrap=True)
    if not complete:
        raise Cancelled("stopped before the end of the trace")
    if trace and not report.summary.ok:
        raise NodeUnavailable("no request was answered")


def print_report(report: ReplayReport) -> None:
    summary = report.summary
    out.print(
        f"[bold]{summary.ok} of {report.planned} requests[/] in {summary.duration_s:.1f} s · "
        f"{summary.rejected} rejected · {summary.failed} failed · {summary.too_long} too long for the model · "
        f"{summary.completion_tokens_per_s:.1f} tokens/s"
    )
    if len(report.results) < report.planned:
        out.print(f"stopped early: {report.sent} of {report.planned} requests sent, {summary.ok} answered")
    out.print()
    answered = [result for result in report.results if result.outcome is Outcome.OK]
    out.print(latency_table(report.results, summary))
    out.print()
    table = plain_table("prompt served from cache", "by block", "by token", "mean of requests")
    for name, rates in (("measured", summary.hits), ("endless cache, one by one", report.endless_cache)):
        shares = (rates.block, rates.token, rates.request_mean)
        table.add_row(name, *(f"{share:.2%}" if answered else NO_SAMPLE for share in shares))
    out.print(table)
    if answered and summary.hits.token > report.endless_cache.token + 1e-9:
        out.print("[dim]more than that: the cluster had cached these prompts before[/]")
    if report.options.speed:
        tell_backlog(answered, "--speed")
    tell_goodput(summary, report.options.slo)
    if summary.too_long:
        out.print("\nsome requests do not fit the model's context: lower --tokens-per-block")
    tell_failures(report.results)
