"""The benchmark of blending runs and reports what it should. Its numbers on a tiny random model mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model

from mooncake.app.bench import blend
from mooncake.errors import ConfigError


def test_it_tells_quality_and_time(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", num_hidden_layers=4, max_position_embeddings=512)
    threads, line = torch.get_num_threads(), tmp_path / "line.json"
    arguments = ["--model", str(tmp_path / "model"), "--prompts", "2", "--chunks", "3", "--chunk-tokens", "64"]
    arguments += [
        "--step-tokens",
        "50",
        "--tail",
        "8",
        "--shares",
        "0.2,1",
        "--time-tokens",
        "256",
        "--repeat",
        "1",
        "--threads",
        "1",
    ]
    try:
        blend.main([*arguments, "--json", str(line)])
    finally:
        torch.set_num_threads(threads)

    report = json.loads(line.read_text())
    best = {(row["subject"], row["name"]): row["best"] for row in report["results"]}
    assert best["all reused", "KL from full prefill"] > 0
    assert best["100% that deviate", "KL from full prefill"] == pytest.approx(0, abs=1e-6)
    assert report["ratios"]["kl_removed_100"] == pytest.approx(1)
    assert report["ratios"]["speedup_20"] > 0
    assert str(tmp_path) not in json.dumps(report), "a path of this machine is in the line"


@pytest.mark.parametrize(
    "wrong", [["--shares", "2"], ["--shares", "some"], ["--chunk-tokens", "100"], ["--chunks", "1"], ["--repeat", "0"]]
)
def test_what_it_cannot_measure_it_refuses(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match=wrong[0]):
        blend.main(wrong)
