"""Prefixes from the pool: loaded, checked, and computed instead when they are gone or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvstore.node import StoreNode
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, load_config
from mooncake.rpc import common_pb2, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from mooncake.sampling import SamplingParams
from prefill_node.node import PrefillNode

PROMPT = np.random.default_rng(5).integers(100, 49000, 200, dtype=np.uint32)
STORED_BLOCKS = 3  # of 64 tokens, full


def config_of(node_id: str, *settings: str) -> Config:
    return load_config(
        None,
        [
            f"node.id={node_id}",
            "node.conductor='127.0.0.1:9'",  # nobody there: nodes work without, they only are not found
            "prefill.kv_gb=0.1",
            "prefill.threads=1",
            "store.dram_gb=0.1",
            *settings,
        ],
    )


@asynccontextmanager
async def store_node() -> AsyncIterator[StoreNode]:
    layout = open_checkpoint("smollm2").kv_layout(64, "float32")
    node = StoreNode(config_of("store-l"), layout.block_bytes)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def prefill_on_a_fresh_node(
    store: StoreNode, name: str, *settings: str, pool_tokens: int | None = None
) -> tuple[int, common_pb2.PrefillReport]:
    """The first token and the report of a node whose own cache is empty."""
    node, channels = PrefillNode(config_of(name, *settings)), Channels()
    await node.start()
    try:
        request = prefill_pb2.PrefillRequest(
            request_id="r",
            tokens=tokens_to_wire(PROMPT),
            num_prompt_tokens=len(PROMPT),
            sampling=sampling_to_wire(SamplingParams(max_tokens=1, temperature=0.0)),
            pools=[prefill_pb2.PoolTarget(control_address=store.control_address)],
            pool_tokens=pool_tokens,
        )
        stub = prefill_pb2_grpc.PrefillStub(channels.get(node.control_address))
        token, report = -1, common_pb2.PrefillReport()
        async for response in stub.Run(request, timeout=60):
            if response.HasField("first_token"):
                token = response.first_token.token_id
            else:
                report = response.report
        pool = node.host.engine.block_pool
        await asyncio.wait_for(node.drained(), 5)
        assert pool.num_in_use == 0, "blocks are still held"
        return token, report
    finally:
        await channels.close()
        await node.stop()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("stages", [1, 2])
async def test_a_stored_prefix_is_loaded_and_a_corrupt_one_is_computed_again(stages: int) -> None:
    async with store_node() as store:
        token, report = await prefill_on_a_fresh_node(store, "prefill-cold")
        assert report.pool_cached_tokens == 0
        assert report.pool_bytes == STORED_BLOCKS * store.segment_address.block_bytes

        in_stages = f"prefill.pipeline_stages={stages}"
        again, report = await prefill_on_a_fresh_node(store, "prefill-warm", in_stages)
        assert again == token
        assert report.pool_cached_tokens == STORED_BLOCKS * 64

        flip_a_bit(store)
        again, report = await prefill_on_a_fresh_node(store, "prefill-hurt", in_stages)
        assert again == token, "a wrong byte reached an answer"
        assert report.pool_cached_tokens == 0
        counters = dict((await store_stats(store)).counters)
        assert counters["checksum_mismatches"] >= 1, counters

        # what was dropped is stored anew by the next request, and good again for the one after it
        again, report = await prefill_on_a_fresh_node(store, "prefill-mending")
        assert again == token
        assert report.pool_bytes == store.segment_address.block_bytes
        again, report = await prefill_on_a_fresh_node(store, "prefill-mended")
        assert again == token
        assert report.pool_cached_tokens == STORED_BLOCKS * 64


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_no_more_of_a_stored_prefix_is_loaded_than_the_conductor_wants() -> None:
    async with store_node() as store:
        token, _ = await prefill_on_a_fresh_node(store, "prefill-cold")
        for wanted, loaded in ((0, 0), (64, 64), (2 * 64 + 63, 2 * 64), (10_000, STORED_BLOCKS * 64)):
            hits = dict((await store_stats(store)).counters).get("hits", 0)
            again, report = await prefill_on_a_fresh_node(store, f"prefill-{wanted}", pool_tokens=wanted)
            assert (again, report.pool_cached_tokens) == (token, loaded)
            assert dict((await store_stats(store)).counters).get("hits", 0) - hits == loaded // 64, "leased in vain"


def flip_a_bit(store: StoreNode) -> None:
    """In the last layer of some block that holds something."""
    blocks = store.segment.array.reshape(-1, store.segment.block_bytes)
    used = next(i for i in range(len(blocks)) if blocks[i, -4096:].any())
    blocks[used, -100] ^= 1


async def store_stats(store: StoreNode):  # type: ignore[no-untyped-def]
    from mooncake.rpc import store_pb2, store_pb2_grpc

    channels = Channels()
    try:
        return await store_pb2_grpc.StoreStub(channels.get(store.control_address)).Stats(
            store_pb2.StatsRequest(), timeout=5
        )
    finally:
        await channels.close()
