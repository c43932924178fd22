"""What a command says, from figures that a reader can check."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mooncake.app.bench import report as bench_report
from mooncake.app.bench.report import progress, tell
from mooncake.app.console import amount, answer_line, duration, plain_table
from mooncake.app.latency import HitRates, Outcome, RequestResult, summarize
from mooncake.app.traces.replay import Replay, ReplayOptions, ReplayReport
from mooncake.app.traces.replay_command import print_report
from mooncake.client import RequestTimings
from mooncake.trace import TraceRequest
from mooncake.types import PrefillReport, Usage


@pytest.mark.parametrize("width", [20, 80])
def test_a_narrow_screen_hides_nothing_of_a_table(width: int) -> None:
    screen, table = Console(width=width, file=io.StringIO()), plain_table("node", "address")
    table.add_row("prefill-0", "127.0.0.1:34563")
    with screen.capture() as shown:
        screen.print(table)
    assert set("prefill-0127.0.0.1:34563") <= set(shown.get()) and "…" not in shown.get()
    assert max(map(len, shown.get().splitlines())) <= width


@pytest.mark.parametrize(
    ("decode_node", "transport", "nodes"),
    [
        ("decode-0", "shm", "prefill-0 → decode-0 (shm)"),
        ("decode-0", "", "prefill-0 → decode-0"),
        ("", "", "prefill-0"),
    ],
)
def test_an_answers_line_names_the_nodes_that_it_ran_on(decode_node: str, transport: str, nodes: str) -> None:
    timings = RequestTimings(120.0, 25.0, 30.0, 500.0, PrefillReport(transport=transport), "prefill-0", decode_node)
    line = answer_line(Usage(100, 9, 64), timings)
    assert line == f"TTFT 120 ms · TBT 25 ms · 40.0 tokens/s · 64 of 100 prompt tokens reused · {nodes}"


def test_a_replay_stopped_before_its_first_answer_shows_no_figure_that_nobody_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replay = Replay("127.0.0.1:9", ReplayOptions())
    replay.sent = 1
    print_report(replay.report([TraceRequest(0, 512, 8, (1,))] * 3))
    said = capsys.readouterr().out
    assert "0 of 3 requests" in said
    assert "stopped early: 1 of 3 requests sent, 0 answered" in said
    rows = {line.split("  ")[0]: line.split()[-1] for line in said.splitlines() if line}
    assert rows["TTFT"] == rows["whole answer"] == rows["measured"] == "–"
    assert " 0.0 ms" not in said


@pytest.mark.parametrize(("speed", "every_s", "is_said"), [(20.0, 0.1, True), (1.0, 2.0, False), (0.0, 0.1, False)])
def test_a_replay_that_outran_the_cluster_says_so(
    speed: float, every_s: float, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    results, free_at = [], 0.0
    for index in range(10):  # answers of 1 s, one after the other
        sent_s = index * every_s
        free_at = max(free_at, sent_s) + 1.0
        total_ms = (free_at - sent_s) * 1e3
        results.append(RequestResult(index, sent_s, sent_s, Outcome.OK, 16, 8, 0, total_ms, (), total_ms))
    options, hits = ReplayOptions(speed=speed), HitRates(0.0, 0.0, 0.0)
    summary = summarize(results, 16, free_at, options.slo)
    print_report(ReplayReport("tiny", options, summary, hits, tuple(results), planned=10, sent=10))
    assert ("it went on for 9.1 s after the last one" in " ".join(capsys.readouterr().out.split())) == is_said


@pytest.mark.parametrize(("every_s", "lines"), [(0.0, ["bench: [turn] 1", "bench: [turn] 2"]), (3600.0, [])])
def test_without_a_terminal_a_long_benchmark_says_now_and_then_what_it_does(
    every_s: float, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_report, "PLAIN_S", every_s)
    with progress("bench") as shown:
        for turn in (1, 2):
            tell(shown, f"[turn] {turn}")
    said = capsys.readouterr()
    assert said.err.splitlines() == lines and not said.out


def test_long_durations_are_seconds() -> None:
    shown = [duration(value_ms) for value_ms in (0, 9.94, 9.96, 999.4, 999.6, 9_994, 41_234, 4_123_400)]
    assert shown == ["0.0 ms", "9.9 ms", "10 ms", "999 ms", "1.00 s", "9.99 s", "41.2 s", "4,123.4 s"]


def test_one_thing_is_no_plural() -> None:
    assert [amount(count, "request") for count in (0, 1, 2000)] == ["0 requests", "1 request", "2,000 requests"]
    assert amount(2, "role switch", "role switches") == "2 role switches"
