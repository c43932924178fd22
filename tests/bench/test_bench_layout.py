"""The benchmark of layouts runs and ends with its line; the one of RDMA says what it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import commands
import pytest

from kvstore.transfer.rdma.find import VerbsUnavailable
from kvstore.transfer.rdma.verbs import Device
from mooncake.app.bench import layout, rdma
from mooncake.errors import ConfigError


def test_a_conversion_is_held_against_a_copy(tmp_path: Path):
    file = tmp_path / "line.json"
    quick = ["--cases", "smollm2_tp3_to_1", "--transports", "shm", "--mb", "4", "--reps", "1", "--json", str(file)]
    run = commands.run("bench", "layout", *quick, timeout=120)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert file.read_text() == run.stdout.splitlines()[-1] + "\n"
    assert [row["subject"] for row in report["results"]] == ["converted", "copied"]
    assert report["ratios"].keys() == {"smollm2_tp3_to_1_vs_copy_shm"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(["--transports", "pigeon"], "knows shm, rdma, tcp, not pigeon"), (["--cases", "tp9"], "tp9")],
)
def test_wrong_options_are_named(options: list[str], sentence: str):
    with pytest.raises(ConfigError) as raised:
        layout.main(options)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("flag", [["--machine", "M"], ["--machine=M"], ["--machin", "M"]])
def test_rdma_goes_to_the_machine_with_all_other_options(flag: list[str], tmp_path: Path):
    program = tmp_path / "machine"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    flag = [part.replace("M", str(program)) for part in flag]
    code = "import sys; from mooncake.app.bench.rdma import main; main(sys.argv[1:])"
    options = ["--kib", "64", "--json", str(program)]  # a file that is called as the program is
    run = subprocess.run(
        [sys.executable, "-c", code, *flag, *options], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip().endswith(f"main({options!r})")


def test_rdma_says_what_it_lacks(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="no program 'nowhere'"):
        rdma.main(["--machine", "nowhere"])
    try:
        Device().close()
        pytest.skip("this machine has verbs")
    except VerbsUnavailable:
        with pytest.raises(ConfigError, match="--machine PROGRAM"):
            rdma.main([])
