"""Two live clusters; one reads the other's KV from its pool. Real processes, the real model, fp32, greedy.

Both have the same weights, so answers must be equal. Names of KV differ because the sender keeps hidden states.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest
from drive import ask, status, wait_idle
from live import small_config
from reference import check_greedy
from store_alone import connect_store

from mooncake.app.cluster.local import LocalCluster
from mooncake.checkpoint import open_checkpoint
from mooncake.hashing import chain_seed, extend_chain, kv_fingerprint
from mooncake.variants import Profile, write_profile

BLOCK_TOKENS, NEW_TOKENS = 64, 70  # answers fill a block of their own
RNG = np.random.default_rng(2)
SMALL = ("prefill.kv_gb=0.2", "decode.kv_gb=0.2", "store.dram_gb=0.2", "prefill.swap_gb=0", "decode.swap_gb=0")


def some_tokens(count: int) -> list[int]:
    return [int(token) for token in RNG.integers(1000, 40_000, count)]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_cluster_reads_what_anothers_prompts_and_answers_left(tmp_path: Path) -> None:
    checkpoint, profile = open_checkpoint("smollm2"), tmp_path / "profile.json"
    write_profile(profile, Profile(checkpoint.digest, checkpoint.digest, 10, 19, (10,)))
    prompt = some_tokens(3 * BLOCK_TOKENS + 20)
    async with (
        LocalCluster(small_config(*SMALL, "model.keep_hidden=[10]", "conductor.max_tail_tokens=0")) as sender,
        grpc.aio.insecure_channel(sender.grpc_address) as theirs,
    ):
        nodes = (await status(theirs)).nodes
        pool = next(node.info.control_address for node in nodes if node.info.role == "store")
        variant = (f"prefill.variant={profile}", f'prefill.variant_pools=["{pool}"]', "conductor.max_tail_tokens=0")
        async with (
            LocalCluster(small_config(*SMALL, *variant)) as receiver,
            grpc.aio.insecure_channel(receiver.grpc_address) as ours,
        ):
            left = await ask(theirs, prompt, NEW_TOKENS)
            assert check_greedy(prompt, left.tokens).wrong == 0
            turn = prompt + left.tokens + some_tokens(10)
            layout = checkpoint.kv_layout(BLOCK_TOKENS, "float32", (10,))
            seed = chain_seed(kv_fingerprint(checkpoint.digest, layout))
            keys = extend_chain(seed, np.array(turn, np.uint32), BLOCK_TOKENS)[:4]
            async with await connect_store(pool) as store:
                await wait_idle(theirs)
                assert await store.exists(keys) == [True] * 4

            answer = await ask(ours, turn, NEW_TOKENS)
            assert check_greedy(turn, answer.tokens).wrong == 0
            await wait_idle(ours)
            load = next(node.load for node in (await status(ours)).nodes if node.info.role == "prefill")
            assert load.counters["tokens_inherited"] == 4 * BLOCK_TOKENS
            assert answer.cached_tokens == 0

            again = await ask(ours, some_tokens(2 * BLOCK_TOKENS), 2)  # nobody has that
            assert len(again.tokens) == 2
            await wait_idle(ours)
            load = next(node.load for node in (await status(ours)).nodes if node.info.role == "prefill")
            assert load.counters["tokens_inherited"] == 4 * BLOCK_TOKENS
            assert load.counters["prompts_not_inherited"] == 1
