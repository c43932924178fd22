"""Prefill and decode nodes on GPUs: the same tokens as on a CPU, through hand-offs, the pool and the swap space, also
where a node computes on two GPUs and loses one.

Without a GPU the kernels run in Triton's interpreter, which is slow; everything else is the same: a node's cache is
separate from the memory that other nodes write and read, and blocks are copied between the two.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
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
from drive import Answer, ask, ask_all, computing_node, counters, leaks, status, wait_idle
from greedy import greedy as greedy_of
from live import command_of, small_config, workers_of
from tiny_hybrid import write_hybrid
from tiny_model import LATENT, write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.app.cluster.local import LocalCluster
from mooncake.rpc import common_pb2, inference_pb2, inference_pb2_grpc

# Triton is not imported here: on import it chooses interpreter or compiler.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="a node over two GPUs, and here is one"
)

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


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def on_cpu(model: str, prompt: list[int], sampling: SamplingParams, kv_dtype: str = "auto") -> list[list[int]]:
    with LLM(model, kv_gb=0.005, block_tokens=BLOCK, threads=1, kv_dtype=kv_dtype) as llm:
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


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_blocks_go_through_host_memory_and_the_tokens_are_those_of_a_cpu(
    channel: grpc.aio.Channel, model: str
) -> None:
    first = await ask(channel, PROMPT, NEW)
    assert [first.tokens] == on_cpu(model, PROMPT, greedy(NEW))

    # The next turn begins with blocks that the decode node has filled, which the prefill node finds in the pool.
    await wait_idle(channel)
    devices = {node.info.role: node.info.device for node in (await status(channel)).nodes}
    assert devices == {"prefill": "cuda", "decode": "cuda", "store": ""}
    turn = PROMPT + first.tokens + PROMPT[:3]
    second = await ask(channel, turn, 3)
    assert [second.tokens] == on_cpu(model, turn, greedy(3))
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
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        first = await ask(channel, PROMPT, 4)
        assert [first.tokens] == on_cpu(str(tmp_path), PROMPT, greedy(4))
        await wait_idle(channel)
        again = await ask(channel, PROMPT, 4)
        assert again.tokens == first.tokens and again.cached_tokens == len(PROMPT) - 1


ON_GPUS = {"prefill": "cuda", "decode": "cuda"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "devices"),
    [("lfm2", ON_GPUS), ("qwen3-next", {"prefill": "cuda"}), ("granite-4", {"decode": "cuda"})],
)
async def test_states_go_through_host_memory_between_any_nodes(
    name: str, devices: dict[str, str], tmp_path: Path, interpreted: None
) -> None:
    theirs = write_hybrid(name, tmp_path)
    config = small_config(*settings(str(tmp_path), **devices), "model.dtype='float32'")
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        first = await ask(channel, PROMPT, NEW)
        assert first.tokens == greedy_of(theirs, PROMPT, NEW)

        # The next turn begins with the state that the decode node has filled a block with.
        await wait_idle(channel)
        turn = PROMPT + first.tokens + PROMPT[:3]
        second = await ask(channel, turn, 3)
        assert second.tokens == greedy_of(theirs, turn, 3)
        assert second.cached_tokens == (len(PROMPT) + NEW - 1) // BLOCK * BLOCK
        await wait_idle(channel)
        assert not leaks(await status(channel))


RANKS = "engine.backends.gpu_ranks"


@needs_two_gpus
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "devices", "others"),
    [
        ({"prefill": 2}, ON_GPUS, ()),
        ({"decode": 2}, ON_GPUS, ()),
        ({"prefill": 2}, {"prefill": "cuda:1"}, ("decode.tensor_parallel=2",)),  # two processes on CPUs
        ({"prefill": 2, "decode": 2}, ON_GPUS, ("transfer.transports=['tcp']", "model.kv_dtype='int8'")),
        ({"coupled": 2}, {"prefill": "cuda"}, ("cluster.coupled=1",)),
    ],
)
async def test_nodes_over_two_gpus_hand_over_to_any_and_share_the_pool(
    ranks: dict[str, int], devices: dict[str, str], others: tuple[str, ...], model: str, interpreted: None
) -> None:
    counts = [f"{role.replace('coupled', 'prefill')}.tensor_parallel={count}" for role, count in ranks.items()]
    kv_dtype = "int8" if "model.kv_dtype='int8'" in others else "auto"
    config = small_config(*settings(model, **devices), *counts, *others)
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        for role in ranks:
            assert len(workers_of(cluster.pids[f"{role}-0"], RANKS)) == 1, "the node computes alone"
        first = await ask(channel, PROMPT, NEW)
        assert [first.tokens] == on_cpu(model, PROMPT, greedy(NEW), kv_dtype)

        # The next turn begins with a block that the decode node has filled, which the prefill node finds in the pool.
        await wait_idle(channel)
        turn = PROMPT + first.tokens + PROMPT[:3]
        second = await ask(channel, turn, 3)
        assert [second.tokens] == on_cpu(model, turn, greedy(3), kv_dtype)
        assert second.cached_tokens >= (len(PROMPT) + NEW) // BLOCK * BLOCK
        answers = await ask_all(channel, [PROMPT[::-1], PROMPT[3:]], 4, at_once=2)
        assert [answer.tokens for answer in answers] == [
            on_cpu(model, prompt, greedy(4), kv_dtype)[0] for prompt in (PROMPT[::-1], PROMPT[3:])
        ]
        await wait_idle(channel)
        assert not leaks(await status(channel))


@needs_two_gpus
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_ends_with_one_of_its_gpus_and_its_requests_go_on_elsewhere(
    role: str, model: str, interpreted: None
) -> None:
    others = (f"{role}.tensor_parallel=2", f"cluster.{role}=2", "conductor.heartbeat_interval_s=0.05")
    config = small_config(*settings(model, **ON_GPUS), *others)
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        asking = asyncio.create_task(ask_all(channel, [PROMPT, PROMPT[::-1]], NEW, at_once=2))
        node = await computing_node(channel, role)
        [rank] = workers_of(cluster.pids[node], RANKS)
        os.kill(rank, signal.SIGKILL)
        answers: list[Answer] = await asking
        wanted = [on_cpu(model, prompt, greedy(NEW))[0] for prompt in (PROMPT, PROMPT[::-1])]
        assert [answer.tokens for answer in answers] == wanted
        error = await asyncio.wait_for(cluster.wait_fatal(), 60)
        assert f"{node} ended with exit code 1" in error.message
        assert "tensor parallel ranks [1] have failed" in error.message


@needs_two_gpus
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("role", "why"), [("prefill", "no step has ended for 5 s"), ("decode", "tensor parallel ranks [1] have failed")]
)
async def test_a_node_whose_gpu_hangs_in_a_step_or_a_copy_ends_and_leaves_no_process(
    role: str, why: str, model: str, interpreted: None
) -> None:
    others = (f"{role}.tensor_parallel=2", "node.step_timeout_s=5")
    config = small_config(*settings(model, **ON_GPUS), *others)
    async with LocalCluster(config) as cluster, grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        await ask(channel, PROMPT, 2)
        [rank] = workers_of(cluster.pids[f"{role}-0"], RANKS)
        os.kill(rank, signal.SIGSTOP)
        asking = asyncio.create_task(ask(channel, PROMPT, NEW))
        error = await asyncio.wait_for(cluster.wait_fatal(), 60)
        assert why in error.message
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert RANKS not in command_of(rank)


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
