"""``mooncake load``: a real cluster under load, and servers that answer in other forms over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run

from mooncake.app.cli.foreign_flags import OF_VLLM_BENCH
from mooncake.app.cluster.local import LocalCluster
from mooncake.app.latency import Outcome, RequestResult
from mooncake.app.load.http_server import HttpServer
from mooncake.app.load.requests import LoadRequest, Shape, Wishes, arrival_times, random_bodies
from mooncake.app.load.run import LoadRun
from mooncake.errors import ConfigError
from mooncake.trace import TraceRequest, save_trace

SHORT = ("--prompt-tokens", "40", "--answer-tokens", "6")


def load(cluster: LocalCluster, *flags: str) -> subprocess.CompletedProcess[str]:
    return run("load", "--address", cluster.http_url, *flags)


def test_random_prompts_have_the_lengths_that_were_asked_for(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "requests.json"
    limits = ("--ttft-slo-ms", "60000", "--total-slo-ms", "0")
    done = load(cluster, *SHORT, "--count", "12", "--rate", "50", "--spread", "0.5", *limits, "--requests", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 of 12 requests in ")
    goodput = "goodput at TTFT ≤ 60000 ms, whole answer ≤ 0 ms: 0.00 requests/s"
    assert all(words in done.stdout for words in ("TTFT", "single gaps", "sent later than planned", goodput))
    told = json.loads(file.read_text())
    assert (told["load"], told["planned"], told["sent"], told["summary"]["ok"]) == ("SmolLM2-135M-Instruct", 12, 12, 12)
    assert told["config"]["concurrency"] == 4096, "requests that have times do not wait for others"
    results = told["results"]
    assert all(20 <= each["prompt_tokens"] <= 60 and 3 <= each["completion_tokens"] <= 9 for each in results)
    assert all(len(each["gaps_ms"]) == each["completion_tokens"] - 1 and each["ttft_ms"] > 0 for each in results)
    times = [each["planned_s"] for each in results]
    assert times == sorted(times) and times[0] == 0.0 < times[1]
    early_s = 0.01  # an event loop looks at its clock so rarely
    assert all(each["sent_s"] >= each["planned_s"] - early_s for each in results)


def test_plots_are_drawn(cluster: LocalCluster, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    done = load(cluster, *SHORT, "--count", "2", "--plots", str(tmp_path / "plots"))
    assert done.returncode == 0 and len(list((tmp_path / "plots").glob("*.png"))) == 4


def test_a_prefix_that_all_share_is_cached(cluster: LocalCluster) -> None:
    sizes = ("--prompt-tokens", "200", "--prefix-tokens", "192", "--answer-tokens", "2")
    done = load(cluster, *sizes, "--count", "4", "--concurrency", "1", "--seed", "7", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert summary["prompt_tokens"] == 4 * 200 and summary["completion_tokens"] == 8
    assert summary["cached_share"] >= 3 * 128 / 800, "all but the first find it"


def test_lines_of_a_file_are_sent_as_they_are(cluster: LocalCluster, tmp_path: Path) -> None:
    file, told = tmp_path / "prompts.jsonl", tmp_path / "told.json"
    lines: list[dict[str, Any]] = [
        {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True},
        {"custom_id": "a", "body": {"prompt": [8, 9], "max_tokens": 2, "ignore_eos": True}},
        {"prompt": [9, 9], "output_tokens": 5, "ignore_eos": True},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    done = load(cluster, "--prompts", str(file), "--count", "6", "--requests", str(told))
    assert done.returncode == 0, done.stderr
    assert "sent later" not in done.stdout, "there were no times to be sent at"
    assert [each["completion_tokens"] for each in json.loads(told.read_text())["results"]] == [3, 4, 2, 5, 3, 4]
    done = load(cluster, "--chat", "--count", "2", "--prompt-tokens", "30", "--answer-tokens", "3", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["summary"]["completion_tokens"] == 6


def test_a_trace_is_played_at_its_times(cluster: LocalCluster, tmp_path: Path) -> None:
    trace, told = tmp_path / "trace.jsonl", tmp_path / "told.json"
    save_trace([TraceRequest(200.0 * n, 512 * (n + 1), 64, tuple(range(n + 1))) for n in range(4)], trace)
    flags = ("--trace", str(trace), "--speed", "2", "--requests", str(told))
    done = load(cluster, *flags)
    assert done.returncode == 0, done.stderr
    results = json.loads(told.read_text())["results"]
    assert [each["planned_s"] for each in results] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [each["prompt_tokens"] for each in results] == [16, 32, 48, 64]


def test_what_is_refused_says_why_once(cluster: LocalCluster) -> None:
    done = load(cluster, *SHORT, "--model", "other", "--count", "3")
    assert done.returncode == 1 and done.stdout.startswith("0 of 3 requests")
    assert done.stderr.count("failed: 404: the model 'other' is not served here") == 1
    assert done.stderr.endswith("mooncake: no request was answered\n")


def test_a_port_for_grpc_is_told_from_one_for_http(cluster: LocalCluster) -> None:
    done = run("load", "--address", cluster.grpc_address)
    assert done.returncode == 1 and "does not speak HTTP" in done.stderr and "is this the port for gRPC" in done.stderr


def test_an_interrupt_reports_what_there_is(cluster: LocalCluster) -> None:
    before = answered(cluster)
    command = [sys.executable, "-m", "mooncake", "load", "--address", cluster.http_url, *SHORT, "--count", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while answered(cluster) < before + 5:
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "\nstopped early: " in said


def answered(cluster: LocalCluster) -> int:
    with urllib.request.urlopen(f"{cluster.http_url}/status.json", timeout=30) as response:
        return int(json.load(response)["requests_total"])


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (
            ("--address", "http://127.0.0.1:9"),
            1,
            "Connection refused; `mooncake serve` starts a server, --address names",
        ),
        (("--address", "ftp://a"), 2, "a server's address is http://HOST:PORT, got 'ftp://a'"),
        (("--address", "http://a:b"), 2, "is no address of a server"),
        (("--prompts", "/none.jsonl"), 2, "cannot read /none.jsonl: No such file"),
        (("--prompts", "/dev/null"), 2, "/dev/null has no requests"),
        (("--prompts", "a", "--trace", "b"), 2, "give one of them"),
        (("--trace", "a", "--rate", "1"), 2, "a trace has times of its own"),
        (("--burstiness", "0.5"), 2, "--burstiness says how the times of --rate vary"),
        (("--prompts", "a", "--chat"), 2, "--chat is for random prompts"),
    ],
)
def test_what_cannot_be_sent_is_refused_at_once(flags: tuple[str, ...], code: int, words: str) -> None:
    done = run("load", *flags)
    assert done.returncode == code and words in done.stderr, done.stderr


@pytest.mark.parametrize("line", ["{", "5", "{}", '{"prompt": "a", "messages": []}'])
def test_a_line_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "a"}\n' + line + "\n")
    done = run("load", "--prompts", str(tmp_path / "in"))
    assert done.returncode == 2 and f"{tmp_path / 'in'}, line 2" in done.stderr


@pytest.mark.parametrize(
    ("flag", "words"),
    [("--dataset-name", "--prompts FILE"), ("--backend=vllm", "--chat asks for chats"), ("--goodput", "--ttft-slo-ms")],
)
def test_a_flag_that_only_vllm_has_says_what_there_is(flag: str, words: str) -> None:
    done = run("load", "--num-prompts", "3", flag, "x")
    assert done.returncode == 2 and words in done.stderr
    assert done.stderr.startswith(f"mooncake: {flag.partition('=')[0]} is a flag of vllm bench serve's; here: ")


def test_what_stands_for_a_flag_is_there() -> None:
    there = run("load", "--help").stdout
    named = re.findall(r"--[a-z][a-z-]+", " ".join(OF_VLLM_BENCH.values()))
    assert named and all(flag in there for flag in named)
    assert not any(f"{flag} " in there for flag in OF_VLLM_BENCH), "those that are taken need no counterpart"


def test_arrivals_are_random_and_as_many_as_asked_for() -> None:
    times = arrival_times(10_000, 50.0, 1.0, 3)
    assert times == sorted(times) == arrival_times(10_000, 50.0, 1.0, 3) != arrival_times(10_000, 50.0, 1.0, 4)
    assert times[0] == 0.0 and times[-1] == pytest.approx(200.0, rel=0.05)
    gaps = sorted(after - before for before, after in pairwise(times))
    assert gaps[len(gaps) // 2] == pytest.approx(0.02 * 0.693, rel=0.1), "the median of exponential gaps"
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0] * 3


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_may_come_in_bursts(burstiness: float) -> None:
    times = arrival_times(40_000, 50.0, burstiness, 3)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1), "that of a gamma distribution"


def test_a_seed_says_which_prompts() -> None:
    shape = Shape(prompt_tokens=20, answer_tokens=4, prefix_tokens=8)
    first, again, other = (list(random_bodies(shape, 3, seed)) for seed in (0, 0, 1))
    assert first == again != other
    prompts: list[Any] = [body["prompt"] for _, body in first]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1 and len({tuple(prompt) for prompt in prompts}) == 3
    assert all(len(prompt) == 20 for prompt in prompts)


@asynccontextmanager
async def answering(status: str, body: str, hangs_up: bool = False) -> AsyncIterator[tuple[HttpServer, list[bytes]]]:
    """A server that answers any request with this, and the requests that it got."""
    got: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        got.append(head + await reader.readexactly(length))
        size = len(body.encode()) + hangs_up
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n{body}".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield HttpServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"), got


def events(*chunks: dict[str, Any], end: str = "\n") -> str:
    return "".join(f"data: {json.dumps(chunk)}{end}{end}" for chunk in chunks) + f"data: [DONE]{end}{end}"


def text(said: str) -> dict[str, Any]:
    return {"choices": [{"text": said}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}


async def ask(server: HttpServer, *, is_plain: bool = False) -> RequestResult:
    load_run = LoadRun(server, Wishes("m", is_plain), 1, 10.0, lambda result: None)
    await load_run.send_all([LoadRequest(0, 0.0, "/v1/completions", {"prompt": "a", "ignore_eos": True})])
    [result] = load_run.results
    return result


@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_a_server_without_running_usage_has_its_events_counted(end: str) -> None:
    async with answering("200 OK", events(text("a"), text("b"), text(""), USAGE, end=end)) as (server, got):
        result = await ask(server, is_plain=True)
    assert (result.outcome, result.prompt_tokens, result.completion_tokens) == (Outcome.OK, 9, 4)
    assert len(result.gaps_ms) == 3 and result.ttft_ms > 0
    assert got[0].startswith(b"POST /v1/completions ")
    sent = json.loads(got[0].partition(b"\r\n\r\n")[2])
    assert sent == {"prompt": "a", "model": "m", "stream": True, "stream_options": {"include_usage": True}}


async def test_an_answer_without_usage_has_as_many_tokens_as_events() -> None:
    async with answering("200 OK", events(text("a"), text("b"))) as (server, got):
        result = await ask(server)
    assert (result.outcome, result.completion_tokens) == (Outcome.OK, 2)
    assert json.loads(got[0].partition(b"\r\n\r\n")[2])["stream_options"]["continuous_usage_stats"] is True


@pytest.mark.parametrize(
    ("status", "body", "outcome", "error"),
    [
        ("429 Too Many Requests", '{"error": {"message": "full"}}', Outcome.REJECTED, "429: full"),
        ("500 Oh", "a stack trace", Outcome.FAILED, "500: a stack trace"),
        ("404 Not Found", "", Outcome.FAILED, "404: it said no more"),
        ("200 OK", events(text("a"), {"error": {"message": "lost"}}), Outcome.FAILED, "lost"),
        ("200 OK", 'data: {"choices": 5}\n\n', Outcome.FAILED, "an event is not one of OpenAI's"),
        ("200 OK", events(), Outcome.FAILED, "an answer had no tokens"),
        ("200 OK", "a" * (5 << 20), Outcome.FAILED, "it sent more than 4 MiB"),
        ("500 Oh", "a" * (5 << 20), Outcome.FAILED, "it sent more than 4 MiB"),
    ],
)
async def test_what_is_no_answer_is_told_apart(status: str, body: str, outcome: Outcome, error: str) -> None:
    async with answering(status, body) as (server, _):
        result = await ask(server)
    assert result.outcome is outcome and result.error.startswith(error)


async def test_a_server_that_hangs_up_is_a_failed_request() -> None:
    async with answering("200 OK", events(text("a")), hangs_up=True) as (server, _):
        result = await ask(server)
    assert result.outcome is Outcome.FAILED and "hung up before the end" in result.error


def test_an_address_is_a_url() -> None:
    for url in ("there:80", "http://", "http://[::1"):
        with pytest.raises(ConfigError):
            HttpServer(url)
