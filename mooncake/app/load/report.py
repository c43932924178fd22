"""What a load test tells while it runs and at its end, whoever sends the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.markup import escape
from rich.table import Table

from mooncake.app.console import counted, duration, err, out, plain_table
from mooncake.app.latency import SLO, LoadSummary, Outcome, RequestResult, Spread

NO_SAMPLE = "–"
MOST_ERRORS = 5


@contextmanager
def metered(title: str, total: int) -> Iterator[Callable[[RequestResult], None]]:
    """A progress bar over results, for each of which it yields what to call."""
    ended = dict.fromkeys(Outcome, 0)
    with counted(title, total) as advance:

        def add(result: RequestResult) -> None:
            ended[result.outcome] += 1
            note = " · ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in ended.items() if count)
            advance(note=note)

        yield add


def latency_table(
    results: Sequence[RequestResult], summary: LoadSummary, gaps_ms: Spread | None = None, *, is_timed: bool = True
) -> Table:
    """With ``gaps_ms`` also a row over all gaps, of whatever requests. ``is_timed``: requests had times to be sent at,
    not only an order."""
    tried = any(result.outcome is not Outcome.TOO_LONG for result in results)
    answered = any(result.outcome is Outcome.OK for result in results)
    has_gaps = any(result.outcome is Outcome.OK and result.gaps_ms for result in results)
    rows = [
        ("TTFT", summary.ttft_ms, answered),
        ("TBT, mean of the longest tenth of gaps", summary.tail_tbt_ms, has_gaps),
        ("TBT, mean of all gaps", summary.mean_tbt_ms, has_gaps),
        *([("single gaps", gaps_ms, has_gaps)] if gaps_ms else []),
        ("whole answer", summary.total_ms, answered),
        *([("sent later than planned", summary.late_ms, tried)] if is_timed else []),
    ]
    table = plain_table("latency, by request", "p50", "p90", "p99", "max", "mean")
    for name, spread, has_samples in rows:
        table.add_row(name, *(_cells(spread) if has_samples else [NO_SAMPLE] * 5))
    return table


def _cells(spread: Spread) -> list[str]:
    return [duration(value) for value in (spread.p50, spread.p90, spread.p99, spread.max, spread.mean)]


def tell_backlog(answered: Sequence[RequestResult], flag: str) -> None:
    """Whether more was sent than could be answered, which a lower ``flag`` avoids: it took longer to answer the rest
    than to send, and than three answers without a queue take."""
    if len(answered) < 2:
        return
    sending_s = max(result.sent_s for result in answered)
    rest_s = max(result.sent_s + result.total_ms / 1e3 for result in answered) - sending_s
    quickest_s = min(result.total_ms for result in answered) / 1e3
    if rest_s > max(sending_s, 3 * quickest_s):
        out.print(
            f"[dim]requests came faster than they were answered: it went on for {rest_s:.1f} s after the last one, "
            f"and TTFT includes the queue; a lower {flag} avoids that[/]"
        )


def tell_goodput(summary: LoadSummary, slo: SLO) -> None:
    if slo.is_set:
        share = f"{summary.goodput_share:.1%} of those sent"
        out.print(f"\ngoodput at {slo}: {summary.goodput_per_s:.2f} requests/s, {share}")


def tell_failures(results: Sequence[RequestResult]) -> None:
    """Each kind once."""
    for error in sorted({result.error for result in results if result.outcome is Outcome.FAILED})[:MOST_ERRORS]:
        err.print(f"[red]failed:[/] {escape(error)}", soft_wrap=True)
