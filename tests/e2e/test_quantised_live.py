"""A quantised folder through a whole cluster: its nodes agree on how its codes are used, and the hand-off is exact."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest
from drive import check_twice
from live import running_cluster, small_config
from quantised import Format, awq, int8, write_quantised
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint

NEW = 12


@pytest.mark.slow
@pytest.mark.parametrize("form", [int8(), awq(32)], ids=["W8A8", "AWQ"])
async def test_a_cluster_answers_as_one_engine_does(form: Format, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.2}
    write_quantised(folder, write_tiny_model(folder, **shape), form)
    prompts = [np.random.default_rng(seed).integers(3, 320, 41).tolist() for seed in range(3)]
    greedy = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), kv_gb=0.01, block_tokens=8) as llm:
        wanted = [list(one.token_ids) for one in llm.generate(prompts, greedy)]
    small = ("block.tokens=8", "prefill.kv_gb=0.02", "decode.kv_gb=0.02", "store.dram_gb=0.02")
    with running_cluster(small_config(f"model.path={folder}", *small)) as cluster:
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            await check_twice(channel, prompts, wanted, 40)
    assert open_checkpoint(str(folder)).coding == ("w8a8" if "config_groups" in form.settings else "")
