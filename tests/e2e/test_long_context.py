"""LongRoPE in a cluster: all roles use the factors of the configured context, as sharing KV requires."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drive import ask
from in_process import InProcessCluster
from tiny_model import write_tiny_model

from decode_node.node import DecodeNode
from mooncake.app.cluster.compute_node.node import ComputeNode
from prefill_node.node import PrefillNode

TRAINED = 64  # tokens
NEW_TOKENS = 8
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.4, 2.0], "long_factor": [1.2, 1.9, 5.0, 16.0]}
SHAPE = {"max_position_embeddings": 512, "original_max_position_embeddings": TRAINED}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("asked", "num_prompt"), [(400, 150), (0, 40)], ids=["long", "short"])
async def test_every_role_takes_the_factors_of_the_context(tmp_path: Path, asked: int, num_prompt: int) -> None:
    theirs = write_tiny_model(tmp_path / "model", "phi3", rope_parameters=LONGROPE, initializer_range=0.2, **SHAPE)
    cluster = InProcessCluster(
        tmp_path / "model", f"model.max_model_len={asked}", "block.tokens=16", "cluster.switchable=true"
    )
    await cluster.start()
    nodes = []
    try:
        for build, name in ((PrefillNode, "prefill-0"), (ComputeNode, "prefill-1"), (DecodeNode, "decode-0")):
            nodes.append(await cluster.join(build, name))
        tokens = [7 * i % 101 + 3 for i in range(num_prompt)]
        answer = await ask(cluster.channel, tokens, NEW_TOKENS)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert answer.tokens == tokens[num_prompt:]
        assert len(await cluster.states()) == 3
    finally:
        for node in reversed(nodes):
            await node.stop()
        await cluster.stop()
