"""``bench http``: servers answer over real sockets; what they send is counted, and what they break is said."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import commands
import pytest
from tiny_model import write_tiny_model

from mooncake.app.bench import http
from mooncake.app.bench.load.http_client import ChatsByHttp, ServedByHttp
from mooncake.errors import ConfigError, InternalError, NodeUnavailable

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def piece(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


def event(tokens: int) -> str:
    return "data: " + json.dumps({"choices": [{"text": "a"}], "usage": {"completion_tokens": tokens}}) + "\n\n"


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[tuple[ServedByHttp, list[bytes]]]:
    """A server that answers any request with these bytes and hangs up, and the requests it got: heads and bodies."""
    got: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        got.append(head)
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        got.append(await reader.readexactly(int(length[1])))
        writer.writelines(parts)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield ServedByHttp("theirs", server.sockets[0].getsockname()[1], "model"), got


async def test_tokens_are_counted_by_usage_however_events_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_API_KEY", "sesame")
    first, rest = event(1), event(2) + event(2) + event(4) + "data: [DONE]\n\n"
    async with answering(OK, piece(first[:9]), piece(first[9:]), piece(rest) + END) as (served, got):
        answer = await served.ask([5, 6, 7], 4)

    assert len(answer.token_times_s) == 4 and answer.token_times_s[2] == answer.token_times_s[3]
    assert answer.sent_s < answer.token_times_s[0] <= answer.token_times_s[1]
    assert b"authorization: bearer sesame" in got[0].lower()
    asked = json.loads(got[1])
    assert (asked["prompt"], asked["max_tokens"], asked["ignore_eos"]) == ([5, 6, 7], 4, True)


async def test_a_chat_has_a_word_for_each_id_of_a_prompt() -> None:
    async with answering(OK, piece(event(1) + "data: [DONE]\n\n") + END) as (served, got):
        answer = await ChatsByHttp(served).ask([5, 6, 5], 1)

    assert len(answer.token_times_s) == 1 and got[0].startswith(b"POST /v1/chat/completions ")
    asked = json.loads(got[1])
    [message] = asked["messages"]
    first, second, third = message["content"].split()
    assert (message["role"], asked["max_tokens"]) == ("user", 1) and first == third != second


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        ((OK, piece(event(1))), NodeUnavailable, "hung up before the end"),
        ((OK, piece(event(1)) + END), InternalError, "1 tokens came, 2 were requested"),
        ((b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\nno model",), InternalError, "answered 404: no model"),
        ((b"SSH-2.0\r\n",), InternalError, "does not speak HTTP"),
    ],
)
async def test_a_broken_answer_is_an_error(parts: tuple[bytes, ...], kind: type[Exception], words: str) -> None:
    async with answering(*parts) as (served, _):
        with pytest.raises(kind, match=words):
            await served.ask([5], 2)


async def test_a_server_that_is_gone_is_an_error(unused_tcp_port: int) -> None:
    with pytest.raises(NodeUnavailable, match="theirs cannot be asked"):
        await ServedByHttp("theirs", unused_tcp_port, "model").ask([5], 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--long", "4096"], "would be up to 4100 tokens; there is room for 1 to 4096"),
        (["--prompt", "3000"], "would be up to 4572 tokens"),
        (["--new", "1025"], "4 times --new and a prompt, or --long, would be up to 4116 tokens"),
        (["--set", "conductor.ssl_certfile=some.pem"], "does not encrypt"),
        (["--new", "1"], "--requests must be at least 1, --new at least 2"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        http.main(arguments)


@pytest.mark.slow
def test_a_cluster_and_a_coupled_node_get_the_same_load(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    line = tmp_path / "line.json"
    run = commands.run("bench", "http", "--quick", "--model", str(tmp_path / "tiny"), "--json", str(line), timeout=240)
    assert run.returncode == 0, run.stderr
    report = json.loads(line.read_text())
    measured = {(row["subject"], row["name"], row.get("clients")) for row in report["results"]}
    names = {"output", "TTFT p50", "TTFT p99", "TBT p50", "TBT p99"}
    servers = ("cluster", "coupled")
    assert {(server, name, clients) for server in servers for name in names for clients in (1, 4)} <= measured
    assert {(server, f"TTFT, {kind}", None) for server in servers for kind in ("cold", "repeated")} <= measured
    fronts = {row["subject"]: row for row in report["results"] if row["name"] == http.FRONT}
    assert fronts.keys() == {*servers} and all(row["streams"] == 32 and row["best"] > 0 for row in fronts.values())
    shorts = {
        (row["subject"], row["asked"], row["tokens"]): row["best"]
        for row in report["results"]
        if row["name"] == http.FRONT_REQUEST
    }
    kinds = (("completion", 1), ("chat", 1), ("chat", 2))
    assert shorts.keys() == {(server, *kind) for server in servers for kind in kinds} and min(shorts.values()) > 0
    assert str(tmp_path) not in line.read_text(), "a path of this machine is in the line"


DYING = """#!{python}
import json, socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(json.dumps({{"port": server.getsockname()[1], "versions": {{}}, "start_s": 0.0}}), flush=True)
server.accept()  # and dies of the first request
"""


@pytest.mark.slow
def test_what_was_measured_before_a_server_died_is_reported(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    dying, line = tmp_path / "dying", tmp_path / "line.json"
    dying.write_text(DYING.format(python=sys.executable))
    dying.chmod(0o700)
    arguments = ["--quick", "--model", str(tmp_path / "tiny"), "--vllm-python", str(dying), "--json", str(line)]
    run = commands.run("bench", "http", *arguments, timeout=240)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    report = json.loads(line.read_text())
    assert {row["subject"] for row in report["results"]} == {"cluster", "coupled"}
    assert report["notes"][-1].startswith("ended before all turns: vllm cannot be asked")
