"""``mooncake replay``: progress while it runs, a report at the end, and optional output files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from mooncake.app.cluster.role_main import run_async, unless_stopped
from mooncake.app.console import counted, duration, err, out, plain_table
from mooncake.app.extras import require
from mooncake.app.latency import Outcome, RequestResult, Spread
from mooncake.app.reach import telling_what_to_do
from mooncake.app.traces.replay import Replay, ReplayOptions, ReplayReport, write_json
from mooncake.errors import Cancelled, NodeUnavailable
from mooncake.trace import load_trace, scale

NO_SAMPLE = "–"


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
    with metered(len(trace)) as add:
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

        files = write_plots(report, output.plots)
        out.print(f"plots: {escape(', '.join(str(file) for file in files))}", soft_wrap=True)
    if not complete:
        raise Cancelled("stopped before the end of the trace")
    if trace and not report.summary.ok:
        raise NodeUnavailable("no request was answered")


@contextmanager
def metered(total: int) -> Iterator[Callable[[RequestResult], None]]:
    """A progress bar over results, for each of which it yields what to call."""
    ended = dict.fromkeys(Outcome, 0)
    with counted("replaying", total) as advance:

        def add(result: RequestResult) -> None:
            ended[result.outcome] += 1
            note = " · ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in ended.items() if count)
            advance(note=note)

        yield add


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
    tried = [result for result in report.results if result.outcome is not Outcome.TOO_LONG]
    answered = [result for result in tried if result.outcome is Outcome.OK]
    with_gaps = [result for result in answered if result.gaps_ms]
    table = plain_table("latency, by request", "p50", "p90", "p99", "max", "mean")
    for name, spread, samples in (
        ("TTFT", summary.ttft_ms, answered),
        ("TBT, mean of the longest tenth of gaps", summary.tail_tbt_ms, with_gaps),
        ("TBT, mean of all gaps", summary.mean_tbt_ms, with_gaps),
        ("whole answer", summary.total_ms, answered),
        ("sent later than planned", summary.late_ms, tried),
    ):
        table.add_row(name, *(_cells(spread) if samples else [NO_SAMPLE] * 5))
    out.print(table)
    out.print()
    table = plain_table("prompt served from cache", "by block", "by token", "mean of requests")
    for name, rates in (("measured", summary.hits), ("endless cache, one by one", report.endless_cache)):
        shares = (rates.block, rates.token, rates.request_mean)
        table.add_row(name, *(f"{share:.2%}" if answered else NO_SAMPLE for share in shares))
    out.print(table)
    if answered and summary.hits.token > report.endless_cache.token + 1e-9:
        out.print("[dim]more than that: the cluster had cached these prompts before[/]")
    if (backlog_s := _backlog_s(report, answered)) > 0:
        out.print(
            f"[dim]requests came faster than they were answered: it went on for {backlog_s:.1f} s after the last one, "
            "and TTFT includes the queue; a lower --speed avoids that[/]"
        )
    slo = report.options.slo
    if slo.is_set:
        out.print(
            f"\ngoodput at TTFT ≤ {slo.ttft_ms:g} ms and TBT (longest tenth) ≤ {slo.tbt_ms:g} ms: "
            f"{summary.goodput_per_s:.2f} requests/s, {summary.goodput_share:.1%} of those sent"
        )
    if summary.too_long:
        out.print("\nsome requests do not fit the model's context: lower --tokens-per-block")
    for error in sorted({result.error for result in report.results if result.outcome is Outcome.FAILED})[:5]:
        err.print(f"[red]failed:[/] {escape(error)}", soft_wrap=True)


def _backlog_s(report: ReplayReport, answered: Sequence[RequestResult]) -> float:
    """For how long the cluster went on when all had been sent; 0 unless that says that it could not keep up: it took
    longer than the sending, and than three answers without a queue take."""
    if len(answered) < 2 or not report.options.speed:
        return 0.0
    sending_s = max(result.sent_s for result in answered)
    rest_s = max(result.sent_s + result.total_ms / 1e3 for result in answered) - sending_s
    quickest_s = min(result.total_ms for result in answered) / 1e3
    return rest_s if rest_s > max(sending_s, 3 * quickest_s) else 0.0


def _cells(spread: Spread) -> list[str]:
    return [duration(value) for value in (spread.p50, spread.p90, spread.p99, spread.max, spread.mean)]
