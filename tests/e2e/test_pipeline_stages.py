"""A cluster whose prefill node is a pipeline of stages: exact answers through hand-offs, reused prefixes and the pool,
and an end of the node when one of its stages dies. Real processes, the real model, fp32, greedy."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import numpy as np
import pytest
from drive import ask, ask_all, computing_node, status, wait_idle
from live import small_config, stages_of
from reference import check_greedy

from mooncake.app.cluster.local import LocalCluster
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, load_config
from mooncake.errors import ConfigError

RNG = np.random.default_rng(29)
STAGES = ("prefill.pipeline_stages=2", "prefill.chunk_tokens=512", "conductor.max_tail_tokens=0")


def some_tokens(count: int) -> list[int]:
    return [int(token) for token in RNG.integers(1000, 40_000, count)]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_prefill_node_in_stages_answers_exactly_until_one_of_them_dies() -> None:
    block_gb = open_checkpoint("smollm2").kv_layout(64, "float32").block_bytes / 1e9
    config = small_config(*STAGES, f"prefill.kv_gb={14.5 * block_gb}")
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        prompts = [some_tokens(700), some_tokens(90), some_tokens(3)]
        answers = await ask_all(channel, prompts, 12, at_once=3)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert check_greedy(prompt, answer.tokens).wrong == 0

        turn = prompts[0] + answers[0].tokens + some_tokens(100)  # its prefix is in this node's cache
        answer = await ask(channel, turn, 12)
        assert check_greedy(turn, answer.tokens).wrong == 0
        assert answer.cached_tokens >= 640

        await wait_idle(channel)
        await ask(channel, some_tokens(13 * 64), 1)  # the node forgets the others, the pool does not
        again = prompts[0] + some_tokens(40)
        answer = await ask(channel, again, 12)
        assert check_greedy(again, answer.tokens).wrong == 0
        assert answer.cached_tokens == 640

        nodes = (await status(channel)).nodes
        assert all(node.load.blocks_in_use == 0 for node in nodes if node.info.role == "prefill")
        stages = stages_of(cluster.pids["prefill-0"])
        assert len(stages) == 2
        os.kill(stages[1], signal.SIGKILL)
        error = await asyncio.wait_for(cluster.wait_fatal(), 30)
        assert "prefill-0 ended with exit code 1" in error.message
        assert "pipeline stages" in error.message


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_requests_whose_step_loses_a_stage_go_on_elsewhere() -> None:
    """The system may kill a stage that uses too much memory, just like a node."""
    config = small_config(*STAGES, "cluster.prefill=2", "prefill.kv_gb=0.2")
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        prompts = [some_tokens(700) for _ in range(3)]
        asking = asyncio.create_task(ask_all(channel, prompts, 4, at_once=3))
        os.kill(stages_of(cluster.pids[await computing_node(channel, "prefill")])[1], signal.SIGKILL)
        answers = await asking
        quiet = await ask_all(channel, prompts, 4, at_once=1)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in quiet]


@pytest.mark.parametrize(
    "with_what",
    [
        "prefill.blend_share=0.2",
        "prefill.device=cuda",
        "model.adapters=['a=/nowhere']",
        "model.key_scales=/nowhere",
        "cluster.switchable=true",
    ],
)
def test_what_stages_do_not_go_together_with_is_refused(with_what: str) -> None:
    with pytest.raises(ConfigError, match=r"prefill\.pipeline_stages does not go together with"):
        load_config(None, [*STAGES, with_what, "decode.device=cuda" if "cuda" in with_what else "decode.device=cpu"])
    assert isinstance(load_config(None, [*STAGES]), Config)
