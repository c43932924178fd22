"""Prefill and decode nodes on a GPU: the same tokens as on a CPU, through hand-offs, the pool and the swap space.

Without a GPU the kernels run in Triton's interpreter, which is slow; everything else is the same: a node's cache is
separate from the memory that other nodes write and read, and blocks are copied between the two.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from drive import ask, status, wait_idle
from live import small_config
from tiny_model import LATENT, write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.app.local import LocalCluster
from mooncake.rpc import common_pb2, inference_pb2, inference_pb2_grpc

# Triton is not imported here: on import it chooses interpreter or compiler, which tests/kernels decides.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

BLOCK = 8
PROMPT = np.random.default_rng(0).integers(3, 320, 11).tolist()  # a full block and a partial one
NEW = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, head_dim=16, hidden_size=64)
    return str(folder)


def settings(model: str, **devices: str) -> list[str]:
    return [
        f"model.path='{model}'",
        "model.max_model_len=32",  # short: each program of a kernel is interpreted
        f"block.tokens={BLOCK}",
        "prefill.kv_gb=0.005",
        "decode.kv_gb=0.005",
        "store.dram_gb=0.05",
        "prefill.chunk_tokens=8",
        *(f"{role}.device='{device}'" for role, device in devices.items()),
    ]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, for the processes that a test starts."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest_asyncio.fixture
async def channel(request: pytest.FixtureRequest, model: str, interpreted: None) -> AsyncIterator[grpc.aio.Channel]:
    overrides = getattr(request, "param", [])
    config = small_config(*settings(model, prefill="cuda", decode="cuda"), *overrides)
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        yield channel


def on_cpu(model: str, prompt: list[int], sampling: SamplingParams) -> list[list[int]]:
    with LLM(model, kv_gb=0.005, block_tokens=BLOCK, threads=1) as llm:
        [found] = llm.generate([prompt], sampling, use_tqdm=False)
    return [answer.token_ids for answer in found.outputs]


async def ask_for_two(channel: grpc.aio.Channel, prompt: list[int], **sampling: Any) -> list[list[int]]:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt), sampling=common_pb2.SamplingParams(n=2, **sampling)
    )
    answers: list[list[int]] = [[], []]
    async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120):
        answers[response.choice] += [token.token_id for token in response.tokens]
    return answers


async def counters(channel: grpc.aio.Channel, role: str) -> dict[str, int]:
    [node] = [node for node in (await status(channel)).nodes if node.info.role == role]
    return dict(node.load.counters)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_blocks_go_through_host_memory_and_the_tokens_are_those_of_a_cpu(
    channel: grpc.aio.Channel, model: str
) -> None:
    greedy = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    first = await ask(channel, PROMPT, NEW)
    assert [first.tokens] == on_cpu(model, PROMPT, greedy)

    # The next turn begins with blocks that the decode node has filled, which the prefill node finds in the pool.
    await wait_idle(channel)
    devices = {node.info.role: node.info.device for node in (await status(channel)).nodes}
    assert devices == {"prefill": "cuda", "decode": "cuda", "store": ""}
    turn = PROMPT + first.tokens + PROMPT[:3]
    second = await ask(channel, turn, 3)
    assert [second.tokens] == on_cpu(model, turn, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    assert second.cached_tokens == (len(PROMPT) + NEW) // BLOCK * BLOCK

    # Two answers share the prompt's blocks behind the hand-off, and copy the last one when they write.
    await wait_idle(channel)
    before = await counters(channel, "decode")
    drawn = {"max_tokens": 3, "temperature": 0.9, "seed": 5, "ignore_eos": True}
    both = await ask_for_two(channel, PROMPT[1:], **drawn)
    assert both == on_cpu(model, PROMPT[1:], SamplingParams(n=2, **drawn))
    await wait_idle(channel)
    after = await counters(channel, "decode")
    assert after["blocks_copied_on_write"] - before["blocks_copied_on_write"] == 1
    assert after["handoffs_taken"] - before["handoffs_taken"] == 1
    assert after["blocks_written_back"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_latent_rows_go_through_host_memory_as_blocks_of_one_kind(tmp_path: Path, interpreted: None) -> None:
    write_tiny_model(tmp_path, "deepseek_v3", **LATENT)
    config = small_config(*settings(str(tmp_path), prefill="cuda", decode="cuda"))
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        first = await ask(channel, PROMPT, 4)
        assert [first.tokens] == on_cpu(str(tmp_path), PROMPT, greedy)
        await wait_idle(channel)
        again = await ask(channel, PROMPT, 4)
        assert again.tokens == first.tokens and again.cached_tokens == BLOCK


def test_a_device_that_is_not_there_is_named_in_one_sentence(model: str) -> None:
    command = [
        sys.executable,
        "-m",
        "decode_node",
        "--set",
        f"model.path='{model}'",
        "--set",
        "decode.device='cuda:99'",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "device 'cuda:99' is not here: torch finds" in run.stderr
    assert "Traceback" not in run.stderr
