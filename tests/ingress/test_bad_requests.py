"""Whatever comes in is answered at once with a 4xx or INVALID_ARGUMENT: never a 5xx, a traceback or a stuck request."""

from __future__ import annotations

import asyncio
import codecs
import json

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from conductor.ingress.apis.anthropic_types import MessagesRequest
from conductor.ingress.apis.openai_types import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from conductor.ingress.apis.responses_types import ResponsesRequest
from conductor.ingress.fields.request_json import decode_request
from conductor.ingress.prompts import MAX_MESSAGES
from mooncake.errors import InvalidRequest
from mooncake.rpc import common_pb2, inference_pb2_grpc
from mooncake.rpc import inference_pb2 as pb

POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"),
    *("/tokenize", "/detokenize"),
)
FORMS = (
    CompletionRequest,
    ChatRequest,
    BatchChatRequest,
    ResponsesRequest,
    MessagesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
FIELDS = sorted({name for form in FORMS for name in form.__struct_fields__})

numbers = st.integers(-(1 << 70), 1 << 70) | st.floats()
texts = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
good = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
bodies = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6).map(lambda wishes: good | wishes)
quick = settings(
    max_examples=60,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def door(open_front):
    """Runs ``work(front)`` to its end: hypothesis calls plain functions, many times, on one front."""
    with asyncio.Runner() as runner:
        manager = open_front(request_timeout_s=5)
        front = runner.run(manager.__aenter__())
        yield lambda work: runner.run(asyncio.wait_for(work(front), 10))
        runner.run(manager.__aexit__(None, None, None))


@quick
@given(path=st.sampled_from(POSTS), body=bodies)
def test_any_json_object_is_answered_or_refused_in_words(door, path, body):
    needed = {"max_tokens": 5} if path == "/v1/messages" else {}

    async def ask(front):
        raw = json.dumps(needed | body).encode(errors="surrogatepass")
        return await front.http.post(path, content=raw, headers={"content-type": "application/json"})

    response = door(ask)

    assert response.status_code == 200 or 400 <= response.status_code < 500
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        assert "Traceback" not in response.text


@quick
@given(path=st.sampled_from(POSTS), raw=st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()))
def test_any_other_bytes_are_refused_as_an_invalid_request(door, path, raw):
    async def ask(front):
        return await front.http.post(path, content=raw, headers={"content-type": "application/json"})

    response = door(ask)

    assert 400 <= response.status_code < 500
    assert response.json()["error"]["type"] == "invalid_request_error"


@in_module_loop
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "surprise": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": ""}',
        b'{"prompt": [""]}',
        b'{"prompt": [1, "x"]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [99999999999999999999]}',
        b'{"prompt": "x", "stop": ""}',
    ],
)
async def test_bodies_that_have_broken_servers(front, raw):
    response = await front.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@in_module_loop
async def test_a_mark_of_utf_8_before_a_body_is_no_part_of_it(front):
    """Some editors and shells write one."""
    said = b'{"prompt": "x", "max_tokens": 1, "surprise": 1}'
    headers = {"content-type": "application/json"}
    response = await front.http.post("/v1/completions", content=codecs.BOM_UTF8 + said, headers=headers)
    assert response.status_code == 200
    empty = await front.http.post("/v1/completions", content=codecs.BOM_UTF8, headers=headers)
    assert empty.json()["error"]["message"] == "the body is empty"


@in_module_loop
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_too_many_messages_are_counted_before_they_are_looked_at(front, path):
    messages = [{"role": "user", "content": "x"}] * MAX_MESSAGES + [{"role": "nobody", "content": "x"}]
    response = await front.http.post(path, json={"messages": messages, "max_tokens": 5})

    assert response.status_code == 400
    assert f"at most {MAX_MESSAGES} messages are allowed" in response.json()["error"]["message"]


LONG = int("9" * 400)


@in_module_loop
@pytest.mark.parametrize(
    "wish",
    [
        {"model": str(LONG)},
        {"max_tokens": LONG},
        {"max_completion_tokens": -LONG},
        {"top_k": LONG},
        {"n": LONG},
        {"seed": LONG},
        {"logprobs": True, "top_logprobs": LONG},
        {"prompt_logprobs": LONG},
        {"truncate_prompt_tokens": LONG},
        {"response_format": {"type": "x" * 400}},
        {"messages": [{"role": "x" * 400, "content": "Hi"}]},
    ],
)
async def test_an_error_does_not_echo_all_of_what_was_sent(front, wish):
    body = {"messages": [{"role": "user", "content": "Hi"}]} | wish
    response = await front.http.post("/v1/chat/completions", json=body)
    message = response.json()["error"]["message"]
    assert response.status_code in (400, 404) and len(message) < 200
    assert "… (40" in message  # and how long it was


@quick
@given(raw=st.binary(min_size=1, max_size=200).map(lambda raw: raw + b"\r\n\r\n"))
def test_bytes_that_are_not_http(door, raw):
    async def ask(front):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        writer.write(raw)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    answer = door(ask)

    assert b" 500 " not in answer.partition(b"\r\n")[0]


floats32 = st.floats(width=32)
uint32 = st.integers(0, (1 << 32) - 1)
samplings = st.builds(
    common_pb2.SamplingParams,
    max_tokens=st.none() | uint32,
    min_tokens=uint32 | st.just(0),
    temperature=st.none() | floats32,
    top_k=uint32,
    top_p=st.none() | floats32,
    min_p=floats32 | st.just(0.0),
    repetition_penalty=st.none() | floats32,
    presence_penalty=floats32 | st.just(0.0),
    logit_bias=st.lists(st.builds(common_pb2.LogitBias, token_id=uint32, bias=floats32), max_size=2),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    stop_token_ids=st.lists(uint32, max_size=2),
    logprobs=st.none() | uint32,
)
chats = st.builds(
    pb.ChatMessages,
    messages=st.lists(st.builds(pb.ChatMessage, role=st.sampled_from(["user", "x"]), content=texts), max_size=2),
)
prompts = st.one_of(
    st.fixed_dictionaries({"text": texts}),
    st.fixed_dictionaries({"chat": chats}),
    st.fixed_dictionaries({"token_ids": st.builds(pb.TokenIds, ids=st.lists(uint32 | st.just(1), max_size=3))}),
    st.just({}),
)


@quick
@given(prompt=prompts, sampling=samplings, stop=st.lists(texts, max_size=2), salt=texts, name=texts, request_id=texts)
def test_any_grpc_request_is_answered_or_refused_as_invalid(door, prompt, sampling, stop, salt, name, request_id):
    async def ask(front):
        request = pb.GenerateRequest(
            sampling=sampling, stop=stop, cache_salt=salt, model=name, request_id=request_id, **prompt
        )
        async with grpc.aio.insecure_channel(front.grpc_address) as channel:
            try:
                async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request):
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

    code = door(ask)

    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


@in_module_loop
async def test_many_bad_requests_at_once_leave_nothing_behind(front):
    responses = await asyncio.gather(
        *(front.http.post("/v1/completions", json={"prompt": "x", "n": -number}) for number in range(50))
    )

    assert {response.status_code for response in responses} == {400}
    assert front.script.asked == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", **{f"field_{number}": 1 for number in range(200_000)}},
        {"prompt": "x", "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 50_000}]},
        {"messages": [{"role": "user", "content": "x", "nmae": 1}] * 50_000},
    ],
    ids=["fields", "parts", "messages"],
)
def test_names_of_ignored_fields_are_not_looked_for_among_very_many(body):
    """That takes seconds, and everybody's tokens wait for it."""
    form = ChatRequest if "messages" in body else CompletionRequest
    request, ignored = decode_request(json.dumps(body).encode(), form)
    assert isinstance(request, form) and ignored == []


def test_a_long_text_does_not_hide_what_is_mistyped_beside_it():
    _, ignored = decode_request(json.dumps({"prompt": "x" * (3 << 20), "temprature": 1}).encode(), CompletionRequest)
    assert ignored == ["temprature (is temperature meant?)"]


def test_a_whole_number_may_be_written_as_a_float():
    body = {"messages": [], "max_tokens": 8.0, "seed": -3.0, "temperature": 1.0, "tools": [call_of({"minimum": 1.0})]}
    request, ignored = decode_request(json.dumps(body | {"temprature": 2.0}).encode(), ChatRequest)
    assert (request.max_tokens, request.seed, request.temperature) == (8, -3, 1.0)
    assert str(request.tools[0].function.parameters) == "{'minimum': 1.0}"  # what is in a schema stays as it is
    assert ignored == ["temprature (is temperature meant?)"]
    with pytest.raises(InvalidRequest, match="max_tokens: Expected `int"):
        decode_request(b'{"messages": [], "n": 1.0, "max_tokens": 8.5}', ChatRequest)


def test_so_may_one_inside_another_field():
    thinking = {"type": "enabled", "budget_tokens": 1024.0}
    message = {"max_tokens": 8, "messages": [], "thinking": thinking, "stop_token_ids": [1, 2.0]}
    request, _ = decode_request(json.dumps(message).encode(), MessagesRequest)
    assert (request.thinking.budget_tokens, request.stop_token_ids) == (1024, [1, 2])

    prompts = {"prompt": ["1.0", [5.0, 6], [7]], "repetition_detection": {"max_pattern_size": 2e1, "min_count": 3.0}}
    request, _ = decode_request(json.dumps(prompts).encode(), CompletionRequest)
    assert request.prompt == ["1.0", [5, 6], [7]]
    assert (request.repetition_detection.max_pattern_size, request.repetition_detection.min_count) == (20, 3)

    for wrong in (2.5, 1e30):
        with pytest.raises(InvalidRequest, match=r"thinking\.budget_tokens: Expected `int"):
            decode_request(
                json.dumps(message | {"thinking": thinking | {"budget_tokens": wrong}}).encode(), MessagesRequest
            )


def call_of(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}
