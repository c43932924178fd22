"""``mooncake validate`` as a whole, with a tiny model: it tests that it works, not its numbers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tiny_model import write_tiny_model

from mooncake.app.sim.commands.validate import main

pytest.importorskip("matplotlib", reason="the plots need matplotlib")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_command_with_a_tiny_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    args = ["--requests", "12", "--tokens-per-block", "8", "--rate", "6", "--out", str(tmp_path / "out")]
    sizes = ("prefill.kv_gb=0.05", "decode.kv_gb=0.05", "store.dram_gb=0.05")
    for setting in (f"model.path={tmp_path / 'model'}", *sizes):
        args += ["--set", setting]
    main(args)
    found = msgspec.json.decode((tmp_path / "out" / "validation.json").read_bytes())
    assert len(found["requests"]) == 12
    assert all(min(request["ttft_ms"]) > 0.0 for request in found["requests"])
    assert {"TTFT, p50", "TTFT, p99", "TBT, longest tenth, p50"} <= {row["what"] for row in found["results"]}
    assert (tmp_path / "out" / "validation-ttft.png").stat().st_size > 1000
    assert "| TTFT, p50 |" in (tmp_path / "out" / "validation.md").read_text()
