"""Clusters with tensor parallel nodes: ranks leave in the one cache what one process would, so nodes of any number of
ranks hand over to each other and read each other's blocks from the pool. Real processes, fp32, greedy."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from drive import Answer, ask, ask_all, computing_node, leaks, status, wait_idle
from greedy import greedy
from live import command_of, running_cluster, small_config, workers_of
from tiny_mixtures import WIDE
from tiny_model import LATENT, write_tiny_model

from mooncake.app.cluster.local import LocalCluster
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config

NEW = 12
SMALL = ("block.tokens=8", "store.dram_gb=0.02", "prefill.chunk_tokens=16", "model.dtype=float32")
PREFILL, DECODE = "prefill.tensor_parallel=2", "decode.tensor_parallel=2"
MODULE = "model.parallel.tensor_parallel"
FAMILIES = {
    "qwen3": {"num_attention_heads": 12, "head_dim": 16},
    "one-head": {"num_attention_heads": 4, "num_key_value_heads": 1},  # of keys, which both ranks need
    "qwen3_moe": WIDE,
    "deepseek_v3": LATENT,
}


def prompts_of(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(3, 320, length).tolist() for length in lengths]


def write_model(folder: Path, family: str) -> torch.nn.Module:
    model: torch.nn.Module = write_tiny_model(folder, family.replace("one-head", "llama"), **FAMILIES[family])
    return model


def config_of(folder: Path, *overrides: str) -> Config:
    caches = ("prefill.kv_gb=0.02", "decode.kv_gb=0.02")
    return small_config(f"model.path={folder}", *SMALL, *caches, *overrides)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", (PREFILL,)),
        ("qwen3", (DECODE,)),
        ("qwen3", (PREFILL, "cluster.coupled=1")),
        ("one-head", (PREFILL, DECODE)),
        ("qwen3_moe", (DECODE, "prefill.pipeline_stages=2")),
        ("deepseek_v3", (PREFILL,)),
        ("deepseek_v3", (DECODE, "transfer.transports=['tcp']")),
    ],
)
async def test_nodes_of_any_number_of_ranks_answer_as_transformers_does(
    family: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_model(tmp_path, family)
    prompts = prompts_of(105, 41, 3)
    wanted = [greedy(model, prompt, NEW) for prompt in prompts]
    with running_cluster(config_of(tmp_path, *settings)) as cluster:
        for role in ("prefill", "decode"):
            if f"{role}.tensor_parallel=2" in settings:
                node = "coupled-0" if "cluster.coupled=1" in settings else f"{role}-0"
                assert len(workers_of(cluster.pids[node], MODULE)) == 1, "the node computes alone"
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            for cached in ([0, 0, 0], [104, 40, 2]):
                answers = await ask_all(channel, prompts, NEW, at_once=3)
                assert [answer.tokens for answer in answers] == wanted
                assert [answer.cached_tokens for answer in answers] == cached
                await wait_idle(channel)
            assert not leaks(await status(channel))


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_prefixes_in_the_pool_serve_nodes_of_other_numbers_of_ranks(tmp_path: Path) -> None:
    """The node with ranks forgets a prompt; what it, and an answering node without ranks, left in the pool comes back
    layer by layer while both ranks wait for it."""
    model = write_model(tmp_path, "qwen3")
    [prompt] = prompts_of(100)
    first = greedy(model, prompt, NEW)
    turn = prompt + first + [7, 8, 9]
    wanted = greedy(model, turn, NEW)
    block_gb = open_checkpoint(str(tmp_path)).kv_layout(8, "float32").block_bytes / 1e9
    with running_cluster(config_of(tmp_path, PREFILL, f"prefill.kv_gb={20.5 * block_gb}")) as cluster:
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            assert (await ask(channel, prompt, NEW)).tokens == first
            await wait_idle(channel)
            await ask(channel, prompts_of(8 * 19)[0], 1)  # in their place
            await wait_idle(channel)
            answer = await ask(channel, turn, NEW)
            assert answer.tokens == wanted
            assert answer.cached_tokens == 104, "the prompt's blocks, and one that the answer filled"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_whose_step_loses_a_rank_go_on_elsewhere(role: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3", hidden_size=256, num_hidden_layers=8, max_position_embeddings=4096)
    often = "conductor.heartbeat_interval_s=0.05"  # a node is seen to compute long before its answers end
    config = config_of(tmp_path, f"{role}.tensor_parallel=2", f"cluster.{role}=2", often)
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        prompts = prompts_of(1500, 1501, 1502)
        asking = asyncio.create_task(ask_all(channel, prompts, 200, at_once=3))
        [rank] = workers_of(cluster.pids[await computing_node(channel, role)], MODULE)
        os.kill(rank, signal.SIGKILL)
        answers: list[Answer] = await asking
        quiet = await ask_all(channel, prompts, 200, at_once=1)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in quiet]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_node_ends_with_its_rank_and_leaves_none(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    config = config_of(tmp_path, "decode.tensor_parallel=4", "decode.threads=1")
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        await ask(channel, prompts_of(20)[0], 2)
        ranks = workers_of(cluster.pids["decode-0"], MODULE)
        assert len(ranks) == 3
        os.kill(ranks[1], signal.SIGKILL)
        error = await asyncio.wait_for(cluster.wait_fatal(), 30)
        assert "decode-0 ended with exit code 1" in error.message
        assert "tensor parallel ranks [2] have failed" in error.message
    assert not [rank for rank in ranks if MODULE in command_of(rank)]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_node_whose_rank_hangs_ends_and_leaves_none(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    config = config_of(tmp_path, DECODE, "node.step_timeout_s=5")
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        prompt = prompts_of(20)[0]
        await ask(channel, prompt, 2)
        [rank] = workers_of(cluster.pids["decode-0"], MODULE)
        os.kill(rank, signal.SIGSTOP)
        asking = asyncio.create_task(ask(channel, prompt, 4))
        error = await asyncio.wait_for(cluster.wait_fatal(), 60)
        assert "no step has ended for 5 s" in error.message
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert MODULE not in command_of(rank)
