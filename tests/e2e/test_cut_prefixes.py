"""A prompt whose stored prefix is partly in a store's memory and partly on its SSD: what is worth reading is read, the
rest is computed, and the answer is the same. Real processes, the real model, fp32, greedy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from drive import Answer, ask, status, wait_idle
from reference import check_greedy
from store_alone import connect_store

from conductor.model_facts import model_facts
from kvstore.client.store_client import StoreClient
from mooncake.app.cluster.local import LocalCluster
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, load_config
from mooncake.hashing import chain_seed, extend_chain
from mooncake.types import BlockKey

BLOCK_TOKENS, BLOCKS, NEW_TOKENS = 64, 12, 8
LEAST_MS = 1e-9  # of computing a block: nothing is worth reading from an SSD
RNG = np.random.default_rng(3)


def some_tokens(blocks: int) -> list[int]:
    return [int(token) for token in RNG.integers(100, 40_000, blocks * BLOCK_TOKENS + 20)]


def settings(ssd: Path, ssd_mb_per_s: float) -> Config:
    """Memory for 20 blocks in the store, and for one long prompt in the prefill node."""
    block_gb = open_checkpoint("smollm2").kv_layout(BLOCK_TOKENS, "float32").block_bytes / 1e9
    return load_config(
        None,
        [
            "conductor.http_port=0",
            "conductor.grpc_port=0",
            "conductor.heartbeat_interval_s=0.1",
            f"conductor.ssd_mb_per_s={ssd_mb_per_s}",
            "conductor.replicate=false",
            f"prefill.kv_gb={16.5 * block_gb}",
            "decode.kv_gb=0.5",
            f"store.dram_gb={20.5 * block_gb}",
            f'store.ssd_path="{ssd}"',
            "store.ssd_gb=1",
            'store.eviction="lru"',
            "prefill.threads=1",
            "decode.threads=1",
        ],
    )


class Pool:
    """Sends requests, and inspects the store and the conductor's view of it."""

    def __init__(self, config: Config, channel: grpc.aio.Channel, client: StoreClient) -> None:
        self._seed = chain_seed(model_facts(config, open_checkpoint("smollm2")).kv_fingerprint, "", "")
        self._channel = channel
        self._client = client
        self._asked: list[BlockKey] = []

    async def ask(self, prompt: list[int], num_tokens: int) -> Answer:
        self._asked += [key for key in self.keys(prompt) if key not in self._asked]
        return await ask(self._channel, prompt, num_tokens)

    def keys(self, prompt: list[int]) -> list[BlockKey]:
        return extend_chain(self._seed, np.array(prompt, dtype=np.uint32), BLOCK_TOKENS)

    async def num_in_memory(self, prompt: list[int]) -> int:
        """Leading blocks."""
        lease = await self._client.ranges.acquire(self.keys(prompt), recompute_ms=LEAST_MS)
        await self._client.ranges.release([lease])
        return len(lease.blocks)

    async def settle(self, prompt: list[int]) -> int:
        """Like ``num_in_memory``, once the conductor knows it: events arrive in order, so when a new block is known, so
        is everything before."""
        while True:
            before = await self.num_in_memory(prompt)
            news = some_tokens(1)
            await self.ask(news, 1)
            await until(partial(self._is_stored, news))
            await until(self._is_heard)
            await wait_idle(self._channel)  # by heartbeats that say what computing costs
            if before == await self.num_in_memory(prompt):
                return before

    async def _is_stored(self, prompt: list[int]) -> bool:
        return all(await self._client.exists(self.keys(prompt)))

    async def _is_heard(self) -> bool:
        """Whether the index has the blocks of all prompts, in either tier; none are lost here."""
        nodes = (await status(self._channel)).nodes
        known = sum(node.indexed_blocks for node in nodes if node.info.node_id.startswith("store"))
        return known >= sum(await self._client.exists(self._asked))

    async def is_in_memory(self, prompt: list[int]) -> bool:
        return await self.num_in_memory(prompt) == len(self.keys(prompt))

    async def num_promoted(self) -> int:
        return (await self._client.stats()).counters.get("promotions", 0)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Pool]:
    async with (
        LocalCluster(config) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        nodes = (await status(channel)).nodes
        address = next(node.info.control_address for node in nodes if node.info.node_id.startswith("store"))
        async with await connect_store(address) as client:
            yield Pool(cluster.config, channel, client)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_slow", [True, False], ids=["slow disk", "fast disk"])
async def test_what_pays_is_read_and_the_rest_computed(tmp_path: Path, is_slow: bool) -> None:
    async with running(settings(tmp_path, 0.01 if is_slow else 1e6)) as pool:
        prompt = some_tokens(BLOCKS)
        first = await pool.ask(prompt, NEW_TOKENS)
        assert check_greedy(prompt, first.tokens).wrong == 0
        await pool.ask(some_tokens(14), 1)  # takes the prompt's place in the node, and some of it in the store
        in_memory = await pool.settle(prompt)
        assert 0 < in_memory < BLOCKS
        promoted = await pool.num_promoted()

        again = await pool.ask(prompt, NEW_TOKENS)
        assert again.tokens == first.tokens
        assert again.cached_tokens == (in_memory if is_slow else BLOCKS) * BLOCK_TOKENS
        assert await pool.num_promoted() - promoted == (0 if is_slow else BLOCKS - in_memory)
        await until(partial(pool.is_in_memory, prompt))  # read or computed
        assert await pool.num_promoted() - promoted == (0 if is_slow else BLOCKS - in_memory)
