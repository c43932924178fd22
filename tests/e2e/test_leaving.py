"""Clients that leave at any moment, before the first token, during the hand-off or in the middle of an answer: nothing
of their requests stays anywhere."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import grpc
import httpx
import pytest
from drive import wait_idle
from live import small_config
from storm_traces import grown, held
from tiny_model import write_tiny_model

from mooncake.app.cluster.local import LocalCluster

SETTINGS = ("model.name=tiny", "block.tokens=16", "prefill.kv_gb=0.1", "decode.kv_gb=0.1", "store.dram_gb=0.05")
LONGEST_S = 0.5  # that a client stays
ROUNDS, CLIENTS, AT_ONCE = 3, 100, 8


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    rng, outcomes, gate = random.Random(5), Counter[str](), asyncio.Semaphore(AT_ONCE)
    write_tiny_model(tmp_path, max_position_embeddings=4096)
    limits = httpx.Limits(max_connections=None)
    async with (
        LocalCluster(small_config(*SETTINGS, f"model.path={tmp_path}")) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=60, trust_env=False, limits=limits) as http,
    ):

        async def ask(stays_s: float) -> None:
            prompt = [rng.randrange(5, 300) for _ in range(rng.choice([20, 300, 1500]))]
            question = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": rng.choice([1, 5, 60]),
                "n": rng.choice([1, 2]),
            }
            question |= {"ignore_eos": True, "stream": rng.random() < 0.5}
            async with gate:
                try:
                    async with asyncio.timeout(stays_s):
                        outcomes[str((await http.post("/v1/completions", json=question)).status_code)] += 1
                except TimeoutError:
                    outcomes["left"] += 1

        await asyncio.gather(*(ask(60) for _ in range(AT_ONCE)))
        await wait_idle(channel)
        pids = dict(cluster.pids)
        before = {node: held(pid) for node, pid in pids.items()}
        for _ in range(ROUNDS):
            await asyncio.gather(*(ask(rng.uniform(0, LONGEST_S)) for _ in range(CLIENTS)))
            await wait_idle(channel)
        assert cluster.pids == pids
        assert {node: more for node, pid in pids.items() if (more := grown(held(pid), before[node]))} == {}
    assert outcomes.keys() == {"200", "left"}
