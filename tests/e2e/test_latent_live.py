"""A model with latent attention through a whole cluster: one row per token is handed over, stored and read back."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest
from drive import check_twice
from greedy import greedy
from live import running_cluster, small_config, workers_of
from tiny_model import LATENT, write_tiny_model

from mooncake import LLM, SamplingParams

NEW = 12
SMALL = ("block.tokens=8", "prefill.kv_gb=0.02", "decode.kv_gb=0.02", "store.dram_gb=0.02", "prefill.chunk_tokens=16")


@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
async def test_a_cluster_answers_as_transformers_does(kv_dtype: str, tmp_path: Path) -> None:
    theirs = write_tiny_model(tmp_path, "deepseek_v3", **LATENT)
    prompts = [np.random.default_rng(seed).integers(3, 320, 41).tolist() for seed in range(3)]
    if kv_dtype == "float32":
        wanted = [greedy(theirs, prompt, NEW) for prompt in prompts]
    else:
        sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
        with LLM(str(tmp_path), kv_gb=0.01, block_tokens=8, kv_dtype=kv_dtype, chunk_tokens=16) as llm:
            wanted = [list(one.token_ids) for one in llm.generate(prompts, sampling)]
    config = small_config(f"model.path={tmp_path}", f"model.kv_dtype={kv_dtype}", "model.dtype=float32", *SMALL)
    with running_cluster(config) as cluster:
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            await check_twice(channel, prompts, wanted, 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "module"),
    [
        ("prefill.pipeline_stages=2", "pipeline_stage"),
        pytest.param("prefill.context_parallel=2", "context_parallel", marks=pytest.mark.slow),
    ],
)
async def test_a_prefill_node_of_several_processes_hands_over_to_one_of_one(
    processes: str, module: str, tmp_path: Path
) -> None:
    """KV that stages write into the one cache, or ranks send to it, reaches the decode node and the pool."""
    theirs = write_tiny_model(tmp_path, "deepseek_v3", **LATENT)
    prompts = [np.random.default_rng(seed).integers(3, 320, 105).tolist() for seed in range(3)]
    wanted = [greedy(theirs, prompt, NEW) for prompt in prompts]
    of_model = (f"model.path={tmp_path}", "model.dtype=float32")
    with running_cluster(small_config(*of_model, *SMALL, "prefill.chunk_tokens=96", processes)) as cluster:
        assert workers_of(cluster.pids["prefill-0"], module), "the node computes alone"
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            await check_twice(channel, prompts, wanted, 104)
