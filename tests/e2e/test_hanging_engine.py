"""A step that never ends: the node notices, ends, and is started again; what was asked of it is answered."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
from drive import ask, status, wait_idle
from live import small_config, stages_of
from tiny_model import write_tiny_model

from mooncake.app.local import LocalCluster
from mooncake.checkpoint import open_checkpoint

PROMPTS = [np.random.default_rng(seed).integers(3, 320, 40).tolist() for seed in range(3)]
NEW_TOKENS = 8


@pytest.mark.timeout(180)
async def test_a_node_whose_stage_stands_still_is_started_again(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", initializer_range=0.3)
    config = small_config(
        f"model.path={tmp_path / 'model'}",
        "prefill.pipeline_stages=2",
        "conductor.max_tail_tokens=0",
        "block.tokens=8",
        "prefill.kv_gb=0.01",
        "decode.kv_gb=0.01",
        "store.dram_gb=0.01",
        "node.step_timeout_s=2",
        "node.drain_s=3",
    )
    assert open_checkpoint(config.model.path).config.num_layers >= 2
    async with (
        LocalCluster(config, restart=True) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        first = await ask(channel, PROMPTS[0], NEW_TOKENS)
        assert len(first.tokens) == NEW_TOKENS
        [node] = [pid for name, pid in cluster.pids.items() if name.startswith("prefill")]
        stages = stages_of(node)
        os.kill(stages[1], signal.SIGSTOP)
        answers = await asyncio.gather(*(ask(channel, prompt, NEW_TOKENS, timeout=120) for prompt in PROMPTS))
        assert [len(answer.tokens) for answer in answers] == [NEW_TOKENS] * 3
        assert answers[0].tokens == first.tokens
        await wait_idle(channel)
        assert cluster.pids and node not in cluster.pids.values(), "another process has taken its place"
        assert not any(os.path.exists(f"/proc/{pid}") for pid in stages)  # noqa: ASYNC240, PTH110
        assert {each.state for each in (await status(channel)).nodes} == {"live"}
