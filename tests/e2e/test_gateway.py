"""A gateway that others wrote, smg, in front of a real cluster: what its clients get is what ours get."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from drive import computing_node, status, wait_idle
from live import running_cluster, small_config
from waiting import until

from mooncake.app.cluster.local import LocalCluster

pytestmark = [
    pytest.mark.skipif(
        find_spec("smg") is None or find_spec("smg_grpc_proto") is None, reason="smg is not installed (extra `test`)"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
MODEL = "SmolLM2-135M-Instruct"
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You answer in a few words. " * 12},
        {"role": "user", "content": "Name three colours, and something that has each of them."},
    ],
    "max_tokens": 32,
    "logprobs": True,
    "top_logprobs": 2,
}
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with running_cluster(small_config("cluster.prefill=2", "cluster.decode=2"), restart=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of smg, once it serves."""
    with contextlib.ExitStack() as free:
        listeners = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, metrics_port = (listener.getsockname()[1] for listener in listeners)
    log = tmp_path_factory.mktemp("smg") / "log"
    command = [
        *(sys.executable, "-m", "smg", "launch", "--worker-urls", f"grpc://{cluster.grpc_address}"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--health-check-interval-secs", "1", "--health-success-threshold", "1"),
    ]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_served(url, process, log)
            yield url
        finally:
            process.terminate()


def _wait_until_served(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 120
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        while True:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
                if answer.status_code == 200:
                    return
            time.sleep(0.1)


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest_asyncio.fixture
async def behind(gateway: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as client:
        yield client


@pytest_asyncio.fixture
async def directly(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(cluster.http_url) as client:
        yield client


@pytest_asyncio.fixture
async def channel(cluster: LocalCluster) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        yield channel


def tokens_of(logprobs: Any) -> list[tuple[bytes, float, list[bytes]]]:
    """The bytes of each token, its log-probability, and the bytes of those beside it; without the end token, of which
    smg tells nothing."""
    return [
        (bytes(token.bytes), pytest.approx(token.logprob, abs=1e-4), [bytes(top.bytes) for top in token.top_logprobs])
        for token in logprobs.content
        if token.token != "<|im_end|>"
    ]


async def streamed(client: openai.AsyncOpenAI, **wishes: Any) -> tuple[str, list[Any], str, Any]:
    text, tokens, reason, usage = "", [], "", None
    stream = await client.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **CHAT | wishes
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            tokens += tokens_of(choice.logprobs) if choice.logprobs else []
            reason = choice.finish_reason or reason
    return text, tokens, reason, usage


async def test_it_serves_the_model(behind: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await behind.models.list()).data] == [MODEL]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_chat_is_the_same_token_for_token(
    behind: openai.AsyncOpenAI, directly: openai.AsyncOpenAI, sampling: dict[str, float]
) -> None:
    ask = {"model": MODEL, **CHAT, **sampling, "n": 2}
    ours = await directly.chat.completions.create(**ask)
    theirs = await behind.chat.completions.create(**ask)

    assert [choice.message.content for choice in theirs.choices] == [choice.message.content for choice in ours.choices]
    assert [choice.finish_reason for choice in theirs.choices] == [choice.finish_reason for choice in ours.choices]
    for one, other in zip(theirs.choices, ours.choices, strict=True):
        assert tokens_of(one.logprobs) == tokens_of(other.logprobs)
    assert theirs.usage.prompt_tokens == ours.usage.prompt_tokens
    assert theirs.usage.completion_tokens == ours.usage.completion_tokens
    assert theirs.usage.prompt_tokens_details.cached_tokens > 0, "the same prompt has the same blocks"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_streamed_chat_is_the_same_token_for_token(
    behind: openai.AsyncOpenAI, directly: openai.AsyncOpenAI, sampling: dict[str, float]
) -> None:
    text, tokens, reason, usage = await streamed(directly, **sampling)
    assert text and usage.completion_tokens - len(tokens) in (0, 1)
    again = await streamed(behind, **sampling)
    assert again[:3] == (text, tokens, reason)
    assert (again[3].prompt_tokens, again[3].completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)


async def test_a_stop_a_schema_and_a_mistake(behind: openai.AsyncOpenAI, directly: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}}}
    text = (await directly.chat.completions.create(model=MODEL, **CHAT, **GREEDY)).choices[0].message.content
    word = text.split()[3]
    for wishes in ({"stop": [word]}, {"response_format": form}):
        ours, theirs = [
            (await client.chat.completions.create(model=MODEL, **CHAT, **GREEDY, **wishes)).choices[0]
            for client in (directly, behind)
        ]
        assert (theirs.message.content, theirs.finish_reason) == (ours.message.content, ours.finish_reason)
    with pytest.raises(openai.BadRequestError, match="this model's maximum context length is 8192 tokens"):
        await behind.chat.completions.create(model=MODEL, **CHAT | {"max_tokens": 9000})


async def test_a_client_that_leaves_frees_everything(
    behind: openai.AsyncOpenAI, channel: grpc.aio.Channel, cluster: LocalCluster
) -> None:
    endless = CHAT | {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    stream = await behind.chat.completions.create(model=MODEL, stream=True, **endless)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    assert (await status(channel)).requests_running == 1
    await stream.close()
    assert await wait_idle(channel, 10.0) < 5.0, "4000 tokens take longer"


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_node_that_dies_behind_it_costs_its_clients_nothing(
    behind: openai.AsyncOpenAI,
    directly: openai.AsyncOpenAI,
    channel: grpc.aio.Channel,
    cluster: LocalCluster,
    role: str,
) -> None:
    long = {**GREEDY, "max_tokens": 80, "extra_body": {"ignore_eos": True}}
    prompt = {"messages": [{"role": "user", "content": f"For {role}, tell a long story. " * 50}]}
    asking = asyncio.create_task(streamed(behind, **prompt, **long))
    victim = await computing_node(channel, role)
    os.kill(cluster.pids[victim], signal.SIGKILL)
    text, tokens, reason, _ = await asking
    assert (len(tokens), reason) == (80, "length")
    ours = await streamed(directly, **prompt, **long)
    assert ours[:3] == (text, tokens, reason)


async def test_a_conductor_that_dies_is_used_again_once_it_is_back(
    behind: openai.AsyncOpenAI, cluster: LocalCluster
) -> None:
    endless = CHAT | {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    stream = await behind.chat.completions.create(model=MODEL, stream=True, **endless)
    await anext(stream)
    before = cluster.pids["conductor"]
    os.kill(before, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    await until(lambda: cluster.pids.get("conductor", before) != before)
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(openai.APIStatusError):
                answer = await behind.chat.completions.create(model=MODEL, **CHAT, **GREEDY)
                break
            await asyncio.sleep(0.1)
    assert answer.usage.completion_tokens > 0
