"""Requests that come while none has room: refused once their body has arrived, and before anybody looks into it."""

import asyncio

import pytest

from mooncake.errors import Overloaded

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPENAI = {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "overloaded"}}
ANTHROPIC = {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
JSON = {"content-type": "application/json"}
EXPECTING = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/completions", OPENAI),
        ("/v1/chat/completions", OPENAI),
        ("/v1/chat/completions/batch", OPENAI),
        ("/v1/responses", OPENAI),
        ("/v1/messages", ANTHROPIC),
    ],
)
async def test_a_refusal_says_when_to_return_in_the_words_of_its_api(front, path, answer):
    front.script.refusal = Overloaded("full", 1.25)

    refused = await front.http.post(path, content=b"{ no JSON", headers=JSON)

    assert refused.status_code == 429
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("2", "1250")
    assert refused.headers["x-request-id"]
    told = refused.json()
    assert {name: told[name] for name in answer} == answer


async def test_a_path_that_serves_completions_and_chats_refuses_as_they_do(front):
    front.script.refusal = Overloaded("full")
    assert (await front.http.post("/invocations", json={"prompt": 5})).status_code == 429


async def test_what_needs_no_node_is_answered_meanwhile(front):
    front.script.refusal = Overloaded("full")
    ask = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", ask),
    ):
        assert (await front.http.post(path, json=body)).status_code == 200, path


async def test_refusals_count_as_errors_of_requests(front):
    async def counted():
        lines = (await front.http.get("/metrics")).text.splitlines()
        return sum(
            float(line.split()[1]) for line in lines if line.startswith('mooncake_request_errors_total{code="over')
        )

    before = await counted()
    front.script.refusal = Overloaded("full")
    await front.http.post("/v1/completions", json={"prompt": "x"})
    assert await counted() == before + 1


async def test_a_refused_connection_goes_on(front):
    """Also where the client waits to be asked for the body."""
    front.script.refusal = Overloaded("full")
    reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
    body = b'{"prompt": "x"}'
    try:
        statuses = []
        for _ in range(2):
            writer.write(EXPECTING + b"content-length: %d\r\n\r\n" % len(body))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            statuses.append(head.split()[1])
            front.script.refusal = None
        assert statuses == [b"429", b"200"]
    finally:
        writer.close()
