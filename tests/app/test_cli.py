"""The command line, as a person or a script meets it: real processes, exit codes, one sentence for an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate
from commands import run

from mooncake.app.cluster.local import LocalCluster
from mooncake.app.run_batch import BatchRequest, BatchServer, read_requests
from mooncake.client import Client
from mooncake.config import load_config
from mooncake.rpc import inference_pb2, inference_pb2_grpc
from mooncake.rpc.server import RpcServer
from mooncake.sampling_params import SamplingParams

MOONCAKE = [str(Path(sys.executable).parent / "mooncake")]
TRACE = "\n".join(
    json.dumps({"timestamp": 100 * n, "input_length": 1500, "output_length": 64, "hash_ids": [0, n % 2 + 1, n + 10]})
    for n in range(6)
)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ["config", "show", "--set", "store.dram=2"],
            2,
            "unknown configuration key store.dram; did you mean",
        ),
        (
            ["config", "show", "--config", "/none.toml"],
            2,
            "cannot read the configuration /none.toml: No such",
        ),
        (["replay", "/none.jsonl"], 2, "cannot read the trace /none.jsonl: No such file or directory"),
        (["trace", "stats", "/none.jsonl"], 2, "cannot read the trace /none.jsonl: No such file or directory"),
        (
            ["replay", "/none.jsonl", "--json", "/none/x.json"],
            2,
            "cannot write /none/x.json: No such file or directory",
        ),
        (["simulate", "/none.jsonl", "--requests", "/none/x"], 2, "cannot write /none/x: No such file or directory"),
        (["sweep", "t", "--vary", "load", "--values", "1", "--plot", "/"], 2, "cannot write /: Is a directory"),
        (["run-batch", "-i", "i", "-o", "o", "--address", "there"], 2, "an address is HOST:PORT"),
        (
            ["reproduce", "/none", "--out", "/none/out"],
            2,
            "there is no folder /none; it is to hold the published traces",
        ),
        (["cache-lab", "/none.jsonl", "--plots", "/dev/null"], 2, "cannot write in /dev/null: Not a directory"),
        (["simulate", "/none.jsonl", "--seed", "-1"], 2, "--seed"),
        (["trace", "generate", "/none", "--shape", "conversation", "--seed", "-1"], 2, "--seed"),
        (
            ["key-scales", "--out", "/tmp/scales", "--text", "/none"],
            2,
            "cannot read /none: No such file or directory\n",
        ),
        (
            ["bench", "nothing"],
            2,
            "no benchmark is called 'nothing'; there are: blend, character, chunked, conductor,",
        ),
        (
            ["status", "--address", "127.0.0.1:9"],
            1,
            "no cluster answers at 127.0.0.1:9; start one with `mooncake serve`",
        ),
        (["generate", "Hi", "--address", "127.0.0.1:9"], 1, "no cluster answers at 127.0.0.1:9"),
        (["chat", "--address", "127.0.0.1:9"], 1, "no cluster answers at 127.0.0.1:9"),
        (["status", "--address", "http://127.0.0.1:9"], 2, "an address is HOST:PORT, such as 127.0.0.1:50051; got"),
        (["serve", "--model", "/no/model"], 2, "/no/model; give an HF folder"),
        (["serve", "Qwen/Qwen3-0.6B"], 2, "no model at Qwen/Qwen3-0.6B here, and https://huggingface.co cannot be"),
        (["serve", "one", "--model", "two"], 2, "got two models, one and two: a cluster serves one"),
        (["serve", "--dtype", "float8"], 2, "dtype"),
        (["serve", "--tensor-parallel-size=2"], 2, "is a flag of vLLM's; here: --set prefill.tensor_parallel=N --set"),
        (
            ["serve", "--tp-size", "2"],
            2,
            "--tp-size is a flag of SGLang's; here: --set prefill.tensor_parallel=N --set",
        ),
        (
            ["serve", "--mem-fraction-static=0.8"],
            2,
            "--mem-fraction-static is a flag of SGLang's; here: --set prefill.gpu",
        ),
        (["serve", "-tp", "2"], 2, "-tp is a flag of vLLM's; here: --set prefill.tensor_parallel=N --set"),
        (
            ["serve", "--gpu_memory_utilization=0.9"],
            2,
            "--gpu_memory_utilization is a flag of vLLM's; here: --set prefill.gpu",
        ),
        (["serve", "-O3"], 2, "-O3 is a flag of vLLM's; here: kernels are compiled where they are needed"),
        (["serve", "--trust-remote-code"], 2, "no code of a model's is ever run, leave it out"),
        (["serve", "--override-generation-config", "{"], 2, "model.generation_overrides is not JSON"),
        (
            ["serve", "--override-generation-config", '{"top_p": 2}', "--http-port", "0", "--grpc-port", "0"],
            2,
            "top_p must be between 0 and 1, got 2",
        ),
        (
            ["serve", "--chat-template", "no/own.jinja", "--http-port", "0", "--grpc-port", "0"],
            2,
            "mooncake: model.chat_template: cannot read no/own.jinja: No such file or directory",
        ),
        (
            ["serve", "--set", "model.chat_template={% if %}", "--http-port", "0", "--grpc-port", "0"],
            2,
            "mooncake: the chat template is broken: Expected an expression",
        ),
        (["serve", "--default-chat-template-kwargs", "[]"], 2, "model.chat_template_kwargs is a JSON object, got []"),
        (["serve", "--tool-call-parser", "no"], 2, "mooncake: conductor.tool_call_parser must be one of auto, hermes"),
        (["replay", __file__], 2, "; a trace is lines of JSON with timestamp, input_length, output_length, hash_ids"),
        (["serve", "--prefill", "0"], 2, "'--prefill': Input should be greater than or equal to 1, got '0'"),
        (["generate", "x", "--max-tokens", "1.5"], 2, "unable to parse string as an integer, got '1.5'"),
        (["generate", "x", "--temperature", "hot"], 2, "unable to parse string as a number, got 'hot'"),
        (
            ["serve", "--max-model-len", "100000", "--http-port", "0", "--grpc-port", "0"],
            2,
            "mooncake: max_model_len is 100000, and the context of the model 8192 tokens: ask for no more, or",
        ),
        (["serve", "--set", "store.dram_gb=1e6", "--http-port", "0", "--grpc-port", "0"], 2, "GB of memory"),
    ],
)
def test_what_a_user_can_get_wrong_is_a_sentence_and_an_exit_code(
    arguments: list[str], code: int, sentence: str
) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_refused_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        done = run("serve", "--http-port", port, "--grpc-port", "0")
    assert done.returncode == 2
    assert f"port {port} is taken by process " in done.stderr
    assert "--http-port" in done.stderr


@pytest.mark.parametrize(("flags", "most_s"), [([], None), (["--timeout-s", "50"], 50)])
async def test_an_answer_may_take_as_long_as_the_cluster_lets_it_unless_one_says_less(
    flags: list[str], most_s: float | None, rpc_server: Callable[[], RpcServer]
) -> None:
    left: list[float | None] = []

    class Servicer(inference_pb2_grpc.InferenceServicer):
        async def Generate(  # noqa: N802
            self, request: inference_pb2.GenerateRequest, context: Any
        ) -> AsyncIterator[inference_pb2.GenerateResponse]:
            left.append(context.time_remaining())
            yield inference_pb2.GenerateResponse(text="Hello", finish_reason="stop")

    server = rpc_server()
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Servicer(), "mooncake.v1.Inference")
    port = await server.start("127.0.0.1", 0)
    done = await asyncio.to_thread(run, "generate", "Hi", "--address", f"127.0.0.1:{port}", *flags)
    assert done.stdout == "Hello\n"
    assert left == [most_s and pytest.approx(most_s, abs=10)]


def test_the_demo_takes_any_ports_but_those_that_are_set(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[conductor]\nhttp_port = 1\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = run("demo", "--config", str(tmp_path / "cluster.toml"), "--set", f"conductor.grpc_port={port}")
    assert done.returncode == 2
    assert f"port {port} is taken by process " in done.stderr


def test_ctrl_c_before_the_command_is_loaded_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    paths = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-m", "mooncake", "status"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_help_loads_nothing_that_takes_long() -> None:
    """So it answers at once; how fast is measured by a benchmark."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mooncake", "--help"], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert {"mooncake", "typer", "msgspec"} <= loaded, "what is loaded is seen"
    assert not loaded & {"numpy", "torch", "triton", "grpc", "google", "starlette", "uvicorn", "rich", "asyncio", "ray"}


def test_help_says_what_there_is_in_whole_sentences_and_benchmarks_list_their_own_flags() -> None:
    commands = run("--help").stdout.partition("Commands:")[2]
    assert "simulate" in commands and "..." not in commands
    for name in ("serve", "cache-lab", "replay"):
        text = run(name, "--help").stdout
        assert "<" not in text.replace("<=", ""), "no types of Python's"
    assert "\n  TRACE  Mooncake JSONL" in text and "  --limit N " in text and "  --speed NUMBER " in text
    assert run("-h").stdout == run("--help").stdout
    assert all(name in run("bench", "-h").stdout for name in ("serve", "transfer"))
    assert "--nodes NODES" in run("bench", "conductor", "--help").stdout
    for name in ("calibrate", "validate"):
        assert "--set SECTION.KEY=VALUE" in run(name, "--help").stdout


def test_every_flag_of_a_benchmark_says_what_it_is() -> None:
    """In one process: each would import torch anew."""
    code = (
        "import contextlib, importlib, mooncake.app.cli.main as cli\n"
        "for name in cli.BENCHES:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        importlib.import_module(f'mooncake.app.bench.{name}').main(['--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "500"}
    )
    lines = [*done.stdout.splitlines(), ""]
    flags = [(line, below) for line, below in pairwise(lines) if line.startswith("  -")]
    silent = [line for line, below in flags if not re.search(r"\S {2,}\S", line) and not below.startswith(" " * 10)]
    assert len(flags) > 150 and silent == []
    assert "``" not in done.stdout


def test_the_version_is_a_command_and_a_flag() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, run("version").stdout)
    assert done.stdout.startswith("mooncake 0.")


def test_config_show_tells_where_each_value_comes_from(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[store]\ndram_gb = 3\nlease_s = 4\n", encoding="utf-8-sig")
    done = run("config", "show", "--origin", "--json", "--config", f"{tmp_path}/c.toml", "--set", "store.lease_s=5")
    origins = {row["name"]: (row["value"], row["origin"]) for row in json.loads(done.stdout)}
    assert origins["store.dram_gb"] == (3.0, f"{tmp_path}/c.toml")
    assert origins["store.lease_s"] == (5.0, "flag")
    assert origins["block.tokens"] == (64, "default")
    shown = run("config", "show", "--origin", "--json", "--set", "decode.device=cuda").stdout
    origins = {row["name"]: (row["value"], row["origin"]) for row in json.loads(shown)}
    assert origins["prefill.chunk_tokens"] == (256, "default")
    assert origins["decode.chunk_tokens"] == (2048, "default")
    assert origins["decode.max_sequences"] == (256, "default")
    assert origins["decode.device"] == ("cuda", "flag")
    assert "store.lease_s" in run("config", "show", "--origin").stdout
    assert re.search("^block.windows +true$", run("config", "show").stdout, re.MULTILINE), "as a file has it"


def test_config_show_writes_a_file_that_means_the_same_and_explains_it(tmp_path: Path) -> None:
    changed = ["store.dram_gb=3", 'model.adapters=["a=ä b"]', "block.windows=false", 'transfer.transports=["tcp"]']
    done = run("config", "show", "--toml", *(word for setting in changed for word in ("--set", setting)))
    (tmp_path / "c.toml").write_text(done.stdout)
    assert load_config(tmp_path / "c.toml") == load_config(None, changed)
    assert "\n# tokens of prompt plus answer; 0: the model's own\nmax_model_len = 0\n" in done.stdout
    prefill = done.stdout.partition("[prefill]")[2].partition("\n[")[0]
    in_common = "\n# running at once; 0: 64, on a GPU 256\nmax_sequences = 0  # 64 on this device\n"
    assert in_common in prefill, "what prefill and decode nodes have in common"
    assert done.stdout.count("\n# ") > 110
    assert run("config", "show", "--toml", "--json").returncode == 2


def test_a_saved_configuration_follows_its_device_when_that_is_changed(tmp_path: Path) -> None:
    done = run("config", "show", "--toml", "--set", "prefill.chunk_tokens=512", "--set", "decode.max_sequences=0")
    (tmp_path / "c.toml").write_text(done.stdout)
    changed = load_config(tmp_path / "c.toml", ["prefill.device=cuda", "decode.device=cuda"])
    assert (changed.prefill.chunk_tokens, changed.prefill.max_sequences) == (512, 256)
    assert (changed.decode.chunk_tokens, changed.decode.max_sequences) == (2048, 256)


def test_trace_stats_count_hits(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TRACE)
    facts = json.loads(run("trace", "stats", f"{tmp_path}/t.jsonl", "--json").stdout)
    assert (facts["requests"], facts["block_references"], facts["distinct_blocks"]) == (6, 18, 9)
    assert facts["lru_hit_rates"][0]["block"] == 9 / 18
    assert "0.5000" in run("trace", "stats", f"{tmp_path}/t.jsonl").stdout


def test_a_file_s_name_is_told_as_it_is(tmp_path: Path) -> None:
    name = "[bold]t.jsonl"
    (tmp_path / name).write_text(TRACE)
    assert name in run("trace", "stats", f"{tmp_path}/{name}").stdout


def test_a_trace_that_comes_at_once_has_no_rate(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TRACE)
    assert (
        json.loads(run("trace", "stats", f"{tmp_path}/t.jsonl", "--limit", "1", "--json").stdout)["requests_per_s"]
        is None
    )


def test_a_replay_that_nobody_answers_says_how_to_start_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TRACE)
    done = run("replay", f"{tmp_path}/t.jsonl", "--address", "127.0.0.1:9")
    assert done.returncode == 1
    assert "no cluster answers at 127.0.0.1:9; start one with `mooncake serve`" in done.stderr


def test_generate_streams_an_answer_and_its_figures(cluster: LocalCluster) -> None:
    arguments = ("generate", "Why is the sky blue?", "--address", cluster.grpc_address, "--max-tokens", "8")
    done = run(*arguments)
    assert done.returncode == 0
    assert len(done.stdout.strip()) > 5
    assert "TTFT" in done.stderr
    assert "prefill-0 → decode-0" in done.stderr

    answer = json.loads(run(*arguments, "--json").stdout)
    assert answer["text"] == done.stdout.rstrip("\n")
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["finish_reason"] == "length"


def test_chat_reuses_the_turns_before(cluster: LocalCluster) -> None:
    story = "Once upon a time there was a small robot that wanted to see the sea. " * 6
    done = run(
        *("chat", "--address", cluster.grpc_address, "--max-tokens", "8", "--temperature", "0"),
        stdin=f"{story}\nAnd then?\n/new\nHello\n",
    )
    assert done.returncode == 0
    reused = [line for line in done.stderr.splitlines() if "prompt tokens reused" in line]
    assert len(reused) == 3
    assert "· 64 of" in reused[1] or "· 128 of" in reused[1]


def test_chat_takes_the_commands_of_other_chats(cluster: LocalCluster) -> None:
    done = run("chat", "--address", cluster.grpc_address, stdin="/help\n/set x\n/clear\n/exit\nHello\n")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["/new", "/new", "/new", "a"]
    assert done.stdout == "", "no question was asked"


@pytest.mark.parametrize("command", [("generate", "Hi"), ("chat",)])
def test_who_is_asked_can_be_named(cluster: LocalCluster, command: tuple[str, ...]) -> None:
    done = run(*command, "--address", cluster.grpc_address, "--model", "poems", stdin="")
    assert done.returncode == 2
    assert done.stderr.startswith("mooncake: the model 'poems' is not served here; served: 'SmolLM2-135M-Instruct'")
    own = run(*command, "--address", cluster.grpc_address, "--model", "SmolLM2-135M-Instruct", stdin="")
    assert own.returncode == 0


def test_status_shows_every_node(cluster: LocalCluster) -> None:
    status = json.loads(run("status", "--address", cluster.grpc_address, "--json").stdout)
    assert status["ready"] is True
    assert {node["info"]["node_id"] for node in status["nodes"]} == {"store-0", "prefill-0", "decode-0"}
    with urllib.request.urlopen(f"{cluster.http_url}/status.json") as answer:
        assert json.load(answer)["requests_total"] >= status["requests_total"] >= 0, "numbers, not their texts"
    table = run("status", "--address", cluster.grpc_address).stdout
    assert all(word in table for word in ("ready", "prefill-0", "decode-0", "store-0", "live"))
    assert "of KV cache" in table and "steps of 256 prompt tokens, 64 sequences" in " ".join(table.split())
    assert re.search(r"^prefill-0 +prefill +live", table, re.MULTILINE), "a node may change its role, not its name"


def test_replay_reports_and_writes_files(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TRACE)
    done = run(
        *("replay", f"{tmp_path}/t.jsonl", "--address", cluster.grpc_address, "--tokens-per-block", "64"),
        *("--max-output", "4", "--concurrency", "1", "--speed", "0", "--ttft-slo-ms", "60000"),
        *("--requests", f"{tmp_path}/r.json", "--plots", f"{tmp_path}/plots"),
    )
    assert done.returncode == 0, done.stderr
    assert "6 of 6 requests" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["summary"]["ok"] == 6
    assert report["summary"]["goodput_share"] == 1.0
    # one after the other, with room for all: exactly what an endless cache hits
    assert report["summary"]["hits"] == pytest.approx(report["endless_cache"])
    assert report["endless_cache"]["block"] == 9 / 18
    assert len(report["results"][0]["gaps_ms"]) == 3
    for name in ("ttft", "tbt", "arrivals", "hit_rate"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    again = run("replay", f"{tmp_path}/t.jsonl", "--address", cluster.grpc_address, "--tokens-per-block", "64")
    hint = "more than that: the cluster had cached these prompts before"
    assert hint in again.stdout and hint not in done.stdout


def test_a_replay_that_gets_no_answer_ends_with_1_after_its_report(cluster: LocalCluster, tmp_path: Path) -> None:
    too_long = {"timestamp": 0, "input_length": 102_400, "output_length": 4, "hash_ids": list(range(200))}
    (tmp_path / "t.jsonl").write_text(json.dumps(too_long))
    done = run("replay", f"{tmp_path}/t.jsonl", "--address", cluster.grpc_address, "--tokens-per-block", "512")
    assert done.returncode == 1
    assert "0 of 1 requests" in done.stdout and "lower --tokens-per-block" in done.stdout
    assert "no request was answered" in done.stderr


def test_ctrl_c_ends_a_replay_with_a_report_of_what_was_measured(cluster: LocalCluster, tmp_path: Path) -> None:
    """One request at a time: once the second has been sent, the client has read the first one's answer."""
    lines = [
        {"timestamp": at_ms, "input_length": 512, "output_length": output, "hash_ids": [at_ms]}
        for at_ms, output in ((0, 64), (1, 4096), (60_000, 64))
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with Client(cluster.grpc_address) as client:
        before = client.status().requests_total
        arguments = ("replay", f"{tmp_path}/t.jsonl", "--address", cluster.grpc_address, "--concurrency", "1")
        with started(*arguments) as process:
            wait_until(lambda: client.status().requests_total == before + 2)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "1 of 3 requests" in out
    assert "stopped early: 2 of 3 requests sent, 1 answered" in out
    assert err.endswith("mooncake: stopped before the end of the trace\n")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_serve_tells_whom_clients_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is for the public name, and nodes can still join."""
    certificate, key = make_certificate(tmp_path, "public", names="DNS:llm.example")
    with started(*SERVE, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as process:
        text = read_until(process, "Ctrl-C stops")
        for name, value in re.findall(r"export (MOONCAKE_SSL_\w+)=(\S+)", text):
            monkeypatch.setenv(name, value)
        done = run("generate", "Hi", "--max-tokens", "2", "--address", re.findall(r"--address (\S+)", text)[0])
        assert done.returncode == 0, done.stderr
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_serve_tells_what_it_does_and_stops_on_ctrl_c() -> None:
    with started(*SERVE) as process:
        text = read_until(process, "Ctrl-C stops")
        assert all(word in text for word in ("OpenAI", "gRPC", "status ", "waiting for", "ready", "mooncake generate"))
        assert '"max_tokens": 100}' in text, "an answer without an end would be all that a newcomer sees"
        nodes = children(process.pid)
        assert len(nodes) == 4
        with Client(re.findall(r"--address (\S+)", text)[0]) as client:
            answer = client.stream("Once upon a time", sampling=SamplingParams(max_tokens=32, ignore_eos=True))
            chunks = [next(answer)]
            process.send_signal(signal.SIGINT)
            chunks += answer
        assert chunks[-1].finish_reason == "length", "an answer under way is given to its end"
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "requests under way have 10 s to finish" in out
        assert "stopped" in out
        assert "Traceback" not in err
        assert all(is_gone(pid) for pid in nodes)


@pytest.mark.slow
def test_a_serve_whose_terminal_is_gone_stops_in_order() -> None:
    with no_nohup(), started(*SERVE) as process:
        read_until(process, "Ctrl-C stops")
        nodes = children(process.pid)
        assert process.stdout is not None
        process.stdout.close()  # nobody reads what it says about stopping
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0
        assert all(is_gone(pid) for pid in nodes)
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    for flags in (["--json"], ["--requests", "/dev/full"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*MOONCAKE, "simulate", str(trace), "--preset", "vllm-16", *flags],
                stdout=full if flags == ["--json"] else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=120,
                check=False,
            )
        assert done.returncode == 1
        file = "/dev/full: " if "/dev/full" in flags else ""
        assert done.stderr.splitlines()[-1] == f"mooncake: {file}No space left on device"
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("wrong", ["--nonsense", "--set=model.nam=x"])
def test_a_disk_too_full_for_an_error_leaves_the_exit_code(wrong: str) -> None:
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([*MOONCAKE, "serve", wrong], stderr=full, timeout=60, check=False).returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "command",
    [
        ("sweep", "--preset", "vllm-16", "--vary", "load", "--values", "1", "--report"),
        ("cache-lab", "--policy", "lru", "--capacity", "10", "--report"),
    ],
)
def test_a_report_for_which_there_is_no_room_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    name, *flags = command
    done = run(name, str(trace), *flags, "/dev/full")
    assert (done.returncode, done.stderr) == (1, "mooncake: /dev/full: No space left on device\n")


@pytest.mark.slow
def test_nothing_outlives_a_serve_that_is_killed() -> None:
    with started(*SERVE) as process:
        read_until(process, "Ctrl-C stops")
        nodes = children(process.pid)
        assert len(nodes) == 4
        process.kill()
        wait_until(lambda: all(is_gone(pid) for pid in nodes))


@pytest.mark.slow
def test_the_demo_shows_everything() -> None:
    done = run("demo", timeout=280)
    assert done.returncode == 0, done.stderr
    for words in ("Why is the sky blue?", "2 blocks = 128 tokens", "over shm", "12 of 12 requests", "Next:"):
        assert words in done.stdout


def test_ctrl_c_ends_a_command_and_its_processes_without_a_traceback(tmp_path: Path) -> None:
    trace = tmp_path / "made.jsonl"
    assert run("trace", "generate", str(trace), "--shape", "conversation", "--requests", "3000").returncode == 0
    command = [*MOONCAKE, "cache-lab", str(trace), "--jobs", "2"]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=listens
    ) as process:
        wait_until(lambda: len(children(process.pid)) >= 2)
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them, which are just starting
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    wait_until(lambda: all(is_gone(pid) for pid in workers))


SMALL_CACHES = [f"--set={size}=0.3" for size in ("prefill.kv_gb", "decode.kv_gb", "store.dram_gb")]
SERVE = ("serve", "--http-port", "0", "--grpc-port", "0", *SMALL_CACHES)


@contextlib.contextmanager
def no_nohup() -> Iterator[None]:
    """Child processes get SIGHUP, even if it is ignored by these tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def no_background_job() -> Iterator[None]:
    """Child processes get SIGINT, even if these tests are a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*MOONCAKE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            break
    return said


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


def batch_line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def test_a_batch_is_answered_in_its_order_and_what_is_refused_says_why(cluster: LocalCluster, tmp_path: Path) -> None:
    asked, told = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [batch_line(f"r{n}", prompt=f"Number {n}:", max_tokens=4, temperature=0) for n in range(20)]
    messages = [{"role": "user", "content": "Hi"}]
    lines.insert(5, batch_line("chat", "/v1/chat/completions", messages=messages, max_tokens=4))
    lines.insert(6, batch_line("text", "/v1/embeddings", input="Hi"))
    lines.insert(7, batch_line("ranking", "/v1/rerank", query="Hi", documents=["Hello", "Hi"]))
    lines.append(batch_line("wrong", prompt="x", max_tokens=-1))
    lines += [
        batch_line("elsewhere", "/v1/audio/speech"),
        batch_line("streamed", stream=True),
        '{"custom_id": "empty"}',
    ]
    lines.append('{"custom_id": "odd", "url": ["/v1/completions"], "body": {}}')
    asked.write_text("\n".join(lines) + "\n\n")
    address = cluster.http_url.removeprefix("http://")
    done = run("run-batch", "-i", str(asked), "-o", str(told), "--address", address, "--concurrency", "6")
    assert done.returncode == 1 and done.stderr.startswith("23 of 28 requests were answered in ")
    assert "\nnot answered, for one: wrong: max_tokens " in done.stderr

    results = [json.loads(line) for line in told.read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [json.loads(line)["custom_id"] for line in lines]
    *good, bad, elsewhere, streamed, empty, odd = results
    assert all(result["response"]["status_code"] == 200 and result["error"] is None for result in good)
    assert good[5]["response"]["body"]["object"] == "chat.completion" and good[5]["response"]["request_id"]
    assert good[6]["response"]["body"]["data"][0]["object"] == "embedding"
    assert [each["index"] for each in good[7]["response"]["body"]["results"]] == [1, 0]
    assert good[0]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert bad["response"]["status_code"] == 400 and bad["response"]["body"]["error"]["param"] == "max_tokens"
    unsent = [(elsewhere, 25, "a request is a POST to one of"), (streamed, 26, "a result is one object, so it is not")]
    unsent += [(empty, 27, "a request is a POST to one of"), (odd, 28, "a request is a POST to one of")]
    for result, number, sentence in unsent:
        assert result["response"] is None and result["error"]["code"] == "invalid_request"
        assert result["error"]["message"].startswith(f"{asked}, line {number}: {sentence}")


@contextlib.contextmanager
def one_that_answers_nothing() -> Iterator[tuple[str, list[socket.socket]]]:
    """A server's address, and the connections to it: it says that it is healthy, and reads no request."""
    taken: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                connection, _ = server.accept()
                if connection.recv(1 << 16).startswith(b"GET /health"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    connection.close()
                else:
                    taken.append(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


def test_an_interrupted_batch_waits_for_no_answer(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(batch_line(f"r{n}", prompt="x") for n in range(8)))
    files = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    with (
        one_that_answers_nothing() as (url, taken),
        no_background_job(),
        started("run-batch", *files, "--url", url, "--concurrency", "3") as batch,
    ):
        wait_until(lambda: len(taken) == 3)
        batch.send_signal(signal.SIGINT)
        assert batch.wait(20) == 130
    assert (tmp_path / "out").read_text() == ""


@contextlib.contextmanager
def one_that_answers(prompts: list[str], is_silent: Callable[[str], bool]) -> Iterator[str]:
    """A server's address: it says each of ``prompts`` back, unless it ``is_silent``."""
    goes_on = threading.Event()

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
            prompts.append(prompt)
            if is_silent(prompt):
                goes_on.wait(60)
            with contextlib.suppress(ConnectionError):  # an interrupted client is gone
                self.answer({"text": prompt})

        def answer(self, body: dict[str, str]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            goes_on.set()
            server.shutdown()


def test_an_interrupted_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    ends = "\u2028"  # ends no line of JSON
    lines = [batch_line(f"r{n}", prompt=f"{n}{ends}").replace(r"\u2028", ends) for n in range(8)]
    (tmp_path / "in").write_text("\n".join(lines))
    files, out = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")), tmp_path / "out"
    before: list[str] = []
    with (
        one_that_answers(before, lambda _: len(before) > 5) as url,
        no_background_job(),
        started("run-batch", *files, "--url", url, "--concurrency", "1") as batch,
    ):
        wait_until(lambda: len(before) == 6 and len(out.read_bytes().splitlines()) == 5)
        batch.send_signal(signal.SIGINT)
        assert batch.wait(20) == 130
    kept = out.read_bytes()
    out.write_bytes(kept[:-9])  # as after a crash within the last line
    after: list[str] = []
    with one_that_answers(after, lambda _: False) as url:
        done = run("run-batch", *files, "--url", url)
        assert done.returncode == 0
        told = " ".join(done.stderr.split())
        assert "out has 4 of 8 answers already; sending the other 4" in told and "4 of 4 requests were answered" in told
        assert sorted(after) == [f"{n}{ends}" for n in (4, 5, 6, 7)]
        assert out.read_bytes().startswith(b"".join(kept.splitlines(keepends=True)[:4]))
        results = [json.loads(line) for line in out.read_bytes().splitlines()]
        assert [result["custom_id"] for result in results] == [f"r{n}" for n in range(8)]
        assert [result["response"]["body"]["text"] for result in results] == [f"{n}{ends}" for n in range(8)]
        whole = out.read_bytes()
        again = run("run-batch", *files, "--url", url)
    assert again.returncode == 0 and "remove it to ask again" in " ".join(again.stderr.split())
    assert len(after) == 4 and out.read_bytes() == whole


def test_an_answer_that_takes_long_keeps_no_other_from_an_interrupted_batch(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(batch_line(f"r{n}", prompt=str(n)) for n in range(8)))
    files, out = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")), tmp_path / "out"
    with (
        one_that_answers([], lambda prompt: prompt == "2") as url,
        no_background_job(),
        started("run-batch", *files, "--url", url, "--concurrency", "2") as batch,
    ):
        wait_until(lambda: out.exists() and len(out.read_bytes().splitlines()) == 7)
        batch.send_signal(signal.SIGINT)
        assert batch.wait(20) == 130
    kept = [json.loads(line)["custom_id"] for line in out.read_bytes().splitlines()]
    assert kept == [f"r{n}" for n in range(8) if n != 2]


def test_a_batch_may_be_answered_into_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(batch_line("r", prompt="x"))
    with one_that_answers([], lambda _: False) as url:
        port = url.rpartition(":")[2]  # the address comes from the configuration
        done = run("run-batch", "-i", str(tmp_path / "in"), "-o", "/dev/stdout", "--set", f"conductor.http_port={port}")
    assert done.returncode == 0 and json.loads(done.stdout)["custom_id"] == "r"


def test_a_server_that_hangs_up_in_an_answer_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Halves(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(500)
            self.send_header("content-length", "99")
            self.end_headers()
            self.wfile.write(b"half")

        def log_message(self, *arguments: object) -> None: ...

    monkeypatch.setattr("mooncake.app.run_batch.TRIES", 1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Halves) as server:
        threading.Thread(target=server.serve_forever).start()
        answer = BatchServer(f"http://127.0.0.1:{server.server_port}").send(BatchRequest("a", "/v1/completions", b"{}"))
        server.shutdown()
    assert answer.status == 0 and json.loads(answer.line)["error"]["message"]


def test_a_batch_does_not_write_over_its_requests(tmp_path: Path) -> None:
    (tmp_path / "both").write_text(batch_line("a", prompt="x"))
    same = tmp_path / "both"
    done = run("run-batch", "-i", str(same), "-o", str(tmp_path / "." / "both"), "--url", "http://127.0.0.1:1")
    assert done.returncode == 2 and "holds the requests" in done.stderr
    assert same.read_text() == batch_line("a", prompt="x")


def test_a_batch_waits_for_a_server_that_is_full(tmp_path: Path) -> None:
    tries: list[str] = []

    class Full(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            tries.append(self.path)
            self.answer(200 if len(tries) > 2 else 429, {"tries": len(tries)})

        def answer(self, status: int, body: dict[str, int]) -> None:
            self.send_response(status)
            self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *arguments: object) -> None: ...

    (tmp_path / "in").write_text(batch_line("a", prompt="x"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Full) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = run("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", url)
        server.shutdown()
    assert done.returncode == 0 and tries == ["/v1/completions"] * 3
    assert json.loads((tmp_path / "out").read_text())["response"]["body"] == {"tries": 3}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["{"], "in, line 1 is not JSON"),
        ([batch_line("a"), batch_line("a")], "in, line 2: the custom_id 'a' is there twice"),
        (['{"url": "/v1/completions", "body": {}}'], "in, line 1: a request has a custom_id"),
        ([""], "in has no requests"),
        ([batch_line("a")], "no server answers at http://127.0.0.1:9; start one with `mooncake serve`"),
    ],
)
def test_a_batch_is_read_before_anything_is_sent(tmp_path: Path, lines: list[str], sentence: str) -> None:
    (tmp_path / "in").write_text("\n".join(lines))
    done = run("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", "http://127.0.0.1:9")
    assert done.returncode in (1, 2) and sentence in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_requests_of_a_file_may_begin_with_the_mark_of_utf_8(tmp_path: Path) -> None:
    """As of some editors."""
    file = tmp_path / "requests.jsonl"
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"prompt": "é"}}
    file.write_text(json.dumps(line, ensure_ascii=False), encoding="utf-8-sig")
    assert [request.custom_id for request in read_requests(file)] == ["one"]
