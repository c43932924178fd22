"""Embeddings by real nodes: a prefix from the pool changes no bit, no decode node takes part, and nothing is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from drive import ask, status, wait_idle
from in_process import InProcessCluster, held
from tiny_embedder import write_embedder
from tiny_model import write_tiny_model
from waiting import until

from decode_node.node import DecodeNode
from kvstore.__main__ import build as store_of
from mooncake.errors import InvalidRequest, NodeUnavailable
from mooncake.pooling import LAST_TOKEN, Pooling, Vector
from mooncake.rpc import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire, vector_from_wire
from mooncake.rpc.errors import error_from_rpc
from mooncake.sampling import SamplingParams
from prefill_node.node import PrefillNode

BLOCK = 8
PROMPT = np.random.default_rng(0).integers(3, 320, 61).tolist()
SETTINGS = (f"block.tokens={BLOCK}", "prefill.chunk_tokens=16")


async def embed(
    cluster: InProcessCluster, prompt: list[int], salt: str = "", timeout: float = 60.0
) -> tuple[Vector, int]:
    """The vector, and how many tokens were reused."""
    ids = inference_pb2.TokenIds(ids=prompt)
    request = inference_pb2.EmbedRequest(token_ids=ids, cache_salt=salt)
    try:
        answer = await inference_pb2_grpc.InferenceStub(cluster.channel).Embed(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return np.array(answer.embedding, np.float32), answer.usage.cached_tokens


async def embed_on(node: PrefillNode, prompt: list[int], pool: str) -> tuple[Vector, int]:
    """Like ``embed``, by this node, which reads all that the pool has: a conductor would predict, on a busy machine,
    that a tiny model computes a prompt sooner."""
    request = prefill_pb2.PrefillRequest(
        request_id="r",
        tokens=tokens_to_wire(np.array(prompt, np.uint32)),
        num_prompt_tokens=len(prompt),
        sampling=sampling_to_wire(SamplingParams(max_tokens=1)),
        pools=[prefill_pb2.PoolTarget(control_address=pool)],
        pooling=Pooling.LAST,
    )
    async with grpc.aio.insecure_channel(node.control_address) as channel:
        said = [response async for response in prefill_pb2_grpc.PrefillStub(channel).Run(request, timeout=60)]
    (vector,) = [vector_from_wire(response.pooled) for response in said if response.HasField("pooled")]
    (report,) = [response.report for response in said if response.HasField("report")]
    return LAST_TOKEN.embedding(vector), report.local_cached_tokens + report.pool_cached_tokens


def unit(states: torch.Tensor) -> Vector:
    vector: Vector = (states / states.norm()).numpy()
    return vector


def of_mean(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"type": "a.Transformer"}, {"type": "a.Pooling"}, {"type": "a.Normalize"}]')
    pooling = folder / "config.json"
    pooling.write_text(pooling.read_text().rstrip().rstrip("}") + ', "pooling_mode_mean_tokens": true}')


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcessCluster]:
    started = InProcessCluster(tmp_path, *SETTINGS)
    yield started
    await started.stop()


@pytest.mark.timeout(120)
async def test_a_prefix_from_the_pool_changes_no_bit(tmp_path: Path, cluster: InProcessCluster) -> None:
    theirs = write_tiny_model(tmp_path, initializer_range=0.2)
    with torch.no_grad():
        expected = unit(theirs.model(torch.tensor([PROMPT])).last_hidden_state[0, -1])
    await cluster.start()
    store = await cluster.join(store_of, "store-0")
    first = await cluster.join(PrefillNode, "prefill-0")
    second = None
    try:
        alone, cached = await embed(cluster, PROMPT)
        np.testing.assert_allclose(alone, expected, rtol=2e-5, atol=2e-5)
        assert cached == 0
        again, cached = await embed(cluster, PROMPT)
        np.testing.assert_array_equal(alone, again)
        assert cached == len(PROMPT) - 1, "the last token is computed"
        await wait_idle(cluster.channel)  # and stored
        first.host.engine.block_pool.check()
        assert first.host.engine.block_pool.num_in_use == 0
        await first.stop()

        second = await cluster.join(PrefillNode, "prefill-1")
        before = second.host.engine.load().computed_tokens
        from_pool, cached = await embed_on(second, PROMPT, store.control_address)
        assert cached == len(PROMPT) // BLOCK * BLOCK, "all that the pool can have"
        assert second.host.engine.load().computed_tokens == before + len(PROMPT) - cached
        np.testing.assert_array_equal(alone, from_pool)
        salted, cached = await embed(cluster, PROMPT, "mine")
        assert cached == 0
        np.testing.assert_array_equal(alone, salted)
    finally:
        if second is not None:
            await second.stop()
        await store.stop()


@pytest.mark.timeout(120)
async def test_a_mean_is_computed_as_a_whole_and_stored_for_others(tmp_path: Path, cluster: InProcessCluster) -> None:
    theirs = write_tiny_model(tmp_path, initializer_range=0.2)
    of_mean(tmp_path)
    with torch.no_grad():
        expected = unit(theirs.model(torch.tensor([PROMPT])).last_hidden_state[0].mean(0))
    await cluster.start()
    nodes = [await cluster.join(store_of, "store-0")]
    try:
        nodes += [await cluster.join(PrefillNode, "prefill-0"), await cluster.join(DecodeNode, "decode-0")]
        vectors = []
        for _ in range(2):
            vector, cached = await embed(cluster, PROMPT)
            assert cached == 0
            vectors.append(vector)
        np.testing.assert_allclose(vectors[0], expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(*vectors)
        answer = await ask(cluster.channel, PROMPT, 4)
        assert answer.cached_tokens == len(PROMPT) - 1, "an answer reuses what they computed"
        after, cached = await embed(cluster, PROMPT)
        assert cached == 0
        np.testing.assert_array_equal(vectors[0], after)
        await wait_idle(cluster.channel)
    finally:
        for node in reversed(nodes):
            await node.stop()


@pytest.mark.timeout(120)
async def test_a_caller_that_leaves_frees_the_node(tmp_path: Path, cluster: InProcessCluster) -> None:
    write_tiny_model(tmp_path)
    await cluster.start()
    node = await cluster.join(PrefillNode, "prefill-0")
    try:
        with held(node):
            waiting = asyncio.create_task(embed(cluster, PROMPT))
            await until(lambda: node.streamer.prompts)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await until(lambda: not node.streamer.prompts)
        await wait_idle(cluster.channel)
        assert node.host.engine.block_pool.num_in_use == 0
        vector, _ = await embed(cluster, PROMPT)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    finally:
        await node.stop()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("setting", ["prefill.pipeline_stages=2", "prefill.tensor_parallel=2"])
async def test_nodes_of_several_processes_embed_or_refuse(
    tmp_path: Path, cluster: InProcessCluster, setting: str
) -> None:
    theirs = write_tiny_model(tmp_path, initializer_range=0.2)
    await cluster.start()
    node = await cluster.join(PrefillNode, "prefill-0", setting, "prefill.threads=1")
    try:
        if "stages" in setting:
            with pytest.raises(InvalidRequest, match="pipeline stages"):
                await embed(cluster, PROMPT)
            return
        vector, _ = await embed(cluster, PROMPT)
        with torch.no_grad():
            expected = unit(theirs.model(torch.tensor([PROMPT])).last_hidden_state[0, -1])
        np.testing.assert_allclose(vector, expected, rtol=2e-5, atol=2e-5)
    finally:
        await node.stop()


@pytest.mark.timeout(120)
async def test_coupled_nodes_embed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    cluster = InProcessCluster(tmp_path, *SETTINGS, "cluster.coupled=1")
    await cluster.start()
    node = await cluster.join(PrefillNode, "prefill-0")
    try:
        first, _ = await embed(cluster, PROMPT)
        second, cached = await embed(cluster, PROMPT)
        assert cached == len(PROMPT) - 1
        np.testing.assert_array_equal(first, second)
    finally:
        await node.stop()
        await cluster.stop()


@pytest.mark.timeout(120)
async def test_without_a_prefill_node_it_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    cluster = InProcessCluster(tmp_path, *SETTINGS, "conductor.node_wait_s=0")
    await cluster.start()
    try:
        with pytest.raises(NodeUnavailable, match="no prefill node"):
            await embed(cluster, PROMPT)
        assert not (await status(cluster.channel)).nodes
    finally:
        await cluster.stop()


@pytest.mark.timeout(120)
async def test_a_published_embedder_is_served_and_generates_nothing(tmp_path: Path, cluster: InProcessCluster) -> None:
    theirs = write_embedder(tmp_path, "Transformer", "Pooling", "Normalize")
    await cluster.start()
    nodes = [await cluster.join(PrefillNode, "prefill-0"), await cluster.join(DecodeNode, "decode-0")]
    try:
        vector, _ = await embed(cluster, PROMPT)
        with torch.no_grad():
            expected = unit(theirs(torch.tensor([PROMPT])).last_hidden_state[0, -1])
        np.testing.assert_allclose(vector, expected, rtol=2e-5, atol=2e-5)
        with pytest.raises(InvalidRequest, match="no output head"):
            await ask(cluster.channel, PROMPT, 4)
    finally:
        for node in nodes:
            await node.stop()
