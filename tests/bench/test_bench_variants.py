"""The benchmark of variants, as small as it goes, on the real model: one step of training and two live clusters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.app.bench.variants import main
from mooncake.errors import ConfigError

QUALITY = ["--records", "2", "--batch", "1", "--questions", "2", "--most-layers", "15", "--stride", "15"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quality_is_measured_and_training_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ["--training", str(tmp_path / "kept"), "--prefix-tokens", "0"]
    reports = []
    for _ in range(2):
        main([*QUALITY, *kept, "--steps", "1", "--json", str(tmp_path / "report.json")])
        reports.append(json.loads((tmp_path / "report.json").read_bytes()))
    assert reports[0]["results"] == reports[1]["results"]  # of the same weights
    assert {"kept_all_read", "kept_together", "kept_apart"} <= set(reports[0]["ratios"])
    assert "right answers" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="tuned with other options"):
        main([*QUALITY, *kept, "--steps", "2"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_first_tokens_are_timed_over_two_live_clusters(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    main(["--questions", "0", "--prefix-tokens", "128", "--repeat", "1", "--threads", "1", "--json", str(file)])
    report = json.loads(file.read_bytes())
    assert {"speedup_first_token", "kv_first_over_inputs_first"} <= set(report["ratios"])
    assert {one["subject"] for one in report["results"]} == {
        "full prefill",
        "hidden states, then KV",
        "KV, then hidden states",
    }


@pytest.mark.parametrize("wrong", [["--layers", "9"], ["--layers", "5-3"], ["--steps", "0"], ["--link", "-1"]])
def test_what_cannot_be_measured_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(wrong)
