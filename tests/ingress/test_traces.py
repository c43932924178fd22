"""Traces of calls, as a collector gets them: whose children they are, how they are found, and what they never cost."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import grpc
import pytest
from collector import running_collector

from conductor.ingress.otlp import FLUSH_S
from mooncake.errors import Overloaded
from mooncake.rpc import inference_pb2
from mooncake.rpc.inference_pb2_grpc import InferenceStub

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5}


@pytest.fixture
def collector():
    with running_collector() as collector:
        yield collector


@pytest.fixture
def endpoint(collector):
    return {"otlp_traces_endpoint": collector.endpoint}


async def test_a_call_is_a_child_of_its_caller_s_span(open_front, collector, endpoint):
    async with open_front(**endpoint) as front:
        answer = await front.http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT})
        assert answer.status_code == 200
        version, trace_id, span_id, flags = answer.headers["traceresponse"].split("-")
        assert (version, trace_id, flags) == ("00", TRACE_ID, "01")
    [root] = collector.roots  # stopping has sent it
    assert (root.name, root.trace_id, root.span.span_id.hex()) == ("llm_request", TRACE_ID, span_id)
    assert root.span.parent_span_id.hex() == PARENT_ID
    assert root.span.kind == root.span.SPAN_KIND_SERVER
    assert root.attributes["gen_ai.request.id"] == answer.json()["id"]
    assert root.attributes["gen_ai.usage.completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.attributes["gen_ai.request.temperature"] == 0.5
    assert abs(root.span.end_time_unix_nano / 1e9 - time.time()) < 10, "on the clock of the world"
    [resource] = collector.resources
    assert resource["service.name"] == "mooncake"


async def test_a_call_without_a_caller_s_span_begins_a_trace(open_front, collector, endpoint):
    async with open_front(**endpoint) as front:
        ids = []
        for headers in ({}, {"traceparent": "nonsense"}):
            answer = await front.http.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=headers)
            ids.append(answer.headers["traceresponse"].split("-")[1])
    assert [root.trace_id for root in collector.roots] == ids
    assert not any(root.span.parent_span_id for root in collector.roots)


async def test_grpc_reads_and_tells_the_same(open_front, collector, endpoint):
    async with open_front(**endpoint) as front, grpc.aio.insecure_channel(front.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(text="Hi", request_id="mine")
        call = InferenceStub(channel).Generate(request, metadata=(("traceparent", PARENT), ("other-bin", b"\xff")))
        assert [piece async for piece in call]
        told = dict(await call.trailing_metadata())["traceresponse"]
    [root] = collector.roots
    assert (root.trace_id, root.span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert told == f"00-{TRACE_ID}-{root.span.span_id.hex()}-01"
    assert root.attributes["gen_ai.request.id"] == "mine"


async def test_what_nobody_samples_is_neither_made_nor_sent(open_front, collector, endpoint, monkeypatch):
    async with open_front(**endpoint) as front:
        answer = await front.http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": UNSAMPLED})
        assert answer.status_code == 200 and "traceresponse" not in answer.headers
        assert front.script.asked[-1].attempts is None
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with open_front(**endpoint) as front:
        assert "traceresponse" not in (await front.http.post("/v1/chat/completions", json=CHAT)).headers
        sampled = await front.http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT})
        assert "traceresponse" in sampled.headers
    assert [root.trace_id for root in collector.roots] == [TRACE_ID]


async def test_several_prompts_and_answers_of_a_call_are_one_trace(open_front, collector, endpoint):
    async with open_front(**endpoint) as front:
        body = {"prompt": ["One", "Three"], "n": 2, "max_tokens": 4}
        answer = (await front.http.post("/v1/completions", json=body)).json()
        assert len(front.script.asked) == 2
        assert front.script.asked[0].attempts is front.script.asked[1].attempts
    [root] = collector.roots
    assert root.attributes["gen_ai.request.id"] == answer["id"]
    assert root.attributes["gen_ai.usage.prompt_tokens"] == 8
    assert root.attributes["gen_ai.usage.completion_tokens"] == 16
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 4


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/invocations"])
async def test_every_api_is_traced(open_front, collector, endpoint, path):
    body = CHAT | {"max_tokens": 4, "model": "bytes"} | ({"input": "Hi"} if path == "/v1/responses" else {})
    if path == "/v1/responses":
        del body["messages"], body["max_tokens"]
    async with open_front(**endpoint) as front:
        answer = await front.http.post(path, json=body, headers={"traceparent": PARENT})
        assert (answer.status_code, "traceresponse" in answer.headers) == (200, True), answer.text
    [root] = collector.roots
    assert root.trace_id == TRACE_ID and root.attributes["gen_ai.usage.completion_tokens"]


async def test_a_failed_call_is_found_by_the_header_of_its_error(open_front, collector, endpoint):
    async with open_front(**endpoint) as front:
        front.script.error = Overloaded("full", 1.0)
        answer = await front.http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 429
        trace_id = answer.headers["traceresponse"].split("-")[1]
    [root] = collector.roots
    assert root.trace_id == trace_id
    assert root.span.status.code == root.span.status.STATUS_CODE_ERROR
    assert root.span.status.message == "full" and root.attributes["error.type"] == "overloaded"
    assert root.names == ["receive", "admission"]


async def test_a_call_that_nobody_waits_for_ends_as_cancelled(open_front, collector, endpoint):
    async with open_front(**endpoint) as front:
        front.script.delay_s = 0.05
        async with front.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            await anext(answer.aiter_lines())
        await front.script.until_closed()
    [root] = collector.roots
    assert root.attributes["error.type"] == "cancelled"


async def test_what_cannot_be_answered_makes_no_trace(open_front, collector, endpoint):
    async with open_front(**endpoint) as front:
        for wrong in ({"messages": 1}, {"max_tokens": 100_000}, {"cache_salt": ""}):
            answer = await front.http.post("/v1/chat/completions", json=CHAT | wrong, headers={"traceparent": PARENT})
            assert (answer.status_code, "traceresponse" in answer.headers) == (400, False), wrong
    assert collector.roots == []


@pytest.fixture
def nobody():
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@pytest.fixture
def closed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}"


async def test_a_collector_that_is_not_there_costs_spans_alone(open_front, nobody, closed, caplog, monkeypatch):
    for key, value in {"MAX_QUEUE_SIZE": 8, "MAX_EXPORT_BATCH_SIZE": 4, "SCHEDULE_DELAY": 20}.items():
        monkeypatch.setenv(f"OTEL_BSP_{key}", str(value))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1.3")  # a batch is tried again after a second
    for endpoint in (nobody, closed):
        async with open_front(otlp_traces_endpoint=endpoint) as front:
            began = time.monotonic()
            for _ in range(5):
                answers = await asyncio.gather(
                    *(front.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}) for _ in range(8))
                )
                assert {answer.status_code for answer in answers} == {200}
                await asyncio.sleep(0.1)
            assert time.monotonic() - began < 10
            began = time.monotonic()
        assert time.monotonic() - began < FLUSH_S + 3
    told = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert 1 <= len(told) <= 2, [record.getMessage() for record in told]  # the SDK leaves out what it has just said
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record not in told]


async def test_stopping_does_not_wait_for_a_collector_that_hangs(open_front, nobody):
    async with open_front(otlp_traces_endpoint=nobody) as front:
        assert (await front.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        began = time.monotonic()
    assert FLUSH_S <= time.monotonic() - began < FLUSH_S + 2
