"""Gemma 4, whose layers take different numbers of rows, through a whole cluster: hand-offs, the pool and second turns
give the tokens of transformers."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from direct_nodes import Nodes
from drive import check_two_turns
from greedy import greedy
from live import running_cluster, small_config
from tiny_families import VOCAB, Published
from tiny_gemma4 import GEMMA4
from tiny_model import write_tokenizer

BLOCK, WINDOW, NEW = 8, 16, 20
SMALL = ("block.tokens=8", "prefill.kv_gb=0.02", "decode.kv_gb=0.02", "store.dram_gb=0.02", "prefill.chunk_tokens=16")


def written(family: str, folder: Path) -> Published:
    made = Published(family, folder, GEMMA4)
    write_tokenizer(folder)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("small", ()),
        ("mixture", ()),
        ("all-at-once", ("block.windows=false",)),
        ("small", ("cluster.coupled=1",)),
        ("mixture", ("model.kv_dtype=int8",)),
    ],
    ids=["small", "mixture", "whole-blocks", "coupled", "int8"],
)
async def test_a_cluster_answers_as_transformers_do(family: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    model = written(family, tmp_path).theirs
    prompts = [np.random.default_rng(seed).integers(3, VOCAB, 30 + 25 * seed).tolist() for seed in range(4)]
    is_exact = not any("int8" in setting for setting in settings)
    config = small_config(f"model.path={tmp_path}", "model.dtype=float32", *SMALL, *settings)
    with running_cluster(config) as cluster:
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            theirs = partial(greedy, model, count=NEW)
            assert all(await check_two_turns(channel, prompts, NEW, theirs if is_exact else None))


async def test_all_rows_of_a_layer_are_handed_over_stored_and_read(tmp_path: Path) -> None:
    """Two groups: the two global layers with KV take two rows each, the four local ones one each."""
    model = written("small", tmp_path).theirs
    async with Nodes(tmp_path, *SMALL) as cluster:
        plan = cluster.first.host.cache_size
        row_bytes = 2 * 16 * BLOCK * 4
        page_bytes = 4 * row_bytes
        assert (plan.groups.windows, plan.groups.rows) == ((0, WINDOW), (1, 1, 2, 1, 1, 2))
        assert (plan.layout.layer_bytes, plan.layout.block_bytes) == (row_bytes, page_bytes)
        prompt = np.random.default_rng(1).integers(3, VOCAB, 123).tolist()
        answer, report = await cluster.ask(cluster.first, prompt, NEW)
        assert answer == greedy(model, prompt, NEW)
        # The next token, 123, sees from 108 on, in block 13; and so does who goes on behind the 15 full blocks.
        assert report.sent_bytes == (16 + 3) * page_bytes
        assert report.pool_bytes == (15 + 2) * page_bytes

        turn = [*prompt, *answer, 5, 6, 7]
        later, report = await cluster.ask(cluster.second, turn, NEW)
        assert later == greedy(model, turn, NEW)
        assert report.local_cached_tokens == 0
        assert report.pool_cached_tokens in (15 * BLOCK, 16 * BLOCK, 17 * BLOCK), "as many as were written back by then"
        await asyncio.gather(*(node.drained() for node in (cluster.first, cluster.second)))
        for node in (cluster.first, cluster.second):
            assert node.host.engine.block_pool.num_in_use == 0
            node.host.engine.block_pool.check()
