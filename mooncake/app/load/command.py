"""``mooncake load``: any OpenAI server under load, and what its clients see."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.markup import escape

from mooncake.app.cluster.role_main import raise_file_limit, run_async, unless_stopped
from mooncake.app.console import out, print_json
from mooncake.app.extras import require
from mooncake.app.latency import SLO, Outcome, RequestResult, Spread, summarize
from mooncake.app.load.http_server import HttpServer
from mooncake.app.load.report import latency_table, metered, tell_backlog, tell_failures, tell_goodput
from mooncake.app.load.requests import (
    LoadRequest,
    Shape,
    Wishes,
    arrival_times,
    file_bodies,
    planned,
    planned_trace,
    random_bodies,
)
from mooncake.app.load.run import LoadRun, served_model
from mooncake.app.outputs import writing
from mooncake.app.traces.replay import ReplayOptions
from mooncake.errors import Cancelled, NodeUnavailable
from mooncake.trace import load_trace, scale

RANDOM = 100  # requests, where nothing says how many


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Prompts are those of ``prompts`` or ``trace`` if there is one, otherwise random ones of this ``shape``. ``count``
    None: as many as those have. ``speed`` and ``tokens_per_block`` are of a trace, which has times of its own."""

    model: str
    rate: float
    burstiness: float
    concurrency: int
    count: int | None
    shape: Shape
    prompts: Path | None
    trace: Path | None
    speed: float
    tokens_per_block: int
    is_plain: bool
    timeout_s: float
    slo: SLO
    seed: int

    def told(self) -> dict[str, object]:
        """What of it affects results: names of files without their folders, no limit as None."""
        limits = {name: _finite(limit) for name, limit in asdict(self.slo).items()}
        files = {"prompts": self.prompts and self.prompts.name, "trace": self.trace and self.trace.name}
        return asdict(self) | files | {"rate": _finite(self.rate), "slo": limits}


@dataclass(frozen=True, slots=True)
class LoadOutput:
    as_json: bool = False
    requests: Path | None = None
    plots: Path | None = None


def load(url: str, options: LoadOptions, output: LoadOutput) -> None:
    """Raises ConfigError and InvalidRequest for files that hold no requests, NodeUnavailable when the server cannot be
    asked; once the results so far are reported, NodeUnavailable when no request was answered, Cancelled after Ctrl-C.
    """
    if output.plots is not None:
        require("matplotlib", "plots", "--plots")
    raise_file_limit()
    server = HttpServer(url)
    requests, count = _requests(options)
    model = run_async(unless_stopped(served_model(server, options.model)))
    is_complete = True
    with metered("answering", count) as add:
        wishes = Wishes(model, options.is_plain)
        run = LoadRun(server, wishes, options.concurrency, options.timeout_s, add)
        try:
            run_async(unless_stopped(run.send_all(requests)))
        except Cancelled:
            is_complete = False
    report = LoadReport(model, options, count, run.sent, tuple(run.results), run.now_s)
    report.tell(output)
    if not is_complete:
        raise Cancelled("stopped before the end")
    if not report.summary.ok:
        raise NodeUnavailable("no request was answered")


def _requests(options: LoadOptions) -> tuple[Iterable[LoadRequest], int]:
    """And how many they are."""
    if options.trace is not None:
        trace = [scale(request, options.tokens_per_block) for request in load_trace(options.trace, options.count)]
        timing = ReplayOptions(options.tokens_per_block, options.speed, seed=options.seed)
        return planned_trace(trace, timing, options.shape.vocabulary), len(trace)
    if options.prompts is not None:
        given = file_bodies(options.prompts, options.count, options.shape.answer_tokens)
        return planned(given, arrival_times(len(given), options.rate, options.burstiness, options.seed)), len(given)
    count = options.count or RANDOM
    times = arrival_times(count, options.rate, options.burstiness, options.seed)
    return planned(random_bodies(options.shape, count, options.seed), times), count


class LoadReport:
    """Of the requests that ended, within ``duration_s``."""

    def __init__(
        self,
        model: str,
        options: LoadOptions,
        count: int,
        sent: int,
        results: tuple[RequestResult, ...],
        duration_s: float,
    ) -> None:
        self.summary = summarize(results, 1, duration_s, options.slo)
        self._gaps_ms = Spread.of(gap for result in results for gap in result.gaps_ms)
        self._model = model
        self._options = options
        self._count = count
        self._sent = sent
        self._results = sorted(results, key=lambda result: result.index)

    def tell(self, output: LoadOutput) -> None:
        if output.as_json:
            print_json(self.to_json())
            tell_failures(self._results)
        else:
            self._print()
        if output.requests is not None:
            line = self.to_json() | {"results": [asdict(result) for result in self._results]}
            with writing(output.requests):
                output.requests.write_bytes(msgspec.json.encode(line) + b"\n")
            self._tell_file(f"every request: {output.requests}", output)
        if output.plots is not None:
            from mooncake.app.plots import write_plots

            files = write_plots(self._results, self._options.slo, output.plots)
            self._tell_file(f"plots: {', '.join(map(str, files))}", output)

    def to_json(self) -> dict[str, object]:
        summary = asdict(self.summary)
        del summary["hits"], summary["too_long"]  # of replays, which know the server's blocks and its context
        return {
            "load": self._model,
            "config": self._options.told(),
            "planned": self._count,
            "sent": self._sent,
            "summary": summary | self._rates() | {"gaps_ms": asdict(self._gaps_ms)},
        }

    def _rates(self) -> dict[str, float]:
        summary = self.summary
        return {
            "requests_per_s": summary.ok / summary.duration_s,
            "prompt_tokens_per_s": summary.prompt_tokens / summary.duration_s,
            "cached_share": summary.hits.token,
        }

    def _print(self) -> None:
        summary, rates = self.summary, self._rates()
        parts = (
            f"[bold]{summary.ok} of {self._count} requests[/] in {summary.duration_s:.1f} s",
            f"{summary.rejected} rejected · {summary.failed} failed",
            f"{rates['requests_per_s']:.2f} requests/s",
            f"{rates['prompt_tokens_per_s']:.0f} prompt tokens/s, {rates['cached_share']:.1%} of them cached",
            f"{summary.completion_tokens_per_s:.1f} tokens/s",
        )
        out.print(" · ".join(parts))
        if len(self._results) < self._count:
            out.print(f"stopped early: {self._sent} of {self._count} requests sent, {summary.ok} answered")
        out.print()
        is_timed = math.isfinite(self._options.rate) or self._options.trace is not None
        out.print(latency_table(self._results, summary, self._gaps_ms, is_timed=is_timed))
        if is_timed:
            answered = [result for result in self._results if result.outcome is Outcome.OK]
            tell_backlog(answered, "--rate" if self._options.trace is None else "--speed")
        tell_goodput(summary, self._options.slo)
        tell_failures(self._results)

    def _tell_file(self, sentence: str, output: LoadOutput) -> None:
        if not output.as_json:
            out.print(escape(sentence), soft_wrap=True)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
