"""What is on the wire, byte for byte where it matters: event streams, headers, limits, routes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import threading
import time

import grpc
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from conductor.ingress.http.event_stream import EventStream
from conductor.ingress.http.server import TELL_EVERY_S, ConnectionLimits, HttpServer, WarningRateLimit
from mooncake.app.cluster.role_main import run_async
from mooncake.errors import NodeUnavailable
from mooncake.rpc import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


async def events(front, path, body):
    async with front.http.stream("POST", path, json=body | {"stream": True}) as response:
        raw = "".join([text async for text in response.aiter_text()])
    return response, raw


async def test_a_stream_is_events_and_ends_with_done(front):
    response, raw = await events(front, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert raw.endswith("\n\ndata: [DONE]\n\n")
    *chunks, done = [line.removeprefix("data: ") for line in raw.strip().split("\n\n")]
    bodies = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]"
    assert bodies[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
    ]
    assert bodies[-2]["choices"][0]["finish_reason"] == "stop"
    assert bodies[-1]["choices"] == []
    assert bodies[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert all(body["object"] == "chat.completion.chunk" and body["usage"] is None for body in bodies[:-1])
    assert len({body["id"] for body in bodies}) == 1
    assert "\ufffd" not in raw


async def test_no_usage_is_told_unless_asked_for_and_running_usage_when_asked_for(front):
    _, plain = await events(front, "/v1/completions", {"prompt": "x"})
    wish = {"include_usage": True, "continuous_usage_stats": True}
    _, running = await events(front, "/v1/completions", {"prompt": "x", "stream_options": wish})

    assert '"usage"' not in plain
    counts = [
        json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
        for line in running.strip().split("\n\n")[:-1]
    ]
    assert counts == sorted(counts)
    assert counts[0] == 1


async def test_silence_is_filled_with_comments(open_front):
    async with open_front(keep_alive_s=0.05) as front:
        front.script.first_delay_s = 0.3

        _, raw = await events(front, "/v1/completions", {"prompt": "x"})

    assert raw.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert raw.endswith("data: [DONE]\n\n")


async def test_a_stream_that_fails_ends_with_the_error_and_without_done(front):
    front.script.error, front.script.error_after = NodeUnavailable("decode-0 is gone"), 2

    response, raw = await events(front, "/v1/chat/completions", CHAT)

    assert response.status_code == 200
    last = json.loads(raw.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last == {
        "error": {
            "message": "decode-0 is gone",
            "type": "service_unavailable_error",
            "param": None,
            "code": "unavailable",
        }
    }
    assert "[DONE]" not in raw


async def test_a_request_that_takes_too_long_ends_at_its_deadline(open_front):
    async with open_front(request_timeout_s=0.1) as front:
        front.script.first_delay_s = 60

        response = await front.http.post("/v1/completions", json={"prompt": "x"})

        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert "--set conductor.request_timeout_s=" in response.json()["error"]["message"]
        assert response.headers["x-should-retry"] == "false"
        await front.script.until_closed()


async def test_a_client_that_does_not_read_is_cut_off_at_the_deadline(open_front):
    async with open_front(request_timeout_s=0.5) as front:
        front.script.text, front.script.ends = "x" * 1000, False
        wish = {"prompt": "x", "n": 8, "max_tokens": 4000, "stream": True, "logprobs": 20}  # tens of megabytes
        body = json.dumps(wish).encode()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", front.http_port))
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        client.sendall(head % len(body) + body)

        await front.script.until_closed(within_s=10)

        client.close()


async def test_ids_of_requests_are_echoed_or_made(front):
    echoed = await front.http.get("/v1/models", headers={"x-request-id": "abc-1"})
    made = await front.http.get("/nowhere")
    refused = await front.http.get("/v1/models", headers={"x-request-id": "a b"})

    assert echoed.headers["x-request-id"] == "abc-1"
    assert len(made.headers["x-request-id"]) == 32
    assert refused.headers["x-request-id"] != "a b"


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completion"])
async def test_a_path_that_is_nearly_one_is_told_which(front, path):
    """Clients append paths to a configured address, with or without /v1."""
    refused = await front.http.post(path, json={"messages": []})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == f"no such path: POST {path}; is /v1/chat/completions meant?"
    far = await front.http.post("/v1/weather", json={})
    assert far.json()["error"]["message"] == "no such path: POST /v1/weather"


async def test_unknown_fields_are_ignored_with_a_warning(front):
    response = await front.http.post("/v1/completions", json={"prompt": "x", "wizardry": 1, "strange name": 2})

    assert response.status_code == 200
    assert response.headers["x-mooncake-warning"] == "ignored unknown fields: wizardry"
    close = await front.http.post("/v1/completions", json={"prompt": "x", "max_token": 1, "temprature": 0})
    asked = "max_token (is max_tokens meant?), temprature (is temperature meant?)"
    assert close.headers["x-mooncake-warning"] == f"ignored unknown fields: {asked}"
    many = {f"field_{number}": 1 for number in range(12)}
    for path in ("/v1/completions", "/tokenize"):
        response = await front.http.post(path, json={"prompt": "x", **many})
        assert response.headers["x-mooncake-warning"].endswith(", and 4 more")


@pytest.mark.parametrize("prompt", ["Hi<end>", ["Hi<end>", "x"]])
async def test_a_completion_warns_of_a_prompt_that_a_chat_template_has_rendered(front, prompt):
    """Other servers take the control tokens in it for what they spell; here no text can forge them."""
    answer = await front.http.post("/v1/completions", json={"prompt": prompt, "wizardry": 1})

    told = answer.headers["x-mooncake-warning"]
    assert told.startswith("ignored unknown fields: wizardry; the prompt spells '<end>', which is plain text in it: ")
    ids = [1, 256]
    for harmless in ("Hi", ids, [ids]):
        answer = await front.http.post("/v1/completions", json={"prompt": harmless})
        assert answer.status_code == 200 and "x-mooncake-warning" not in answer.headers


async def test_an_operator_lets_completions_have_prompts_that_a_chat_template_has_rendered(open_front):
    async with open_front(rendered_prompts=True) as front:
        answer = await front.http.post("/v1/completions", json={"prompt": "Hi<end>"})
        assert "x-mooncake-warning" not in answer.headers and answer.json()["usage"]["prompt_tokens"] == 3
        counted = await front.http.post("/tokenize", json={"prompt": "<end>"})
        assert counted.json()["tokens"] == [256]
        chat = {"messages": [{"role": "user", "content": "<end>"}]}
        assert 256 not in (await front.http.post("/tokenize", json=chat)).json()["tokens"]


async def test_unknown_fields_inside_others_are_named_once_and_those_without_effect_not_at_all(front):
    user = {"role": "user", "name": "Ada", "content": [{"type": "text", "text": "Hi"}]}
    tool = {"type": "function", "function": {"name": "look", "strict": True, "parameters": {"anything": {}}}}
    options = {"include_usage": True, "include_obfuscation": False}
    chat = {"messages": [user, user], "tools": [tool], "stream": True, "stream_options": options}
    usual = await front.http.post("/v1/chat/completions", json=chat)
    assert usual.status_code == 200 and "x-mooncake-warning" not in usual.headers

    odd = {**user, "nmae": "Ada", "content": [{"type": "text", "text": "Hi", "wizardry": 1}]}
    wrong = chat | {"messages": [odd, odd], "stream_options": {"usage": True}}
    told = (await front.http.post("/v1/chat/completions", json=wrong)).headers["x-mooncake-warning"]
    assert told == "ignored unknown fields: messages[].content[].wizardry, messages[].nmae, stream_options.usage"


@pytest.mark.parametrize("depth", [300, 900])
async def test_blocks_that_nest_too_deeply_are_refused_and_not_a_failure(front, depth):
    deep = '{"type":"tool_result","content":[' * depth + "]}" * depth
    body = '{"max_tokens":4,"messages":[{"role":"user","content":[' + deep + "]}]}"
    refused = await front.http.post("/v1/messages", content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400, refused.text


async def test_a_wrong_key_names_its_field(front):
    response = await front.http.post("/v1/completions", json={"prompt": "x", "logit_bias": {"one": 1}})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")


async def test_affinity_is_taken_from_headers(front):
    await front.http.post("/v1/completions", json={"prompt": "x", "user": "u"}, headers={"x-correlation-id": "c"})
    await front.http.post(
        "/v1/completions", json={"prompt": "x"}, headers={"x-correlation-id": "c", "x-session-affinity": "s"}
    )

    assert [request.session for request in front.script.asked] == ["c", "s"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/../../etc", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("PUT", "/v1/completions/", 404, "not_found"),
    ],
)
async def test_wrong_paths_and_methods_are_told_in_the_same_shape(front, method, path, status, code):
    response = await front.http.request(method, path)

    assert response.status_code == status
    assert response.json()["error"]["code"] == code


@pytest.mark.parametrize(("capacity_tokens", "context"), [(0, 4096), (640, 640), (8192, 4096)])
async def test_the_context_is_what_the_nodes_have_memory_for_if_that_is_less(open_front, capacity_tokens, context):
    async with open_front(capacity_tokens=capacity_tokens) as front:
        models = (await front.http.get("/v1/models")).json()["data"]
        tokenized = (await front.http.post("/tokenize", json={"prompt": "x"})).json()
        refused = (await front.http.post("/v1/completions", json={"prompt": "x" * 5000})).json()
        async with grpc.aio.insecure_channel(front.grpc_address) as channel:
            listed = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())

    told = [models[0]["max_model_len"], tokenized["max_model_len"], listed.models[0].max_model_len]
    assert told == [context] * 3
    assert f"maximum context length is {context} tokens" in refused["error"]["message"]


async def test_an_answer_that_the_nodes_have_no_memory_for_is_refused_before_it_begins(open_front):
    async with open_front(capacity_tokens=640) as front:
        fits = await front.http.post("/v1/completions", json={"prompt": "x" * 600, "max_tokens": 40})
        more = await front.http.post("/v1/completions", json={"prompt": "x" * 600, "max_tokens": 41})
        full = await front.http.post("/v1/completions", json={"prompt": "x" * 640, "max_tokens": 1})

    assert [response.status_code for response in (fits, more, full)] == [200, 400, 400]
    assert len(front.script.asked) == 1
    assert more.json()["error"]["message"].endswith("is 640 tokens, and a prompt of 600 leaves 40")
    assert full.json()["error"]["message"].startswith("prompt is too long: 640 tokens > 639 maximum")


@pytest.mark.parametrize(
    ("path", "wishes", "length"),
    [
        ("/v1/completions", {"prompt": "x" * 5000}, 5000),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, 5017),
        ("/v1/responses", {"input": "x" * 5000}, 5017),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 9}, 5017),
    ],
)
async def test_clients_find_the_words_by_which_they_shorten_a_conversation(front, path, wishes, length):
    answer = await front.http.post(path, json=wishes)

    told = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert told.startswith(f"prompt is too long: {length} tokens > 4095 maximum; ")
    assert "this model's maximum context length is 4096 tokens" in told


async def test_open_requests_have_a_bound_and_health_does_not_count(open_front):
    async with open_front(max_requests=1) as front:
        front.script.first_delay_s = 60
        waiting = [asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"})) for _ in range(2)]
        await front.script.until(lambda: len(front.script.running) == 2)

        refused = await front.http.post("/v1/completions", json={"prompt": "x"})

        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.headers["x-request-id"]
        assert (await front.http.get("/health/live")).status_code == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await front.script.until_closed(count=2)


async def test_a_body_has_a_bound(front):
    response = await front.http.post(
        "/v1/completions", content=b"x" * (5 << 20), headers={"content-type": "application/json"}
    )

    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/invocations"])
async def test_a_compressed_body_is_refused_by_its_name(front, path):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await front.http.post(path, content=gzip.compress(b'{"prompt": "x"}'), headers=headers)

    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    assert "gzip" in response.json()["error"]["message"]

    plain = await front.http.post("/v1/completions", json={"prompt": "x"}, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


async def test_a_body_that_is_not_declared_as_json_is_refused(front):
    response = await front.http.post("/v1/completions", data={"prompt": "x"})

    assert response.status_code == 415


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x-filler: %b\r\n" % (b"y" * 1000) * 100 + b"\r\n", b"GET /" + b"a" * 99_000],
)
async def test_the_head_of_a_request_has_a_bound(front, head):
    reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
    for start in range(0, len(head), 1000):
        writer.write(head[start : start + 1000])
        await writer.drain()
    status = await reader.readline()
    writer.close()

    assert b"431" in status


async def answer_ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def listening(limits, app=answer_ok):
    server = HttpServer(app, limits=limits)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.stop()


IN_CHUNKS = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n"


async def count_headers(scope, receive, send):
    """Answer with the number of the request's headers, once all of its body is there."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": b"%d" % len(scope["headers"])})


@pytest.mark.parametrize(
    "rest",
    [b"0\r\n" + b"x-filler: %b\r\n" % (b"y" * 1000) * 1000, b"0\r\nx: " + b"y" * 1_000_000, b"2;" + b"y" * 1_000_000],
)
async def test_what_comes_with_a_body_in_chunks_has_a_bound(rest):
    async with listening(ConnectionLimits(), count_headers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(IN_CHUNKS)
        for start in range(0, len(rest), 1000):
            writer.write(rest[start : start + 1000])
            await writer.drain()
        async with asyncio.timeout(10):
            status = await reader.readline()
        writer.close()

    assert b"431" in status


async def test_many_requests_that_arrive_at_once_are_answered():
    async with listening(ConnectionLimits(), count_headers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKED * 4000)
        async with asyncio.timeout(20):
            for _ in range(4000):
                assert b"200" in await reader.readline()
                await reader.readuntil(b"\r\n\r\n1")
        writer.close()


async def test_what_follows_a_body_is_no_header_of_the_request():
    async with listening(ConnectionLimits(), count_headers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(IN_CHUNKS + b"0\r\nauthorization: Bearer other\r\n\r\n" + ASKED)
        async with asyncio.timeout(10):
            first, second = await reader.readuntil(b"\r\n\r\n2"), await reader.readuntil(b"\r\n\r\n1")
        writer.close()

    assert first.startswith(b"HTTP/1.1 200") and second.startswith(b"HTTP/1.1 200")


ASKED = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HALF_A_BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc"


async def test_a_loop_whose_passes_are_slow_accepts_several_connections_in_each():
    """Otherwise clients wait in the kernel, for a minute, to be told that there is no room."""
    clients = 200

    async def passes_until_answered():
        passes = 0
        async with listening(ConnectionLimits(max_open=2 * clients)) as port:

            async def ask():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(ASKED)
                await reader.readuntil(b"\r\n\r\nok")
                writer.close()

            asking = asyncio.gather(*(ask() for _ in range(clients)))
            while not asking.done():
                time.sleep(0.002)  # noqa: ASYNC251
                await asyncio.sleep(0)
                passes += 1
            await asking
        return passes

    assert await asyncio.to_thread(run_async, passes_until_answered()) < clients / 2


@pytest.mark.parametrize(
    ("first", "then"),
    [(b"", b""), (b"", b"\r\n"), (b"", b"GE"), (ASKED, b""), (ASKED, b"\r\n"), (ASKED, b"GE"), (HALF_A_BODY, b"d")],
)
async def test_a_connection_that_asks_for_nothing_is_closed(first, then):
    async with listening(ConnectionLimits(head_s=0.2, idle_s=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        if first:
            await reader.readuntil(b"\r\n\r\nok")
        writer.write(then)

        await asyncio.wait_for(reader.read(), 5)

        writer.close()


async def test_a_client_that_stood_still_with_the_process_may_ask_afterwards():
    """As when a whole machine is frozen, between the opening of a connection and the request."""

    async def answer_after_a_stop():
        async with listening(ConnectionLimits(head_s=2.0)) as port:
            early_reader, early = await asyncio.open_connection("127.0.0.1", port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASKED)
            await reader.readuntil(b"\r\n\r\nok")  # by now the earlier connection is accepted, too
            time.sleep(2.1)  # noqa: ASYNC251 - all stand still
            writer.write(ASKED)
            await reader.readuntil(b"\r\n\r\nok")  # and here all go on
            early.write(ASKED)
            answer = await early_reader.readuntil(b"\r\n\r\n")
            for each in (early, writer):
                each.close()
            return answer

    assert (await asyncio.to_thread(run_async, answer_after_a_stop())).startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_is_told_once_in_a_while_and_not_for_every_connection(caplog):
    async with listening(ConnectionLimits()) as port:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert b"400" in await asyncio.wait_for(reader.readline(), 5)
            writer.close()

    assert caplog.text.count("Invalid HTTP request received.") <= 1


async def test_each_kind_of_warning_is_told_again_after_a_while():
    now = 0.0
    spare = WarningRateLimit(lambda: now)

    def passes(message, level=logging.WARNING):
        return spare.filter(logging.LogRecord("uvicorn.error", level, "", 0, message, None, None))

    assert [passes("bad"), passes("bad"), passes("worse"), passes("worse")] == [True, False, True, False]
    assert all(passes("a bug", logging.ERROR) for _ in range(3))
    now = TELL_EVERY_S
    assert passes("bad")


async def test_connections_have_a_bound_and_those_beyond_are_told_so():
    async def status():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKED)
        answer = await asyncio.wait_for(reader.read(100), 5)
        writer.close()
        return answer.partition(b"\r\n")[0], b"retry-after: 1" in answer

    async with listening(ConnectionLimits(max_open=2, quiet_s=60)) as port:
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(2)]

        assert await status() == (b"HTTP/1.1 503 Service Unavailable", True)

        writers[0].close()
        async with asyncio.timeout(5):
            while await status() != (b"HTTP/1.1 200 OK", False):
                pass  # the end of a connection takes a moment
        writers[1].close()


async def test_texts_become_tokens_and_back(front):
    tokens = (await front.http.post("/tokenize", json={"prompt": "hé"})).json()
    chat = (await front.http.post("/tokenize", json=CHAT)).json()
    text = (await front.http.post("/detokenize", json={"tokens": [*tokens["tokens"], 256]})).json()
    both = await front.http.post("/tokenize", json=CHAT | {"prompt": "x"})

    assert tokens == {"count": 3, "max_model_len": 4096, "tokens": [104, 195, 169]}
    assert bytes(chat["tokens"]) == b"<user>Hello<assistant>"
    assert text == {"prompt": "hé<end>"}
    assert both.status_code == 400


async def test_a_huge_text_is_refused_without_tokenizing_it_all(front):
    response = await front.http.post("/v1/completions", json={"prompt": "x" * (3 << 20)})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_what_a_template_reads_beside_the_messages_counts_as_text(open_front, path):
    """The event loop must not block while it is rendered and tokenized, and a huge one is refused first."""
    async with open_front(template="tools <tool_call>") as front:
        answers = [
            await front.http.post(path, json=CHAT | {"chat_template_kwargs": {"document": "x" * size, "id": 1 << 70}})
            for size in (10, 100_000, 500_000)
        ]

        assert [answer.status_code for answer in answers] == [200, 400, 400]
        assert [answer.json()["error"]["code"] for answer in answers[1:]] == ["context_length_exceeded"] * 2
        loop, beside = front.tokenizer.chats_in
        assert loop == threading.current_thread().name
        assert beside != loop


async def test_many_short_messages_and_long_bad_words_do_not_block_the_event_loop_either(open_front):
    """A template takes as long for a message of one character as for a longer one."""
    async with open_front() as front:
        words = [f"{number}{'x' * 200}" for number in range(400)]  # of too many tokens, as their tokenizing shows
        for body, status in (
            ({"bad_words": ["x"]}, 200),
            ({"messages": CHAT["messages"] * 200, "bad_words": words}, 400),
        ):
            assert (await front.http.post("/v1/chat/completions", json=CHAT | body)).status_code == status

        for threads in (front.tokenizer.chats_in, front.tokenizer.words_in):
            assert threads[0] == threading.current_thread().name
            assert threads[-1] != threads[0]


@pytest.mark.parametrize(
    ("path", "wishes"),
    [
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 5}),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 0}),
        ("/v1/completions", {"prompt": "xy", "prompt_logprobs": 1}),
    ],
)
async def test_the_log_probabilities_of_a_whole_answer_do_not_block_the_event_loop(open_front, path, wishes):
    """They are many, and all are put into words at its end."""
    async with open_front() as front:
        answer = await front.http.post(path, json=wishes)

        told = answer.json()["choices"][0]
        assert told["logprobs"] or told["prompt_logprobs"]
        assert front.tokenizer.named_in[-1] != threading.current_thread().name


@pytest.mark.parametrize("wishes", [{"echo": True, "logprobs": 0}, {"prompt_logprobs": 1}])
async def test_those_of_a_prompt_do_not_block_it_in_a_stream_either(open_front, wishes):
    async with open_front() as front:
        _, raw = await events(front, "/v1/completions", {"prompt": "xyz"} | wishes)

        assert '"token_logprobs":[null,' in raw or '"prompt_logprobs":[null,' in raw
        assert front.tokenizer.named_in[0] != threading.current_thread().name


@pytest.mark.parametrize(("template", "is_read"), [("", False), ("<think> </think>", True)])
async def test_how_a_prompt_ends_is_looked_at_only_where_an_answer_may_reason_first(open_front, template, is_read):
    async with open_front(template=template) as front:
        assert (await front.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert bool(front.tokenizer.named_in) is is_read


async def test_a_comment_that_is_given_up_before_a_response_starts_does_not_count_as_its_start():
    sent, is_sending, may_send = [], asyncio.Event(), asyncio.Event()

    async def send(message):  # as to a client that has not read the answer before
        is_sending.set()
        await may_send.wait()
        sent.append(message["type"])

    stream = EventStream(send, {}, keep_alive_s=0.0)
    comment = asyncio.create_task(stream.keep_alive())
    await is_sending.wait()
    comment.cancel()
    await asyncio.gather(comment, return_exceptions=True)
    may_send.set()
    await stream.event(b"1")

    assert sent == ["http.response.start", "http.response.body"]


async def test_health_says_what_the_cluster_waits_for(front):
    assert (await front.http.get("/health/ready")).status_code == 200

    front.status.ready = False
    front.status.waiting_for.append("a decode node")
    ready = await front.http.get("/health/ready")

    assert ready.status_code == 503
    assert ready.json()["waiting_for"] == ["a decode node"]
    assert (await front.http.get("/health")).status_code == 503
    assert (await front.http.get("/health/live")).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/ping"])
async def test_a_probe_does_not_look_at_every_node(front, path):
    """It comes every second, and a cluster may have a thousand nodes."""
    front.statuses_told.clear()

    assert (await front.http.get(path)).json() == {"status": "ready"}

    assert not front.statuses_told


@pytest.mark.parametrize("path", ["/metrics", "/status.json"])
async def test_what_is_told_of_every_node_is_worded_beside_the_event_loop(front, path):
    front.statuses_told.clear()

    assert "decode-0" in (await front.http.get(path)).text

    [told] = front.statuses_told
    assert threading.current_thread().name not in told.read_in


async def test_the_page_shows_the_status_and_needs_nothing_from_outside(front):
    page = await front.http.get("/")
    status = (await front.http.get("/status.json")).json()

    assert "http://" not in page.text
    assert "https://" not in page.text
    assert [node["info"]["node_id"] for node in status["nodes"]] == ["prefill-0", "decode-0"]
    assert status["nodes"][0]["load"]["waiting"] == 0
    assert (await front.http.get("/version")).json()["version"]


OPEN = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1"


@pytest.mark.parametrize("wanted", [OPEN, "text/html, application/openmetrics-text; version=x", "*/*", ""])
async def test_metrics_come_in_the_format_that_a_scraper_reads(front, wanted):
    answer = await front.http.get("/metrics", headers={"accept": wanted})
    is_open = "openmetrics" in wanted
    read = openmetrics.text_string_to_metric_families if is_open else text_string_to_metric_families
    kind = "application/openmetrics-text; version=1.0.0" if is_open else "text/plain; version=0.0.4"
    assert answer.headers["content-type"].startswith(kind) and answer.text.endswith("# EOF\n") is is_open
    names = {sample.name for family in read(answer.text) for sample in family.samples}
    assert {"vllm:generation_tokens_total", "mooncake_requests_total", "vllm:kv_cache_usage_perc"} <= names


async def metrics(front):
    """A function from a sample's name and labels to its value."""
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families((await front.http.get("/metrics")).text)
        for sample in family.samples
    }
    return lambda name, **labels: samples[(name, *sorted(labels.items()))]


VLLM = {"model_name": "bytes", "engine": "0"}


async def test_what_is_done_once_for_several_answers_counts_once(open_front):
    async with open_front() as front:
        await front.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "n": 3})
        of = await metrics(front)

    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_prompt_tokens"):
        assert of(f"vllm:{name}_count", **VLLM) == 1
    assert of("mooncake_handoff_seconds_count") == 1
    assert of("vllm:e2e_request_latency_seconds_count", **VLLM) == 3
    assert of("vllm:generation_tokens_total", **VLLM) == 12
    assert of("vllm:request_max_num_generation_tokens_sum", **VLLM) == 4
    assert of("vllm:request_params_max_tokens_sum", **VLLM) == 4
    assert of("vllm:request_params_n_sum", **VLLM) == 3
    assert of("vllm:request_params_n_count", **VLLM) == 1


async def test_metrics_count_what_happened(open_front):
    async with open_front() as front:
        front.script.cached_tokens = 2
        await front.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        front.script.error = NodeUnavailable("gone")
        await front.http.post("/v1/completions", json={"prompt": "abc"})
        of = await metrics(front)

    assert of("vllm:time_to_first_token_seconds_count", **VLLM) == 1
    assert of("vllm:inter_token_latency_seconds_count", **VLLM) == 3
    assert of("vllm:e2e_request_latency_seconds_count", **VLLM) == 1
    assert of("vllm:request_queue_time_seconds_sum", **VLLM) == pytest.approx(0.001)
    assert of("vllm:prompt_tokens_total", **VLLM) == 3
    assert of("vllm:generation_tokens_total", **VLLM) == 4
    assert of("vllm:prefix_cache_queries_total", **VLLM) == 3
    assert of("vllm:prefix_cache_hits_total", **VLLM) == 2
    assert of("vllm:request_success_total", finished_reason="length", **VLLM) == 1
    assert of("vllm:num_requests_running", **VLLM) == 2
    assert of("vllm:kv_cache_usage_perc", **VLLM) == pytest.approx(0.2)
    assert of("vllm:num_preemptions_total", **VLLM) == 0
    assert of("vllm:spec_decode_num_accepted_tokens_total", **VLLM) == 0
    assert of("vllm:request_inference_time_seconds_count", **VLLM) == 1
    assert of("vllm:cache_config_info", block_size="64", num_gpu_blocks="20", **VLLM) == 1
    assert of("mooncake_node_blocks", node="decode-0", role="decode", state="cached") == 3
    assert of("mooncake_node_events_total", node="decode-0", role="decode", event="handoffs_taken") == 7
    assert of("mooncake_node_level", node="decode-0", role="decode", level="handoffs_open") == 1
    assert of("mooncake_node_limit", node="decode-0", role="decode", limit="kv_bytes") == 640
    assert of("mooncake_node_limit", node="decode-0", role="decode", limit="max_sequences") == 8
    assert of("mooncake_request_errors_total", code="unavailable") == 1
    assert of("mooncake_http_responses_total", route="/v1/completions", status="200") == 1
    assert of("mooncake_http_responses_total", route="/v1/completions", status="503") == 1
    assert of("mooncake_transport_bytes_per_second", node="prefill-0", peer="decode-0", transport="shm") == 1.5e9


async def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head(front):
    times_s = []
    for _ in range(10):
        begun_at = time.monotonic()
        await front.http.get("/health/live")
        times_s.append(time.monotonic() - begun_at)

    assert min(times_s[1:]) < 0.03  # Nagle's algorithm and a delayed ACK would make it 0.04
