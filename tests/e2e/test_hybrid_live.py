"""A model with recurrent layers through a whole cluster: a state is handed over, stored and read back as a page, and
the answers are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from direct_nodes import Nodes
from drive import check_two_turns
from greedy import greedy
from live import running_cluster, small_config
from node_pair import until
from tiny_hybrid import BLOCK, prompt_of, write_hybrid

from mooncake.checkpoint import open_checkpoint

NEW = 20
SMALL = ("block.tokens=8", "prefill.kv_gb=0.02", "decode.kv_gb=0.02", "store.dram_gb=0.02", "prefill.chunk_tokens=16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3-next", ()),
        ("qwen3-next", ("cluster.coupled=1",)),
        ("qwen3-next", ("prefill.chunk_tokens=5",)),
        ("qwen3-next", ("block.windows=false",)),
        ("lfm2", ()),
        ("lfm2-moe", ()),
        ("granite-4-moe", ()),
        ("falcon-h1", ()),
        ("nemotron-3", ()),
    ],
    ids=str,
)
async def test_a_cluster_answers_as_transformers_do(name: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    model = write_hybrid(name, tmp_path)
    prompts = [prompt_of(length) for length in (7, 31, 32, 33, 90)]
    config = small_config(f"model.path={tmp_path}", "model.dtype=float32", *SMALL, *settings)
    with running_cluster(config) as cluster:
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            cached = await check_two_turns(channel, prompts, NEW, partial(greedy, model, count=NEW))
            # What only the pool has is read if that is predicted to be faster, so of the shortest prompt, which filled
            # no block in the prefill node, nothing may be.
            assert all(cached[1:])


@pytest_asyncio.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Nodes, Any]]:
    model = write_hybrid("qwen3-next", tmp_path)
    async with Nodes(tmp_path, *SMALL) as nodes:
        yield nodes, model


@pytest.mark.parametrize(
    "length", [pytest.param(95, marks=pytest.mark.slow), 96, pytest.param(97, marks=pytest.mark.slow)]
)
async def test_of_states_one_is_handed_over_and_one_is_stored(
    nodes: tuple[Nodes, Any], tmp_path: Path, length: int
) -> None:
    """A prompt that ends on a block border, before it and after it."""
    cluster, model = nodes
    plan = cluster.first.host.cache_size
    page_bytes = open_checkpoint(str(tmp_path)).kv_layout(BLOCK, "float32").layer_bytes * 3
    assert plan.layout.block_bytes == page_bytes and plan.groups.windows == (0, 2, 2, 2)
    prompt = prompt_of(length)
    answer, report = await cluster.ask(cluster.first, prompt, NEW)
    assert answer == greedy(model, prompt, NEW)
    assert report.sent_bytes == (-(-length // BLOCK) + 3) * page_bytes
    assert report.pool_bytes == (length // BLOCK + 3) * page_bytes

    # until the blocks that the answer filled are in the pool, each with its states
    await until(lambda: cluster.decode.host.engine.block_pool.num_in_use == 0)
    turn = [*prompt, *answer, 5, 6, 7]
    later, report = await cluster.ask(cluster.second, turn, NEW)
    assert later == greedy(model, turn, NEW)
    assert report.local_cached_tokens == 0
    assert report.pool_cached_tokens == (length + NEW - 1) // BLOCK * BLOCK

    # The first node has the states of every border, the other one those from the border on to which it read.
    for node, cached in ((cluster.first, (length - 1) // BLOCK * BLOCK), (cluster.second, 0)):
        again, report = await cluster.ask(node, prompt, NEW)
        assert again == answer
        assert report.local_cached_tokens == cached
    await asyncio.gather(*(node.drained() for node in (cluster.first, cluster.second)))
    for node in (cluster.first, cluster.second, cluster.decode):
        node.host.engine.block_pool.check()
    assert cluster.first.host.engine.block_pool.num_in_use == 0
