"""A step that never ends: the node notices, exits, and is restarted; its requests are answered."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from drive import ask, status, wait_idle
from live import command_of, small_config, stages_of
from tiny_model import write_tiny_model

from mooncake.app.cluster.local import LocalCluster
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.engine.contract import NO_HOOK, CausalModel, StepOutput
from mooncake.engine.hosting.host import EngineHost, HostPlan
from mooncake.errors import MooncakeError
from mooncake.events import EventLog
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.sampling import SamplingParams

PROMPTS = [np.random.default_rng(seed).integers(3, 320, 40).tolist() for seed in range(3)]
NEW_TOKENS = 8


@pytest.mark.slow
@pytest.mark.timeout(400)
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
        "conductor.node_wait_s=150",  # a busy machine takes long to start a node again
        "node.step_timeout_s=10",
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
        answers = await asyncio.gather(*(ask(channel, prompt, NEW_TOKENS) for prompt in PROMPTS))
        assert [len(answer.tokens) for answer in answers] == [NEW_TOKENS] * 3
        assert answers[0].tokens == first.tokens
        await wait_idle(channel)
        assert cluster.pids and node not in cluster.pids.values(), "another process has taken its place"
        assert not any("pipeline_stage" in command_of(pid) for pid in stages)
        async with asyncio.timeout(30):  # a late heartbeat makes a node a suspect
            while {each.state for each in (await status(channel)).nodes} != {"live"}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


class Slow:
    """A model whose layers take long, and whose steps take longer than any may."""

    def __init__(self, model: CausalModel, layer_s: float) -> None:
        self._model = model
        self._layer_s = layer_s
        self.config = model.config

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        for layer in range(4):
            time.sleep(self._layer_s)
            hook.after_layer(layer)
        return self._model.forward(batch, cache, NoHook())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("layer_s", "hangs"), [(0.45, False), (4.0, True)])
async def test_a_step_that_gets_on_may_take_long(tmp_path: Path, layer_s: float, hangs: bool) -> None:
    write_tiny_model(tmp_path / "model")
    settings = [f"model.path={tmp_path / 'model'}", "decode.kv_gb=0.01", "decode.threads=1", "node.step_timeout_s=1.5"]
    config = load_config(None, settings)
    checkpoint = open_checkpoint(config.model.path)
    host = await EngineHost.open(HostPlan(config, config.decode, checkpoint), EventLog(1))
    host.run(NO_HOOK)
    try:
        broken = asyncio.create_task(host.wait_broken())
        if hangs:  # an idle engine is the same in both cases
            await asyncio.sleep(2.0)
            assert not broken.done(), "it is only idle"
        host.engine._model = Slow(host.engine._model, layer_s)
        ended: asyncio.Queue[StepOutput | MooncakeError] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        prompt = np.array(PROMPTS[0], np.uint32)
        sequence = host.sequence("r", prompt, len(prompt), SamplingParams(max_tokens=1, temperature=0.0), host.chain())
        host.thread.add(sequence, lambda output: loop.call_soon_threadsafe(ended.put_nowait, output) and None)
        told = await asyncio.wait_for(ended.get(), 30)
        assert isinstance(told, MooncakeError) == hangs
        if hangs:
            assert "no step has ended" in (await asyncio.wait_for(broken, 10)).message
        assert broken.done() == hangs
    finally:
        broken.cancel()
        await host.stop()
