"""Embeddings through a live cluster, asked for by OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import os
import signal

import grpc
import httpx
import numpy as np
import openai
import pytest
from drive import computing_node
from live import running_cluster, small_config

from mooncake.app.cluster.local import LocalCluster
from mooncake.pooling import Vector

LONG = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 20


def client_of(cluster: LocalCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0, timeout=120)


def vector_of(embedding: list[float]) -> Vector:
    return np.array(embedding, np.float32)


@pytest.mark.timeout(240)
def test_texts_are_embedded_and_what_means_the_same_is_near(cluster: LocalCluster) -> None:
    texts = ["A cat sits on the mat.", "A cat is sitting on the mat.", "Interest rates rose again in March."]
    with client_of(cluster) as client:
        answer = client.embeddings.create(model="", input=texts)
    assert [each.index for each in answer.data] == [0, 1, 2]
    cat, same_cat, rates = (vector_of(each.embedding) for each in answer.data)
    assert np.linalg.norm(cat) == pytest.approx(1, abs=1e-6)
    assert cat @ same_cat > cat @ rates
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 15


@pytest.mark.timeout(240)
def test_the_forms_of_inputs_and_vectors(cluster: LocalCluster) -> None:
    with client_of(cluster) as client:
        model = client.models.list().data[0].id
        ids = httpx.post(f"{cluster.http_url}/tokenize", json={"prompt": "Hello there"}).json()["tokens"]
        given = ["Hello there", ["Hello there"], ids, [ids]]
        answers = [client.embeddings.create(model=model, input=each, encoding_format="float") for each in given]
        vectors = [answer.data[0].embedding for answer in answers]
        assert all(vector == vectors[0] for vector in vectors)
        plain = httpx.post(f"{cluster.http_url}/v1/embeddings", json={"input": ids, "encoding_format": "base64"})
        unpacked = np.frombuffer(base64.b64decode(plain.json()["data"][0]["embedding"]), "<f4")
        np.testing.assert_array_equal(unpacked, vector_of(vectors[0]))
        short = client.embeddings.create(model=model, input=ids, dimensions=64).data[0].embedding
        cut = vector_of(vectors[0])[:64]
        np.testing.assert_allclose(vector_of(short), cut / np.linalg.norm(cut), atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="dimensions must be between 1 and 576"):
            client.embeddings.create(model=model, input=ids, dimensions=577)
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model=model, input=[1] * 9000)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.timeout(240)
def test_a_prefix_in_the_pool_is_reused_and_changes_no_bit(cluster: LocalCluster) -> None:
    """A chat leaves its prompt's blocks behind; an embedding of the same text reads them, and with a salt none."""
    text = LONG + "What a life!"
    with client_of(cluster) as client:
        alone = client.embeddings.create(model="", input=text, extra_body={"cache_salt": "alone"})
        first = client.embeddings.create(model="", input=text)
        second = client.embeddings.create(model="", input=text)
        block = cluster.config.block.tokens
        cached = second.usage.prompt_tokens_details["cached_tokens"]  # type: ignore[attr-defined]
        assert cached >= second.usage.prompt_tokens // block * block > 0
        assert alone.usage.prompt_tokens_details["cached_tokens"] == 0  # type: ignore[attr-defined]
        assert alone.data[0].embedding == first.data[0].embedding == second.data[0].embedding


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_prefill_node_that_is_killed_midway_costs_a_retry_and_changes_no_bit() -> None:
    texts = [f"{number}. {LONG * 4}" for number in range(4)]
    with running_cluster(small_config("cluster.prefill=2")) as cluster:
        url = f"{cluster.http_url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client,
            grpc.aio.insecure_channel(cluster.grpc_address) as channel,
            httpx.AsyncClient() as http,
        ):
            asking = asyncio.create_task(client.embeddings.create(model="", input=texts))
            os.kill(cluster.pids[await computing_node(channel, "prefill")], signal.SIGKILL)
            found = await asking
            again = await client.embeddings.create(model="", input=texts, extra_body={"cache_salt": "again"})
            metrics = (await http.get(f"{cluster.http_url}/metrics")).text
        assert [each.embedding for each in found.data] == [each.embedding for each in again.data]
        retries = next(line for line in metrics.splitlines() if line.startswith("mooncake_request_retries_total"))
        assert float(retries.split()[-1]) >= 1
