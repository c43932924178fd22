"""A model with sliding windows through a whole cluster: of layers with a window, only the window's pages are handed
over, stored and read back, and the answers are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from direct_nodes import Nodes
from drive import check_two_turns, status
from greedy import greedy
from in_process import InProcessCluster
from live import running_cluster, small_config
from tiny_model import write_tiny_model

from decode_node.node import DecodeNode
from mooncake.checkpoint import open_checkpoint
from mooncake.rpc import inference_pb2, inference_pb2_grpc
from prefill_node.node import PrefillNode

BLOCK, WINDOW, NEW = 8, 16, 20
SMALL = ("block.tokens=8", "prefill.kv_gb=0.02", "decode.kv_gb=0.02", "store.dram_gb=0.02", "prefill.chunk_tokens=16")


def write_model(folder: Path) -> Any:
    """13 layers, every sixth with full attention: 7 groups of 2 rows, one of them empty."""
    shape = {"sliding_window": WINDOW, "num_hidden_layers": 13, "hidden_size": 64, "head_dim": 16}
    return write_tiny_model(folder, "gemma3_text", **shape, query_pre_attn_scalar=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [(), ("cluster.coupled=1",), ("model.kv_dtype=int8",)], ids=["fp32", "coupled", "int8"]
)
async def test_a_cluster_answers_as_transformers_do(settings: tuple[str, ...], tmp_path: Path) -> None:
    model = write_model(tmp_path)
    prompts = [np.random.default_rng(seed).integers(3, 320, 30 + 25 * seed).tolist() for seed in range(4)]
    is_exact = not any("int8" in setting for setting in settings)
    config = small_config(f"model.path={tmp_path}", "model.dtype=float32", *SMALL, *settings)
    with running_cluster(config) as cluster:
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            theirs = partial(greedy, model, count=NEW)
            assert all(await check_two_turns(channel, prompts, NEW, theirs if is_exact else None))


@pytest_asyncio.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Nodes, Any]]:
    model = write_model(tmp_path)
    async with Nodes(tmp_path, *SMALL) as nodes:
        yield nodes, model


async def test_what_is_handed_over_stored_and_read_is_a_window_of_each_local_group(
    nodes: tuple[Nodes, Any], tmp_path: Path
) -> None:
    cluster, model = nodes
    page_bytes = open_checkpoint(str(tmp_path)).kv_layout(BLOCK, "float32").layer_bytes * 2
    plan = cluster.first.host.cache_size
    assert plan.layout.block_bytes == page_bytes and plan.groups.windows == (0, *[WINDOW] * 6)
    before = cluster.decode.host.engine.load().computed_tokens
    prompt = np.random.default_rng(1).integers(3, 320, 123).tolist()
    answer, report = await cluster.ask(cluster.first, prompt, NEW)
    assert answer == greedy(model, prompt, NEW)
    # The next token, 123, sees from 108 on, in block 13; and so does who goes on behind the 15 full blocks.
    assert report.sent_bytes == (16 + 6 * 3) * page_bytes
    assert report.pool_bytes == (15 + 6 * 2) * page_bytes

    turn = [*prompt, *answer, 5, 6, 7]
    later, report = await cluster.ask(cluster.second, turn, NEW)
    assert later == greedy(model, turn, NEW)
    assert report.local_cached_tokens == 0
    assert report.pool_cached_tokens in (15 * BLOCK, 16 * BLOCK, 17 * BLOCK), "as many as were written back by then"
    computed = cluster.decode.host.engine.load().computed_tokens - before
    assert computed == 2 * (NEW - 1), "the decode node computed a prompt"
    await asyncio.gather(*(node.drained() for node in (cluster.first, cluster.second)))
    for node in (cluster.first, cluster.second):
        assert node.host.engine.block_pool.num_in_use == 0
        node.host.engine.block_pool.check()


@pytest.mark.parametrize(("role", "build"), [("prefill", PrefillNode), ("decode", DecodeNode)])
async def test_the_context_that_is_told_is_what_a_node_can_hold(role: str, build: Any, tmp_path: Path) -> None:
    """Each of the 7 groups takes pages of its own."""
    write_model(tmp_path)
    cluster = InProcessCluster(tmp_path, "block.tokens=8", f"{role}.kv_gb=0.0001", f"{role}.chunk_tokens=8")
    await cluster.start()
    node = await cluster.join(build, f"{role}-0")
    try:
        stub = inference_pb2_grpc.InferenceStub(cluster.channel)
        size = node.host.cache_size
        async with asyncio.timeout(10):
            while not (await status(cluster.channel)).nodes[0].load.blocks_total:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.02)
        told = (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0].max_model_len
        assert told == size.max_model_len < size.num_blocks * BLOCK // 2
    finally:
        await node.stop()
        await cluster.stop()


async def test_a_prefix_whose_windows_are_gone_is_computed(nodes: tuple[Nodes, Any]) -> None:
    """The pool has all blocks of the beginning, but windows only at the end of the prompt they were stored with."""
    cluster, model = nodes
    head = np.random.default_rng(2).integers(3, 320, 96).tolist()
    longer = [*head, *np.random.default_rng(3).integers(3, 320, 40).tolist()]
    await cluster.ask(cluster.first, longer, 2)
    other = [*head, *np.random.default_rng(4).integers(3, 320, 30).tolist()]
    answer, report = await cluster.ask(cluster.second, other, NEW)
    assert answer == greedy(model, other, NEW)
    assert (report.local_cached_tokens, report.pool_cached_tokens) == (0, 0)
    # A node that has computed it still has the windows in the middle, as long as nobody needs their room.
    _, report = await cluster.ask(cluster.first, other, 2)
    assert report.local_cached_tokens == 96
