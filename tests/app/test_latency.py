"""The figures of a load test, on small numbers that a reader can check."""

from __future__ import annotations

import pytest

from mooncake.app.latency import SLO, Outcome, RequestResult, Spread, longest_tenth_mean, summarize


def ok(index: int, ttft_ms: float, gaps: tuple[float, ...] = (), prompt: int = 100, cached: int = 0) -> RequestResult:
    return RequestResult(index, index, index + 0.01, Outcome.OK, prompt, len(gaps) + 1, cached, ttft_ms, gaps, 500.0)


def test_percentiles_are_values_that_were_measured() -> None:
    spread = Spread.of(range(1, 101))
    assert (spread.p50, spread.p90, spread.p99, spread.max, spread.mean) == (50, 90, 99, 100, 50.5)
    assert Spread.of([7.0]) == Spread(7, 7, 7, 7, 7)
    assert Spread.of([]) == Spread(0, 0, 0, 0, 0)


def test_the_longest_tenth_shows_the_stall_that_the_mean_hides() -> None:
    gaps = (10.0,) * 19 + (400.0,)
    assert longest_tenth_mean(gaps) == (400 + 10) / 2
    assert ok(0, 1, gaps).mean_tbt_ms == pytest.approx(29.5)
    assert longest_tenth_mean((5.0,)) == 5
    assert longest_tenth_mean(()) == 0


def test_goodput_counts_rejections_against_itself() -> None:
    results = [
        ok(0, 90, (40.0, 40.0)),
        ok(1, 110, (40.0, 40.0)),  # too late
        ok(2, 90, (40.0, 60.0)),  # too slow at its worst
        RequestResult(3, 3, 3, Outcome.REJECTED),
        RequestResult(4, 4, 4, Outcome.TOO_LONG),  # never sent: not counted
    ]
    summary = summarize(results, block_tokens=16, duration_s=2.0, slo=SLO(ttft_ms=100, tbt_ms=50))
    assert (summary.ok, summary.rejected, summary.too_long, summary.met_slo) == (3, 1, 1, 1)
    assert summary.goodput_per_s == 0.5
    assert summary.goodput_share == 0.25
    assert summarize(results, 16, 2.0, SLO()).met_slo == 3


def test_the_three_hit_rates_are_told_apart() -> None:
    results = [ok(0, 1, prompt=160, cached=128), ok(1, 1, prompt=20, cached=0)]
    hits = summarize(results, block_tokens=16, duration_s=1.0, slo=SLO()).hits
    assert hits.block == 8 / 12
    assert hits.token == 128 / 180
    assert hits.request_mean == (0.8 + 0) / 2


def test_a_request_that_is_sent_a_moment_too_early_is_not_late() -> None:
    early = RequestResult(0, planned_s=1.0, sent_s=0.999, outcome=Outcome.OK)
    assert summarize([early, ok(1, 1)], 16, 2.0, SLO()).late_ms.p50 == 0.0


def test_nothing_measured_is_no_crash() -> None:
    assert summarize([], 16, 0.0, SLO()).goodput_share == 0
