"""``mooncake bench pipeline`` on a tiny model, once: what it reports, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from mooncake.app.bench import pipeline
from mooncake.errors import ConfigError


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two stages want two cores")
def test_it_measures_stages_beside_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write_tiny_model(tmp_path / "tiny", head_dim=16, num_hidden_layers=4)
    picture, line = tmp_path / "stages.png", tmp_path / "line.json"
    cores = os.sched_getaffinity(0)
    sizes = ["--tokens", "200,100", "--pieces", "4", "--repeat", "2", "--chunk-tokens", "64"]
    pipeline.main(["--model", str(tmp_path / "tiny"), *sizes, "--plot", str(picture), "--json", str(line)])
    assert os.sched_getaffinity(0) == cores
    report = json.loads(line.read_text())
    assert picture.stat().st_size > 1000
    ratios = report["ratios"]
    for tokens in (200, 100):
        assert ratios[f"ideal_{tokens}"] == pytest.approx(8 / 5)
        assert ratios[f"bytes_vs_formula_{tokens}"] == 1
        for name in (
            "stages_vs_one",
            "stages_vs_all_threads",
            "steps_of_64_vs_one",
            "equal_cost_vs_equal_length",
            "predicted_vs_measured",
        ):
            assert ratios[f"{name}_{tokens}"] > 0
    passes = [each for each in report["results"] if each["name"] == "forward pass"]
    assert len(passes) == 14 and all(len(each["values"]) == 2 for each in passes)
    assert str(tmp_path) not in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--stages", "1"],
        ["--pieces", "0"],
        ["--tokens", "some"],
        ["--tokens", "4"],
        ["--chunk-tokens", "0"],
        ["--threads", "1000"],
    ],
)
def test_what_it_cannot_measure_it_refuses(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match=wrong[0].removeprefix("--")):
        pipeline.main(wrong)
