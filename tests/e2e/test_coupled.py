"""The coupled baseline as a cluster: every node does prefill and decode, and nothing is handed over."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest
from drive import ask_all
from greedy import greedy
from live import running_cluster, small_config
from tiny_model import write_tiny_model

from mooncake.client import Client
from mooncake.rpc import cluster_pb2, cluster_pb2_grpc
from mooncake.sampling_params import SamplingParams

NEW = 24


@pytest.mark.slow
async def test_coupled_nodes_answer_exactly_and_hand_nothing_on(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, head_dim=16)
    config = small_config(
        f"model.path={tmp_path}", "block.tokens=8", "cluster.coupled=2", "prefill.kv_gb=0.02", "prefill.chunk_tokens=16"
    )
    prompts = [np.random.default_rng(seed).integers(3, 320, 30 + 5 * seed).tolist() for seed in range(6)]
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    with running_cluster(config) as cluster:
        assert set(cluster.pids) == {"conductor", "store-0", "coupled-0", "coupled-1"}
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            seen: list[set[str]] = [set() for _ in prompts]  # the nodes that had it; which one gets it depends on load
            for _ in range(3):  # of two nodes, one gets a prompt twice
                answers = await ask_all(channel, prompts, NEW, at_once=4)
                assert [answer.tokens for answer in answers] == expected
                for answer, nodes in zip(answers, seen, strict=True):
                    assert not answer.timings.decode_node
                    assert nodes or not answer.cached_tokens
                    assert answer.cached_tokens or answer.timings.prefill_node not in nodes
                    nodes.add(answer.timings.prefill_node)
            status = await cluster_pb2_grpc.ClusterStub(channel).Status(cluster_pb2.StatusRequest())
            assert [node.info.node_id for node in status.nodes if node.info.role != "store"] == [
                "coupled-0",
                "coupled-1",
            ]
        with Client(cluster.grpc_address) as client:
            short = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
            chunks = list(client.stream(token_ids=prompts[0], sampling=short))
            assert [token.token_id for chunk in chunks for token in chunk.tokens] == expected[0]
            assert len(chunks) > 2, "the answer came at once, not as it was made"
