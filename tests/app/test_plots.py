"""Plots of a replay, looked at as matplotlib's lines and limits."""

import math

import pytest

from mooncake.app import plots
from mooncake.app.latency import Outcome, RequestResult

pytest.importorskip("matplotlib", reason="needs the extra plots")
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def axes() -> Axes:
    return Figure().add_subplot()


def result(sent_s: float, outcome: Outcome = Outcome.OK) -> RequestResult:
    return RequestResult(0, sent_s, sent_s, outcome, prompt_tokens=10, cached_tokens=4, ttft_ms=300.0, gaps_ms=(20.0,))


def test_a_single_answer_is_seen() -> None:
    plots._ttft(shown := axes(), [result(0.0)], math.inf)
    [line] = shown.lines
    assert line.get_xydata().tolist() == [[0.3, 0.0], [0.3, 1.0]]
    assert shown.get_xlim()[0] == 0
    plots._hit_rate(shown := axes(), [result(0.0)], 60.0, endless=0.5)
    assert shown.lines[0].get_xydata().tolist() == [[0.0, 0.4], [60.0, 0.4]]


def test_plots_over_time_have_one_axis_also_where_the_last_requests_failed() -> None:
    sent = [result(0.0), result(30.0), result(60.0, Outcome.REJECTED)]
    plots._arrivals(arrivals := axes(), sent, 60.0)
    plots._hit_rate(rates := axes(), sent[:2], 60.0, endless=0.5)
    assert arrivals.get_xlim() == rates.get_xlim() == (0, 60)
    assert [label.get_text() for label in arrivals.legend().get_texts()] == ["sent", "of these, rejected"]


def test_nothing_answered_is_an_empty_plot() -> None:
    for draw in (plots._ttft, plots._tbt):
        draw(shown := axes(), [], 40.0)
        assert shown.get_ylim() == plots.SHARES
    plots._hit_rate(shown := axes(), [], 60.0, endless=0.5)
    assert shown.get_xlim() == (0, 60)
