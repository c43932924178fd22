"""The benchmarks run, and end with the line that scripts rely on. No test asserts a speed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from tiny_model import LATENT, write_tiny_model

from mooncake.app.bench import chunked, conductor, engine, quality, serve, speculation, ssd
from mooncake.app.bench.engine_parts import kernels
from mooncake.app.bench.engine_parts.options import parse
from mooncake.app.bench.peers.engine import PeerEngine
from mooncake.app.bench.peers.spawned import START_S, spawned
from mooncake.app.bench.report import Figure, Report, progress
from mooncake.app.sim.commands import calibrate
from mooncake.checkpoint import open_checkpoint
from mooncake.errors import Cancelled, ConfigError, ModelError, NodeUnavailable

RESULTS = Path(__file__).parent / "results"
KEYS = ["bench", "commit", "machine", "config", "seed", "results", "ratios", "notes"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, max_position_embeddings=1024, head_dim=16)  # which our own kernels take
    return folder


def bench(name: str, *arguments: str) -> dict[str, Any]:
    """The JSON line of a quick run, which is the last one of its output and the content of its file."""
    run = commands.run("bench", name, "--quick", *arguments, timeout=240)
    assert run.returncode == 0, run.stderr
    line = run.stdout.splitlines()[-1]
    file = Path(arguments[arguments.index("--json") + 1])
    assert file.read_text() == line + "\n"
    report = json.loads(line)
    assert list(report) == KEYS
    assert report["bench"] == name
    assert all(row["values"] and min(row["values"]) >= 0 for row in report["results"])
    return report


@pytest.mark.slow
def test_transfers_are_held_against_a_socket_and_against_changing_paths(tmp_path: Path) -> None:
    report = bench("transfer", "--json", str(tmp_path / "line.json"))

    sizes = {row["size"] for row in report["results"] if row["name"] == "read" and row["subject"] == "mooncake tcp"}
    assert sizes == {"1 MiB", "16x1 MiB", "4 MiB", "16 MiB"}
    ratios = set(report["ratios"])
    assert {"tcp_read_1MiB_vs_socket", "tcp_write_1MiB_vs_socket", "shm_read_1MiB_vs_memcpy"} <= ratios
    assert {"paths_cut_vs_left", "paths_killed_vs_left", "paths_silent_stall_ms"} <= ratios


def test_the_engine_is_held_against_the_machine(tiny: Path, tmp_path: Path) -> None:
    report = bench("engine", "--model", str(tiny), "--json", str(tmp_path / "line.json"))

    measured = {(row["subject"], row["name"], row.get("batch")) for row in report["results"]}
    for batch in (1, 8):
        for name in ("prefill", "decode", "decode step", "decode step outside the model", "of it, Python's own"):
            assert ("mooncake", name, batch) in measured
    assert ("mooncake", "TTFT, repeated", None) in measured
    assert {
        "decode_b1_vs_roofline",
        "attention_b32_vs_sdpa",
        "attention_b32_vs_gather",
        "attention_shared_prefix_vs_copies",
        "draw_temperature_vs_torch",
        "draw_top_p_vs_torch",
        "ttft_prefix_vs_cold",
    } == set(report["ratios"])
    assert str(tiny.parent) not in json.dumps(report), "a path of this machine is in the line"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_attention_is_measured_over_keys_that_are_the_values_too(dtype: torch.dtype) -> None:
    width = 64 + (4 if dtype is torch.int8 else 0)  # int8 rows end with their scale
    cache = torch.zeros(8, 2, 1, 1, 16, width, dtype=dtype)
    ways = kernels.decode_attention_s(cache, num_heads=4, batch=2, context=50, reps=1)
    assert set(ways) == {"ours", "sdpa_groups", "sdpa_rows", "gather_sdpa"} and all(map(min, ways.values()))


def test_a_token_reads_no_more_experts_than_it_uses(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "deepseek_v3", **LATENT)
    config = open_checkpoint(str(tmp_path)).config
    expert, layers, unused = 3 * 24 * config.hidden_size, 2, 8 - 2
    everything = kernels.weight_bytes(replace(config, experts_per_token=8), 2)
    assert everything - kernels.weight_bytes(config, 2) == 2 * layers * unused * expert


def test_a_stopped_comparison_of_formats_goes_on_where_it_was(tiny: Path, tmp_path: Path) -> None:
    line, begun = tmp_path / "line.json", tmp_path / "begun.json"
    arguments = ["--model", str(tiny), "--formats", "w8a8", "--window", "64", "--threads", "1"]
    arguments += ["--resume", str(begun), "--json", str(line)]
    quality.main([*arguments, "--tokens", "64"])
    first = json.loads(begun.read_text())["losses"]
    quality.main([*arguments, "--tokens", "192"])
    both = json.loads(begun.read_text())["losses"]

    assert {name: losses[:1] for name, losses in both.items()} == first
    assert [len(losses) for losses in both.values()] == [3, 3]
    report = json.loads(line.read_text())
    assert report["ratios"]["perplexity_w8a8_vs_float32"] == pytest.approx(1, abs=0.05)
    with pytest.raises(ConfigError, match="results with a different window"):
        quality.main([*arguments, "--tokens", "64", "--window", "32"])


@pytest.mark.slow
def test_the_engine_and_a_peer_do_the_same_tasks(tiny: Path, tmp_path: Path) -> None:
    report = bench("engine", "--model", str(tiny), "--against", "transformers", "--json", str(tmp_path / "line.json"))

    measured = {(row["subject"], row["name"], row.get("batch")) for row in report["results"]}
    assert {("transformers", name, batch) for name in ("prefill", "decode") for batch in (1, 8)} <= measured
    assert ("transformers", "TTFT, repeated", None) not in measured, "it has no prefix cache to hit"
    assert {"decode_b1_vs_transformers", "decode_b8_vs_transformers", "prefill_vs_transformers"} <= set(
        report["ratios"]
    )
    assert report["config"]["transformers"]["transformers"], "the peer's version belongs to the numbers"


@pytest.mark.slow
def test_a_cluster_and_one_engine_get_the_same_traffic(tiny: Path, tmp_path: Path) -> None:
    report = bench("serve", "--model", str(tiny), "--json", str(tmp_path / "line.json"))

    subjects: dict[str, set[str]] = {}
    for row in report["results"]:
        subjects.setdefault(row["subject"], set()).add(row["name"])
    common = {"one-token request", "TTFT, cold", "TTFT, repeated", "output", "requests", "TBT p50", "TBT p99"}
    assert common <= subjects["one engine"]
    assert common | {"one-token request outside of the prefill node"} <= subjects["cluster, shm"]
    handed_over = [row for row in report["results"] if row["name"] == "KV handed over, cold"]
    assert min(handed_over[0]["values"]) > 0
    assert {"ttft_cluster_vs_engine", "ttft_prefix_cluster_vs_engine", "output_4_cluster_vs_engine"} <= set(
        report["ratios"]
    )


@pytest.mark.slow
def test_a_peer_rests_between_its_turns_and_leaves_nothing_behind(tiny: Path) -> None:
    with PeerEngine("transformers", sys.executable, str(tiny), "float32", threads=1) as peer:
        assert state_of(peer.process.pid) == "T"
        assert peer.run([[5, 6, 7], [8, 9, 10]], new=2) > 0
        assert state_of(peer.process.pid) == "T"
        pid = peer.process.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_peer_that_dies_loses_nothing_that_others_measure(tiny: Path) -> None:
    options = parse(["--model", str(tiny), "--batch", "1", "--prompt", "8", "--new", "2", "--long", "16"])
    report = Report("engine", {}, seed=0)
    peers = [PeerEngine("transformers", sys.executable, str(tiny), "float32", threads=1) for _ in range(2)]
    peers[1].name = "mortal"
    with peers[0], peers[1], progress("") as shown:
        os.kill(peers[1].process.pid, signal.SIGKILL)
        bench = engine.EngineBench([*reversed(peers)], 64, options, report, shown)
        bench.run()
    assert len(bench.lost) == 1 and bench.lost[0].startswith("mortal ended")
    assert report.notes == [f"mortal was left out from warm-up on: {bench.lost[0]}"]
    assert {figure.subject for figure in report.figures} == {"transformers"}
    assert {figure.name for figure in report.figures} == {"prefill", "decode", "TTFT, cold"}


def state_of(pid: int) -> str:
    """A process's state as the kernel tells it: T when it is stopped."""
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # the signal takes a moment
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("python", "model", "words"),
    [
        ("/no/python", "", "cannot start transformers with /no/python: No such file"),
        (sys.executable, "/no/model", "ended"),
    ],
)
def test_a_peer_that_does_not_start_says_why(python: str, model: str, words: str) -> None:
    peer = PeerEngine("transformers", python, model, "float32", threads=1)
    with pytest.raises(NodeUnavailable, match=words), peer:
        pass


@pytest.mark.parametrize(
    ("main", "arguments", "sentence"),
    [
        (engine.main, ["--against", "nobody"], "--against knows transformers, vllm, llama.cpp, not nobody"),
        (engine.main, ["--against", "vllm"], "--against vllm needs --vllm-python"),
        (engine.main, ["--against", "llama.cpp"], "--against llama.cpp needs --llama-python"),
        (engine.main, ["--against", "vllm", "--vllm-python", "/no/x"], "--vllm-python: there is no program '/no/x'"),
        (engine.main, ["--batch", "1,x"], "--batch takes numbers from 1 to 64, got '1,x'"),
        (engine.main, ["--long", "5000"], "prompt and answer must have 2 to 4096 tokens"),
        (serve.main, ["--transports", "pigeon"], "--transports knows shm, tcp, not pigeon"),
        (serve.main, ["--set", "store.dram=2"], "unknown configuration key store.dram"),
        (serve.main, ["--transports", ""], "--transports takes at least one of shm, tcp"),
        (serve.main, ["--new", "600"], "would be up to 5056 tokens; there is room for 1 to 4096"),
        (serve.main, ["--model", '/no/"model"'], 'there is no model at /no/"model"'),
        (conductor.main, ["--seed", "-1"], "--seed must be a whole number from 0 on, got '-1'"),
        (conductor.main, ["--nodes", "100,1"], "--nodes takes numbers from 2 on, got '100,1'"),
        (chunked.main, ["--threads", "-1"], "--threads must be a whole number from 0 on, got '-1'"),
        (chunked.main, ["--limit-ms", "nan"], "--limit-ms must be positive, got 'nan'"),
        (chunked.main, ["--prompt", "9000"], "--prompt 9000 is too long: the model takes 8192"),
        (ssd.main, ["--reps", "0"], "--reps must be a whole number from 1 on, got '0'"),
        (ssd.main, ["--fio", "nosuch"], "--fio: there is no program 'nosuch'; '' does without"),
        (ssd.main, ["--fio", "", "--quick", "--path", "/proc"], "cannot write in /proc: No such file"),
        (calibrate.main, ["--set", "model.path=/no/model"], "there is no model at /no/model"),
    ],
)
def test_a_wrong_option_is_one_sentence(main: Callable[[list[str]], None], arguments: list[str], sentence: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=re.escape(sentence)):
        main(arguments)


def test_a_process_that_ends_before_it_is_ready_is_not_waited_for() -> None:
    begin = time.monotonic()
    with pytest.raises(NodeUnavailable, match="ended before it was ready"), spawned(str, print):  # which sends nothing
        pass
    assert time.monotonic() < begin + START_S / 2


def test_a_prompt_that_the_model_has_no_room_for_is_refused_at_once(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="prompt and answer would have 2081 tokens, and the model takes 1024"):
        engine.main(["--model", str(tiny)])


def test_llama_cpp_is_compared_on_the_same_file(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("--against llama.cpp needs a .gguf file as --model")):
        engine.main(["--model", str(tiny), "--long", "16", "--against", "llama.cpp", "--llama-python", sys.executable])


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (chunked.main, ["--prompt", "128", "--budget", "64", "--running", "1"]),
        (speculation.main, ["--tokens", "4"]),
    ],
)
def test_any_vocabulary_does_and_the_line_names_no_path(
    tmp_path: Path, main: Callable[[list[str]], None], arguments: list[str]
) -> None:
    write_tiny_model(tmp_path / "tiny", max_position_embeddings=2048)
    line = tmp_path / "line.json"
    main(["--model", str(tmp_path / "tiny"), *arguments, "--reps", "1", "--threads", "1", "--json", str(line)])
    report = json.loads(line.read_text())
    assert report["config"]["model"] == "tiny" and report["ratios"]
    assert str(tmp_path) not in line.read_text()


def test_calibrate_ends_with_the_line_of_json_that_it_promises(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrate.main(["--set", f"model.path={tiny}", "--max-tokens", "64", "--reps", "1", "--threads", "1", "--json"])
    *table, line = capsys.readouterr().out.splitlines()
    assert any(each.startswith("[curves.here]") for each in table)
    assert json.loads(line)["points"]


def test_what_was_measured_is_told_also_where_its_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("demo", {}, seed=0)
    with pytest.raises(ConfigError, match=r"cannot write .*gone/line\.json: No such file"):
        report.finish(tmp_path / "gone" / "line.json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "demo"


def test_what_was_measured_before_ctrl_c_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("half", {}, seed=0)
    with report.measuring("half"):
        report.add(Figure("ours", "speed", "GB/s", (2.0,), more_is_better=True))
        raise KeyboardInterrupt
    with pytest.raises(Cancelled):
        report.finish(tmp_path / "half.json")
    line = json.loads((tmp_path / "half.json").read_text())
    assert line == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["results"][0]["best"], line["notes"]) == (2.0, ["stopped before the end"])


def test_a_ratio_compares_the_best_of_each_and_needs_both() -> None:
    report = Report("demo", {}, seed=0)
    report.add(
        Figure("ours", "decode", "tok/s", (10.0, 30.0, 20.0), True, {"batch": 8}),
        Figure("theirs", "decode", "tok/s", (15.0, 5.0), True, {"batch": 8}),
        Figure("ours", "TTFT", "ms", (8.0, 4.0)),
        Figure("theirs", "TTFT", "ms", (16.0, 20.0)),
    )
    for ratio, name in (("rate", "decode"), ("time", "TTFT"), ("nothing", "prefill")):
        report.compare(ratio, report.find("ours", name), report.find("theirs", name))
    assert report.ratios == {"rate": 2.0, "time": 0.25}
    assert report.find("ours", "decode", batch=1) is None


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_saved_results_are_such_lines_and_name_no_machine(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") == 1
    assert set(KEYS) <= set(json.loads(text))
    assert "/home" not in text
    assert "/tmp" not in text
