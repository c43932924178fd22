"""The rules of the verdicts: saved verdicts follow from their rows, and other rows give other verdicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from mooncake.app.reproduction import verdicts
from mooncake.app.reproduction.findings import Finding, Row, Verdict
from mooncake.app.reproduction.reproduce import ALL, load

SAVED = {finding.name: finding for finding in load(Path(__file__).parents[2] / "deploy" / "reproduction")}
RULES: dict[str, Callable[[Sequence[Row]], Verdict]] = {
    "fig5": verdicts.scheduling,
    "fig6": verdicts.capacity,
    "fig9": verdicts.hit_rates,
    "fig10": verdicts.local_and_global,
    "fig13": verdicts.bandwidth,
    "fig15": verdicts.ratio,
    "table3": verdicts.rejections,
    "oscillation": verdicts.oscillation,
    "crowd": verdicts.crowd,
    "overload": verdicts.overload,
    "shift": verdicts.shift,
}


def judge(finding: Finding) -> Verdict:
    if rule := RULES.get(finding.name):
        return rule(finding.rows)
    inside = {}  # of rivals: their notes have it
    for row in finding.rows:
        said = re.search(r"inside 30 s ([\d.]+)%", row.note)
        assert said is not None
        inside[row.what.rpartition(": ")[2]] = float(said[1]) / 100
    return verdicts.rivals(finding.rows, inside)


@pytest.mark.parametrize("name", ALL)
def test_the_saved_rows_give_the_saved_verdict(name: str) -> None:
    assert judge(SAVED[name]) == (SAVED[name].verdict, SAVED[name].why)


@pytest.mark.parametrize(
    ("name", "what", "measured", "verdict"),
    [
        ("fig5", "local_cache_aware / global", 0.9, "not reproduced"),
        ("fig6", "synthetic, gain over the best baseline at 300 ms, %", -1.0, "not reproduced"),
        ("fig9", "synthetic, endless tokens", 0.7, "not reproduced"),
        ("fig10", "synthetic, global, hit %", 70.0, "not reproduced"),
        ("fig10", "toolagent (generated), global, hit %", 99.0, SAVED["fig10"].verdict),
        ("fig13", "320 Gbps, mean TTFT s", 99.0, "not reproduced"),
        ("fig15", "8P8D effective, %", 10.0, "not reproduced"),
        ("table3", "predicted, rejected / baseline", 1.5, "not reproduced"),
        ("oscillation", "early: correlation of both", 0.0, "not reproduced"),
        ("oscillation", "deviation of decode load, look-ahead / early", 0.7, "not reproduced"),
        ("rivals-synthetic-1.2", "synthetic at 1.2: milliseconds", 1.1, "missed"),
        ("crowd", "milliseconds: most / mean work of a machine", 1.4, "missed"),
        ("crowd", "longest_prefix: p99 TTFT over that before", 1.0, "missed"),
        ("overload", "lookahead: prefill of dropped requests, %", 2.1, "missed"),
        ("shift", "the whole conversation trace alone: switches an hour", 6.1, "partly met"),
        ("shift", "goodput over the best fixed split", 0.9, "missed"),
    ],
)
def test_a_figure_that_moves_moves_the_verdict(name: str, what: str, measured: float, verdict: str) -> None:
    [_] = [row for row in SAVED[name].rows if row.what == what]
    rows = [msgspec.structs.replace(row, measured=measured) if row.what == what else row for row in SAVED[name].rows]
    assert judge(msgspec.structs.replace(SAVED[name], rows=rows)).verdict == verdict
