"""Prompts with known chunks in another order, through a live cluster: chunks are found under their own names, blended,
handed over, and never mistaken for exact KV. Real processes, the real model, fp32, greedy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import numpy as np
import pytest
from drive import ask, status, wait_idle
from reference import check_greedy
from store_alone import connect_store

from conductor.model_facts import model_facts
from mooncake.app.cluster.local import LocalCluster
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.hashing import chain_seed, chunk_seed, extend_chain

BLOCK_TOKENS, NEW_TOKENS = 64, 70  # answers fill a block of their own
RNG = np.random.default_rng(11)
SEPARATOR = open_checkpoint("smollm2").load_tokenizer().encode(" # #").tolist()


def some_tokens(count: int) -> list[int]:
    return [int(token) for token in RNG.integers(1000, 40_000, count)]


def chunk() -> list[int]:
    """Three blocks and a rest that is not reused."""
    return SEPARATOR + some_tokens(3 * BLOCK_TOKENS + 10)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("share", [1.0, 0.15])
async def test_known_chunks_are_blended_and_never_published(share: float) -> None:
    checkpoint = open_checkpoint("smollm2")
    block_gb = checkpoint.kv_layout(BLOCK_TOKENS, "float32").block_bytes / 1e9
    config = load_config(
        None,
        [
            "conductor.http_port=0",
            "conductor.grpc_port=0",
            "conductor.heartbeat_interval_s=0.1",
            "conductor.max_tail_tokens=0",
            f"prefill.blend_share={share}",
            f"prefill.kv_gb={20.5 * block_gb}",
            "decode.kv_gb=0.5",
            "store.dram_gb=0.5",
            "prefill.threads=1",
            "decode.threads=1",
        ],
    )
    fingerprint = model_facts(config, checkpoint).kv_fingerprint
    first, second = chunk(), chunk()
    shown = some_tokens(80) + first + second + SEPARATOR + some_tokens(20)
    mixed = some_tokens(90) + second + first + SEPARATOR + some_tokens(20)

    async with (
        LocalCluster(config) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        nodes = (await status(channel)).nodes
        address = next(node.info.control_address for node in nodes if node.info.node_id.startswith("store"))
        async with await connect_store(address) as store:

            async def num_stored(seed: bytes, tokens: list[int]) -> int:
                keys = extend_chain(seed, np.array(tokens, np.uint32), BLOCK_TOKENS)
                return sum(await store.exists(keys))

            async def are_stored() -> bool:
                seed = chunk_seed(fingerprint)
                return await num_stored(seed, first) == await num_stored(seed, second) == 3

            async def num_blended() -> int:
                await wait_idle(channel)
                load = next(node.load for node in (await status(channel)).nodes if node.info.role == "prefill")
                return load.counters["tokens_blended"]

            answer = await ask(channel, shown, NEW_TOKENS)
            assert check_greedy(shown, answer.tokens).wrong == 0
            await until(are_stored)  # each computed alone, when it had been seen
            assert await num_blended() == 0

            answer = await ask(channel, mixed, NEW_TOKENS)
            assert len(answer.tokens) == NEW_TOKENS
            if share == 1.0:  # nothing is left out then
                assert check_greedy(mixed, answer.tokens).wrong == 0
            assert await num_blended() == 6 * BLOCK_TOKENS
            assert answer.cached_tokens == 0

            # Only what stands before the first chunk is known by its tokens, to whomever it may be of use.
            await asyncio.sleep(0.5)  # whoever would write it back has had time to
            assert await num_stored(chain_seed(fingerprint), mixed + answer.tokens) == 1
            turn = mixed + answer.tokens + some_tokens(30)
            assert (await ask(channel, turn, 1)).cached_tokens == BLOCK_TOKENS

            # The node has forgotten the chunks, the pool has not.
            await ask(channel, some_tokens(19 * BLOCK_TOKENS), 1)
            before = await num_blended()
            other = some_tokens(30) + first + SEPARATOR + some_tokens(20)
            answer = await ask(channel, other, NEW_TOKENS)
            if share == 1.0:
                assert check_greedy(other, answer.tokens).wrong == 0
            assert await num_blended() - before == 3 * BLOCK_TOKENS

            # Another tenant's chunks are another's.
            await ask(channel, other, 1, salt="somebody-else")
            assert await num_blended() - before == 3 * BLOCK_TOKENS
