"""POST /v1/embeddings and its gRPC twin: forms of inputs and vectors, what is asked of the core, and refusals."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest

from mooncake.client import Client
from mooncake.errors import InvalidRequest, ModelError, NodeUnavailable
from mooncake.pooling import Pooling, PoolingSettings
from tests.ingress.conftest import states_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
EOS = 256


def unit(front, number=-1):
    """Of what the core has given for one of its requests."""
    states = states_of(front.script.asked[number].tokens)
    return states / np.linalg.norm(states)


async def embed(front, **body):
    answer = await front.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_text_becomes_a_vector_of_length_one(front):
    front.script.cached_tokens = 3
    answer = await embed(front, model="bytes", input="hello")
    [asked] = front.script.asked
    assert asked.tokens.tolist() == [*b"hello", EOS], "with what the model expects behind a text"
    assert asked.pooling is Pooling.LAST and asked.sampling.max_tokens == 1
    [data] = answer["data"]
    assert (answer["object"], answer["model"], data["object"], data["index"]) == ("list", "bytes", "embedding", 0)
    np.testing.assert_allclose(data["embedding"], unit(front), atol=1e-7)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (6, 6)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["ab", "c"], [[*b"ab", EOS], [*b"c", EOS]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [7, 8]], [[*b"a", EOS], [7, 8]]),
    ],
)
async def test_the_forms_of_inputs(front, given, asked):
    answer = await embed(front, input=given)
    assert [request.tokens.tolist() for request in front.script.asked] == asked
    assert [each["index"] for each in answer["data"]] == list(range(len(asked)))


async def test_base64_are_the_same_numbers(front, client):
    plain = (await embed(front, input="x"))["data"][0]["embedding"]
    coded = (await embed(front, input="x", encoding_format="base64"))["data"][0]["embedding"]
    unpacked = np.frombuffer(base64.b64decode(coded), "<f4")
    np.testing.assert_array_equal(unpacked, np.array(plain, np.float32))
    theirs = await client.embeddings.create(model="bytes", input="x")  # which asks for base64
    np.testing.assert_array_equal(np.array(theirs.data[0].embedding, np.float32), unpacked)


async def test_fewer_dimensions_have_length_one_again(front):
    vector = (await embed(front, input="x", dimensions=3))["data"][0]["embedding"]
    cut = unit(front)[:3]
    np.testing.assert_allclose(vector, cut / np.linalg.norm(cut), atol=1e-6)


@pytest.mark.parametrize(
    ("wishes", "param", "words"),
    [
        ({"dimensions": 9}, "dimensions", "between 1 and 8"),
        ({"dimensions": 0}, "dimensions", "between 1 and 8"),
        ({"encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [1, "a"]}, "input", "mixes"),
        ({"input": [1, 900]}, "input", "token ids"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 inputs"),
        ({"cache_salt": ""}, "cache_salt", "separates nothing"),
        ({"priority": 1 << 40}, "priority", "priority"),
        ({"request_id": "a b"}, "request_id", "letters"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_field(front, wishes, param, words):
    refused = await front.http.post("/v1/embeddings", json={"input": "x"} | wishes)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param) and words in error["message"]
    assert not front.script.asked


async def test_an_input_may_fill_the_context_and_no_more(front):
    await embed(front, input=[1] * 4096)
    refused = await front.http.post("/v1/embeddings", json={"input": "a" * 4096})
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded" and "4097 tokens > 4096" in error["message"]


async def test_unknown_models_and_fields(front):
    refused = await front.http.post("/v1/embeddings", json={"input": "x", "model": "other"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    warned = await front.http.post("/v1/embeddings", json={"input": "x", "dimension": 3})
    assert "dimension (is dimensions meant?)" in warned.headers["x-mooncake-warning"]


async def test_the_first_failure_ends_all(front):
    front.script.error = NodeUnavailable("the node is gone")
    failed = await front.http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert failed.status_code == 503 and "the node is gone" in failed.json()["error"]["message"]


async def test_a_client_that_leaves_ends_all(front):
    front.script.delay_s = 30.0
    asking = asyncio.create_task(front.http.post("/v1/embeddings", json={"input": ["a", "b"]}))
    await front.script.until(lambda: len(front.script.running) == 2)
    asking.cancel()
    await front.script.until_closed(2)


async def test_so_many_inputs_run_at_once_as_the_cluster_may(open_front):
    """A request with more inputs than there are places is answered, a few at a time."""
    async with open_front(max_requests=3) as front:
        running = []
        front.script.delay_s = 0.001
        generate = front.script.generate

        async def counting(request):
            async for delta in generate(request):
                running.append(len(front.script.running))
                yield delta

        front.ingress._pipeline._generator.generate = counting
        answer = await embed(front, input=[[1, number] for number in range(20)])
        assert len(answer["data"]) == 20 and max(running) == 3


async def test_what_the_core_is_told_of_a_request(front):
    headers = {"x-session-affinity": "s1"}
    body = {"input": "x", "priority": 7, "cache_salt": "salt", "request_id": "mine"}
    await front.http.post("/v1/embeddings", json=body, headers=headers)
    [asked] = front.script.asked
    assert (asked.priority, asked.salt, asked.session) == (7, "salt", "s1")
    assert asked.request_id == "embd-mine-0"


async def test_a_mean_without_a_norm_and_a_model_that_cannot(open_front):
    async with open_front(pooling=lambda: PoolingSettings(Pooling.MEAN, is_normalised=False)) as front:
        vector = (await embed(front, input="x"))["data"][0]["embedding"]
        assert front.script.asked[0].pooling is Pooling.MEAN
        assert np.linalg.norm(vector) != pytest.approx(1)

    def refuse():
        raise ModelError("1_Pooling/config.json asks for pooling_mode_cls_token")

    async with open_front(pooling=refuse) as front:
        refused = await front.http.post("/v1/embeddings", json={"input": "x"})
        assert refused.status_code == 400 and "pooling_mode_cls_token" in refused.json()["error"]["message"]
        assert (await front.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_model_without_a_head_embeds_and_does_not_generate(open_front):
    async with open_front(has_head=False) as front:
        await embed(front, input="x")
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            refused = await front.http.post(path, json=body)
            assert refused.status_code == 400 and "no output head" in refused.json()["error"]["message"]


async def test_answers_are_counted_without_embeddings(front):
    """An embedding has no tokens, and no time per token."""

    async def counted():
        lines = (await front.http.get("/metrics")).text.splitlines()
        names = ("vllm:request_generation_tokens_count", "vllm:prompt_tokens_total", "vllm:request_decode_time_seconds")
        return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if line.startswith(names[:2])}

    before = await counted()
    await embed(front, input=[1, 2, 3])
    after = await counted()
    assert after["vllm:prompt_tokens_total"] == before.get("vllm:prompt_tokens_total", 0) + 3
    name = "vllm:request_generation_tokens_count"
    assert after.get(name, 0) == before.get(name, 0)


async def test_grpc(front):
    def ask():
        with Client(front.grpc_address) as client:
            vector = client.embed("hello", dimensions=4, cache_salt="s", priority=2)
            with pytest.raises(InvalidRequest, match="between 1 and 8"):
                client.embed(token_ids=[1, 2], dimensions=12)
            return vector

    vector = await asyncio.to_thread(ask)
    [asked] = front.script.asked
    assert asked.tokens.tolist() == [*b"hello", EOS] and (asked.salt, asked.priority) == ("s", 2)
    cut = unit(front, 0)[:4]
    np.testing.assert_allclose(vector, cut / np.linalg.norm(cut), atol=1e-6)
