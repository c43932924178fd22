"""NaN in a node's cache, as after a bit flip: clients get right answers, and no other answer is affected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from drive import ask, wait_idle
from in_process import InProcessCluster
from tiny_model import write_tiny_model

from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode

BLOCK, NEW_TOKENS = 8, 12
PROMPTS = [np.random.default_rng(seed).integers(3, 320, 61).tolist() for seed in range(3)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_an_answer_over_a_spoilt_block_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, value: float
) -> None:
    write_tiny_model(tmp_path / "model", initializer_range=0.3)
    cluster = InProcessCluster(tmp_path / "model", f"block.tokens={BLOCK}", "prefill.chunk_tokens=16")
    await cluster.start()
    nodes: dict[str, PrefillNode | DecodeNode] = {}
    try:
        nodes["prefill-0"] = await cluster.join(PrefillNode, "prefill-0")
        nodes["decode-0"] = await cluster.join(DecodeNode, "decode-0")
        wanted = [await ask(cluster.channel, prompt, NEW_TOKENS) for prompt in PROMPTS]
        await wait_idle(cluster.channel)
        spoil(nodes[where], PROMPTS[0], value)
        got = await asyncio.gather(*(ask(cluster.channel, prompt, NEW_TOKENS) for prompt in PROMPTS))
        assert [answer.tokens for answer in got] == [answer.tokens for answer in wanted]
        assert "is tried elsewhere after" in caplog.text and "not finite" in caplog.text
        await wait_idle(cluster.channel)
        again = await ask(cluster.channel, PROMPTS[0], NEW_TOKENS)
        assert again.tokens == wanted[0].tokens and again.cached_tokens == len(PROMPTS[0]) - 1
        await wait_idle(cluster.channel)
        for node in nodes.values():
            node.host.engine.block_pool.check()
            assert node.host.engine.block_pool.num_in_use == 0
    finally:
        for node in reversed(nodes.values()):
            await node.stop()
        await cluster.stop()


def spoil(node: PrefillNode | DecodeNode, prompt: list[int], value: float) -> None:
    """A value of its third block, in a node that does nothing."""
    engine = node.host.engine
    keys = node.host.chain().keys(np.array(prompt, np.uint32), BLOCK)[:3]
    held = engine.block_pool.take_prefix(keys, 3)
    engine.block_pool.release(held)
    cache: torch.Tensor = engine.cache.tensor
    cache[held[2], 0, 1, :, 3] = value
