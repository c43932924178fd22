"""The benchmark of context parallelism runs and reports what it should. Its times on a tiny model mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import LATENT, write_tiny_model

from mooncake.app.bench import context
from mooncake.errors import ConfigError


@pytest.mark.slow  # it starts two more processes
@pytest.mark.parametrize(("family", "changes"), [("llama", {"head_dim": 16}), ("deepseek_v3", LATENT)])
def test_it_tells_times_and_bytes(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", family, **changes)
    line = tmp_path / "line.json"
    arguments = ["--model", str(tmp_path / "model"), "--tokens", "250", "--tail", "70", "--repeat", "1"]
    context.main([*arguments, "--methods", "auto,pass-q", "--json", str(line)])

    report = json.loads(line.read_text())
    best = {(row["name"], row["step"], row["method"]): row["best"] for row in report["results"]}
    for method in ("auto", "pass-q"):
        for step in ("whole prompt", "behind a prefix"):
            assert best["sent", step, method] == best["sent, by formula", step, method] > 0
            assert report["ratios"][f"speedup_{step.replace(' ', '_')}_{method}"] > 0
    assert "whole prompt, auto: by pass-kv" in report["notes"]
    assert str(tmp_path) not in json.dumps(report), "a path of this machine is in the line"


@pytest.mark.parametrize(
    "wrong", [["--ranks", "1"], ["--methods", "auto,some"], ["--tail", "63"], ["--tail", "4096"], ["--repeat", "0"]]
)
def test_what_it_cannot_measure_it_refuses(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match=wrong[0]):
        context.main(wrong)
